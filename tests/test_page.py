"""``gkd report --html``: one page that anybody can open, whatever a job printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import report_schema
from page_checks import assert_accessible
from test_plugin import Run

from pytest_gkd import language
from pytest_gkd.__main__ import main
from pytest_gkd.options import LANGUAGES
from pytest_gkd.processes import host_capabilities
from pytest_gkd.report import history, page
from pytest_gkd.report.compare import Report
from pytest_gkd.stage_specs import BY_NAME

HOSTILE = "</pre><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
PROBE = """
import os, subprocess, sys, threading
import pytest

@pytest.mark.gkd_stage("fine")
def test_fine(gkd):
    gkd.fact("bus_bandwidth_gb_s", {"1 MiB": 2.0, "64 MiB": 4.0})
    gkd.fact("summary", "all good")

@pytest.mark.gkd_stage("lock", timeout=12)
def test_lock(gkd):
    gkd.step("taking the lock")
    for number in range(5):
        environ = {**os.environ, "ODD": str(number == 3)}
        subprocess.Popen([sys.executable, "worker.py"], env=environ)
    threading.Event().wait()
"""
WORKER = """
import os, time
def save(): time.sleep(600)
def step(): time.sleep(600)
save() if os.environ["ODD"] == "True" else step()
"""


def made(**stage: Any) -> Report:
    """A report of one stage that failed."""
    whole = {
        "name": "probe",
        "lane": "host",
        "outcome": "failed",
        "started_s": 1.0,
        "duration_s": 2.0,
        "budget_s": 60,
        "facts": {},
        **stage,
    }
    settings = {"layout": "colocated", "gpus": 0}
    return Report("r", {"stages": [whole], "settings": settings, "versions": {}})


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stuck")
    (place / "test_probe.py").write_text(PROBE)
    (place / "worker.py").write_text(WORKER)
    Run(place, "--gkd-stages=fine,lock", "test_probe.py")
    return place


def test_a_run_is_shown_with_its_times_its_stacks_and_its_numbers(
    stuck: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stuck)
    assert main(["report", "--html"]) == 0
    path = stuck / ".gkd/last/report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text("utf-8")
    assert_accessible(text)
    assert '<h1><span class="failed">1 of 2 stages failed: lock</span></h1>' in text
    assert "all good" in text
    assert "4 GB/s" in text
    bars = re.findall(r'class="bar (\w+)" style="margin-left:[\d.]+%;width:', text)
    assert bars == ["passed", "timeout"]
    stacks = text.partition("<details><summary>.gkd/last/stacks/lock/")[2]
    assert "test_lock (test_probe.py" in stacks
    if host_capabilities.may_trace():
        # Of five workers, the one that is elsewhere is marked.
        (odd,) = re.findall(r'<div class="box odd">(.*?)</div>', text, re.DOTALL)
        assert re.match(r"<strong>pid \d+ leaves the others here</strong>", odd)
        assert "save (worker.py:3)" in odd
    # The next run moves it away with the rest of the report, and has its own.
    Run(stuck, "--gkd-stages=fine", "test_probe.py")
    (kept,) = (stuck / ".gkd/runs").glob("*/report.html")
    assert kept.read_text("utf-8") == text
    assert "1 of 1 stages passed" in path.read_text("utf-8")


FINE = "import pytest\n@pytest.mark.gkd_stage('fine')\ndef test_fine(): pass\n"


@pytest.mark.parametrize("workers", ["1", "0"])
def test_every_run_makes_it_and_names_it_last(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_probe.py").write_text(FINE)
    run = Run(tmp_path, "--gkd-stages=fine", f"-n{workers}", "test_probe.py")
    path = tmp_path / ".gkd/last/report.html"
    made = path.read_text("utf-8")
    assert path.stat().st_mode & 0o777 == 0o600
    assert run.out.splitlines()[-2] == "gkd: report in .gkd/last/report.html"
    # It is the page that the command makes of the report.
    assert main(["report", "--html", str(path.parent)]) == 0
    assert path.read_text("utf-8") == made


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("raise ImportError('no template here')", "no template here"),
        ("import time; time.sleep(600)", "reading the template took over 5 s"),
    ],
)
def test_a_run_ends_as_it_would_without_a_page(
    tmp_path: Path, template: str, told: str
) -> None:
    (tmp_path / "test_probe.py").write_text(FINE)
    (tmp_path / "jinja2.py").write_text(template)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = Run(tmp_path, "--gkd-stages=fine", "-n1", "test_probe.py", env=environ)
    assert (run.code, run.outcomes()) == (0, {"fine": "passed"}), run.text
    (note,) = run.report["notes"]
    assert note.startswith("there is no report.html of this run: ")
    assert told in note
    assert run.out.splitlines()[-2] == "gkd: report in .gkd/last/report.json"


def test_the_first_thing_to_do_is_the_likeliest_fix_of_the_first_failure() -> None:
    told = {"cause": "data.file-missing", "title": "no file", "why": "it is not there"}
    advice = ["Look for it: ls", "Copy it"]
    report = made(diagnosis={**told, "advice": advice, "explain": "gkd explain x"})
    text = page.html(report, Path())
    assert "<strong>First:</strong> Look for it: ls" in text
    assert text.index("First:") < text.index("What to do") < text.index("Copy it")


def test_a_fault_that_was_put_in_is_told_at_the_top() -> None:
    fault = {"fault": "nccl:rank-stopped", "how": "rank 1 is stopped"}
    text = page.html(Report("r", {**made().data, "injected": fault}), Path())
    said = "this fault was injected: nccl:rank-stopped"
    assert 0 < text.find(said) < text.find("<h2>")
    assert "was injected" not in page.html(made(), Path())


def test_what_changed_since_the_last_run_that_passed_is_told() -> None:
    good = made(outcome="passed")
    bad = made(outcome="failed")
    worse = Report("r", {**made().data, "versions": {"torch": "2.14.0"}})
    earlier = Report("e", {**good.data, "started": "yesterday"})
    text = page.html(worse, Path(), [bad, earlier])
    assert "Changed since yesterday" in text
    assert "versions torch: none -&gt; 2.14.0" in text


def test_nothing_that_a_job_said_is_markup_and_the_page_stays_small(
    tmp_path: Path,
) -> None:
    folder, outside = tmp_path / "report", tmp_path / "outside.txt"
    (folder / "stacks").mkdir(parents=True)
    outside.write_text("somebody else's")
    (folder / "stacks/1.txt").write_text(f"\x1b[31m{HOSTILE}\n" + "x" * 10_000_000)
    (folder / "stacks/2.txt").symlink_to(outside)
    report = made(
        name=HOSTILE,
        message=HOSTILE * 1000,
        stuck=[HOSTILE],
        stacks=["stacks/1.txt", "stacks/2.txt", str(outside), "../outside.txt"],
        facts={"bus_bandwidth_gb_s": {HOSTILE: 1.0, "no number": HOSTILE}},
        telling=[{"source": HOSTILE, "line": None, "text": HOSTILE}],
    )
    text = page.html(report, folder)
    assert "<summary>stacks/1.txt</summary>" in text
    assert len(text.encode()) < 1_000_000
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "somebody else" not in text


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    text = page.html(made(), Path())
    assert not re.search(r"(?:src|href|action)\s*=|url\(|@import|//", text)


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is here")
def test_a_browser_shows_it_and_runs_nothing(tmp_path: Path) -> None:
    report = made(name=HOSTILE, message=HOSTILE, stuck=[HOSTILE])
    path = tmp_path / "report.html"
    # Even where escaping had a hole, the page's own policy stops a script.
    text = page.html(report, tmp_path)
    path.write_text(text.replace("<main>", f"<main>{HOSTILE}"), "utf-8")
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--virtual-time-budget=2000", "--window-size=390,1200", "--dump-dom"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "<title>1 of 1 stages failed" in shown
    assert "<title>owned" not in shown
    assert 'class="bar failed"' in shown


# What of a page, all of it folded out, lies beyond the right edge of a narrow screen.
MEASURE = """<iframe src="%s" style="width:390px;height:3000px;border:0"></iframe>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  page.querySelectorAll("details").forEach(one => one.open = true);
  const beyond = [...page.querySelectorAll("main *")].filter(
    one => one.getBoundingClientRect().right > 390);
  document.title = beyond.map(one => one.textContent).join("|").slice(0, 300) || "fits";
}
</script>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is here")
@pytest.mark.parametrize("lang", LANGUAGES)
def test_nothing_of_a_page_lies_beyond_the_edge_of_a_phone(
    tmp_path: Path, lang: str
) -> None:
    (whole,) = made(outcome="passed", duration_s=125.0).data["stages"]
    stages = [{**whole, "name": name, "budget_s": 120} for name in BY_NAME]
    stages.append({**whole, "name": "mine", "outcome": "timeout", "message": "x" * 900})
    settings = {**made().data["settings"], "gpu_memory_utilization": "/data" * 90}
    data = {**made().data, "stages": stages, "settings": settings}
    runs = [history.entry({**data, "started": f"2026-11-26T01:0{n}"}) for n in range(3)]
    language.use(lang)
    last = Report("r", {**data, "started": "2026-11-27"})
    text = page.html(last, tmp_path, (), runs)
    (tmp_path / "report.html").write_text(text, "utf-8")
    (tmp_path / "frame.html").write_text(MEASURE % (tmp_path / "report.html").as_uri())
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-web-security", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--allow-file-access-from-files", "--virtual-time-budget=4000"),
            *("--dump-dom", (tmp_path / "frame.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "<title>fits</title>" in shown


def test_a_report_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--html", str(tmp_path)]) == 2
    assert "report.json does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "report.json").write_text(json.dumps(report_schema.EMPTY))
    assert main(["report", "--html", str(tmp_path)]) == 0
    assert "0 of 0 stages passed" in (tmp_path / "report.html").read_text("utf-8")


def test_a_page_of_somebody_elses_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pytest-html writes one, for example, into a report's directory."""
    (tmp_path / "test_probe.py").write_text(FINE)
    Run(tmp_path, "--gkd-stages=fine", "test_probe.py")
    folder = tmp_path / ".gkd/last"
    theirs = folder / "report.html"
    theirs.unlink()
    theirs.write_text("<html>theirs</html>")
    assert main(["report", "--html", str(folder)]) == 2
    assert "was not made by pytest-gkd" in capsys.readouterr().err
    run = Run(tmp_path, "--gkd-stages=fine", "test_probe.py")
    assert run.shows("*there is no report.html of this run: *was not made by*")
    assert theirs.read_text() == "<html>theirs</html>"
    (kept,) = (tmp_path / ".gkd/runs").iterdir()
    assert not (kept / "report.html").exists()
    # Ours is replaced, but not what a link in its place leads to.
    theirs.unlink()
    for _ in range(2):
        assert main(["report", "--html", str(folder)]) == 0
    (tmp_path / "far").write_bytes(theirs.read_bytes())
    theirs.unlink()
    theirs.symlink_to(tmp_path / "far")
    assert main(["report", "--html", str(folder)]) == 2


def test_memory_is_drawn_with_its_peak_and_the_stage_that_ran_then(
    tmp_path: Path,
) -> None:
    gib = 2**30
    used = {"total_bytes": 80 * gib, "at_s": [0, 2.0, 4.0]}
    report = made()
    data = {
        **report.data,
        "memory": [{"of": 1, **used, "used_bytes": [gib, 60 * gib, 0]}],
    }
    text = page.html(Report("r", data), tmp_path)
    assert "<h3>GPU 1</h3>" in text
    assert "0.0 to 60.0 of 80.0 GiB; most after 2.0 s (probe)" in text
    assert 'points="0,98.8 500,25.0 1000,100.0"' in text


def test_a_run_samples_the_memory_of_its_host(stuck: Path) -> None:
    told = json.loads((stuck / ".gkd/last/report.json").read_text())
    assert [one["of"] for one in told["memory"]] == ["host"]
    assert told["memory"][0]["at_s"]  # an earlier test ran a short run there
    assert "<h2>Memory in use</h2>" in (stuck / ".gkd/last/report.html").read_text()


def test_times_and_bandwidth_are_shown_beside_what_is_usual() -> None:
    def run(number: int, seconds: float, gb_s: float) -> Report:
        facts = {"bus_bandwidth_gb_s": {"64 MiB": gb_s}}
        one = made(outcome="passed", duration_s=seconds, facts=facts)
        return Report("r", {**one.data, "started": f"2026-11-26T01:00:{number:02}"})

    runs = [history.entry(run(n, 2.0 + n, 100.0 + n).data) for n in range(3)]
    text = page.html(run(9, 5.0, 50.5), Path(), (), runs)
    assert '5.0 s<br><span class="soft">usually 3.0 s</span>' in text
    assert 'style="width:50.0%"></span><span class="tick" style="left:100.0%">' in text
    assert '50.5 GB/s<br><span class="soft">usually 101</span>' in text
    assert "usually" not in page.html(run(9, 5.0, 50.5), Path(), (), runs[:2])
