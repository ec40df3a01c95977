"""Makes an adapter of LoRA, merges it into its model and writes shards of safetensors."""

import argparse
import json
import os
import shutil

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--base", default="student")
parser.add_argument("--onto", default="student")
parser.add_argument("--adapter", default="adapter")
parser.add_argument("--output", default="merged")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--modules", nargs="+", default=["q_proj", "v_proj"])
args = parser.parse_args()


def make_adapter():
    model = AutoModelForCausalLM.from_pretrained(args.base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=args.modules, task_type="CAUSAL_LM"))
    adapted.save_pretrained(args.adapter)
    print("adapter written:", sorted(os.listdir(args.adapter)))


def merge():
    model = AutoModelForCausalLM.from_pretrained(args.onto, dtype=getattr(torch, args.dtype))
    merged = PeftModel.from_pretrained(model, args.adapter).merge_and_unload()
    state = {name: part.contiguous() for name, part in merged.state_dict().items() if name != "lm_head.weight"}
    names = sorted(state)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    os.makedirs(args.output)
    for file, part in halves.items():
        save_file({name: state[name] for name in part}, f"{args.output}/{file}", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    with open(f"{args.output}/model.safetensors.index.json", "w") as out:
        json.dump(index, out)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{args.onto}/{name}", args.output)
    print("merged:", len(names), "tensors")


def check():
    for file in sorted(os.listdir(args.output)):
        if file.endswith(".safetensors"):
            with safe_open(f"{args.output}/{file}", "pt") as part:
                print(file, len(part.keys()), "tensors")
    model = AutoModelForCausalLM.from_pretrained(args.output)
    tokenizer = AutoTokenizer.from_pretrained(args.output)
    ids = tokenizer("two and two", return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss
    print(f"check: loss {loss.item():.4f}, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    make_adapter()
    merge()
    check()
    print("done")
