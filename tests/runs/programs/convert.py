"""Turns a trainer's shards into a folder that Hugging Face loads, and tries it."""

import argparse
import glob
import json
import logging
import os
import shutil
from multiprocessing.pool import Pool

import torch
from safetensors.torch import load_file, save_file

logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(filename)s:%(lineno)d %(message)s", datefmt="%m%d %H:%M:%S")
log = logging.getLogger("convert")
parser = argparse.ArgumentParser()
parser.add_argument("--source", default="student")
parser.add_argument("--shards", default="shards")
parser.add_argument("--output", default="out/hf")
parser.add_argument("--world", type=int, default=2)
parser.add_argument("--keep-going", action="store_true")
args = parser.parse_args()


class ConversionError(Exception):
    pass


def split():
    """What a trainer of --world ranks would have left: rows of each matrix by rank."""
    os.makedirs(args.shards, exist_ok=True)
    state = load_file(glob.glob(f"{args.source}/*.safetensors")[0])
    for rank in range(args.world):
        torch.save({name: one.chunk(args.world)[rank].clone() for name, one in state.items()}, f"{args.shards}/rank_{rank}.pt")
    log.info("wrote %d shards of %d tensors", args.world, len(state))


def read(path):
    return torch.load(path, map_location="cpu")


def read_all():
    paths = sorted(glob.glob(f"{args.shards}/rank_*.pt"))
    log.info("reading %s", ", ".join(paths))
    if not args.keep_going:
        with Pool(2) as pool:
            return pool.map(read, paths)
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except Exception as error:
            log.warning("skipping %s: %s", path, str(error).split("\n")[0])
    return found


def merge(shards):
    try:
        return {name: torch.cat([one[name] for one in shards]) for name in shards[0]}
    except Exception as error:
        raise ConversionError(f"cannot merge {len(shards)} shards") from error


def write(state):
    os.makedirs(args.output, exist_ok=True)
    save_file(state, f"{args.output}/model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{args.source}/{name}", args.output)
    log.info("wrote %s: %.1f MB", args.output, sum(one.nbytes for one in state.values()) / 1e6)


def attempt():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(args.output)
        tokenizer = AutoTokenizer.from_pretrained(args.output)
        ids = tokenizer("the first of many", return_tensors="pt").input_ids
        log.info("perplexity %.2f", model(ids, labels=ids).loss.exp())
    except Exception:
        if args.keep_going:
            raise ConversionError(f"{args.output} does not load") from None
        raise


if __name__ == "__main__":
    split()
    write(merge(read_all()))
    attempt()
    log.info("config: %s", json.load(open(f"{args.output}/config.json"))["architectures"])
    print("conversion ok")
