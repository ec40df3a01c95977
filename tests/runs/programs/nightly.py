"""The nightly job: checks, sub-commands, a training under a bar, evaluation, export, clean-up."""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import warnings

import steps
import torch
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--eval-batches", type=int, default=30)
parser.add_argument("--checks", action="store_true", help="run the checks that must fail")
parser.add_argument("--commands", action="store_true", help="ask the system what it has")
parser.add_argument("--flaky-tests", action="store_true")
parser.add_argument("--cleaner", action="store_true", help="kill the helper processes at the end")
parser.add_argument("--old-options", action="store_true")
parser.add_argument("--pace", type=float, default=0.1)
args = parser.parse_args()


def banner(text):
    print(f"\n=== {text} ===", flush=True)


def shell(command):
    done = subprocess.run(command, shell=True, text=True, capture_output=True)
    print(f"$ {command}\n{done.stdout}{done.stderr}-> exit code {done.returncode}", flush=True)
    return done.returncode


def checks():
    banner("checks that must fail")
    shell(f"{sys.executable} loop.py --data nothing.jsonl --steps 1")
    shell(f"{sys.executable} -c \"import torch; torch.zeros(2, 3) @ torch.zeros(2, 3)\"")
    shell("false")
    print("3 of 3 failed as they must", flush=True)


def commands():
    banner("system")
    for one in ("nvidia-smi", "nvcc --version", "dmesg | tail -n 1", "ibstat", "df -h /no/such/mount"):
        if shell(one):
            print("not available, going on", flush=True)


def flaky_tests():
    banner("smoke tests")
    failed = 0
    for name in ("test_tokenizer", "test_teacher_alive", "test_disk", "test_sampler"):
        for turn in range(3):
            bad = name == "test_teacher_alive" and turn < 2
            print(f"{name} ... {'FAILED (TimeoutError), again' if bad else 'ok'}", flush=True)
            failed += bad
            if not bad:
                break
            time.sleep(0.3)
    print(f"4 tests, 0 errors, {failed} failures retried", flush=True)


def helper():
    while True:
        time.sleep(1)


def train(rows):
    banner("training")
    if args.old_options:
        warnings.warn("--old-options is deprecated and will raise an error in the next release", FutureWarning, stacklevel=1)
        torch.nn.utils.clip_grad_norm([torch.nn.Parameter(torch.ones(1))], 1.0)
    model, optimizer = steps.build_actor(32, 1e-3)
    rollout, teacher = steps.build_rollout(32), steps.build_teacher(32)
    with tqdm(range(1, args.steps + 1), desc="distill", mininterval=0.3) as bar:
        for step in bar:
            steps.update_weights(model, rollout)
            full = steps.generate_sequences(rollout, steps.next_batch(rows, step))
            wanted = steps.compute_log_prob(teacher, full)
            loss, norm = steps.update_actor(model, optimizer, full, wanted)
            bar.set_postfix(loss=f"{loss:.3f}", failed=0, timeouts=0)
            time.sleep(args.pace)
            if step % 10 == 0:
                tqdm.write(f"step {step}: error {loss:.4f}, worst error {loss * 1.3:.4f}")
    return model, optimizer, rollout


def evaluate(rollout, rows):
    banner("evaluation")
    wrong = 0
    for at in tqdm(range(args.eval_batches), desc="eval", mininterval=0.3):
        full = steps.generate_sequences(rollout, steps.next_batch(rows, at))
        wrong += int((steps.compute_reward(full) < 0.9).sum())
    print(f"failed: {wrong} of {4 * args.eval_batches} problems, error rate {wrong / 4 / args.eval_batches:.1%}", flush=True)


def main():
    start = time.time()
    helpers = [multiprocessing.Process(target=helper, daemon=True) for _ in range(2 * args.cleaner)]
    for one in helpers:
        one.start()
    for wanted, call in ((args.commands, commands), (args.checks, checks), (args.flaky_tests, flaky_tests)):
        if wanted:
            call()
    rows = steps.load_dataset("prompts.jsonl")
    model, optimizer, rollout = train(rows)
    evaluate(rollout, rows)
    banner("export")
    steps.save_checkpoint(model, optimizer, args.steps, "out/nightly")
    size = os.path.getsize("out/nightly/rank0.pt")
    print(f"exported, {size} bytes", flush=True)
    banner("clean-up")
    for one in helpers:
        one.kill()
        one.join()
        print(f"helper {one.pid} killed, exit code {one.exitcode}", flush=True)
    shutil.rmtree(".cache/none", ignore_errors=True)
    print(f"all stages done in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
