"""``gkd report``: what changed since an earlier run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_schema
from test_plugin import Run

from pytest_gkd import language
from pytest_gkd.__main__ import main
from pytest_gkd.report import compare

PROBE = """
import time
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    gkd.fact("bandwidth", {{"64 MiB": {bandwidth}}})
    time.sleep({seconds})
    assert {good}
"""


def run(
    place: Path, *, seconds: float = 0, bandwidth: float = 4.0, good: bool = True
) -> None:
    (place / "test_probe.py").write_text(
        PROBE.format(seconds=seconds, bandwidth=bandwidth, good=good)
    )
    Run(place, "--gkd-stages=probe", "test_probe.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sound runs, a slow one with less bandwidth, and the last, which failed."""
    place = tmp_path_factory.mktemp("job")
    for _ in range(3):
        run(place)
    run(place, seconds=3, bandwidth=1.0)
    run(place, good=False)
    return place


def told(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main(["report", *map(str, words)])
    return code, "".join(capsys.readouterr())


def test_a_stage_that_no_longer_passes_is_worse(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, text = told(capsys)
    assert code == 1
    assert "WORSE probe: passed -> failed" in text
    assert ".gkd/last against the 4 runs kept beside it" in text


def test_a_slow_run_is_held_against_the_median_of_those_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *sound, slow = sorted((place / ".gkd/runs").glob("2*"))
    code, text = told(capsys, slow, sound[0])
    assert code == 1
    assert "WORSE probe seconds: 0" in text
    assert "probe bandwidth 64 MiB: 4 -> 1 (0.25 times)" in text
    code, text = told(capsys, sound[1], sound[0])
    assert (code, "no difference that counts" in text) == (0, True)
    code, text = told(capsys, "--format=json", slow, sound[0])
    found = json.loads(text)
    assert (found["schema"], found["worse"]) == (1, True)
    (ratio,) = (c["ratio"] for c in found["changes"] if "64 MiB" in c["what"])
    assert ratio == pytest.approx(0.25)


def test_of_several_runs_one_that_was_slower_before_is_no_reason_to_stop() -> None:
    def made(seconds: float, **more: Any) -> compare.Report:
        stage = {"name": "nccl", "outcome": "passed", "duration_s": seconds, **more}
        return compare.Report("r", {"stages": [stage]})

    usual = [made(2.0), made(2.2), made(9.0)]
    assert not compare.compare(made(8.0), usual).worse
    assert compare.compare(made(9.5), usual).worse
    assert not compare.compare(made(2.9), usual).changes
    (change,) = compare.compare(
        made(2.1, facts={"gb": 1}), [made(2.1, facts={"gb": 3})]
    ).changes
    assert not change.worse


def test_versions_and_settings_that_changed_are_named() -> None:
    def made(**more: Any) -> compare.Report:
        return compare.Report("r", {"stages": [], **more})

    before = made(versions={"torch": "2.13.0"}, settings={"top_k": 64, "layout": "ray"})
    after = made(
        versions={"torch": "2.14.0", "trl": "1.13.0"},
        settings={"top_k": 64, "layout": "split", "layout_why": "--gkd-layout"},
    )
    found = compare.compare(after, [before])
    assert compare.text(found).splitlines()[1:] == [
        "  versions torch: 2.13.0 -> 2.14.0",
        "  versions trl: none -> 1.13.0",
        "  settings layout: ray -> split",
    ]
    assert not found.worse


def test_the_comparison_is_told_in_chinese() -> None:
    def made(outcome: str, seconds: float, **more: Any) -> compare.Report:
        stages = [
            {"name": "nccl", "outcome": outcome},
            {"name": "vllm", "outcome": "passed", "duration_s": seconds},
        ]
        return compare.Report("r", {"stages": stages, "versions": more})

    after = made("failed", 9.0, torch="2.14.0")
    found = compare.compare(after, [made("passed", 3.0)])
    language.use("zh")
    text = compare.text(found)
    of_several = compare.text(compare.compare(after, [made("passed", 3.0)] * 3))
    head = of_several.partition("\n")[0]
    assert head.startswith("r（对照：旁边保留的 3 次运行）")
    assert not re.search("[a-z]{2}", head)
    assert text.splitlines() == [
        "r（对照：r）",
        "  变差 nccl：通过 -> 失败",
        "  变差 vllm 秒数：3 -> 9（3 倍）",
        "  版本 torch：无 -> 2.14.0",
    ]
    assert found.to_json()["changes"][1]["what"] == "seconds"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "report.json does not exist"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "not a report of pytest --gkd-stages: $: [] is not of type 'object'"),
        ('{"stages": [1]}', "not a report of pytest --gkd-stages"),
        (
            json.dumps(report_schema.EMPTY | {"versions": ["torch"]}),
            "$.versions: ['torch'] is not of type 'object'",
        ),
        ('{"schema": 7, "stages": []}', "has schema 7; this release reads 1"),
    ],
)
def test_what_is_no_report_is_refused_by_name(
    tmp_path: Path,
    content: str | None,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    code, text = told(capsys, tmp_path)
    assert (code, expected in text, str(tmp_path) in text) == (2, True, True), text


def test_nothing_that_a_report_says_reaches_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, version in (("a", "1"), ("b", "\x1b]0;owned\x07\n::error::x")):
        (tmp_path / name).mkdir()
        data = report_schema.EMPTY | {"versions": {"torch": version}}
        (tmp_path / name / "report.json").write_text(json.dumps(data))
    code, text = told(capsys, tmp_path / "b", tmp_path / "a")
    assert code == 0
    assert "\x1b" not in text
    assert "\n::error" not in text
