"""Generates the models and prompts of a run for which the user names none.

A student and a teacher of the Qwen2 architecture with one byte-level tokenizer, and a
file of prompts, all seeded and small. Only numpy and safetensors are needed, so
generating them does not wait for torch. They are kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.files import cache_directory
from pytest_gkd.workload.models import tiny_text

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. Heads are 32 wide, the smallest that vLLM supports on CPU."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    seed: int


STUDENT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=256, seed=1)
TEACHER = Shape(hidden=256, layers=3, heads=8, kv_heads=4, intermediate=512, seed=2)


@dataclass(frozen=True)
class Tiny:
    """Where the generated models and prompts are; all paths are absolute.

    ``train_file`` is JSONL with chat messages under ``prompt``, 288 rows, each shorter
    than 64 tokens.
    """

    root: Path
    student: Path
    teacher: Path
    train_file: Path


def make(fallback_dir: Path) -> Tiny:
    """The models and prompts: from the cache if complete, else generated now.

    The cache is ``$XDG_CACHE_HOME`` or ``~/.cache``; if that is not writable,
    ``fallback_dir`` is used instead. Several processes may call this at once.
    """
    name = f"tiny-{content_version()}"
    home = cache_directory()
    if home is not None:
        try:
            return _kept(home / name)
        except OSError:
            pass  # not writable, or full: the caller's directory may do
    return _kept(fallback_dir.absolute() / name)


def content_version() -> str:
    """A digest of the generators' sources: it changes whenever their output may."""
    digest = hashlib.sha256()
    for source in (__file__, tiny_text.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:12]


def is_whole(root: Path) -> bool:
    """Whether every file in ``root``'s manifest exists, unchanged."""
    try:
        promised = json.loads((root / MANIFEST).read_text("utf-8"))
        return bool(promised) and all(
            _digest(root / name) == digest for name, digest in promised.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def write(root: Path) -> None:
    """Write models, prompts and the manifest (last) into the directory ``root``."""
    made = (("student", STUDENT), ("teacher", TEACHER))
    for name, shape in made:
        at = root / name
        at.mkdir(parents=True)
        _write_json(at / "config.json", model_config(shape))
        _write_json(at / "generation_config.json", generation_config())
        _write_json(at / "tokenizer.json", tiny_text.tokenizer())
        _write_json(at / "tokenizer_config.json", tiny_text.tokenizer_config())
        _write_weights(at / "model.safetensors", shape)
    (root / "prompts.jsonl").write_text(tiny_text.prompt_lines(), "utf-8")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = [path.relative_to(root).as_posix() for path in files]
    _write_json(root / MANIFEST, {name: _digest(root / name) for name in names})


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

    Projections have a gain above 1, so that the layers' contribution outweighs the
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
    # reaches its full length and can be decoded.
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


def _write_weights(path: Path, shape: Shape) -> None:
    from safetensors.numpy import save

    # Not save_file, whose files only the user can read whatever the umask says.
    path.write_bytes(save(dict(_tensors(shape)), metadata={"format": "pt"}))


def _kept(root: Path) -> Tiny:
    if not is_whole(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
        try:
            write(draft)
            draft.chmod(0o755)  # mkdtemp makes it private; the cache need not be
            _put_in_place(draft, root)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Tiny(
        root=root,
        student=root / "student",
        teacher=root / "teacher",
        train_file=root / "prompts.jsonl",
    )


def _put_in_place(draft: Path, root: Path) -> None:
    """Rename ``draft`` to ``root``; another process may be doing the same.

    Raises OSError if ``root`` is still incomplete after a few tries.
    """
    for _ in range(5):
        try:
            draft.rename(root)
        except OSError:  # something is there
            if is_whole(root):
                return
            # Renamed in one step, so never half gone under this name; and kept, because
            # what changed it may be the user's training run.
            changed = f"{root.name}.changed-{time.time_ns()}-{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):  # another process was first
                root.rename(root.with_name(changed))
        else:
            return
    raise OSError(f"{root} could not be put in place")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), "utf-8")
