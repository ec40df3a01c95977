"""A flood of metrics is read evenly, in bounded memory, and says what was read."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.metrics import findings, series

CATALOGUE = catalogue.load()
FLOOD = 60_000


def read(line: Callable[[int], str], count: int = FLOOD) -> log_file.Log:
    """A log of so many lines; some six MiB."""
    text = "".join(f"{line(n)} {'.' * 40}\n" for n in range(1, count + 1))
    return log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)


def only(log: log_file.Log, name: str) -> series.Series:
    (found,) = (one for one in log.metrics.series() if one.name == name)
    return found


def test_the_middle_of_a_flood_is_read_evenly() -> None:
    log = read(lambda n: f"step:{n} - actor/entropy:{n / FLOOD:.6f}")
    told = only(log, "actor/entropy")
    assert len(told) <= series.EVENLY + series.AT_THE_END + 2
    assert (told.steps[0] < 500, told.steps[-1]) == (True, FLOOD)
    apart = [late - early for early, late in itertools.pairwise(told.steps)]
    assert max(apart) < FLOOD / 4  # a block of a MiB
    assert all(
        value == pytest.approx(n / FLOOD, abs=1e-5)
        for n, value in zip(told.steps, told.values, strict=True)
    )
    assert told.places == sorted(told.places)
    assert [line for line, _ in told.places] == told.steps


def test_what_goes_wrong_in_the_middle_and_lasts_is_found_there() -> None:
    log = read(lambda n: f"step:{n} - actor/grad_norm:{0.0 if n > 25_000 else 1.0}")
    (one,) = findings.find(log.metrics.current())
    assert one.cause == "train.no-grad"
    assert 25_000 < one.step < 25_000 + FLOOD / 4


def test_what_goes_wrong_at_the_very_end_is_found() -> None:
    log = read(lambda n: f"step:{n} - actor/grad_norm:{'nan' if n > FLOOD - 20 else 1}")
    (one,) = findings.find(log.metrics.current())
    assert (one.cause, one.step) == ("train.nan", FLOOD - 19)


def test_the_least_and_the_greatest_are_kept() -> None:
    spikes = {15_000: 99.0, 100: -99.0}
    log = read(lambda n: f"step:{n} - loss:{spikes.get(n, 1.0)}", 30_000)
    told = only(log, "loss")
    assert min(told.values) == -99  # read as it came


def test_values_that_no_step_is_told_of_have_their_lines() -> None:
    log = read(lambda n: f"{{'loss': {math.nan if n > 30_000 else 1.0}}}")
    told = only(log, "loss")
    assert (told.unit, told.steps[-1]) == ("line", FLOOD)
    (one,) = findings.find(log.metrics.current())
    assert one.where == f"line {one.line}"
    assert 30_000 < one.line < 30_000 + FLOOD / 4


def test_what_is_read_is_bounded_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "".join(f"step:{n} - loss:1.0 {'.' * 80}\n" for n in range(1, FLOOD + 1))
    )
    command.main(["diagnose", str(path), "--format=json"])
    (told,) = json.loads(capsys.readouterr().out)["sampled"]
    assert told["file"] == str(path)
    assert told["read"] < 20_000
    assert told["of_about"] == pytest.approx(FLOOD, rel=0.1)
    command.main(["diagnose", str(path)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"metrics from {told['read']:,} of about {told['of_about']:,} lines" in said


def test_a_log_that_was_read_whole_says_nothing_of_it() -> None:
    log = read(lambda n: f"step:{n} - loss:1.0", 2000)
    assert not log.metrics.sampled
    assert len(only(log, "loss")) == 2000
    assert logs.judge([log], CATALOGUE).sampled == ()


def test_json_is_strict_and_says_what_is_no_number() -> None:
    one = series.Series("loss", [1, 2, 3], [1.0, math.nan, -math.inf], [(1, 0)] * 3)
    assert json.loads(json.dumps(one.to_json(), allow_nan=False)) == {
        "metric": "loss",
        "by": "step",
        "steps": [1, 2, 3],
        "values": [1.0, None, None],
        "not_finite": [{"step": 2, "value": "nan"}, {"step": 3, "value": "-inf"}],
    }


def test_json_has_the_last_of_many_points() -> None:
    steps = list(range(1, 1001))
    told = series.Series("a", steps, [1.0] * 1000, [(1, 0)] * 1000).to_json()
    assert len(told["steps"]) <= series.SHOWN  # type: ignore[arg-type]
    assert told["steps"][-1] == 1000  # type: ignore[index]
