"""A log that ends mid-step says how far it is, since when, and what to suspect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command

TIME = "2026-11-21 10:{0:02d}:{1:02d}"


def at(step: int) -> str:
    return TIME.format(30 + step * 11 // 60, step * 11 % 60)


LAYOUTS: dict[str, Callable[[int], str]] = {
    "verl": lambda n: (
        f"(TaskRunner pid=7) {at(n)} step:{n} - actor/loss:0.1 - timing_s/step:11.0\n"
        f"(TaskRunner pid=7) Training Progress:  2%|▏| {n}/2400 [10:27<7:09:33, 11s/it]"
    ),
    "trl": lambda n: (
        f"{{'loss': 0.5, 'grad_norm': 1.0}}\n{at(n)} INFO x\n"
        f"  2%|▏         | {n}/2400 [10:27<7:09:33, 11.00s/it]"
    ),
    "swift": lambda n: (
        f"{at(n)} {{'loss': 0.5, 'global_step/max_steps': '{n}/2400', "
        "'train_speed(s/it)': 11.0}"
    ),
    "megatron": lambda n: (
        f" [{at(n)}] iteration {n:8d}/    2400 | consumed samples: 64 | elapsed time "
        "per iteration (ms): 11000.0 | lm loss: 2.3E+00 | grad norm: 1.0 |"
    ),
    "nemo": lambda n: (
        f"========== Step {n}/2400 ==========\n{at(n)} INFO x\n"
        "  • Loss: 0.5\n  • Total step time: 11.0s"
    ),
    "json": lambda n: (
        f'{at(n)} {{"step": {n}, "loss": 0.5, "step_time": 11.0, "total_steps": 2400}}'
    ),
}
# Some say nowhere how many steps there are.
NO_TOTAL = {"json"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_at_work_says_exactly_where_it_is(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join(LAYOUTS[layout](n) for n in range(1, 58)) + "\n")
    assert command.main(["diagnose", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    far = "step 57" + ("" if layout in NO_TOTAL else " of 2400")
    assert said.startswith(
        f"running: at work when the log ends ({far}, 11 s a step), and nothing failed; "
        f"if nothing was added since {at(57)} it is stuck in the "
    )


# The forms of a last step, and whether steps of further epochs may follow it.
LAST_STEPS = {
    "INFO step {n}/5 loss 2.1": True,
    "INFO step {n} of 5 | loss 2.1": True,
    "INFO Epoch 3/3 step {n}/5 loss 2.1": True,
    "iteration        {n}/       5 | consumed samples: 64 | lm loss: 2.3E+00 |": True,
    "{{'loss': 0.5, 'epoch': 2.0, 'global_step/max_steps': '{n}/5'}}": True,
    "INFO Epoch 1/3 step {n}/5 loss 2.1": False,
    "INFO epoch 1 step {n}/5 loss 2.1": False,
    "INFO step {n}/6 loss 2.1": False,
}


@pytest.mark.parametrize("form", LAST_STEPS)
def test_a_run_that_ends_with_its_last_step_is_not_stuck_in_it(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    lines = [f"{at(n)} {form.format(n=n)}" for n in range(1, 6)]
    path.write_text("\n".join(lines) + "\n")
    is_last = LAST_STEPS[form]
    assert command.main(["diagnose", str(path), "--now=12:00"]) == (not is_last)
    said = " ".join(capsys.readouterr().out.split())
    if is_last:
        assert said.startswith("running: every step is done when the log ends (step 5 ")
        assert "is in what follows, such as a last checkpoint" in said
        assert "step 5 of 5 is done: saving may have begun" in said
    else:
        assert said.startswith("hung: stopped during the training step")
