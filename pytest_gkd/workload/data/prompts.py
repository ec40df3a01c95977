"""Turns a row into a prompt, and counts its tokens.

A prompt is chat messages or a text; a text is the content of one user message. Where
the tokenizer has a chat template it is applied, with the generation prompt added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gkd.near_names import near_names
from pytest_gkd.options import near
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.models.tokenizer_load import refusals, special_tokens

if TYPE_CHECKING:
    import numpy

    Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

# The names that public datasets and the trainers use, in the order they are tried:
# verl and TRL (prompt, messages), ShareGPT (conversations), OpenRLHF
# (context_messages, input), ms-swift (query), gsm8k (question), alpaca and dolly
# (instruction), preference pairs (chosen).
COLUMNS = (
    "prompt",
    "messages",
    "conversations",
    "conversation",
    "context_messages",
    "problem",
    "question",
    "query",
    "instruction",
    "input",
    "text",
    "chosen",
)
# The input of an instruction is in a second column, which may be empty (alpaca, dolly).
# ms-swift appends it on a new line (ms-swift, dataset/preprocessor/core.py,
# AlpacaPreprocessor).
MATERIAL = ("input", "context")
# Columns that hold whole conversations, from which trainers remove the last answer
# (TRL, experimental/utils.py, DataCollatorForChatML; ms-swift, remove_response).
CONVERSATIONS = ("messages", "conversations", "conversation", "chosen")
# Roles that every chat template knows or that the trainers fill in themselves.
ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
# What ShareGPT calls user and assistant.
SHAREGPT = ("human", "gpt")
# These may be empty: a call without text, a tool without output.
TOOLS = ("tool", "function", "ipython")
SILENT = ("system", "assistant", *TOOLS)
# In the names of tokens that stand for something other than text.
MEDIA_NAMES = ("image", "img", "vision", "video", "audio")
# A prompt that consists of these alone is unusable.
UNASKED = ("assistant", "system", "developer")

# A list of messages that was written as text, with json.dumps or str; for RE2 as well.
ENCODED = r"""\[\s*\{\s*["'](role|from|content|value)["']\s*:"""

# The most by which Unicode normalisation can lengthen UTF-8 text: 11 times for NFKC, 3
# times for NFC (unicode.org, FAQ on normalization, maximum expansion factors).
_GROWTH, _NFC_GROWTH = 11, 3


@dataclass(frozen=True)
class Sizes:
    """How large prompts are, without a tokenizer: three numbers for each.

    ``ascii_bytes`` and ``other_bytes`` are the UTF-8 bytes of the texts that are ASCII
    and of those that are not; ``messages`` counts the messages, 1 for a text.
    """

    ascii_bytes: Numbers
    other_bytes: Numbers
    messages: Numbers


@dataclass(frozen=True)
class PromptColumn:
    """Where the prompts are: in one column, or in two that belong together."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages and reports."""
        return " + ".join(self.columns)

    def of(self, row: Mapping[str, Any]) -> Any:
        """The prompt of a row."""
        if len(self.columns) == 1:
            return row.get(self.columns[0])
        values = [row.get(column) for column in self.columns]
        filled = [value for value in values if value is not None and value != ""]
        other = next((value for value in filled if not isinstance(value, str)), None)
        if other is not None:
            return other
        return "\n".join(text for text in filled if text.strip()) or None


def choose_column(
    columns: Sequence[str],
    named: str | None,
    where: str,
    origin: str = "--gkd-prompt-column",
) -> PromptColumn:
    """The prompt column: the one named, else the first with a known name.

    ``where`` are the files that have the columns, ``origin`` says who named the column.

    Raises StageFault ``data.schema``.
    """
    if named is not None:
        if named in columns:
            return PromptColumn((named,))
        wanted = repr(named)
        hint = near(named, columns).rstrip("?")
    else:
        known = [name for name in COLUMNS if name in columns]
        if known:
            pairs = known[0] == "instruction"
            material = [name for name in MATERIAL if pairs and name in columns]
            return PromptColumn((known[0], *material[:1]))
        wanted, origin = "one of " + ", ".join(COLUMNS), "the default"
        named = next((c for c in columns if c.strip().lower() in COLUMNS), None)
        hint = f"; did you mean {named!r}" if named else ""
    found = ", ".join(columns) or "none"
    similar = near_names(named or "", columns, 1)
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
    """What makes a prompt unusable, worded to follow "is"; empty if nothing does."""
    if value is None:
        return "null"
    if kind not in ("text", "messages"):
        return f"of type {kind}; expected text or a list of messages"
    if kind_of(value) != kind:
        return f"{_typed(value)}, where other rows have {kind}"
    if isinstance(value, str):
        return _text_problem(value)
    if not value:
        return "a list without messages"
    for position, message in enumerate(value):
        wrong = _message_problem(message)
        if wrong:
            return f"a list whose message {position} {wrong}"
    asked = any(message["role"] not in UNASKED for message in value)
    return "" if asked else "a conversation without a turn of the user"


def problem_facts(value: Any) -> dict[str, Any]:
    """What the advice needs to know about a faulty prompt: its form."""
    if isinstance(value, str) and _text_problem(value):
        return {"encoded": True} if value.strip() else {}
    first = value[0] if isinstance(value, list) and value else None
    is_sharegpt = isinstance(first, dict) and bool(first.keys() >= {"from", "value"})
    return {"sharegpt": True} if is_sharegpt else {}


def contents(prompt: Any) -> list[str]:
    """The texts that a prompt of any form contains, if any."""
    if isinstance(prompt, str):
        return [prompt]
    messages = prompt if isinstance(prompt, list) else []
    return [_plain(m.get("content")) for m in messages if isinstance(m, dict)]


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """The prompt as chat messages, without the assistant's turns at its end.

    Those are the reference answer; in on-policy training the student writes its own.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    # datasets fills in null where only other messages have a key; a template may ask
    # for the content of every message, though.
    messages = [
        {k: v for k, v in m.items() if v is not None or k == "content"} for m in prompt
    ]
    while messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


class RoughRenderer:
    """Lengths without a tokenizer: a quarter of the bytes, as in English.

    ``controls`` are tokens that only the chat template should write, never a prompt;
    none if unknown.
    """

    controls: tuple[str, ...] = ()

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        """Length of each prompt in tokens."""
        texts = ("".join(contents(as_messages(prompt))) for prompt in prompts)
        return [(len(text.encode("utf-8", "replace")) + 3) // 4 for text in texts]

    def bounds(self, sizes: Sizes) -> Numbers:
        """Upper bounds on the prompts' numbers of tokens, without tokenizing them."""
        tokens: Numbers = (sizes.ascii_bytes + sizes.other_bytes + 3) // 4
        return tokens

    def takes(self, role: str) -> bool:
        """Whether the chat template has a use for this role; True if unknown."""
        return True


class Renderer(RoughRenderer):
    """Prompts to token ids with one tokenizer.

    ``has_template`` is False where the tokenizer has no chat template: the contents
    are then joined, as the job would do with plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = str(getattr(tokenizer, "chat_template", None) or "")
        self.has_template = bool(self.template)
        self.controls = self._controls()
        self._frame_tokens: int | None = None

    def text(self, prompt: Any) -> str:
        """The text that is tokenized."""
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
        return [len(ids) for ids in self.ids(prompts)]

    def bounds(self, sizes: Sizes) -> Numbers:
        """A token covers at least one byte.

        A message costs at most what the whole frame of a one-message conversation does.
        """
        if self._frame_tokens is None:
            self._frame_tokens = self.lengths([[{"role": "user", "content": "x"}]])[0]
        texts: Numbers = sizes.ascii_bytes + self._growth() * sizes.other_bytes
        texts += (sizes.messages + 1) * self._frame_tokens
        return texts

    def takes(self, role: str) -> bool:
        """Whether the chat template names a role, or writes out whatever role it gets.

        ShareGPT's names for user and assistant have to be named, and so do User and the
        like: a model whose template writes out any role has not been trained on these.
        """
        named = any(f"{q}{role}{q}" in self.template for q in ("'", '"'))
        if named or not self.has_template:
            return True
        if role in SHAREGPT or role.lower() in ROLES:
            return False
        said = "said by this role"
        try:
            text = self.text(
                [{"role": "user", "content": "x"}, {"role": role, "content": said}]
            )
        except refusals():
            return False
        return said in text

    def _controls(self) -> tuple[str, ...]:
        """Special tokens that the chat template writes, and start and end of a text.

        A prompt that contains them has been rendered already. Those that stand for
        images and audio do belong in prompts.
        """
        special = special_tokens(self.tokenizer)
        if not self.has_template or not special:
            return ()
        ends = {self.tokenizer.bos_token, self.tokenizer.eos_token}
        return tuple(
            text
            for text in special
            if (text in ends or text in self.template)
            and not any(name in text.lower() for name in MEDIA_NAMES)
        )

    def _growth(self) -> int:
        """The factor by which the tokenizer's normalizer can lengthen text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        normaliser = type(getattr(backend, "normalizer", self)).__name__
        return {"NoneType": 1, "NFC": _NFC_GROWTH}.get(normaliser, _GROWTH)


def _text_problem(text: str) -> str:
    """What makes a text unusable as a prompt, worded to follow "is"."""
    if not text.strip():
        return "empty"
    if re.match(ENCODED, text.lstrip()):
        return (
            "text that spells out a list of messages, which trainers take for one "
            "user's message, or refuse; expected the list itself"
        )
    return ""


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
    if {"from", "value"} <= set(keys):
        return (
            f"has no role; it has {', '.join(keys)}, as ShareGPT; expected role and "
            "content, with the roles user and assistant (ms-swift converts it itself, "
            "verl and TRL do not)"
        )
    if not isinstance(role, str) or not role:
        return f"has no role; it has {', '.join(keys) or 'nothing'}"
    if isinstance(content, str):
        if content.strip() or role in SILENT:
            return ""
        return f"has no text (role {role})"
    if isinstance(content, list) and content:
        return ""
    if content is None and _says_nothing(message):
        return ""
    if content is None:
        return f"has no content; it has {', '.join(keys)}"
    return f"has {_typed(content)} as content; expected text"


def _says_nothing(message: dict[str, Any]) -> bool:
    """Whether a message without content is a call, or from a tool without output.

    Whether the chat template copes with it is for the template to tell.
    """
    role = message["role"]
    calls = message.get("tool_calls") or message.get("function_call")
    return bool(calls) if role == "assistant" else role in TOOLS


def _typed(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"
