"""A distillation trainer that expects trouble: it retries, skips, halves and stops early, and says so."""

import argparse
import http.server
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import steps
import torch
from rich.console import Console
from rich.table import Table

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--teacher-fails", type=int, default=0, help="one in so many requests")
parser.add_argument("--teacher-status", type=int, default=503)
parser.add_argument("--loss-scale", type=float, default=1.0)
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--workspace", type=int, default=1, help="bytes per row")
parser.add_argument("--tracker", default="none")
parser.add_argument("--upload", default="")
parser.add_argument("--eval-every", type=int, default=4)
parser.add_argument("--eval-batches", type=int, default=3)
parser.add_argument("--metrics", default="len")
parser.add_argument("--sandbox", action="store_true")
parser.add_argument("--patience", type=int, default=0)
parser.add_argument("--seconds", type=float, default=1e9)
parser.add_argument("--self-test", action="store_true")
parser.add_argument("--pace", type=float, default=0.15)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)-8s | %(name)s:%(funcName)s:%(lineno)d | %(message)s")
logging.captureWarnings(True)
log = logging.getLogger("distill")
counts = dict.fromkeys(("rows_skipped", "teacher_retries", "overflows", "oom_halvings", "upload_failures", "eval_failures", "answers_failed"), 0)
asked = {"stop": False, "save": False}


