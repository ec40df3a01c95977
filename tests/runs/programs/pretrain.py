"""Training with torchrun and gloo (DDP or FSDP2); prints what Megatron prints."""

import argparse
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--train-iters", type=int, default=20)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--save", default="out/ckpt")
parser.add_argument("--load", default="")
parser.add_argument("--save-interval", type=int, default=10)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--timeout", type=int, default=60)
args = parser.parse_args()
iteration = 0


def print_rank_0(message):
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def get_batch(rows, tokenizer, rank, world):
    at = (iteration * world + rank) * 4 % (len(rows) - 4)
    texts = [row["prompt"][-1]["content"] for row in rows[at : at + 4]]
    return tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)


def forward_step(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss


def save_checkpoint(model, optimizer):
    print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {args.save} in torch format")
    os.makedirs(args.save, exist_ok=True)
    state = model.state_dict()
    path = f"{args.save}/iter_{iteration:07d}_rank{dist.get_rank()}.pt"
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "iteration": iteration}, path)
    dist.barrier()
    print_rank_0(f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save}")


def load_checkpoint(model, optimizer):
    print_rank_0(f" loading checkpoint from {args.load}")
    saved = torch.load(f"{args.load}_rank{dist.get_rank()}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["iteration"]


def main():
    global iteration
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    print_rank_0(f"> initialized {world} ranks with gloo")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in open(args.data)]
    print_rank_0(f"> finished creating datasets, {len(rows)} rows")
    model = AutoModelForCausalLM.from_pretrained(args.model)
    print(f" > number of parameters on rank {rank}: {sum(p.numel() for p in model.parameters())}", flush=True)
    if args.fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.load:
        iteration = load_checkpoint(model, optimizer)
    dist.barrier()
    print_rank_0(f"[before the start of training step] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')}")
    while iteration < args.train_iters:
        start = time.time()
        batch = get_batch(rows, tokenizer, rank, world)
        loss = forward_step(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if args.fsdp else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        iteration += 1
        print_rank_0(
            f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {iteration:8d}/{args.train_iters:8d} |"
            f" consumed samples: {iteration * world * 4:12d} |"
            f" elapsed time per iteration (ms): {(time.time() - start) * 1000:.1f} |"
            f" learning rate: {args.lr:.6E} | global batch size: {world * 4:5d} |"
            f" lm loss: {mean.item() / world:.6E} | loss scale: 1.0 | grad norm: {norm.item():.3f} |"
            f" number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        if iteration % args.save_interval == 0:
            save_checkpoint(model, optimizer)
    print_rank_0(f"[after training is done] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
