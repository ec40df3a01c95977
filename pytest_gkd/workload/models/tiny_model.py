"""The made models: their shape and their seeded weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.workload.models import tiny_text


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. Heads are 32 wide, the smallest that vLLM has on CPU."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    seed: int


STUDENT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=256, seed=1)
TEACHER = Shape(hidden=256, layers=3, heads=8, kv_heads=4, intermediate=512, seed=2)


def model_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of a Qwen2 model, as transformers 4 and 5 read it."""
    ids = tiny_text.token_ids()
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[tiny_text.END_TOKEN],
        "pad_token_id": ids[tiny_text.PAD_TOKEN],
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": tiny_text.MAX_POSITIONS,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tiny_text.VOCAB_SIZE,
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: greedy, ending at the chat's end of turn."""
    ids = tiny_text.token_ids()
    return {
        "do_sample": False,
        "eos_token_id": ids[tiny_text.END_TOKEN],
        "pad_token_id": ids[tiny_text.PAD_TOKEN],
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, Any]]:
    """Name and float32 array of each parameter, from one seeded generator.

    Projections have a gain above 1, so that what the layers add outweighs the
    token's own embedding. Otherwise a tied model would repeat its input whatever its
    layers hold, and a weight sync that did nothing would look right.
    """
    import numpy as np

    rng = np.random.default_rng(shape.seed)

    def normal(std: float, *size: int) -> Any:
        return rng.standard_normal(size, dtype=np.float32) * np.float32(std)

    def projection(gain: float, rows: int, columns: int) -> Any:
        return normal(gain * columns**-0.5, rows, columns)

    width = 32
    embedding = normal(0.5, tiny_text.VOCAB_SIZE, shape.hidden)
    # Special and padding rows are small: a sampled rollout rarely picks them, so it
    # has its full length and decodes.
    embedding[
        min(tiny_text.token_ids()[token] for token in tiny_text.SPECIAL_TOKENS) :
    ] *= 0.1
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", np.ones(shape.hidden, np.float32)
        for name, rows in (
            ("q_proj", shape.heads * width),
            ("k_proj", shape.kv_heads * width),
            ("v_proj", shape.kv_heads * width),
        ):
            name = f"{at}self_attn.{name}"
            yield f"{name}.weight", projection(1.5, rows, shape.hidden)
            yield f"{name}.bias", normal(0.1, rows)
        out = projection(2.0, shape.hidden, shape.heads * width)
        yield at + "self_attn.o_proj.weight", out
        yield at + "post_attention_layernorm.weight", np.ones(shape.hidden, np.float32)
        for name in ("gate_proj", "up_proj"):
            inner = projection(1.5, shape.intermediate, shape.hidden)
            yield f"{at}mlp.{name}.weight", inner
        down = projection(2.0, shape.hidden, shape.intermediate)
        yield at + "mlp.down_proj.weight", down
    yield "model.norm.weight", np.ones(shape.hidden, np.float32)


def write_weights(path: Path, shape: Shape) -> None:
    from safetensors.numpy import save

    # Not save_file, whose files only the user can read whatever the umask says.
    path.write_bytes(save(dict(_tensors(shape)), metadata={"format": "pt"}))
