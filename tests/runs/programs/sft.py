"""SFT of a small model with TRL."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--output", default="out/sft")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()


def to_text(row):
    answer = {"role": "assistant", "content": "the answer is " + row["prompt"][-1]["content"][:20]}
    return {"text": tokenizer.apply_chat_template(row["prompt"] + [answer], tokenize=False)}


tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model)
dataset = load_dataset("json", data_files=args.data, split="train")
dataset = dataset.map(to_text, remove_columns=dataset.column_names)
config = SFTConfig(
    output_dir=args.output,
    max_steps=args.steps,
    per_device_train_batch_size=args.batch,
    learning_rate=args.lr,
    logging_steps=1,
    save_steps=5,
    max_length=64,
    dataloader_num_workers=args.workers,
    report_to="none",
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=args.resume or None)
trainer.save_model(args.output + "/final")
