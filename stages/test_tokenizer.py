"""Stage tokenizer: the student's and teacher's tokenizers work and match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload.data import first_prompts
from pytest_gkd.workload.models import inputs, model_files, model_paths, tokenizer_load
from pytest_gkd.workload.models import tokenizer_check as check


@pytest.mark.gkd_stage("tokenizer")
def test_tokenizer(gkd: StageContext) -> None:
    """Each tokenizer by itself, then against both embeddings and the other one."""
    job = inputs.resolve(gkd.settings, gkd.run_dir)
    names = {"student": job.student, "teacher": job.teacher}
    loaded: dict[str, Any] = {}
    rows: dict[str, int | None] = {}
    for role, name in names.items():
        gkd.fact(role, name)
        rows[role] = _embedding_rows(name, job.origin(role))
        gkd.fact(f"{role}_embedding_rows", rows[role])
        if role == "teacher" and name == job.student:
            loaded[role] = loaded["student"]
            continue
        # The teacher is given token ids; only the student's template is used.
        chats = _chats(gkd, job) if role == "student" else ""
        loaded[role] = _one(gkd, role, name, job.origin(role), rows[role], chats)

    gkd.step("comparing the vocabularies")
    student, teacher = loaded["student"], loaded["teacher"]
    vocabularies = {role: tokenizer.get_vocab() for role, tokenizer in loaded.items()}
    for role, vocabulary in vocabularies.items():
        beyond = check.check_ids(vocabulary, rows[role], job.origin(role), loaded[role])
        for token in beyond:
            del vocabulary[token]
        if beyond:
            gkd.note(
                "tokenizer.beyond",
                f"{job.origin(role)}: {len(beyond)} special tokens have no row in the "
                f"embedding of {rows[role]} ({beyond[0]!r} first); no text should "
                "be encoded to them; one that is will fail",
            )
    agreement = check.compare(
        vocabularies["student"],
        vocabularies["teacher"],
        (rows["student"], rows["teacher"]),
    )
    gkd.fact("tokens", agreement.tokens)
    gkd.fact("tokens_only_student", agreement.only_student)
    gkd.fact("tokens_only_teacher", agreement.only_teacher)
    for role, other in (("student", "teacher"), ("teacher", "student")):
        # The student's rollouts are fed to the teacher, the teacher's top-k ids index
        # the student's logits: each vocabulary must fit both embeddings.
        check.check_ids(
            vocabularies[other], rows[role], job.origin(role), loaded[other]
        )
    check.check_same_ids(student, teacher)
    gkd.fact("same_chat_template", student.chat_template == teacher.chat_template)
    gkd.fact("summary", f"student and teacher agree on {agreement.tokens} tokens")


def _chats(gkd: StageContext, job: inputs.Inputs) -> str:
    """Train files whose prompts need a chat template; a note if that is unknown."""
    try:
        return first_prompts.chat_prompts(job, gkd.settings)
    except Exception as error:  # whatever the files' loader raises
        why = error.message if isinstance(error, StageFault) else repr(error)[:300]
        gkd.note(
            "tokenizer.prompts-unread",
            "whether the prompts are chat messages, which need a chat template, is not "
            f"known: {why} (pytest --gkd-stages=data says more)",
        )
        return ""


def _one(
    gkd: StageContext, role: str, name: str, origin: str, rows: int | None, chats: str
) -> Any:
    """One tokenizer, loaded and tested by itself; ``chats`` need its template."""
    trust = gkd.settings.trust_remote_code
    gkd.step(f"loading the {role}'s tokenizer")
    tokenizer = tokenizer_load.load(name, origin, trust_remote_code=trust)
    gkd.fact(f"{role}_tokenizer", type(tokenizer).__name__)
    gkd.step(f"trying the {role}'s tokenizer")
    ends = _ends(name, origin)
    others = tokenizer.get_vocab()
    others.pop(tokenizer.pad_token, None)  # it has its own cause
    check.check_ids(others, rows, origin, tokenizer)
    for text in check.check_special_tokens(tokenizer, rows, origin, ends):
        gkd.note("tokenizer.special", text)
    gkd.fact(f"{role}_pad_is_eos", tokenizer.pad_token_id == tokenizer.eos_token_id)
    if check.check_chat_template(tokenizer, origin, chats) is None:
        gkd.note(
            "tokenizer.no-template",
            f"{origin}: the tokenizer of {name} has no chat template, as is usual "
            "for a base model; plain-text prompts are used as they are",
        )
    elif role == "student":
        for text in check.check_generation_prompt(tokenizer, origin):
            gkd.note("tokenizer.generation-prompt", text)
    lossy = check.check_round_trip(tokenizer, origin)
    gkd.fact(f"{role}_lossy_texts", list(lossy))
    if lossy:
        first, back = next(iter(lossy.items()))
        gkd.note(
            "tokenizer.lossy",
            f"{origin}: text changes when it is encoded and decoded "
            f"({', '.join(lossy)}): {check.SAMPLES[first]!r} becomes {back!r}; a "
            "student can neither read nor write what is lost",
        )
    gkd.step(f"loading the {role}'s processor, if it has one")
    processor = tokenizer_load.load_processor(name, origin, trust_remote_code=trust)
    gkd.fact(f"{role}_processor", processor)
    return tokenizer


def _embedding_rows(name: str, origin: str) -> int | None:
    """vocab_size in the model's config; None if the config is only on the hub."""
    found = model_paths.locate(name, origin)
    if found is None:
        return None
    return model_files.vocab_size(
        model_files.read_config(Path(found.directory), origin)
    )


def _ends(name: str, origin: str) -> frozenset[int]:
    """The end tokens named by the model's configuration; empty if that is unknown."""
    found = model_paths.locate(name, origin)
    if found is None:
        return frozenset()
    return model_files.end_tokens(found.directory, origin)
