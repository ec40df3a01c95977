"""Measures prompts by the student's tokenizer or, without one, by a rough guess."""

from __future__ import annotations

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data.prompts import Renderer, RoughRenderer
from pytest_gkd.workload.models import model_files, tokenizer_load
from pytest_gkd.workload.models.inputs import Inputs


def renderer(inputs: Inputs, settings: Settings) -> Renderer:
    """Prompts as the student's tokenizer has them; raises what its load raises."""
    return Renderer(
        tokenizer_load.load(
            inputs.student,
            inputs.origin("student"),
            trust_remote_code=settings.trust_remote_code,
        )
    )


def best(inputs: Inputs, settings: Settings) -> tuple[RoughRenderer, str]:
    """What measures, and its description in words.

    A tokenizer that fails is reported by the tokenizer stage, not here. The description
    says so, and why.
    """
    try:
        found = renderer(inputs, settings)
        found.lengths(["a prompt"])  # the chat template works
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        return RoughRenderer(), f"characters divided by 4, because {problem}"
    how = "chat template" if found.has_template else "no chat template"
    return found, f"{type(found.tokenizer).__name__} of the student, {how}"


def check_context(inputs: Inputs, settings: Settings, longest_tokens: int) -> None:
    """Check that the longest prompt kept leaves room for an answer in the context.

    ``longest_tokens`` is its length; prompts over the length limit are not counted.
    Raises StageFault ``data.too-long``.
    """
    context = model_files.context_tokens(inputs.student, inputs.origin("student"))
    if context is None or longest_tokens + settings.max_new_tokens <= context:
        return
    raise StageFault(
        "data.too-long",
        f"the longest prompt that is kept has {longest_tokens} tokens, and with "
        f"{settings.max_new_tokens} new ones ({settings.origin('max_new_tokens')}) it "
        f"does not fit into the student's context of {context} (config.json)",
        facts={
            "longest_tokens": longest_tokens,
            "new_tokens": settings.max_new_tokens,
            "context_tokens": context,
        },
    )
