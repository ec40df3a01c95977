"""``gkd report --html LOG``: verdict, causes, each metric with where it went wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from page_checks import assert_accessible

from pytest_gkd.__main__ import main
from pytest_gkd.diagnosis.metrics.series import Series
from pytest_gkd.report import log_page

RUNS = Path(__file__).parent / "metrics_runs/development"
LOGS = Path(__file__).parent / "logs"
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def made(*logs: Path, status: int = 0) -> str:
    assert main(["report", "--html", *map(str, logs)]) == status
    return Path("report.html").read_text("utf-8")


def test_a_loss_that_is_no_number_is_marked_at_its_first_step(here: Path) -> None:
    text = made(RUNS / "openrlhf-sft-nan.log")
    assert_accessible(text)
    assert "the loss or gradient norm in the metrics is NaN</span></h1>" in text
    first, *others = text.split('<section class="metric">')[1:]
    assert first.startswith("<h3>gpt_loss</h3>")
    # Step 90 of 1 to 160, on a drawing 1000 wide; the curve ends before it.
    (mark,) = re.findall(r'class="wrong" x1="([\d.]+)"', first)
    assert float(mark) == pytest.approx(1000 * 89 / 159, abs=0.1)
    (curve,) = re.findall(r'points="([^"]*)"', first)
    assert float(curve.split()[-1].partition(",")[0]) < float(mark)
    assert "step 90: gpt_loss: is nan from here on; 2.19 before (step 90)" in first
    assert not any('class="wrong"' in other for other in others)
    assert (here / "report.html").stat().st_mode & 0o777 == 0o600


def test_a_sound_run_has_its_curves_and_nothing_marked() -> None:
    text = made(RUNS / "swift-jsonl-plain.log")
    assert text.count('<section class="metric">') > 2
    assert 'class="wrong"' not in text
    assert "First:" not in text


def test_the_heading_is_the_whole_verdict() -> None:
    text = made(LOGS / "running/resumed-run-that-goes-on.log")
    (heading,) = re.findall(r"<h1>.*?</h1>", text, re.DOTALL)
    told = "running: at work when the log ends"
    assert f"{told} (step 74 of 900, 33.44 s a step), and nothing failed;" in heading
    assert "it is stuck in the generation" in heading


def test_what_is_worth_a_look_is_no_failure() -> None:
    text = made(RUNS / "nemo-grpo-generation-kl-grows.log")
    assert 'class="noted"' in text or 'class="wrong"' in text


def test_a_spike_stays_however_many_points_there_are() -> None:
    values = [1.0] * 50_000
    values[31_234] = 9.0
    values[40_000:41_000] = [float("nan")] * 1000
    one = Series("loss", list(range(50_000)), values, [(0, 0)] * 50_000)
    before, after = log_page.curves(one, 1.0, 9.0)
    points = [tuple(map(float, p.split(","))) for p in before.split()]
    assert len(points) <= log_page.POINTS + 1
    (spike,) = (x for x, y in points if y < 50)
    assert spike == pytest.approx(1000 * 31_234 / 49_999, abs=0.1)
    assert float(after.partition(",")[0]) == pytest.approx(820.0, abs=0.1)


def test_nothing_that_a_log_says_is_markup_and_the_page_stays_small(
    tmp_path: Path,
) -> None:
    lines = [f"{HOSTILE}\x1b]0;owned\x07"]
    for step in range(40):
        numbers = ", ".join(f"'{HOSTILE}{n}': {step}" for n in range(5))
        lines.append(f"{{'loss': {2.0 - step / 40}, {numbers}, 'step': {step}}}")
    lines.append("x" * 10_000_000)
    lines.append(f"ValueError: {HOSTILE}" + "<" * 100_000)
    log = tmp_path / f"{HOSTILE.replace('/', '')}.log"
    log.write_text("\n".join(lines))
    text = made(log)
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"(?:src|href|action)\s*=\s*\"|url\(|@import", text)


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is here")
def test_a_browser_draws_the_curves_and_runs_nothing(
    here: Path, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    steps = [f"{{'loss': {2.0 - n / 40}, 'step': {n}}}" for n in range(30)]
    log.write_text("\n".join([*steps, f"ValueError: {HOSTILE}"]))
    page = here / "report.html"
    made(log)
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--virtual-time-budget=2000", "--window-size=390,1200", "--dump-dom"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "<title>owned" not in shown
    assert '<polyline class="curve" points="0,' in shown
    assert "&lt;script&gt;" in shown


def test_a_page_of_somebody_elses_stays_and_one_of_ours_is_made_anew(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(RUNS / "swift-jsonl-plain.log")
    theirs = here / "report.html"
    theirs.write_text("<html>theirs</html>")
    assert main(["report", "--html", log]) == 2
    assert "was not made by pytest-gkd" in capsys.readouterr().err
    assert theirs.read_text() == "<html>theirs</html>"
    for _ in range(2):
        assert main(["report", "--html", "--output=mine.html", log]) == 0
    assert capsys.readouterr().out == "mine.html\nmine.html\n"
    assert main(["report", "--html", "--output=no/where.html", log]) == 2
    told = capsys.readouterr().err
    assert "no/where.html: cannot be written: No such file or directory" in told


def test_a_log_that_cannot_be_read_is_told_and_the_others_are_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/fine.log").write_bytes(
        (RUNS / "swift-jsonl-plain.log").read_bytes()
    )
    (tmp_path / "logs/bad.log.gz").write_bytes(b"\x1f\x8b no gzip")
    assert main(["report", "--html", str(tmp_path / "nowhere.log")]) == 2
    assert "nowhere.log" in capsys.readouterr().err
    assert '<section class="metric">' in made(tmp_path / "logs", status=2)
    assert "bad.log.gz" in capsys.readouterr().err


def test_only_reports_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "a", "b", "c"]) == 2
    assert "without --html it takes two reports" in capsys.readouterr().err
