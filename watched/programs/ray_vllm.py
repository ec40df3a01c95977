"""On-policy distillation with Ray: a driver, a trainer, rollouts by vLLM, a teacher."""

import argparse
import json
import logging
import os
import time

import ray
import workers

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("distill")
parser = argparse.ArgumentParser()
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--tokens", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--save-interval", type=int, default=5)
parser.add_argument("--pace", type=float, default=0.2)
parser.add_argument("--teacher-cpus", type=float, default=1)
args = parser.parse_args()


def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("student")
    rows = [json.loads(line)["prompt"] for line in open(args.data)]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    # All of one length, so that the teacher needs no padding.
    return [(tokenizer(text).input_ids * 16)[:16] for text in texts]


def actor(kind, cpus, *given):
    return ray.remote(num_cpus=cpus)(kind).remote(*given)


def main():
    rows = prompts()
    log.info("dataset len: %d", len(rows))
    trainer = actor(workers.TrainerWorker, 1, "student", args.lr)
    rollout = actor(workers.RolloutWorker, 1, "student")
    teacher = actor(workers.TeacherWorker, args.teacher_cpus, "teacher")
    ray.get(rollout.ready.remote())
    log.info("rollout engine is ready")
    weights = os.path.abspath("weights.safetensors")
    for step in range(1, args.steps + 1):
        begin = time.time()
        ray.get(trainer.push_weights.remote(weights))
        ray.get(rollout.update_weights.remote(weights))
        part = [rows[(step * args.batch + at) % len(rows)] for at in range(args.batch)]
        full = ray.get(rollout.generate_sequences.remote(part, args.tokens))
        full = [row[:64] for row in full]
        wanted = ray.get(teacher.compute_log_prob.remote(full))
        loss = ray.get(trainer.update_actor.remote(full, wanted))
        time.sleep(args.pace)
        log.info("step:%d - actor/kl_loss:%.4f - timing_s/step:%.3f", step, loss, time.time() - begin)
        if step % args.save_interval == 0:
            ray.get(trainer.save_checkpoint.remote(f"out/step_{step}"))
    log.info("training finished after %d steps", args.steps)


if __name__ == "__main__":
    ray.init(num_cpus=4, object_store_memory=100 * 1024 * 1024, include_dashboard=False)
    main()
    ray.shutdown()
