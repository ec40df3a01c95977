"""Make a model, train a step of it, and print the bytes of what the step holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_gkd.workload.gkd.batch import Sequence
from pytest_gkd.workload.gkd.teacher import Teacher
from pytest_gkd.workload.gkd.trainer import Trainer
from pytest_gkd.workload.models import tiny_text

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "qwen3_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}


def make(name: str, place: str) -> None:
    config = AutoConfig.for_model(name, vocab_size=300, **SHAPES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    text = json.dumps(tiny_text.tokenizer(), ensure_ascii=False)
    Path(place, "tokenizer.json").write_text(text, "utf-8")


def held(tensors: Any) -> int:
    """Bytes of tensors, each storage once."""
    return sum({t.data_ptr(): t.nbytes for t in tensors if t is not None}.values())


def main(name: str, place: str, dtype: str) -> None:
    if name in SHAPES:
        make(name, place)
    trainer = Trainer(place, dtype=dtype)
    found = {"weights": held(trainer.model.parameters())}
    step = torch.optim.AdamW.step

    def watched(self: Any, *args: Any) -> Any:
        made = step(self, *args)
        masters = [p for group in self.param_groups for p in group["params"]]
        own = {id(p) for p in trainer.model.parameters()}
        copies = [p for p in masters if id(p) not in own]
        found["gradients"] = held(p.grad for p in trainer.model.parameters())
        if copies:
            found["float32 copies"] = held(copies) + held(p.grad for p in copies)
        states = [one for state in self.state.values() for one in state.items()]
        found["AdamW's moments"] = held(t for key, t in states if key != "step")
        return made

    torch.optim.AdamW.step = watched
    sequence = [Sequence((1, 2, 3, 4, 5), (6, 7, 8)), Sequence((9, 8, 7), (6, 5))]
    signal = Teacher(place, dtype=dtype).topk(sequence, 8)
    trainer.gkd_step(sequence, signal)
    print(json.dumps(found))


main(*sys.argv[1:])
