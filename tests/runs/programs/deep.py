"""Training with DeepSpeed on CPUs: ZeRO, gradients of its engine, its own checkpoints."""

import argparse

import deepspeed
import steps
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save-interval", type=int, default=6)
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
deepspeed.utils.logging.set_log_level_from_string("info")


def main():
    rows = steps.load_dataset("prompts.jsonl")
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    model = steps.Network(32)
    teacher = steps.build_teacher(32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(1, args.steps + 1):
        ids = steps.next_batch(rows, step)
        wanted = steps.compute_log_prob(teacher, ids)
        loss = steps.distill_loss(engine(ids).log_softmax(-1), wanted)
        engine.backward(loss)
        engine.step()
        deepspeed.utils.logger.info(f"step: {step} loss: {loss.item():.4f}") if step % 2 == 0 else None
        if step % args.save_interval == 0:
            engine.save_checkpoint("out/ds", tag=f"global_step{step}")
    torch.distributed.destroy_process_group()
    print("training done", flush=True)


if __name__ == "__main__":
    main()
