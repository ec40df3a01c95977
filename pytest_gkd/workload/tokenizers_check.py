"""Do the tokenizers of student and teacher work, and fit each other?"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gkd.fault import StageFault

SAMPLES = {
    "ascii": "The quick brown fox jumps over 13 lazy dogs.",
    "chinese": "今天天气很好,我们去公园散步。",
    "emoji": "Thumbs up \U0001f44d, family \U0001f468\u200d\U0001f469\u200d\U0001f467.",
    "code": "def area(r):\n    return 3.14159 * r ** 2  # m^2\n",
    "mathematics": "\\frac{a}{b} = \\sqrt{x_1^2 + 2}",
    "accents": "Zo\u00eb caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",
    "whitespace": "one  two\n\n\tthree   \n",
}


@dataclass(frozen=True)
class Agreement:
    """How two vocabularies compare, where they do not contradict each other.

    ``only_student`` and ``only_teacher`` count added tokens that the other lacks.
    """

    tokens: int
    only_student: int = 0
    only_teacher: int = 0


def check_round_trip(tokenizer: Any, origin: str) -> list[str]:
    """Every sample comes back from its tokens; the names of those that lose blanks.

    A sample may come back normalised (NFC or NFKC) and with a blank added or dropped
    at its start, as sentencepiece does. One that only differs in white space is named,
    not failed. Raises AssertionError with the text and what it became.
    """
    lossy = []
    for name, text in SAMPLES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if same_text(text, back):
            continue
        if "".join(text.split()) == "".join(back.split()):
            lossy.append(name)
            continue
        raise AssertionError(
            f"{origin}: the tokenizer does not give back what it is given ({name}): "
            f"{text!r} became {back!r}"
        )
    return lossy


def same_text(text: str, back: str) -> bool:
    """Whether ``back`` is ``text`` up to normalisation and one blank at the start."""
    forms = {text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFKC"))}
    return bool(forms & {back, back.removeprefix(" "), " " + back})


def check_chat_template(tokenizer: Any, origin: str) -> str:
    """A user's turn as the chat template renders it, generation prompt added.

    Raises StageFault ``tokenizer.chat-template`` when there is no template, it fails,
    or it drops the user's text.
    """
    asked = "What is the capital of France?"
    facts = {"origin": origin, "path": str(getattr(tokenizer, "name_or_path", ""))}
    if not getattr(tokenizer, "chat_template", None):
        raise StageFault(
            "tokenizer.chat-template",
            f"{origin}: the tokenizer of {facts['path']} has no chat template",
            facts=facts,
        )
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:
        raise StageFault(
            "tokenizer.chat-template",
            f"{origin}: the chat template of {facts['path']} fails on one turn of a "
            f"user: {type(error).__name__}: {error}",
            facts=facts,
        ) from error
    if asked not in rendered:
        raise StageFault(
            "tokenizer.chat-template",
            f"{origin}: the chat template of {facts['path']} drops the user's text: it "
            f"rendered {rendered[:80]!r}",
            facts=facts,
        )
    return str(rendered)


def check_special_tokens(tokenizer: Any, vocab_rows: int | None, origin: str) -> None:
    """There are a padding and an end token, with ids inside the embedding.

    Raises StageFault ``tokenizer.pad-token`` or ``tokenizer.vocab-mismatch``, and
    AssertionError for a tokenizer without an end token.
    """
    path = str(getattr(tokenizer, "name_or_path", ""))
    if tokenizer.pad_token_id is None:
        raise StageFault(
            "tokenizer.pad-token",
            f"{origin}: the tokenizer of {path} has no padding token (pad_token is "
            f"{tokenizer.pad_token!r}, eos_token is {tokenizer.eos_token!r})",
            facts={"origin": origin, "path": path, "eos_token": tokenizer.eos_token},
        )
    if vocab_rows is not None and tokenizer.pad_token_id >= vocab_rows:
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
    assert tokenizer.eos_token_id is not None, (
        f"{origin}: the tokenizer of {path} has no end-of-sequence token, so rollouts "
        "would only end at their length limit"
    )


def check_ids(vocab: Mapping[str, int], vocab_rows: int | None, origin: str) -> None:
    """Every id of a vocabulary is a row of an embedding.

    Raises StageFault ``tokenizer.vocab-mismatch``. ``vocab_rows`` None skips it.
    """
    if vocab_rows is None:
        return
    beyond = sorted((i, token) for token, i in vocab.items() if i >= vocab_rows)
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


def compare(
    student: Mapping[str, int],
    teacher: Mapping[str, int],
    rows: tuple[int | None, int | None] = (None, None),
) -> Agreement:
    """Student's and teacher's vocabularies: the same token has the same id in both.

    Tokens that only one has are allowed as long as the other uses their ids for
    nothing, has embedding ``rows`` for them, and they are few (additions such as
    ``<think>``). Raises StageFault ``tokenizer.vocab-mismatch``.
    """
    if student == teacher:
        return Agreement(len(student))
    differing = [t for t in student if t in teacher and student[t] != teacher[t]]
    only_student = {t: i for t, i in student.items() if t not in teacher}
    only_teacher = {t: i for t, i in teacher.items() if t not in student}
    taken_student, taken_teacher = set(student.values()), set(teacher.values())
    clashing = [t for t, i in only_student.items() if i in taken_teacher]
    clashing += [t for t, i in only_teacher.items() if i in taken_student]
    student_rows, teacher_rows = rows
    for extra, limit in ((only_student, teacher_rows), (only_teacher, student_rows)):
        if len(extra) > _FEW or limit is None:
            clashing += list(extra)
        else:
            clashing += [token for token, i in extra.items() if i >= limit]
    wrong = sorted(
        {*differing, *clashing},
        key=lambda t: (student.get(t, teacher.get(t, 0)), t),
    )
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
    """Both tokenizers cut the samples into the same ids.

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
                f"student and teacher cut {text!r} differently: {ours[:8]} and "
                f"{theirs[:8]} (first 8 ids)",
                facts={"text": name, "student_ids": ours, "teacher_ids": theirs},
            )


# Chat and tool markers that a model of the same family adds; Qwen3 adds 4 to Qwen2.5.
_FEW = 64
