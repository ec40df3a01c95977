"""Stage training_step: one on-policy GKD step, from rollouts to served weights."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import StageContext

if TYPE_CHECKING:
    from pytest_gkd.workload.gkd.step import StepReport
    from pytest_gkd.workload.layouts.layout import Job
    from pytest_gkd.workload.models.inputs import Inputs

STEPS = 3  # more in half precision
ROOM = 10  # in durations of a step
SEED = 20
DISTANCE = 0.05


@pytest.mark.gkd_stage("training_step")
def test_training_step(gkd: StageContext, job: Job, inputs: Inputs) -> None:
    from pytest_gkd.workload.data.first_prompts import prompt_ids
    from pytest_gkd.workload.gkd import memory_use, rollouts
    from pytest_gkd.workload.gkd.step import judge_steps, needs_another
    from pytest_gkd.workload.layouts import reference

    settings = gkd.settings
    rollouts.check_batch(settings)
    gkd.step("reading prompts")
    prompts = prompt_ids(inputs, settings, settings.batch_size)
    gkd.fact("prompt_tokens", sum(map(len, prompts)))

    if inputs.student == inputs.teacher:
        # The two would agree on every token: no loss, gradients only from rounding.
        job.trainer.perturb(seed=2, scale=DISTANCE)
        job.push_weights()
        gkd.fact(
            "student_perturbed",
            f"teacher and student are the same, so the student got noise ({DISTANCE})",
        )
    job.check_served("before the rollouts")
    completions = job.generate(
        prompts, settings.max_new_tokens, temperature=1.0, seed=SEED
    )
    sequences = rollouts.sequences(prompts, completions)
    gkd.fact("rollout_tokens", sum(len(s.response_ids) for s in sequences))

    signal = rollouts.teacher_signal(
        gkd, job.teacher, sequences, job.source.vocab_size()
    )

    def step(number: int, *, collect: bool = False) -> StepReport:
        gkd.step(f"running training step {number}")
        report: StepReport = job.trainer.gkd_step(
            sequences,
            signal,
            beta=settings.beta,
            temperature=settings.temperature,
            collect=collect,
        )
        return report

    started = monotonic()
    reports = [step(number + 1) for number in range(STEPS)]
    while needs_another(reports, job.config.engine.dtype):
        # But leave time for what follows, a push and a generation.
        if gkd.working_s() < ROOM * (monotonic() - started) / len(reports):
            break
        reports.append(step(len(reports) + 1))
    if note := job.trainer.optimizer_note():
        gkd.note("train.no-masters", note)
    first, last = reports[0], reports[-1]
    for name, value in job.trainer.load_facts().items():
        gkd.fact(name, value)
    gkd.fact("loss", settings.loss)
    gkd.fact("steps", len(reports))
    gkd.fact("loss_first_nats", first.loss)
    gkd.fact("loss_last_nats", last.loss)
    gkd.fact("grad_norm", first.grad_norm)
    gkd.fact("parameters_moved", f"{last.parameters_moved} of {last.parameters}")
    judge_steps(reports)
    gkd.fact("step_growth_bytes", memory_use.growths(reports))
    if memory_use.grows(reports):
        # It may be garbage in cycles, such as calls through Ray leave (70 kB a step).
        numbers = itertools.count(len(reports) + 1)
        again = memory_use.steps_again(
            lambda: step(next(numbers), collect=True), STEPS, 2 * STEPS
        )
        gkd.fact("step_growth_collected_bytes", memory_use.growths(again))
        judge_steps([*reports, *again])
        memory_use.judge_memory(again, settings.device)

    pushed = job.push_weights()
    job.check_served("after the training step")
    gkd.fact("push_s", round(pushed.seconds, 4))
    gkd.fact("transport", pushed.transport)
    served = job.generate(prompts, settings.max_new_tokens)
    gkd.step("running the reference forward pass")
    checks = reference.check(job, prompts, served)
    if rounding := reference.judge(job, checks, "after the training step"):
        gkd.note("vllm.rounding", rounding)
    steps = f"{len(reports)} steps"
    gkd.fact("summary", f"loss {first.loss:.3f} to {last.loss:.3f} in {steps}")