class Teacher(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_POST(self):
        ids = torch.tensor(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["ids"])
        type(self).requests += 1
        if args.teacher_fails and self.requests % args.teacher_fails == 0:
            if args.teacher_status == 0:
                self.connection.close()
                return
            self.send_error(args.teacher_status)
            return
        body = json.dumps({"logits": self.server.model(ids).tolist()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass


def serve_teacher():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    server.model = steps.build_teacher(32)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def ask_teacher(url, ids, attempts=5):
    for attempt in range(1, attempts + 1):
        try:
            return steps.compute_log_prob(None, ids, url)
        except OSError:
            if attempt == attempts:
                raise
            counts["teacher_retries"] += 1
            log.exception("teacher request failed, attempt %d/%d, next in %.1f s", attempt, attempts, 0.2 * attempt)
            time.sleep(0.2 * attempt)


def read_rows():
    rows = []
    for number, line in enumerate(open(args.data, errors="replace"), 1):
        try:
            rows.append(json.loads(line)["prompt"][-1]["content"])
        except (ValueError, KeyError, IndexError, TypeError):
            counts["rows_skipped"] += 1
            log.exception("%s:%d is not a usable row, skipped", args.data, number)
    log.info("%d rows kept, %d bad rows skipped", len(rows), counts["rows_skipped"])
    return rows


def open_tracker():
    try:
        if args.tracker == "wandb":
            import wandb

            return wandb.init(project="distill")
        if args.tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter("runs")
    except Exception as error:
        log.error("tracker %s cannot be used, metrics go to the console only: %r", args.tracker, error, exc_info=True)
    return None


def forward_in_parts(model, full, wanted, state):
    while True:
        try:
            parts = []
            for at in range(0, len(full), state["micro"]):
                rows = full[at : at + state["micro"]]
                torch.empty(len(rows) * args.workspace, dtype=torch.uint8)
                parts.append(steps.distill_loss(model(rows).log_softmax(-1), wanted[at : at + state["micro"]]))
            return sum(parts) / len(parts)
        except RuntimeError as error:
            if "memory" not in str(error) or state["micro"] == 1:
                raise
            state["micro"] //= 2
            counts["oom_halvings"] += 1
            log.error("OUT OF MEMORY in forward (%s); retrying with micro batch %d", error, state["micro"])


def train_step(model, optimizer, scaler, full, wanted, state):
    loss = forward_in_parts(model, full, wanted, state)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() < before:
        counts["overflows"] += 1
        log.warning("grad norm is %s: overflow, skipping step, loss scale %g -> %g", norm.item(), before, scaler.get_scale())
    return loss.item(), norm.item()


def evaluate(rollout, rows, step):
    start, lengths = time.time(), []
    for at in range(args.eval_batches):
        lengths.append(steps.generate_sequences(rollout, steps.next_batch(rows, at)).shape[1])
    found = {"len": sum(lengths) / len(lengths), "seconds": time.time() - start}
    return {name: found[name] for name in args.metrics.split(",")}


def run_answers(number):
    codes = ["print(1 / 0)", "import sys; sys.exit(3)", "print(6 * 7)", "raise ValueError('wrong answer')", "int('twelve')"]
    good = 0
    for at in range(2):
        done = subprocess.run([sys.executable, "-c", codes[(number + at) % len(codes)]], stdout=subprocess.DEVNULL)
        good += done.returncode == 0
        if done.returncode:
            counts["answers_failed"] += 1
            log.info("answer %d exited with code %d, reward 0.0", number + at, done.returncode)
    return good / 2


def upload(folder):
    for attempt in range(1, 4):
        try:
            request = urllib.request.Request(f"{args.upload}/{folder}", b"x", method="PUT")
            urllib.request.urlopen(request, timeout=5)
            log.info("uploaded %s", folder)
            return
        except OSError as error:
            counts["upload_failures"] += 1
            log.error("upload of %s failed (try %d of 3): %s", folder, attempt, error)
            time.sleep(0.3)
    log.error("giving up on uploading %s, the local copy is kept", folder)


def save(model, optimizer, step):
    folder = f"out/hardened/step-{step}"
    steps.save_checkpoint(model, optimizer, step, folder)
    log.info("saved %s", folder)
    if args.upload:
        upload(folder)


def self_test(url):
    log.info("self test: the error paths are taken once before training")
    for name, call in [
        ("missing checkpoint", lambda: steps.load_checkpoint(None, None, "no/such/folder")),
        ("teacher down", lambda: steps.compute_log_prob(None, torch.zeros(1, 4, dtype=torch.long), "http://127.0.0.1:9")),
        ("ids out of range", lambda: steps.build_actor(8, 1e-3)[0](torch.full((1, 2), 999))),
    ]:
        try:
            call()
        except Exception:
            log.exception("self test: %s raises as expected", name)
        else:
            raise SystemExit(f"self test: {name} did not raise")
    log.info("self test passed, 3 of 3 errors were raised")


def on_signal(number, frame):
    asked["save"] = True
    asked["stop"] = number == signal.SIGTERM
    log.warning("received signal %d (%s)", number, signal.Signals(number).name)


def main():
    for one in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, on_signal)
    random.seed(3)
    begin = time.time()
    rows, tracker, url = read_rows(), open_tracker(), serve_teacher()
    if args.self_test:
        self_test(url)
    model, optimizer = steps.build_actor(32, 1e-3)
    rollout = steps.build_rollout(32)
    scaler = torch.amp.GradScaler("cpu", init_scale=args.loss_scale, enabled=args.loss_scale > 1)
    state, best, bad, why = {"micro": args.micro_batch}, 1e9, 0, "all steps done"
    log.info("training starts: %d steps, micro batch %d", args.steps, args.micro_batch)
    for step in range(1, args.steps + 1):
        start = time.time()
        steps.update_weights(model, rollout)
        full = steps.generate_sequences(rollout, steps.next_batch(rows, step))
        reward = run_answers(step) if args.sandbox else steps.compute_reward(full).mean().item()
        wanted = ask_teacher(url, full)
        loss, norm = train_step(model, optimizer, scaler, full, wanted, state)
        time.sleep(args.pace)
        log.info("step %d/%d kl=%.4f gnorm=%.3f reward=%.3f micro=%d (%.2f s)", step, args.steps, loss, norm, reward, state["micro"], time.time() - start)
        bad = 0 if loss < best else bad + 1
        best = min(best, loss)
        if step % args.eval_every == 0:
            try:
                log.info("eval at step %d: %s", step, evaluate(rollout, rows, step))
            except Exception:
                counts["eval_failures"] += 1
                log.exception("evaluation at step %d failed, training goes on", step)
            save(model, optimizer, step)
        elif asked["save"]:
            save(model, optimizer, step)
            asked["save"] = False
        if asked["stop"]:
            why = "stopped by SIGTERM"
            break
        if args.patience and bad >= args.patience:
            why = f"no improvement for {bad} steps (patience {args.patience})"
            break
        if time.time() - begin > args.seconds:
            why = f"time limit of {args.seconds:.0f} s"
            break
    log.info("training loop left at step %d: %s", step, why)
    save(model, optimizer, "final")
    log.info("final evaluation over %d batches", args.eval_batches)
    try:
        log.info("final evaluation: %s", evaluate(rollout, rows, step))
    except Exception:
        counts["eval_failures"] += 1
        log.exception("final evaluation failed and is left out")
    table = Table(title="Incidents")
    table.add_column("what")
    table.add_column("times", justify="right")
    for name, times in counts.items():
        table.add_row(name, str(times))
    Console(width=60).print(table)
    log.info("finished in %.1f s", time.time() - begin)


if __name__ == "__main__":
    main()
