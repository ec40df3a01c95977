"""What becomes of a stage, decided without processes (pytest_gkd.run.outcome)."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gkd import typed_json
from pytest_gkd.processes.stall import Progress
from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    StageRecord,
)
from pytest_gkd.run import outcome as decided
from pytest_gkd.run.outcome import Loss, Outcome, of_loss, of_report
from pytest_gkd.run.watchdog import Overrun
from pytest_gkd.stage_api import StageFault
from pytest_gkd.stage_events import StageResult

DIED = "the process that ran it died: signal SIGKILL"


def record(**more: Any) -> StageRecord:
    """A stage with a budget of 20 s that began at 100."""
    begun: dict[str, Any] = {"started": 100.0, "step": "loading weights"}
    return StageRecord("vllm", "stages/vllm", "rollout", 20.0, **(begun | more))


def report(outcome: str, duration_s: float = 5.0, **more: Any) -> StageResult:
    return StageResult("vllm", outcome, duration_s, **more)


def overrun(**more: Any) -> Overrun:
    values: dict[str, Any] = {"phase": "running", "limit_s": 20.0, "after_s": 20.8}
    told: dict[str, Any] = {"stacks": (), "ended": ("7 sleep",), "survived": ()}
    return Overrun("gw0", "vllm", output="", **(values | told | more))


# -- from a report -------------------------------------------------------------------


def test_a_stage_that_passed_has_nothing_to_say() -> None:
    found = of_report(record(), report(PASSED))
    assert (found.outcome, found.message, found.duration_s) == (PASSED, "", 5.0)


def test_how_long_it_took_is_what_its_events_said() -> None:
    assert of_report(record(duration_s=3.0), report(PASSED)).duration_s == 3.0


@pytest.mark.parametrize(
    ("said", "duration_s", "outcome"),
    [
        (FAILED, 20.5, FAILED),  # too near to tell
        (FAILED, 30.0, TIMEOUT),
        (TIMEOUT, 5.0, FAILED),
        (TIMEOUT, 20.4, TIMEOUT),
        (SKIPPED, 30.0, SKIPPED),
    ],
)
def test_a_clock_of_the_stages_own_moves_no_budget(
    said: str, duration_s: float, outcome: str
) -> None:
    found = of_report(record(duration_s=duration_s), report(said), failed=True)
    assert found.outcome == outcome


def test_time_on_top_of_the_budget_is_no_delay() -> None:
    late = record(duration_s=30.0, extra_s={"imports": 15.0})
    assert of_report(late, report(FAILED), failed=True).outcome == FAILED


def test_a_failure_is_told_by_its_first_line_and_what_was_found_besides() -> None:
    other = StageFault("env.disk-full", "no room\nat all")
    fault = StageFault("env.no-gpu", "no GPU", also=[other])
    said = report(FAILED, error="no GPU\nmore of it", fault=fault.to_json())
    sent = typed_json.loads(StageResult, typed_json.dumps(said))
    found = of_report(record(), sent, failed=True)
    assert found.message == "no GPU"
    assert found.changes["also"] == ["[env.disk-full] no room"]
    assert str(decided.found(sent)) == str(fault)


def test_a_timeout_is_told_by_its_budget_and_with_what_was_ended() -> None:
    said = report(TIMEOUT, 21.0, error="Failed: not over", ended=("7 sleep",))
    found = of_report(record(), said, failed=True)
    assert found.message == "not finished within 20 s while loading weights"
    assert found.changes["cleaned"] == ["7 sleep"]
    assert "also" not in found.changes


def test_a_blocked_stage_names_its_needs() -> None:
    found = of_report(record(), report(BLOCKED, blocked_by=("vllm", "data")))
    assert found.message == "blocked by vllm, data"
    assert found.changes["blocked_by"] == ["vllm", "data"]


@pytest.mark.parametrize(
    ("outcome", "xfail", "message"),
    [
        (SKIPPED, "known", "was expected to fail (xfail): known"),
        (PASSED, "known", "passed, though it was expected to fail (xfail): known"),
        (SKIPPED, "", "was expected to fail (xfail): "),
        (SKIPPED, None, "no GPU here"),
    ],
)
def test_a_skip_and_an_expected_failure_say_why(
    outcome: str, xfail: str | None, message: str
) -> None:
    skipped = "no GPU here" if xfail is None else ""
    found = of_report(record(), report(outcome), skipped=skipped, xfail=xfail)
    assert (found.outcome, found.message) == (outcome, message)


# -- from the loss of its worker -----------------------------------------------------


def test_a_worker_that_died_fails_its_stage() -> None:
    found = of_loss(record(), Loss(died=DIED), 104.0)
    assert found == Outcome(FAILED, DIED, 4.0, crashed=True)


def test_a_worker_that_the_guardian_ended_was_late() -> None:
    found = of_loss(record(), Loss(died="stood still", by_guardian=True), 180.0)
    assert (found.outcome, found.crashed) == (TIMEOUT, False)


@pytest.mark.parametrize("had", [{"outcome": PASSED}, {"ended_with": PASSED}])
def test_a_stage_that_passed_and_did_not_close_fails(had: dict[str, str]) -> None:
    died = of_loss(record(**had), Loss(died=DIED), 104.0)
    assert died.message == f"it passed, then while it closed {DIED}"
    hung = of_loss(record(**had), Loss(overrun(phase="closing", limit_s=15)), 120.0)
    assert hung.message == "it passed, then did not close within 15 s"
    assert (died.outcome, hung.outcome) == (FAILED, TIMEOUT)
    assert died.closing
    assert hung.closing
    assert hung.crashed


def test_a_verdict_that_stood_is_told_with_what_followed() -> None:
    failed = record(outcome=FAILED, message="no GPU")
    found = of_loss(failed, Loss(died=DIED), 104.0)
    assert found.message == f"no GPU, then while it closed {DIED}"


@pytest.mark.parametrize(("duration_s", "outcome"), [(5.0, FAILED), (21.0, TIMEOUT)])
def test_what_was_raised_counts_by_when_it_was(duration_s: float, outcome: str) -> None:
    raised = record(raised="ValueError: no", duration_s=duration_s)
    hung = of_loss(raised, Loss(overrun(phase="closing", limit_s=15)), 140.0)
    assert (hung.outcome, hung.duration_s) == (outcome, duration_s)
    assert hung.message.startswith("ValueError: no; making its traceback took over")
    died = of_loss(raised, Loss(died=DIED), 140.0)
    assert died.message == f"ValueError: no; while its traceback was made {DIED}"


def test_an_overrun_is_a_timeout_with_its_budget_and_what_was_ended() -> None:
    found = of_loss(record(), Loss(overrun()), 120.8)
    assert found.outcome == TIMEOUT
    assert found.duration_s == pytest.approx(20.8)
    assert found.message == "not finished within 20 s while loading weights"
    assert found.changes["cleaned"] == ["7 sleep"]
    assert not found.crashed


def test_one_that_was_stuck_was_ended_early_and_says_how_to_wait() -> None:
    proof = Progress("stuck", 10.0, 0.0, 0, 0, 1, (), None, ())
    found = of_loss(record(), Loss(overrun(early=True, progress=proof)), 110.0)
    assert found.message == "stuck while loading weights"
    assert found.changes["state"].endswith(
        "pass --gkd-full-budget to use the whole budget"
    )
    assert found.changes["progress"]["verdict"] == "stuck"


def test_an_outcome_is_written_into_the_record_and_nothing_else_is() -> None:
    stage = record(facts={"a": 1})
    of_loss(stage, Loss(overrun()), 120.8).write(stage)
    assert (stage.outcome, stage.cleaned, stage.facts) == (
        TIMEOUT,
        ["7 sleep"],
        {"a": 1},
    )
