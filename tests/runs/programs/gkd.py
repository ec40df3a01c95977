"""On-policy distillation of a small model with TRL's GKDTrainer."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--student", default="student")
parser.add_argument("--teacher", default="teacher")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--lmbda", type=float, default=0.5)
args = parser.parse_args()


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    student = AutoModelForCausalLM.from_pretrained(args.student)
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher)
    dataset = load_dataset("json", data_files=args.data, split="train")
    dataset = dataset.map(
        lambda row: {"messages": row["prompt"] + [{"role": "assistant", "content": "yes, that is so"}]},
        remove_columns=dataset.column_names,
    )
    config = GKDConfig(
        output_dir="out/gkd",
        max_steps=args.steps,
        per_device_train_batch_size=2,
        learning_rate=args.lr,
        lmbda=args.lmbda,
        max_new_tokens=16,
        max_length=96,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=config,
        processing_class=tokenizer,
        train_dataset=dataset,
    )
    trainer.train()
    trainer.save_model()
    print("saved to", config.output_dir)


if __name__ == "__main__":
    main()
