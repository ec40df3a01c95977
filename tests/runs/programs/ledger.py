"""Distillation over ranks that keeps a ledger of JSON lines; torchrun may restart it, it resumes."""

import argparse
import json
import os
import sys
import time
import traceback

import steps
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--save-every", type=int, default=4)
parser.add_argument("--eval-batches", type=int, default=4)
parser.add_argument("--crash-at", type=int, default=0, help="rank 1 raises there in the first attempt")
parser.add_argument("--late", type=float, default=0, help="seconds that the last rank ends later")
parser.add_argument("--warm-up", type=float, default=0)
parser.add_argument("--flaky", type=int, default=0, help="one in so many judgements fails")
parser.add_argument("--stall-after", type=float, default=1e9)
parser.add_argument("--all-ranks", action="store_true")
parser.add_argument("--pace", type=float, default=0.2)
args = parser.parse_args()
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
totals = {"errors": 0, "retried": 0, "timeouts": 0, "killed": 0}


def note(event, level="info", **more):
    if steps.rank() == 0 or args.all_ranks or level != "info":
        line = {"t": round(time.time(), 3), "level": level, "rank": steps.rank(), "attempt": attempt, "event": event, **more}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def judge(full, step):
    for turn in range(3):
        try:
            if args.flaky and step % args.flaky == 0 and turn < 2:
                raise TimeoutError(f"judge did not answer within 0.5 s (request {step}-{turn})")
            return steps.compute_reward(full).mean().item()
        except TimeoutError as error:
            totals["retried"] += 1
            totals["timeouts"] += 1
            note("judge_failed", "warning", step=step, turn=turn, error=repr(error), stack=traceback.format_exc())
            time.sleep(0.2)
    totals["errors"] += 1
    return 0.0


def evaluate(rollout, rows):
    found = [steps.compute_reward(steps.generate_sequences(rollout, steps.next_batch(rows, at))).mean().item() for at in range(args.eval_batches)]
    return steps.reduce_metrics([sum(found) / len(found)])[0]


def main():
    note("start", pid=os.getpid(), world=os.environ.get("WORLD_SIZE", "1"), restarts_left=os.environ.get("TORCHELASTIC_MAX_RESTARTS"))
    rows = steps.load_dataset("prompts.jsonl")
    steps.init_process_group(600)
    model, optimizer = steps.build_actor(32, 1e-3)
    rollout, teacher = steps.build_rollout(32), steps.build_teacher(32)
    first, last_save = 1, "out/ledger/last"
    if os.path.exists(f"{last_save}/rank{steps.rank()}.pt"):
        first += steps.load_checkpoint(model, optimizer, last_save)
        note("resumed", "warning", step=first, why="an earlier attempt did not end")
    if args.warm_up:
        note("warm_up", seconds=args.warm_up)
        end = time.time() + args.warm_up
        while time.time() < end:
            steps.generate_sequences(rollout, steps.next_batch(rows, 0), 200)
    for step in range(first, args.steps + 1):
        start = time.time()
        steps.update_weights(model, rollout)
        full = steps.generate_sequences(rollout, steps.next_batch(rows, step))
        reward = judge(full, step)
        wanted = steps.compute_log_prob(teacher, full)
        if step == args.crash_at and attempt == 0 and steps.rank() == 1:
            raise RuntimeError("lost the connection to the data server")
        loss, norm = steps.update_actor(model, optimizer, full, wanted)
        time.sleep(args.pace)
        loss, norm, reward = steps.reduce_metrics([loss, norm, reward])
        seconds = time.time() - start
        if seconds > args.stall_after:
            note("slow_step", "error", step=step, seconds=round(seconds, 2), message="step stalled; is a worker dead?")
        note("step", step=step, of=args.steps, loss=round(loss, 5), norm=round(norm, 4), reward=round(reward, 4), seconds=round(seconds, 3), **totals)
        if step % args.save_every == 0:
            steps.save_checkpoint(model, optimizer, step, last_save)
            note("saved", step=step)
    note("loop_end", step=args.steps)
    steps.save_checkpoint(model, optimizer, args.steps, "out/ledger/final")
    note("final_saved")
    note("eval", score=round(evaluate(rollout, rows), 4))
    if steps.rank() == steps.world() - 1:
        time.sleep(args.late)
    if steps.dist.is_initialized():
        note("leaving_group")
        steps.dist.destroy_process_group()
    note("exit", status=0, **totals)


if __name__ == "__main__":
    main()
