"""The text of the generated models: their prompts and their tokenizer."""

from __future__ import annotations

import itertools
import json
from typing import Any

VOCAB_SIZE = 512  # embedding rows; the tokenizer has fewer entries, like Qwen's
PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)
MAX_POSITIONS = 2048

# Qwen's chat format, without a default system message and without tools. Content may be
# a list of parts, or absent next to a tool call: the prompts may be the user's own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# How text is split before merges apply. It is Qwen2's own (transformers,
# models/qwen2/tokenization_qwen2.py), because transformers 5 builds a Qwen2Tokenizer
# with this one whatever tokenizer.json says: every loader then gives the same ids.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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


def prompts() -> list[str]:
    """The 288 prompts, in an order that mixes tasks and topics."""
    pairs = list(itertools.product(_TASKS, _TOPICS))
    # 35 and 288 are coprime, so every pair comes exactly once.
    mixed = [pairs[(index * 35) % len(pairs)] for index in range(len(pairs))]
    return [task.format(topic) for task, topic in mixed]


def prompt_lines() -> str:
    """The prompts as JSONL, as chat messages under ``prompt``."""
    chats = ([{"role": "user", "content": text}] for text in prompts())
    return "".join(json.dumps({"prompt": chat}) + "\n" for chat in chats)


def token_ids() -> dict[str, int]:
    """Token to id: 256 bytes, then merged tokens, then the special ones."""
    merged = dict.fromkeys(left + right for left, right in _merges())
    return {
        token: index
        for index, token in enumerate((*byte_symbols(), *merged, *SPECIAL_TOKENS))
    }


def tokenizer() -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE: any text round-trips, up to NFC."""
    ids = token_ids()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, **_SPECIAL_FLAGS}
            for token in SPECIAL_TOKENS
        ],
        "normalizer": {"type": "NFC"},
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
        "tokenizer_class": "Qwen2Tokenizer",
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
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
_BYTE_LEVEL_FLAGS = dict.fromkeys(
    ("add_prefix_space", "trim_offsets", "use_regex"), False
)


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level BPE, by byte value.

    Bytes printable in Latin-1 stand for themselves; the others map, in order, to the
    characters from U+0100 on (openai/gpt-2, src/encoder.py).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _merges() -> list[tuple[str, str]]:
    """Merges that build the prompts' own words, left to right, most common first."""
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
