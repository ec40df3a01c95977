"""REINFORCE with generate() of transformers and rewards out of a user's own file."""

import argparse
import importlib.util
import json
import logging
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--reward-file", default="my_reward.py")
parser.add_argument("--reward-name", default="score")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--max-new-tokens", type=int, default=12)
parser.add_argument("--output", default="out/reinforce")
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="[%(levelname)s|%(filename)s:%(lineno)d] %(asctime)s >> %(message)s")
log = logging.getLogger("reinforce")


def load_reward(path, name):
    spec = importlib.util.spec_from_file_location("user_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def prompts_of(rows, tokenizer):
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


def main():
    score = load_reward(args.reward_file, args.reward_name)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in open(args.data)]
    log.info("Loaded %d prompts and the reward %s", len(rows), args.reward_name)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, args.steps + 1):
        part = rows[(step - 1) * args.batch :][: args.batch]
        batch = prompts_of(part, tokenizer)
        with torch.no_grad():
            full = model.generate(**batch, max_new_tokens=args.max_new_tokens, do_sample=True, pad_token_id=tokenizer.pad_token_id)
        answers = full[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = torch.tensor([score(row, text) for row, text in zip(part, texts, strict=True)])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logits = model(full[:, :-1]).logits[:, -answers.shape[1] :]
        logp = logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
        loss = -(logp.mean(-1) * advantages).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.info("step=%d reward=%.4f loss=%.4f grad_norm=%.4f", step, rewards.mean(), loss, norm)
    os.makedirs(args.output, exist_ok=True)
    model.save_pretrained(args.output)
    log.info("Saved to %s", args.output)


if __name__ == "__main__":
    main()
