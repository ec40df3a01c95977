"""What the actors of ray_vllm.py do: a trainer, rollouts by vLLM, a teacher."""

import os

import torch


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


class Receiver:
    """In vLLM's worker: takes the trainer's weights from a file."""

    def receive_weights(self, path):
        from safetensors.torch import load_file

        # Not load_weights: on a CPU vLLM has packed them.
        self.reload_weights(weights_iterator=load_file(path).items())


class RolloutWorker:
    def __init__(self, path):
        from vllm import LLM

        self.llm = LLM(
            path,
            dtype="float32",
            max_model_len=2048,
            enforce_eager=True,
            gpu_memory_utilization=0.03,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=8,
            seed=1,
            worker_extension_cls="workers.Receiver",
        )

    def ready(self):
        return True

    def update_weights(self, path):
        return self.llm.collective_rpc("receive_weights", args=(path,))

    def generate_sequences(self, prompts, tokens):
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        answers = self.llm.generate(asked, sampling, use_tqdm=False)
        return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in answers]


class TeacherWorker:
    def __init__(self, path):
        self.model = load(path)

    def compute_log_prob(self, rows):
        with torch.no_grad():
            return self.model(torch.tensor(rows)).logits.log_softmax(-1)


class TrainerWorker:
    def __init__(self, path, lr):
        self.model = load(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def push_weights(self, path):
        from safetensors.torch import save_file

        weights = self.model.state_dict()
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, path)

    def update_actor(self, rows, wanted):
        got = self.model(torch.tensor(rows)).logits.log_softmax(-1)
        loss = (wanted.exp() * (wanted - got)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save_checkpoint(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save(self.model.state_dict(), f"{folder}/model.pt")
