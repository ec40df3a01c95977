"""RL with samplers that run beside the trainer (asyncio), a pool for rewards, a queue between."""

import argparse
import asyncio
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import steps
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--samplers", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--queue", type=int, default=4)
parser.add_argument("--patience", type=float, default=15)
parser.add_argument("--on-error", choices=["raise", "log", "drop"], default="log")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--pace", type=float, default=0.2)
args = parser.parse_args()
start = time.time()


def say(who, text):
    print(f"[{time.time() - start:8.2f}s] {who:<10} {text}", file=sys.stderr, flush=True)


def reward_of(rows):
    return [len(set(row)) / len(row) for row in rows]


def normalized(rewards):
    found = torch.tensor(rewards)
    return (found - found.mean()) / (found.std() + 1e-6)


async def sample(number, rows, rollout, queue, pool):
    loop, turn = asyncio.get_running_loop(), number
    while True:
        try:
            ids = steps.next_batch(rows, turn)
            full = await asyncio.to_thread(steps.generate_sequences, rollout, ids)
            rewards = await loop.run_in_executor(pool, reward_of, full.tolist())
            await queue.put((turn, full, rewards))
        except Exception as error:
            if args.on_error == "raise":
                raise
            if args.on_error == "log":
                say(f"sampler{number}", f"sample {turn} failed: {type(error).__name__}: {error}")
        turn += args.samplers
        await asyncio.sleep(args.pace)


async def train(rows):
    say("main", f"{len(rows)} prompts")
    model, optimizer = steps.build_actor(32, 1e-3)
    rollout, teacher = steps.build_rollout(32), steps.build_teacher(32)
    queue = asyncio.Queue(args.queue)
    with ProcessPoolExecutor(2) as pool:
        tasks = [asyncio.create_task(sample(one, rows, rollout, queue, pool)) for one in range(args.samplers)]
        say("main", f"{len(tasks)} samplers started")
        for step in range(1, args.steps + 1):
            begin = time.time()
            try:
                turn, full, rewards = await asyncio.wait_for(queue.get(), args.patience)
            except asyncio.TimeoutError:
                say("trainer", f"no sample for {args.patience:.0f} s, queue is empty")
                raise RuntimeError("trainer starved") from None
            advantage = normalized(rewards)
            wanted = await asyncio.to_thread(steps.compute_log_prob, teacher, full)
            loss, norm = await asyncio.to_thread(steps.update_actor, model, optimizer, full, wanted)
            await asyncio.to_thread(steps.update_weights, model, rollout)
            say("trainer", f"update {step}/{args.steps} kl {loss:.4f} gnorm {norm:.3f} reward {sum(rewards) / len(rewards):.3f} adv {advantage.abs().max():.2f} qsize {queue.qsize()} {time.time() - begin:.2f}s")
            if step % 5 == 0:
                await asyncio.to_thread(steps.save_checkpoint, model, optimizer, step, f"out/async/{step}")
                say("trainer", f"checkpoint {step} written")
        for one in tasks:
            one.cancel()
    say("main", "bye")


if __name__ == "__main__":
    asyncio.run(train(steps.load_dataset(args.data)))
