"""Rollouts of a student in vLLM, offline, and what the teacher says of them."""

import argparse
import json
import logging

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(levelname)s] %(message)s")
log = logging.getLogger("rollout")
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--teacher", default="teacher")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--max-model-len", type=int, default=128)
parser.add_argument("--max-tokens", type=int, default=16)
args = parser.parse_args()


def main():
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in open(args.data)]
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        enforce_eager=True,
        gpu_memory_utilization=0.03,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=16,
        seed=1,
    )
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher)
    sampling = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, logprobs=1)
    for number in range(args.rounds):
        part = [row["prompt"] for row in rows[number * args.batch :][: args.batch]]
        answers = llm.chat(part, sampling, use_tqdm=True)
        lengths, scores = [], []
        for answer in answers:
            ids = list(answer.prompt_token_ids) + list(answer.outputs[0].token_ids)
            with torch.no_grad():
                logits = teacher(torch.tensor([ids])).logits
            scores.append(logits.log_softmax(-1).max(-1).values.mean().item())
            lengths.append(len(answer.outputs[0].token_ids))
        mean = sum(scores) / len(scores)
        log.info("round %d: %d answers, mean length %.1f, teacher %.4f", number, len(answers), sum(lengths) / len(lengths), mean)
        with open("rollouts.jsonl", "a") as out:
            for answer in answers:
                out.write(json.dumps({"text": answer.outputs[0].text}) + "\n")
    log.info("wrote rollouts.jsonl")


if __name__ == "__main__":
    main()
