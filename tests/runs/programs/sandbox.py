"""Rewards by running the answers' code in a process of its own; GRPO-like steps around."""

import argparse
import logging
import subprocess
import sys
import time

import steps
import torch

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-8s [%(name)s] %(message)s")
log = logging.getLogger("rl")
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--limit", type=float, default=5)
parser.add_argument("--python", default=sys.executable)
parser.add_argument("--show", action="store_true", help="show what the answers' code prints")
args = parser.parse_args()
ANSWERS = [
    "print(sum(range(10)))",
    "print(sum(range(10))",
    "print([1, 2][5])",
    "import numpyy\nprint(numpyy.arange(3))",
    "while True: pass",
    "print({'a': 1}['b'])",
    "def f(n): return f(n + 1)\nf(0)",
    "open('/no/such/file')",
]


def execute(code):
    done = subprocess.run([args.python, "-c", code], capture_output=True, text=True, timeout=args.limit)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def score(code):
    try:
        status, out, err = execute(code)
    except subprocess.TimeoutExpired:
        log.info("answer ran for more than %.0f s: reward 0", args.limit)
        return 0.0
    if args.show and err:
        log.info("answer ended with status %d:\n%s", status, err[-600:])
    return 1.0 if out == "45" else 0.0


def main():
    rows = steps.load_dataset("prompts.jsonl")
    model, optimizer = steps.build_actor(32, 1e-3)
    rollout, teacher = steps.build_rollout(32), steps.build_teacher(32)
    for step in range(1, args.steps + 1):
        start = time.time()
        steps.update_weights(model, rollout)
        full = steps.generate_sequences(rollout, steps.next_batch(rows, step))
        rewards = torch.tensor([score(ANSWERS[(step + at) % len(ANSWERS)]) for at in range(4)])
        loss, norm = steps.update_actor(model, optimizer, full, steps.compute_log_prob(teacher, full))
        log.info("step %d | reward %.2f | loss %.4f | grad %.3f | %.1f s", step, rewards.mean(), loss, norm, time.time() - start)
    log.info("fit finished")


if __name__ == "__main__":
    main()
