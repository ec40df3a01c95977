"""The JSON of ``gkd diagnose`` is strict, and docs/diagnose.md names every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import __main__ as command

PAGE = Path(__file__).parent.parent.joinpath("docs", "diagnose.md").read_text("utf-8")
ROWS = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|$", PAGE.partition("## JSON")[2])[1:]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3"
STEP = "2026-11-21 10:%02d:%02d step:%d - actor/loss:%s - timing_s/step:9 - "
STEP += "timing_s/reward:6\n"
STEPS = "".join(
    STEP % (n // 6, n % 6 * 10, n, "nan" if n % 9 else 1) for n in range(60)
)
LOGS = {
    "failed": f"{STEPS.replace('nan', '1')}{OOM}\nRuntimeError: NCCL error: x\n",
    "hung": STEPS.replace("nan", "1") + "2026-11-21 12:00:00 INFO Saving checkpoint\n",
    "running": f"{OOM}\n" + STEPS.replace("nan", "1") * 2,
    "interrupted": STEPS.replace("nan", "1") + "KeyboardInterrupt\n",
    "unknown": "ValueError: nobody knows this\n",
    "healthy": "'train_runtime': 3.0\n",
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def told(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path.write_text(text)
    now = "--now=2026-11-22 13:00:00" if "Saving" in text else "--now=10:09:51"
    command.main(["diagnose", str(path), "--format=json", now])
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def keys(value: object) -> Iterator[str]:
    """Every key at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for one in value:
            yield from keys(one)


@pytest.mark.parametrize("verdict", LOGS)
def test_every_field_of_every_verdict_is_documented(
    verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(tmp_path / "a.log", LOGS[verdict], capsys)
    assert found["verdict"] == verdict
    assert f"| `{verdict}` |" in PAGE
    documented = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == found.keys()
    assert [key for key in {*keys(found)} if f"`{key}`" not in PAGE] == []


def test_numbers_that_are_none_are_null_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(tmp_path / "a.log", STEPS, capsys)
    loss = next(one for one in found["series"] if one["metric"] == "actor/loss")
    assert loss["values"][:3] == [1, None, None]
    assert loss["not_finite"][0] == {"step": 1, "value": "nan"}
    numbers = [one for one in loss["values"] if one is not None]
    assert all(isinstance(one, (int, float)) for one in numbers)
