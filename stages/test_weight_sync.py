"""Stage weight_sync: the engine serves the trainer's weights after each push."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gkd.stage_api import StageContext, StageFault

if TYPE_CHECKING:
    from pytest_gkd.workload.layouts.layout import Job

NEW_TOKENS = 16


@pytest.mark.gkd_stage("weight_sync")
def test_weight_sync(gkd: StageContext, job: Job) -> None:
    from pytest_gkd.workload.layouts import reference

    prompts = job.engine.encode(list(reference.PROMPTS))
    original = job.generate(prompts, NEW_TOKENS)
    loaded = job.check_served("before any push", "vllm.wrong-output")

    job.trainer.snapshot()
    gkd.step("changing the trainer's weights")
    job.trainer.perturb(seed=1)
    pushed = job.push_weights()
    served = job.check_served("after the push")
    for name, value in job.trainer.load_facts().items():
        gkd.fact(name, value)
    gkd.fact("tensors", pushed.tensors)
    gkd.fact("bytes", pushed.bytes)
    gkd.fact("first_push_s", round(pushed.seconds, 4))
    gkd.fact("transport", pushed.transport)
    gkd.fact("transport_why", job.transfer.why)

    unchanged = [name for name in loaded if served[name] == loaded[name]]
    assert not unchanged, f"{len(unchanged)} tensors were pushed unchanged: {unchanged}"
    changed = job.generate(prompts, NEW_TOKENS)
    gkd.step("running the reference forward pass")
    checks = reference.check(job, prompts, changed)
    if reference.same_answers(original, changed, checks[0].tolerance):
        raise StageFault(
            "sync.not-applied",
            f"after the push the engine answers {len(prompts)} prompts as it did "
            f"before, though {len(loaded)} tensors in it have changed",
        )
    if rounding := reference.judge(job, checks, "after the push"):
        gkd.note("vllm.rounding", rounding)

    gkd.step("restoring the trainer's weights")
    job.trainer.restore()
    # The first push was also a warm-up.
    seconds = job.push_weights().seconds
    gkd.fact("push_s", round(seconds, 4))
    restored = job.check_served("after the push back")
    different = [name for name in loaded if restored[name] != loaded[name]]
    assert not different, f"{len(different)} tensors did not come back: {different}"
    again = job.generate(prompts, NEW_TOKENS)
    checks = reference.check(job, prompts, again)
    if rounding := reference.judge(job, checks, "after the push back"):
        gkd.note("vllm.rounding", rounding)
    what = f"{pushed.tensors} tensors, {pushed.bytes / 1e6:.1f} MB"
    gkd.fact("summary", f"{what}, {pushed.transport}, {seconds:.3f} s a push")
