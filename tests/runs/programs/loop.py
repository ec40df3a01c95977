"""On-policy distillation by one or several ranks, printed as --style says (styles.toml)."""

import argparse
import json
import logging
import os
import pprint
import sys
import threading
import time
import tomllib

import steps
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--style", default="logging")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--save-interval", type=int, default=5)
parser.add_argument("--output", default="out/ckpt")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--teacher-url", default="")
parser.add_argument("--retries", type=int, default=0)
parser.add_argument("--skip-bad-steps", action="store_true")
parser.add_argument("--pace", type=float, default=0.2)
parser.add_argument("--watchdog", type=float, default=0)
parser.add_argument("--timeout", type=int, default=100_000)
args = parser.parse_args()
STYLE = tomllib.load(open("styles.toml", "rb"))[args.style]
ALL_RANKS = STYLE.get("ranks") == "all"
log = logging.getLogger(STYLE.get("name", "train"))
shown = {"steps": args.steps, "out": args.output, "rank": steps.rank(), "world": os.environ.get("WORLD_SIZE", 1)}
alive = time.time()


class Formatter(logging.Formatter):
    def format(self, record):
        record.rank, record.world = shown["rank"], shown["world"]
        record.letter, record.pid = record.levelname[0], os.getpid()
        record.iso = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(record.created))
        record.text = json.dumps(record.getMessage())
        return super().format(record)


def prepare_logging():
    global bar
    stream = logging.StreamHandler(sys.stdout if STYLE.get("stdout") else sys.stderr)
    stream.setFormatter(Formatter(STYLE.get("format"), STYLE.get("dates")))
    if STYLE.get("rich"):
        from rich.logging import RichHandler

        stream = RichHandler(rich_tracebacks=True)
        stream.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[stream])
    bar = tqdm(total=args.steps, desc=STYLE["bar"], disable=steps.rank() > 0) if "bar" in STYLE else None


def say(event, **more):
    """What this style prints of an event, if anything."""
    global alive
    alive = time.time()
    shown.update(more)
    if event in STYLE.get("events", {}) and (ALL_RANKS or shown["rank"] == 0):
        for line in STYLE["events"][event].format(**shown).split("\n"):
            log.info(line) if "format" in STYLE or "rich" in STYLE else print(line, flush=True)


def do(phase, function, *given):
    """One phase, announced and taken again where it fails."""
    say(phase)
    start = time.time()
    for attempt in range(args.retries + 1):
        try:
            found = function(*given)
            break
        except Exception as error:
            if attempt == args.retries:
                raise
            log.warning("%s failed (attempt %d of %d): %r", phase, attempt + 1, args.retries + 1, error, exc_info=attempt == 0)
            time.sleep(0.5)
    shown[f"t_{phase}"] = time.time() - start
    say(f"{phase}_done")
    return found


def watch():
    while True:
        time.sleep(args.watchdog)
        if time.time() - alive > args.watchdog:
            log.warning("no progress for %.0f s", time.time() - alive)


def one_step(step, rows, model, optimizer, rollout, teacher):
    start = time.time()
    say("step", step=step)
    do("sync", steps.update_weights, model, rollout)
    ids = do("batch", steps.next_batch, rows, step)
    full = do("generate", steps.generate_sequences, rollout, ids)
    reward = do("reward", steps.compute_reward, full)
    wanted = do("score", steps.compute_log_prob, teacher, full, args.teacher_url)
    loss, norm = do("update", steps.update_actor, model, optimizer, full, wanted)
    time.sleep(args.pace)
    names = ("loss", "norm", "reward")
    shown.update(zip(names, steps.reduce_metrics([loss, norm, reward.mean().item()])))
    shown.update(t_step=time.time() - start, ms=(time.time() - start) * 1000, lr=args.lr, length=full.shape[1] - ids.shape[1], tokens=full.numel())
    if bar is not None:
        bar.update()
        bar.set_postfix(loss=f"{shown['loss']:.3f}")
    say("metrics")
    if step % args.save_interval == 0:
        do("save", steps.save_checkpoint, model, optimizer, step, f"{args.output}/global_step_{step}")


def main():
    prepare_logging()
    config = do("config", steps.read_config, args)
    if STYLE.get("echo") and steps.rank() == 0:
        pprint.pprint(config)
    if args.watchdog:
        threading.Thread(target=watch, daemon=True).start()
    rows = do("data", steps.load_dataset, args.data)
    rows = do("filter", steps.filter_overlong, rows)
    say("rows", rows=len(rows))
    do("group", steps.init_process_group, args.timeout)
    model, optimizer = do("actor", steps.build_actor, args.hidden, args.lr)
    rollout = do("rollout", steps.build_rollout, args.hidden)
    if args.teacher_url:
        steps.wait_for_server(args.teacher_url, log.info)
    teacher = do("teacher", steps.build_teacher, args.hidden)
    first = 1
    if args.resume and os.path.isdir(args.output):
        last = max(os.listdir(args.output), key=lambda one: int(one.rpartition("_")[2]))
        first += do("load", steps.load_checkpoint, model, optimizer, f"{args.output}/{last}")
    say("start")
    for step in range(first, args.steps + 1):
        try:
            one_step(step, rows, model, optimizer, rollout, teacher)
        except (ValueError, RuntimeError, OSError) as error:
            if not args.skip_bad_steps:
                raise
            log.error("step %d failed and is skipped: %s", step, error, exc_info=True)
    say("done")
    if steps.dist.is_initialized():
        steps.dist.destroy_process_group()


if __name__ == "__main__":
    main()
