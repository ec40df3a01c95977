"""How does a row become a prompt, and how long is it in tokens?

A prompt is chat messages or a text; a text is the content of one user message. Where
the tokenizer has a chat template it is applied, with the generation prompt added.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.fault import StageFault
from pytest_gkd.settings import near
from pytest_gkd.workload.datafiles import DataFile
from pytest_gkd.workload.jsonlines import is_one_value, nonblank_lines, open_text

# The names that public datasets and the trainers use, in the order they are tried.
COLUMNS = (
    "prompt",
    "messages",
    "problem",
    "question",
    "input",
    "instruction",
    "text",
)

# The most by which Unicode normalisation can lengthen UTF-8 text: 11 times for NFKC
# (unicode.org, FAQ on normalization, maximum expansion factors).
_NORMALISED_GROWTH = 11


def choose_column(columns: Sequence[str], named: str | None, where: str) -> str:
    """The prompt column: the named one, else the first known name there is.

    ``where`` are the files that have the columns.

    Raises StageFault ``data.schema``.
    """
    if named is not None:
        if named in columns:
            return named
        wanted, origin = repr(named), "--gkd-prompt-column"
        hint = near(named, columns).rstrip("?")
    else:
        for name in COLUMNS:
            if name in columns:
                return name
        wanted, origin, hint = "one of " + ", ".join(COLUMNS), "the default", ""
    found = ", ".join(columns) or "none"
    similar = difflib.get_close_matches(named or "", columns, n=1)
    raise StageFault(
        "data.schema",
        f"{where}: no prompt column; expected {wanted} ({origin}), found {found}{hint}",
        facts={
            "prompt_column": named or COLUMNS[0],
            "columns": list(columns),
            "column": columns[0] if len(columns) == 1 else (similar or [""])[0],
            "path": where.split(", ")[0],
        },
    )


def kind_of(value: Any) -> str:
    """``text``, ``messages``, or the name of a type that is neither."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "messages"
    return type(value).__name__


def problem(value: Any, kind: str) -> str:
    """What makes a prompt unusable, in words after "is"; empty if nothing does."""
    if value is None:
        return "null"
    if kind_of(value) != kind:
        return f"{_typed(value)}, where other rows have {kind}"
    if isinstance(value, str):
        return "" if value.strip() else "empty"
    if not value:
        return "a list without messages"
    asked = False
    for position, message in enumerate(value):
        wrong = _message_problem(message)
        if wrong:
            return f"a list whose message {position} {wrong}"
        asked = asked or message["role"] != "assistant"
    return "" if asked else "a conversation without a turn of the user"


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """The prompt as chat messages, without the assistant's turns at its end.

    Those are the reference answer; on-policy training has the student write its own.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    # datasets fills in null where only other messages have a key.
    messages = [{k: v for k, v in m.items() if v is not None} for m in prompt]
    while messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


class Renderer:
    """Prompts to token ids with one tokenizer.

    ``has_template`` is False where the tokenizer has no chat template: the contents
    are then joined, as the job would do with plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._frame_tokens: int | None = None

    def text(self, prompt: Any) -> str:
        """The text that is cut into tokens."""
        messages = as_messages(prompt)
        if not self.has_template:
            return "\n".join(_plain(message.get("content")) for message in messages)
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each prompt, without special tokens beyond the template's."""
        texts = [self.text(prompt) for prompt in prompts]
        encoded = self.tokenizer(texts, add_special_tokens=not self.has_template)
        return [list(map(int, ids)) for ids in encoded["input_ids"]]

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        """Length of each prompt in tokens."""
        return [len(ids) for ids in self.ids(prompts)]

    def bound(self, prompt: Any) -> int:
        """A number of tokens that the prompt cannot exceed, without cutting it.

        A token covers a byte at least. A message costs what the whole frame of a
        one-message conversation costs, or less.
        """
        if self._frame_tokens is None:
            self._frame_tokens = self.lengths([[{"role": "user", "content": "x"}]])[0]
        if isinstance(prompt, str):
            return _bytes_bound(prompt) + 2 * self._frame_tokens
        contents = sum(_bytes_bound(_plain(m.get("content"))) for m in prompt)
        return contents + (len(prompt) + 1) * self._frame_tokens


class RoughRenderer:
    """Lengths without a tokenizer: a quarter of the characters, as English has it."""

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        """Estimated length of each prompt in tokens."""
        return [self.bound(prompt) for prompt in prompts]

    def bound(self, prompt: Any) -> int:
        """The same estimate."""
        contents = [_plain(m.get("content")) for m in as_messages(prompt)]
        return (sum(map(len, contents)) + 3) // 4


def read_rows(files: Sequence[DataFile]) -> Iterator[dict[str, Any]]:
    """The rows one after the other, without ``datasets`` and without a cache.

    For the first few prompts of files that the data stage loads in full.
    """
    import json

    for file in files:
        if file.kind == "parquet":
            import pyarrow.parquet

            parquet = pyarrow.parquet.ParquetFile(file.path)
            for batch in parquet.iter_batches(batch_size=256):
                yield from batch.to_pylist()
        elif is_one_value(file.path):
            with open_text(Path(file.path)) as opened:
                value = json.loads(opened.read().decode("utf-8-sig"))
            yield from value if isinstance(value, list) else [value]
        else:
            for _, raw in nonblank_lines(file.path):
                yield json.loads(raw.decode("utf-8-sig"))


def _bytes_bound(text: str) -> int:
    if text.isascii():
        return len(text)
    return _NORMALISED_GROWTH * len(text.encode("utf-8", "replace"))


def _plain(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {_typed(message)}; expected an object with role and content"
    keys = [key for key, value in message.items() if value is not None]
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"has no role; it has {', '.join(keys) or 'nothing'}"
    if isinstance(content, str):
        if content.strip() or role in ("system", "assistant"):
            return ""
        return f"has no text (role {role})"
    if isinstance(content, list) and content:
        return ""
    if content is None and message.get("tool_calls"):
        return ""
    if content is None:
        return f"has no content; it has {', '.join(keys)}"
    return f"has {_typed(content)} as content; expected text"


def _typed(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"
