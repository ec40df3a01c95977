"""Which models and prompts does a run use when the user names none? Made here.

A student and a teacher of the Qwen2 shape with one byte-level tokenizer, and a file of
prompts, all seeded and small. Only numpy and safetensors are needed, so that making
them does not wait for torch. They are kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
VOCAB_SIZE = 512  # embedding rows; the tokenizer has fewer entries, as Qwen's has
PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)
MAX_POSITIONS = 2048

# The chat format of Qwen, without a default system message and without tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Text is cut into words, single digits, and runs of signs before merges apply.
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

_TASKS = (
    "Write one sentence about {}.",
    "Name two facts about {}.",
    "Explain {} to a child.",
    "What do people like about {}?",
    "List three words for {}.",
    "Why is {} important?",
    "Give a short title for a book about {}.",
    "Ask a good question about {}.",
    "What is the opposite of {}?",
    "How would you draw {}?",
    "Where can I find {}?",
    "Tell a story about {} in ten words.",
)
_TOPICS = (
    "the sea", "a river", "the moon", "winter", "a small bird", "bread", "music",
    "the number 7", "a long train", "rain", "an old map", "the colour red", "a garden",
    "numbers", "a bridge", "the night sky", "paper", "a good friend", "salt", "wind",
    "glass", "a lost key", "the first day", "light",
)  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """Where the made models and prompts lie; all paths are absolute.

    ``train_file`` is JSONL with chat messages under ``prompt``; ``text_file`` holds
    the same prompts as plain text. Both have 288 rows, shorter than 64 tokens.
    """

    root: Path
    student: Path
    teacher: Path
    train_file: Path
    text_file: Path


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


def make(fallback_dir: Path) -> Tiny:
    """The models and prompts: from the cache when whole, else made now.

    The cache is ``$XDG_CACHE_HOME`` or ``~/.cache``; where that cannot be written,
    ``fallback_dir`` takes its place. Several processes may call this at once.
    """
    name = f"tiny-{content_version()}"
    try:
        return _kept(cache_home() / name)
    except OSError:
        return _kept(fallback_dir.absolute() / name)


def cache_home() -> Path:
    """``$XDG_CACHE_HOME/pytest-gkd`` (when absolute, as its specification asks)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # Not Path.home(): without HOME and a passwd entry it raises RuntimeError.
    base = given if given.startswith("/") else os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base).absolute() / "pytest-gkd"


def content_version() -> str:
    """Changes with this file, and so with everything that it writes."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def is_whole(root: Path) -> bool:
    """Whether every file that ``root``'s manifest promises is there, unchanged."""
    try:
        promised = json.loads((root / MANIFEST).read_text("utf-8"))
        return bool(promised) and all(
            _digest(root / name) == digest for name, digest in promised.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def write(root: Path) -> None:
    """Write models, prompts and the manifest (last) into the directory ``root``."""
    for name, shape in (("student", STUDENT), ("teacher", TEACHER)):
        directory = root / name
        directory.mkdir(parents=True)
        _write_json(directory / "config.json", model_config(shape))
        _write_json(directory / "generation_config.json", generation_config())
        _write_json(directory / "tokenizer.json", tokenizer())
        _write_json(directory / "tokenizer_config.json", tokenizer_config())
        _write_weights(directory / "model.safetensors", shape)
    texts = prompts()
    chats = [[{"role": "user", "content": text}] for text in texts]
    _write_lines(root / "prompts.jsonl", [{"prompt": chat} for chat in chats])
    _write_lines(root / "prompts-text.jsonl", [{"prompt": text} for text in texts])
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = [path.relative_to(root).as_posix() for path in files]
    _write_json(root / MANIFEST, {name: _digest(root / name) for name in names})


def prompts() -> list[str]:
    """The 288 prompts, in an order that mixes tasks and topics."""
    pairs = list(itertools.product(_TASKS, _TOPICS))
    # 35 has no factor in common with 288, so every pair comes exactly once.
    mixed = [pairs[(index * 35) % len(pairs)] for index in range(len(pairs))]
    return [task.format(topic) for task, topic in mixed]


def model_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of a Qwen2 model, as transformers 4 and 5 read it."""
    ids = token_ids()
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[END_TOKEN],
        "pad_token_id": ids[PAD_TOKEN],
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: greedy, ending at the chat's end of turn."""
    ids = token_ids()
    return {
        "do_sample": False,
        "eos_token_id": ids[END_TOKEN],
        "pad_token_id": ids[PAD_TOKEN],
    }


def token_ids() -> dict[str, int]:
    """Token to id: 256 bytes, then merged tokens, then the special ones."""
    merged = dict.fromkeys(left + right for left, right in _merges())
    return {
        token: index
        for index, token in enumerate((*_byte_symbols(), *merged, *SPECIAL_TOKENS))
    }


def tokenizer() -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE: any text round-trips exactly."""
    ids = token_ids()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, **_SPECIAL_FLAGS}
            for token in SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", **_BYTE_LEVEL_FLAGS},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **_BYTE_LEVEL_FLAGS},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for t, i in ids.items() if t not in SPECIAL_TOKENS},
            "merges": [[left, right] for left, right in _merges()],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``, with the chat template inside."""
    ids = token_ids()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(ids[token]): {"content": token, **_SPECIAL_FLAGS}
            for token in SPECIAL_TOKENS
        },
        "bos_token": None,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


