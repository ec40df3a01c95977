"""DPO with TRL on pairs that are made of the prompts."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--reference", default="teacher")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--beta", type=float, default=0.1)
args = parser.parse_args()


def pair(row):
    question = row["prompt"][-1]["content"]
    return {
        "prompt": row["prompt"],
        "chosen": [{"role": "assistant", "content": f"{question[:12]} is right"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = AutoModelForCausalLM.from_pretrained(args.model)
    reference = AutoModelForCausalLM.from_pretrained(args.reference)
    dataset = load_dataset("json", data_files=args.data, split="train")
    dataset = dataset.map(pair, remove_columns=[c for c in dataset.column_names if c != "prompt"])
    config = DPOConfig(
        output_dir="out/dpo",
        max_steps=args.steps,
        per_device_train_batch_size=2,
        beta=args.beta,
        max_length=64,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = DPOTrainer(model=policy, ref_model=reference, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("out/dpo/final")
    print("done, model in out/dpo/final")


if __name__ == "__main__":
    main()
