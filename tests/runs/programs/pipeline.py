"""On-policy distillation with three Ray actors: rollout, teacher, trainer."""

import argparse
import json
import logging
import os
import time

import ray
import torch

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("distill")
parser = argparse.ArgumentParser()
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--timeout", type=float, default=200)


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@ray.remote(num_cpus=1)
class RolloutWorker:
    def __init__(self, path):
        print(f"loading rollout model from {path}", flush=True)
        self.model = load(path)

    def update_weights(self, state):
        self.model.load_state_dict(state)
        print(f"update_weights done, {len(state)} tensors", flush=True)

    def generate_sequences(self, ids):
        with torch.no_grad():
            return self.model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0)


@ray.remote(num_cpus=1)
class TeacherWorker:
    def __init__(self, path):
        print(f"loading teacher from {path}", flush=True)
        self.model = load(path)

    def compute_log_prob(self, ids):
        with torch.no_grad():
            return self.model(ids).logits.log_softmax(-1)


@ray.remote(num_cpus=1)
class TrainerWorker:
    def __init__(self, path, lr):
        print(f"loading actor from {path}", flush=True)
        self.model = load(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def state(self):
        return self.model.state_dict()

    def update_actor(self, ids, wanted):
        got = self.model(ids).logits.log_softmax(-1)
        loss = (wanted.exp() * (wanted - got)).sum(-1).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def save_checkpoint(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save(self.model.state_dict(), f"{folder}/model.pt")
        print(f"checkpoint saved to {folder}", flush=True)


def batches(args):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("student", padding_side="left")
    rows = [json.loads(line) for line in open(args.data)]
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False) for r in rows]
    log.info("dataset len: %d", len(texts))
    for step in range(args.steps):
        part = texts[step * args.batch : (step + 1) * args.batch]
        yield tokenizer(part, return_tensors="pt", padding=True).input_ids


def fit(args):
    rollout = RolloutWorker.remote("student")
    teacher = TeacherWorker.remote("teacher")
    trainer = TrainerWorker.remote("student", args.lr)
    for step, ids in enumerate(batches(args), 1):
        times = [time.time()]
        state = ray.get(trainer.state.remote(), timeout=args.timeout)
        ray.get(rollout.update_weights.remote(state), timeout=args.timeout)
        times.append(time.time())
        full = ray.get(rollout.generate_sequences.remote(ids), timeout=args.timeout)
        times.append(time.time())
        wanted = ray.get(teacher.compute_log_prob.remote(full), timeout=args.timeout)
        times.append(time.time())
        loss, norm = ray.get(trainer.update_actor.remote(full, wanted), timeout=args.timeout)
        times.append(time.time())
        sync, gen, teach, update = (b - a for a, b in zip(times, times[1:]))
        log.info(
            f"step:{step} - actor/kl_loss:{loss:.4f} - actor/grad_norm:{norm:.4f}"
            f" - response_length/mean:{full.shape[1] - ids.shape[1]:.1f}"
            f" - timing_s/update_weights:{sync:.3f} - timing_s/gen:{gen:.3f}"
            f" - timing_s/teacher:{teach:.3f} - timing_s/update_actor:{update:.3f}"
            f" - timing_s/step:{times[-1] - times[0]:.3f}"
        )
        if step % 3 == 0:
            log.info("saving checkpoint of step %d", step)
            ray.get(trainer.save_checkpoint.remote(f"out/ray/step_{step}"), timeout=args.timeout)
    log.info("all steps done")


if __name__ == "__main__":
    ray.init(num_cpus=4, object_store_memory=150 * 1024 * 1024, include_dashboard=False)
    fit(parser.parse_args())
    ray.shutdown()
