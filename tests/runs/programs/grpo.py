"""GRPO of a small model with TRL and a reward of one's own."""

import argparse

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--generations", type=int, default=4)
parser.add_argument("--max-completion", type=int, default=16)
parser.add_argument("--beta", type=float, default=0.0)
parser.add_argument("--server", default="")
args = parser.parse_args()


def length_reward(completions, **kwargs):
    texts = [c[0]["content"] for c in completions]
    return [len(set(text)) / 20.0 for text in texts]


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dataset = load_dataset("json", data_files=args.data, split="train")
    dataset = dataset.filter(lambda row: len(row["prompt"][-1]["content"]) < 200)
    config = GRPOConfig(
        output_dir="out/grpo",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        num_generations=args.generations,
        max_completion_length=args.max_completion,
        learning_rate=args.lr,
        beta=args.beta,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        bf16=False,
        use_vllm=bool(args.server),
        vllm_mode="server",
        vllm_server_base_url=args.server or None,
        vllm_server_timeout=20,
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=length_reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model("out/grpo/final")


if __name__ == "__main__":
    main()