_SPECIAL_FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
_BYTE_LEVEL_FLAGS = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level BPE, by byte value.

    Bytes that are printable in Latin-1 stand for themselves; the others, in order, are
    the characters from U+0100 on (openai/gpt-2, src/encoder.py).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _merges() -> list[tuple[str, str]]:
    """The merges that build the prompts' own words, from the left, commonest first."""
    words: dict[str, int] = {}
    for text in (*prompts(), " assistant", " user"):
        for word in text.replace(".", "").replace("?", "").split():
            words["\u0120" + word] = words.get("\u0120" + word, 0) + 1
    room = VOCAB_SIZE - 256 - len(SPECIAL_TOKENS) - 16  # 16 ids stay padding
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(words, key=lambda word: (-words[word], word)):
        for end in range(1, len(word)):
            merges.setdefault((word[:end], word[end]), None)
    return list(merges)[:room]


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

    width = 32
    embedding = normal(0.5, VOCAB_SIZE, shape.hidden)
    # Special and padding rows are small: a sampled rollout rarely picks them, so it
    # has its full length and decodes.
    embedding[min(token_ids()[token] for token in SPECIAL_TOKENS) :] *= 0.1
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", np.ones(shape.hidden, np.float32)
        for name, rows in (
            ("q_proj", shape.heads * width),
            ("k_proj", shape.kv_heads * width),
            ("v_proj", shape.kv_heads * width),
        ):
            gain = 1.5 * shape.hidden**-0.5
            yield at + f"self_attn.{name}.weight", normal(gain, rows, shape.hidden)
            yield at + f"self_attn.{name}.bias", normal(0.1, rows)
        gain = 2.0 * shape.hidden**-0.5
        yield (
            at + "self_attn.o_proj.weight",
            normal(gain, shape.hidden, shape.heads * width),
        )
        yield at + "post_attention_layernorm.weight", np.ones(shape.hidden, np.float32)
        for name in ("gate_proj", "up_proj"):
            gain = 1.5 * shape.hidden**-0.5
            yield at + f"mlp.{name}.weight", normal(gain, shape.intermediate, shape.hidden)
        gain = 2.0 * shape.intermediate**-0.5
        yield at + "mlp.down_proj.weight", normal(gain, shape.hidden, shape.intermediate)
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
        text_file=root / "prompts-text.jsonl",
    )


def _put_in_place(draft: Path, root: Path) -> None:
    """Rename ``draft`` to ``root``; another process may be doing the same.

    Raises OSError when ``root`` still is not whole after a few tries.
    """
    for _ in range(5):
        try:
            draft.rename(root)
        except OSError:  # something is there
            if is_whole(root):
                return
            # The damaged one moves inside our draft's name, never half-deleted in place.
            aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=root.parent))
            try:
                root.rename(aside / root.name)
            except FileNotFoundError:
                pass  # another process moved it first
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        else:
            return
    raise OSError(f"{root} could not be put in place")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), "utf-8")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, "utf-8")
