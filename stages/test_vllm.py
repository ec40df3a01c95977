"""Stage vllm: a real rollout engine starts, and its answers match its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import StageContext

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts.layout import Job

NEW_TOKENS = 16


@pytest.mark.gkd_stage("vllm")
def test_vllm(gkd: StageContext, job: Job) -> None:
    from pytest_gkd.workload.layouts import reference

    prompts = job.engine.encode(list(reference.PROMPTS))
    completions = job.generate(prompts, NEW_TOKENS)
    # The first call also compiled and warmed up.
    started = monotonic()
    job.generate(prompts, NEW_TOKENS)
    seconds = monotonic() - started

    assert len(completions) == len(prompts)
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert all(completion.token_ids for completion in completions), (
        f"the engine generated {tokens} tokens for {len(prompts)} prompts, and none "
        "for some of them"
    )
    gkd.fact("generated_tokens", tokens)
    gkd.fact("tokens_per_s", round(tokens / seconds, 1))

    gkd.step("running the reference forward pass")
    checks = reference.check(job, prompts, completions)
    gkd.fact("max_logprob_difference_nats", reference.largest_difference(checks))
    for name, value in job.describe().items():
        gkd.fact(name, value)
    if rounding := reference.judge(job, checks, "after the start", pushed=False):
        gkd.note("vllm.rounding", rounding)
    if deviation := reference.deviation(checks):
        gkd.note("vllm.deviation", deviation)
    if slow := job.engine.slow_loading():
        gkd.note("vllm.loading-slow", slow)
    facts = job.describe()
    engine = f"{facts['engine']}, {facts['engine_dtype']}"
    gkd.fact("summary", f"{engine}, up in {facts['engine_start_s']} s")
