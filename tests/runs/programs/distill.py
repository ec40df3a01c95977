"""A student that generates, asks a teacher server and learns from its answer."""

import argparse
import json
import logging
import os
import time

import requests
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

logging.basicConfig(level=logging.INFO, format="[student] %(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("student")
parser = argparse.ArgumentParser()
parser.add_argument("--student", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--teacher-url", default="http://127.0.0.1:8021")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--timeout", type=float, default=10)
parser.add_argument("--retries", type=int, default=3)
args = parser.parse_args()


def ask_teacher(ids):
    for attempt in range(1, args.retries + 1):
        try:
            answer = requests.post(args.teacher_url, json={"ids": ids.tolist()}, timeout=args.timeout)
            answer.raise_for_status()
            found = answer.json()
            return torch.tensor(found["ids"]), torch.tensor(found["logprobs"])
        except requests.RequestException as error:
            log.warning("teacher: attempt %d of %d failed: %s", attempt, args.retries, error)
            time.sleep(1)
    raise RuntimeError(f"no answer of the teacher at {args.teacher_url} after {args.retries} attempts")


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.student, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rows = [json.loads(line)["prompt"] for line in open(args.data)]
    log.info("student loaded, %d prompts", len(rows))
    writer = SummaryWriter("out/tb")
    for step in range(1, args.steps + 1):
        start = time.time()
        texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows[step * 4 : step * 4 + 4]]
        ids = tokenizer(texts, return_tensors="pt", padding=True).input_ids
        with torch.no_grad():
            full = model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0)
        chosen, wanted = ask_teacher(full)
        got = model(full).logits.log_softmax(-1).gather(-1, chosen)
        loss = (wanted.exp() * (wanted - got)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        writer.add_scalar("loss", loss.item(), step)
        metrics = {"step": step, "loss": round(loss.item(), 4), "grad_norm": round(norm.item(), 4), "length": full.shape[1], "time": round(time.time() - start, 2)}
        print(json.dumps(metrics), flush=True)
        if step % 6 == 0:
            log.info("saving model to out/student")
            model.save_pretrained("out/student")
    log.info("done after %d steps", args.steps)


if __name__ == "__main__":
    main()
