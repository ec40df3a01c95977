"""A training loop with accelerate, worker processes for the data, and checkpoints."""

import argparse
import json
import math

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--resume", default="")
args = parser.parse_args()
logger = get_logger(__name__, log_level="INFO")


class Prompts(Dataset):
    def __init__(self, path, tokenizer):
        self.rows = [json.loads(line) for line in open(path)]
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        text = self.rows[at]["prompt"][-1]["content"]
        ids = self.tokenizer(text, truncation=True, max_length=48).input_ids
        return torch.tensor(ids)


def collate(items):
    ids = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"input_ids": ids, "labels": ids.clone()}


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulation)
    accelerator.print(accelerator.state)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    loader = DataLoader(Prompts(args.data, tokenizer), 4, shuffle=True, collate_fn=collate, num_workers=args.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = get_scheduler("cosine", optimizer, 2, args.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if args.resume:
        accelerator.load_state(args.resume)
        accelerator.print(f"resumed from {args.resume}")
    bar = tqdm(range(args.steps), disable=not accelerator.is_local_main_process)
    done = 0
    for epoch in range(math.ceil(args.steps / len(loader))):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            bar.update(1)
            bar.set_postfix(loss=f"{loss.item():.3f}", lr=f"{schedule.get_last_lr()[0]:.2e}")
            if done % 10 == 0:
                mean = accelerator.gather(loss.detach()).mean()
                accelerator.print(f"epoch {epoch} step {done}: loss {mean:.4f}")
                accelerator.save_state(f"out/acc/step_{done}")
            if done >= args.steps:
                break
    accelerator.wait_for_everyone()
    accelerator.print("training finished")
    accelerator.end_training()


if __name__ == "__main__":
    main()
