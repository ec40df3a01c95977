"""Processes by torch.multiprocessing.spawn: rank 0 trains, the others generate for it."""

import argparse
import datetime
import os
import queue

import steps
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--world", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--timeout", type=float, default=30)
parser.add_argument("--port", type=int, default=29641)


def generator(rank, args, rows, samples, weights):
    rollout = steps.build_rollout(32)
    print(f"GEN{rank} ready", flush=True)
    for step in range(1, args.steps + 1):
        rollout.load_state_dict(weights[rank].get(timeout=args.timeout))
        full = steps.generate_sequences(rollout, steps.next_batch(rows, step * args.world + rank))
        samples.put((rank, full, steps.compute_reward(full)))


def trainer(args, samples, weights):
    model, optimizer = steps.build_actor(32, 1e-3)
    teacher = steps.build_teacher(32)
    print("TRAIN ready", flush=True)
    for step in range(1, args.steps + 1):
        state = {name: one.clone() for name, one in getattr(model, "module", model).state_dict().items()}
        for one in weights[1:]:
            one.put(state)
        losses = []
        for _ in range(args.world - 1):
            try:
                rank, full, reward = samples.get(timeout=args.timeout)
            except queue.Empty:
                raise SystemExit(f"TRAIN: step {step}: nothing from the generators in {args.timeout:.0f} s, giving up")
            losses.append(steps.update_actor(model, optimizer, full, steps.compute_log_prob(teacher, full))[0])
        print(f"TRAIN step={step} loss={sum(losses) / len(losses):.5f} reward={reward.mean():.4f}", flush=True)


def main(rank, args, rows, samples, weights):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=args.world, timeout=datetime.timedelta(seconds=args.timeout))
    group = dist.new_group([0])
    del group
    steps.world = lambda: 1
    (trainer(args, samples, weights) if rank == 0 else generator(rank, args, rows, samples, weights))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parser.parse_args()
    context = mp.get_context("spawn")
    rows = steps.load_dataset("prompts.jsonl")
    samples, weights = context.Queue(), [context.Queue() for _ in range(args.world)]
    print(f"{len(rows)} rows, spawning {args.world} processes", flush=True)
    mp.spawn(main, (args, rows, samples, weights), nprocs=args.world)
    print("FINISHED", flush=True)
