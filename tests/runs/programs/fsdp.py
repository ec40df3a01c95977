"""Training of sharded parameters (FSDP2) on several CPUs, with distributed checkpoints."""

import argparse
import datetime
import json
import logging
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-every", type=int, default=4)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--timeout", type=float, default=60)
parser.add_argument("--load", default="")
args = parser.parse_args()
rank = int(os.environ.get("RANK", 0))
logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank{rank} %(levelname)s %(message)s")
log = logging.getLogger()


def collate(rows):
    ids = [torch.tensor(row) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded[:, :32]


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    mesh = init_device_mesh("cpu", (args.shards,), mesh_dim_names=("shard",))
    log.info("mesh %s", mesh)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [tokenizer(json.loads(line)["prompt"][-1]["content"]).input_ids for line in open(args.data)]
    loader = DataLoader(rows, 2, sampler=DistributedSampler(rows, seed=1), collate_fn=collate, drop_last=True)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        log.info("loaded %s", args.load)
    step = 0
    while step < args.steps:
        for ids in loader:
            step += 1
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                log.info("step %d/%d loss %.4f grad_norm %.3f", step, args.steps, total.item() / dist.get_world_size(), float(norm))
            if step % args.save_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"out/fsdp/step_{step}")
                log.info("checkpoint out/fsdp/step_%d", step)
            if step >= args.steps:
                break
    dist.barrier()
    dist.destroy_process_group()
    log.info("bye")


if __name__ == "__main__":
    main()
