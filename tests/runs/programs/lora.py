"""Fine-tuning with transformers' Trainer and a LoRA adapter, set by Hydra (conf/lora.yaml)."""

import logging
import os

import hydra
import numpy as np
import torch
from datasets import load_dataset
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

log = logging.getLogger(__name__)


def encode(rows, tokenizer, cfg):
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in rows["prompt"]]
    return tokenizer(texts, truncation=True, max_length=cfg.data.max_length)


class Collator:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, items):
        batch = self.tokenizer.pad(items, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        return {**batch, "labels": labels}


def accuracy(predicted):
    logits, labels = predicted
    hits = np.argmax(logits[:, :-1], -1) == labels[:, 1:]
    return {"accuracy": float(hits[labels[:, 1:] != -100].mean())}


@hydra.main(version_base=None, config_path="conf", config_name="lora")
def main(cfg: DictConfig):
    log.info("settings\n%s", OmegaConf.to_yaml(cfg, resolve=True))
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    data = load_dataset("json", data_files=cfg.data.path, split="train")
    data = data.map(
        encode,
        batched=True,
        num_proc=cfg.data.num_proc,
        remove_columns=data.column_names,
        fn_kwargs={"tokenizer": tokenizer, "cfg": cfg},
    )
    split = data.train_test_split(test_size=cfg.data.held_out, seed=0)
    log.info("%d rows to train on, %d to evaluate", len(split["train"]), len(split["test"]))
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=getattr(torch, cfg.model.dtype))
    if cfg.lora.adapter:
        model = PeftModel.from_pretrained(model, cfg.lora.adapter, is_trainable=True)
    else:
        model = get_peft_model(model, LoraConfig(r=cfg.lora.r, target_modules=list(cfg.lora.modules), task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**cfg.trainer),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=Collator(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=cfg.resume or None)
    log.info("evaluation: %s", trainer.evaluate())
    model.save_pretrained(os.path.join(cfg.trainer.output_dir, "adapter"))
    log.info("adapter saved")


if __name__ == "__main__":
    main()
