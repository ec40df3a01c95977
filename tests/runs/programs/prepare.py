"""Prepares a data set with Hugging Face datasets: read, clean, tokenize, split, write shards."""

import argparse
import os

from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk
from tokenizers import Tokenizer
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--data", nargs="+", default=["prompts.jsonl"])
parser.add_argument("--format", default="json")
parser.add_argument("--tokenizer", default="student")
parser.add_argument("--output", default="out/prepared")
parser.add_argument("--shards", type=int, default=4)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--shortest", type=int, default=2)
args = parser.parse_args()


def question_of(row):
    return {"question": row["prompt"][-1]["content"].strip(), "turns": len(row["prompt"])}


def main():
    fast = Tokenizer.from_file(os.path.join(args.tokenizer, "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    print(f"vocabulary: {fast.get_vocab_size()} entries, {len(tokenizer)} with what was added")
    parts = [load_dataset(args.format, data_files=path, split="train") for path in args.data]
    data = concatenate_datasets(parts).map(question_of, num_proc=args.workers, desc="questions")
    data = data.filter(lambda row: len(row["question"].split()) >= args.shortest, desc="too short")
    print(f"{len(data)} questions are left")
    data = data.map(lambda rows: tokenizer(rows["question"]), batched=True, batch_size=50, desc="tokens")
    lengths = [len(ids) for ids in data["input_ids"]]
    print(f"tokens: mean {sum(lengths) / len(lengths):.1f}, longest {max(lengths)}")
    data = data.select_columns(["question", "input_ids"])
    os.makedirs(args.output, exist_ok=True)
    for number in range(args.shards):
        data.shard(args.shards, number).to_parquet(f"{args.output}/{number:05}.parquet")
    again = load_dataset("parquet", data_files=f"{args.output}/*.parquet", split="train")
    Dataset.from_list([{"rows": len(again)}]).save_to_disk(f"{args.output}/info")
    print("written:", load_from_disk(f"{args.output}/info")[0])


if __name__ == "__main__":
    main()
