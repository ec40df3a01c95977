"""Checks that the student's and teacher's tokenizers work, and fit each other."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.models.tokenizer_load import refusals, special_tokens

SAMPLES = {
    "ascii": "The quick brown fox jumps over 13 lazy dogs.",
    "chinese": "今天天气很好,我们去公园散步。",
    "emoji": "Thumbs up \U0001f44d, family \U0001f468\u200d\U0001f469\u200d\U0001f467.",
    "code": "def area(r):\n    return 3.14159 * r ** 2  # m^2\n",
    "mathematics": "\\frac{a}{b} = \\sqrt{x_1^2 + 2}",
    "accents": "Zo\u00eb caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",
    "whitespace": "one  two\n\n\tthree   \n",
}
ASKED, ANSWERED = "What is the capital of France?", "Because it is so."


@dataclass(frozen=True)
class Agreement:
    """How two compatible vocabularies compare.

    ``only_student`` and ``only_teacher`` count added tokens that the other lacks.
    """

    tokens: int
    only_student: int = 0
    only_teacher: int = 0


def check_round_trip(tokenizer: Any, origin: str) -> dict[str, str]:
    """Check that samples survive encode and decode; returns the lossy ones' output.

    A sample may come back normalized (NFC or NFKC) and with a space added or dropped at
    its start, as in sentencepiece. Returned by name are those that come back with other
    white space, without zero-width marks, or with the unknown token in place of
    characters that the vocabulary lacks. Raises StageFault ``tokenizer.load`` for any
    other change, and if plain English loses all its spaces or any characters.
    """
    lossy: dict[str, str] = {}
    for name, text in SAMPLES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if same_text(text, back):
            continue
        known = getattr(tokenizer, "unk_token_id", None) not in ids
        same_marks = _marks(text) == _marks(back)
        same_words = back.split() == text.split()
        lossy[name] = back
        if same_words if name == "ascii" else same_marks or not known:
            continue
        raise StageFault(
            "tokenizer.load",
            f"{origin}: the tokenizer does not give back what it is given: "
            f"{text!r} became {back!r}",
            facts={
                "origin": origin,
                "path": _path(tokenizer),
                "changed_text": name,
            },
        )
    return lossy


def _path(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", ""))


def _marks(text: str) -> str:
    """The visible part of a text: no spaces, nothing zero-width (as in some emoji)."""
    return "".join(c for c in text if unicodedata.category(c)[0] not in "ZC")


def same_text(text: str, back: str) -> bool:
    """Whether ``back`` is ``text`` up to normalization and one space at the start."""
    forms = {text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFKC"))}
    return bool(forms & {back, back.removeprefix(" "), " " + back})


def check_chat_template(tokenizer: Any, origin: str, needed_for: str) -> str | None:
    """A user turn as the chat template renders it, with the generation prompt.

    None if there is no template and ``needed_for``, the prompts that are chat messages,
    is empty. Raises StageFault ``tokenizer.chat-template`` if it is needed and missing,
    if it fails, or if it drops the user's text.
    """
    path = _path(tokenizer)

    def fault(problem: str) -> StageFault:
        facts = {"origin": origin, "path": path}
        return StageFault(
            "tokenizer.chat-template", f"{origin}: {problem}", facts=facts
        )

    if not getattr(tokenizer, "chat_template", None):
        if not needed_for:
            return None
        raise fault(
            f"the tokenizer of {path} has no chat template, and the prompts of "
            f"{needed_for} are chat messages"
        )
    template = f"the chat template of {path}"
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": ASKED}],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise fault(f"{template} fails on one turn of a user: {said}") from error
    if ASKED not in rendered:
        said = f"it rendered {rendered[:80]!r}"
        raise fault(f"{template} drops the user's text: {said}")
    return str(rendered)


def check_generation_prompt(tokenizer: Any, origin: str) -> list[str]:
    """Check that the chat template lets the student begin where an answer begins.

    Returns a note if not: asked for a generation prompt it adds nothing, although it
    writes control tokens between a question and its answer.
    """
    question, answer = {"role": "user", "content": "Why?"}, ANSWERED
    turns = [question, {"role": "assistant", "content": answer}]

    def rendered(messages: list[dict[str, str]], *, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
        )

    asked = rendered([question], prompt=True)
    try:
        whole, found, _ = rendered(turns, prompt=False).partition(answer)
    except refusals():
        return []  # for a conversation that goes on; a prompt is one question
    between = whole.removeprefix(asked)
    if (
        asked != rendered([question], prompt=False)
        or not (found and whole.startswith(asked))
        or not any(text in between for text in special_tokens(tokenizer))
    ):
        return []
    return [
        f"{origin}: the chat template has no generation prompt: it writes {between!r} "
        "before an answer, and nothing where the student is to write one"
    ]


def check_special_tokens(
    tokenizer: Any,
    vocab_rows: int | None,
    origin: str,
    ends: Set[int] = frozenset(),
) -> list[str]:
    """Check that there is an end token, and a padding token inside the embedding.

    ``ends`` are the end tokens named in the model's files. Returns notes on what is no
    failure: no padding token (verl and TRL then use the end token), or an end token
    that only the model's files name, or that is none of these. Raises StageFault
    ``tokenizer.pad-token`` or ``tokenizer.eos-token``.
    """
    path, end = _path(tokenizer), tokenizer.eos_token_id
    notes = []
    if end is None:
        problem = f"{origin}: the tokenizer of {path} names no end token"
        if not ends:
            raise StageFault(
                "tokenizer.eos-token",
                f"{problem}, and no configuration of the model does: rollouts would "
                "only end at their length limit",
                facts={"origin": origin, "path": path},
            )
        notes.append(f"{problem}; only the model's configuration does")
    elif ends and end not in ends:
        named = ", ".join(map(str, sorted(ends)))
        notes.append(
            f"{origin}: the tokenizer's end token {tokenizer.eos_token!r} has id "
            f"{end}, and the model's configuration ends at {named}: trainer and engine "
            "may not end a rollout at the same token"
        )
    if tokenizer.pad_token_id is None:
        notes.append(
            f"{origin}: the tokenizer of {path} has no padding token; frameworks take "
            f"the end token {tokenizer.eos_token!r} for it, so padding must be masked "
            "by position, not by id"
        )
    elif vocab_rows is not None and tokenizer.pad_token_id >= vocab_rows:
        raise StageFault(
            "tokenizer.pad-token",
            f"{origin}: the padding token {tokenizer.pad_token!r} of {path} has id "
            f"{tokenizer.pad_token_id}, but the embedding has {vocab_rows} rows",
            facts={
                "origin": origin,
                "path": path,
                "pad_token": tokenizer.pad_token,
                "pad_token_id": tokenizer.pad_token_id,
                "vocab_size": vocab_rows,
            },
        )
    return notes


def _idle_tokens(tokenizer: Any) -> frozenset[str]:
    """Special tokens that no text produces, by their text.

    Not padding, end or start, and not in the chat template or what it renders for a
    turn.
    """
    special = special_tokens(tokenizer)
    if not special:
        return frozenset()
    template = str(getattr(tokenizer, "chat_template", None) or "")
    named = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    texts = [*SAMPLES.values(), ""]
    if template:
        turn = [{"role": "user", "content": SAMPLES["ascii"]}]
        texts.append(tokenizer.apply_chat_template(turn, tokenize=False))
    for text in texts:
        named |= set(tokenizer.encode(text))
    return frozenset(
        token
        for token, number in special.items()
        if number not in named and token not in template
    )


def check_ids(
    vocab: Mapping[str, int],
    vocab_rows: int | None,
    origin: str,
    tokenizer: Any = None,
) -> list[str]:
    """Check that every id of a vocabulary is an embedding row, except idle tokens.

    Those are the special ones of ``tokenizer`` that no text produces; the ones beyond
    the embedding are returned. Raises StageFault ``tokenizer.vocab-mismatch``.
    ``vocab_rows`` None skips the check.
    """
    if vocab_rows is None:
        return []
    all_beyond = sorted((i, token) for token, i in vocab.items() if i >= vocab_rows)
    if not all_beyond:
        return []
    idle = _idle_tokens(tokenizer)
    beyond = [(i, token) for i, token in all_beyond if token not in idle]
    if beyond:
        shown = ", ".join(f"{token!r} is {i}" for i, token in beyond[:3])
        raise StageFault(
            "tokenizer.vocab-mismatch",
            f"{origin}: {len(beyond)} token ids lie outside an embedding of "
            f"{vocab_rows} rows (vocab_size in config.json): {shown}",
            facts={
                "origin": origin,
                "vocab_size": vocab_rows,
                "largest_id": beyond[-1][0],
                "beyond": len(beyond),
            },
        )
    return [token for _, token in all_beyond]


def compare(
    student: Mapping[str, int],
    teacher: Mapping[str, int],
    rows: tuple[int | None, int | None] = (None, None),
) -> Agreement:
    """Check that the same token has the same id in student and teacher.

    Tokens that only one has are allowed if the other leaves their ids unused, has
    embedding ``rows`` for them, and they are few (additions such as ``<think>``).
    Raises StageFault ``tokenizer.vocab-mismatch``.
    """
    if student == teacher:
        return Agreement(len(student))
    only_student = {t: i for t, i in student.items() if t not in teacher}
    only_teacher = {t: i for t, i in teacher.items() if t not in student}
    differing = {t for t in student if t in teacher and student[t] != teacher[t]}
    for extra, other, limit in (
        (only_student, teacher, rows[1]),
        (only_teacher, student, rows[0]),
    ):
        taken, many = set(other.values()), len(extra) > _FEW
        for token, i in extra.items():
            if limit is None or many or i in taken or i >= limit:
                differing.add(token)
    wrong = sorted(differing, key=lambda t: (student.get(t, teacher.get(t, 0)), t))
    if wrong:
        shown = ", ".join(
            f"{t!r} is {student.get(t, 'absent')} and {teacher.get(t, 'absent')}"
            for t in wrong[:3]
        )
        raise StageFault(
            "tokenizer.vocab-mismatch",
            f"student and teacher disagree on {len(wrong)} of "
            f"{len(student.keys() | teacher.keys())} tokens: {shown}",
            facts={
                "differences": len(wrong),
                "first": [[t, student.get(t), teacher.get(t)] for t in wrong[:3]],
                "student_tokens": len(student),
                "teacher_tokens": len(teacher),
            },
        )
    return Agreement(len(student), len(only_student), len(only_teacher))


def check_same_ids(student: Any, teacher: Any) -> None:
    """Check that both tokenizers split the samples into the same ids.

    Equal vocabularies do not make equal tokenizers: merges and splits may differ.
    Raises StageFault ``tokenizer.vocab-mismatch``.
    """
    for name, text in SAMPLES.items():
        ours, theirs = (
            list(tokenizer.encode(text, add_special_tokens=False))
            for tokenizer in (student, teacher)
        )
        if ours != theirs:
            raise StageFault(
                "tokenizer.vocab-mismatch",
                f"student and teacher split {text!r} differently: {ours[:8]} and "
                f"{theirs[:8]} (first 8 ids)",
                facts={"text": name, "student_ids": ours, "teacher_ids": theirs},
            )


# Chat and tool markers that a model of the same family adds; Qwen3 adds 4 to Qwen2.5.
_FEW = 64
