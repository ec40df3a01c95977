"""A vLLM engine in a Ray actor, a trainer in another; weights go over as a file."""

import argparse
import json
import logging
import time

import ray

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--max-model-len", type=int, default=160)
parser.add_argument("--max-tokens", type=int, default=12)
parser.add_argument("--weights", default="/dev/shm")
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)s | %(message)s")
log = logging.getLogger("pool")


class Receiver:
    """What is mixed into vLLM's worker."""

    def load_file(self, path):
        from safetensors.torch import load_file

        state = load_file(path)
        self.model_runner.model.load_weights(iter(state.items()))
        return len(state)


@ray.remote(num_cpus=1)
class Engine:
    def __init__(self, args):
        from vllm import LLM

        self.args = args
        self.llm = LLM(
            args.model,
            dtype="float32",
            max_model_len=args.max_model_len,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=8,
            worker_extension_cls="engine_pool.Receiver",
        )

    def generate(self, chats):
        from vllm import SamplingParams

        told = self.llm.chat(chats, SamplingParams(max_tokens=self.args.max_tokens, logprobs=1), use_tqdm=False)
        return [list(one.prompt_token_ids) + list(one.outputs[0].token_ids) for one in told]

    def sync_weights(self, path):
        return self.llm.collective_rpc("load_file", args=(path,))


@ray.remote(num_cpus=1)
class Trainer:
    def __init__(self, args):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(args.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train_step(self, answers, rewards):
        total = 0.0
        for ids, reward in zip(answers, rewards, strict=True):
            ids = self.torch.tensor([ids])
            loss = reward * self.model(input_ids=ids, labels=ids).loss / len(answers)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def export(self, path):
        from safetensors.torch import save_file

        state = {name: part.contiguous() for name, part in self.model.state_dict().items() if name != "lm_head.weight"}
        save_file(state, path)
        return path


def reward_of(ids):
    return len(set(ids)) / len(ids) - 0.5


def main():
    rows = [json.loads(line)["prompt"] for line in open(args.data)]
    log.info("%d prompts", len(rows))
    engine, trainer = Engine.remote(args), Trainer.remote(args)
    for number in range(args.rounds):
        begin = time.time()
        part = rows[number * args.batch :][: args.batch]
        answers = ray.get(engine.generate.remote(part))
        rewards = [reward_of(ids) for ids in answers]
        loss = ray.get(trainer.train_step.remote(answers, rewards))
        path = ray.get(trainer.export.remote(f"{args.weights}/weights.{number}.safetensors"))
        count = ray.get(engine.sync_weights.remote(path))
        log.info("round %d | loss %.4f | reward %.3f | %s tensors | %.1f s", number, loss, sum(rewards) / len(rewards), count, time.time() - begin)
    log.info("all rounds done")


if __name__ == "__main__":
    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, runtime_env={"working_dir": ".", "excludes": ["out"]})
    main()
