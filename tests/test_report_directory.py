"""Where a report goes: nothing of the user's is moved, removed or read by others."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.processes.host_capabilities import may_mount
from pytest_gkd.run.report_directory import (
    KEPT,
    MARKER,
    ReportDir,
    ReportRefusedError,
    restore,
)

PROBE = """
import os, pathlib, time
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    os.umask(0)
    (gkd.output_dir / "child.log").write_text("said")
    (gkd.output_dir / "deep").mkdir()
    (gkd.output_dir / "deep/more.log").write_text("said")
    wait = pathlib.Path(os.environ.get("WAIT_FOR", "."))
    while not wait.exists():
        time.sleep(0.05)
    assert not os.environ.get("FAILS"), "as it should"
"""


def report(directory: Path, *stages: str, started: str = "now") -> None:
    """What a run leaves: a report and one file a stage."""
    for stage in stages:
        for part in ("stacks", "output"):
            (directory / part / stage).mkdir(parents=True)
            (directory / part / stage / "1.txt").write_text("x")
    told = [
        {
            "name": stage,
            "ran": True,
            "stacks": [f"{directory}/stacks/{stage}/1.txt"],
        }
        for stage in stages
    ]
    text = json.dumps({"started": started, "stages": told})
    (directory / "report.json").write_text(text)


def a_run(base: Path, name: str | None = None, *stages: str, started: str = "") -> Path:
    """A whole run, over when this returns."""
    made = ReportDir(base, name)
    report(made.path, *stages, started=started)
    made.close()
    return made.path


def run(
    directory: Path, *args: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), **options(directory, environ), timeout=120)


def command(*args: str) -> list[str]:
    names = ("-p", "no:cacheprovider", "--gkd-stages=probe", "test_probe.py")
    return [sys.executable, "-m", "pytest", *names, *args]


def options(directory: Path, environ: dict[str, str]) -> dict[str, Any]:
    (directory / "test_probe.py").write_text(PROBE)
    return {
        "cwd": directory,
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "env": {**os.environ, **environ},
    }


def everything(directory: Path) -> dict[str, str | None]:
    """All paths below a directory, with the texts of files."""
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


# -- the user's files ------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory of a job, with names in it that a report has as well."""
    place = tmp_path / "job"
    (place / "output/checkpoint-500").mkdir(parents=True)
    (place / "output/checkpoint-500/model.safetensors").write_text("dear")
    (place / "stacks").mkdir()
    (place / "stacks/notes.txt").write_text("mine")
    (place / "report.json").write_text("{}")
    return place


def test_a_run_that_would_report_into_the_users_directory_is_refused(
    job: Path,
) -> None:
    (job / "test_probe.py").write_text(PROBE)
    before = everything(job)
    done = run(job, "--gkd-report=.")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--gkd-report: cannot write the report" in done.stdout
    assert "Name a directory of its own" in done.stdout
    assert everything(job) == before


@pytest.mark.parametrize(
    "name", [".", "..", "../job", "../job/output", "../job/stacks"]
)
def test_a_directory_without_the_marker_is_left_as_it_is(job: Path, name: str) -> None:
    before = everything(job.parent)
    with pytest.raises(ReportRefusedError, match="not empty"):
        ReportDir(job, name)
    assert everything(job.parent) == before


@pytest.mark.parametrize("text", ["", "x", "Made by pytest-gkd for somebody else"])
def test_what_only_looks_like_the_marker_makes_nothing_ours(
    job: Path, text: str
) -> None:
    (job / "real").write_text("Made by pytest-gkd")
    (job / MARKER).symlink_to("real") if not text else (job / MARKER).write_text(text)
    with pytest.raises(ReportRefusedError):
        ReportDir(job, ".")


def test_what_a_job_wrote_beside_a_report_is_not_moved(tmp_path: Path) -> None:
    path = a_run(tmp_path, "out", "data")
    (path / "output/checkpoint-500").mkdir()
    (path / "output/checkpoint-500/model.safetensors").write_text("dear")
    before = everything(path)
    with pytest.raises(ReportRefusedError, match="output/checkpoint-500"):
        ReportDir(tmp_path, "out")
    assert everything(path) == before


@pytest.mark.parametrize("folder", ["output", "stacks"])
@pytest.mark.parametrize("left_out", [False, True])
def test_the_name_of_a_stage_that_did_not_run_makes_nothing_ours(
    tmp_path: Path, folder: str, left_out: bool
) -> None:
    path = a_run(tmp_path, "out", "nccl")
    if not left_out:
        told = json.loads((path / "report.json").read_text())
        told["stages"] += [{"name": "data", "ran": False, "outcome": "skipped"}]
        (path / "report.json").write_text(json.dumps(told))
    mine = path / folder / "data/train.jsonl"
    mine.parent.mkdir()
    mine.write_text("dear")
    before = everything(path)
    with pytest.raises(ReportRefusedError, match=f"{folder}/data is not part of"):
        ReportDir(tmp_path, "out")
    assert everything(path) == before


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 1}'])
@pytest.mark.parametrize("name", ["data", "session", "gw0"])
def test_without_a_report_that_can_be_read_nothing_is_proven_ours(
    tmp_path: Path, text: str | None, name: str
) -> None:
    path = a_run(tmp_path, "out", name)
    (path / "report.json").unlink()
    if text is not None:
        (path / "report.json").write_text(text)
    before = everything(path)
    with pytest.raises(ReportRefusedError, match="an interrupted run") as refused:
        ReportDir(tmp_path, "out")
    assert everything(path) == before
    assert "move it elsewhere" in str(refused.value)
    path.rename(tmp_path / "elsewhere")
    a_run(tmp_path, "out", "data")


@pytest.mark.parametrize(
    ("place", "ours"),
    [
        ("stacks/gw0", True),
        ("output/gw0", False),
        ("output/session", True),
        ("stacks/session", False),
    ],
)
def test_what_no_stage_made_is_ours_where_a_run_puts_it(
    tmp_path: Path, place: str, ours: bool
) -> None:
    path = a_run(tmp_path, "out", "data")
    (path / place).mkdir()
    if ours:
        a_run(tmp_path, "out", "data")
        return
    with pytest.raises(ReportRefusedError, match=place):
        ReportDir(tmp_path, "out")


def test_a_kept_report_with_output_of_the_users_is_never_removed(
    tmp_path: Path,
) -> None:
    a_run(tmp_path, None, "nccl")
    a_run(tmp_path, None, "nccl")
    (kept,) = (tmp_path / ".gkd/runs").iterdir()
    (kept / "output/data").mkdir()
    (kept / "output/data/train.jsonl").write_text("dear")
    for _ in range(KEPT + 2):
        a_run(tmp_path, None, "nccl")
    assert (kept / "output/data/train.jsonl").read_text() == "dear"


def test_the_report_of_a_run_that_was_killed_is_moved(tmp_path: Path) -> None:
    path = tmp_path / ".gkd/last"
    never = str(tmp_path / "never")
    first = subprocess.Popen(command(), **options(tmp_path, {"WAIT_FOR": never}))
    log = path / "output/probe/child.log"
    try:
        while not (
            log.exists() and '"ran": true' in (path / "report.json").read_text()
        ):
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
        first.communicate(timeout=300)
    second = run(tmp_path)
    assert second.returncode == 0, second.stdout
    assert list(tmp_path.glob(".gkd/runs/*/output/probe/child.log"))


def test_other_files_in_a_reports_directory_stay_where_they_are(
    tmp_path: Path,
) -> None:
    path = a_run(tmp_path, "out", "data")
    (path / "thesis.txt").write_text("mine")
    a_run(tmp_path, "out", "data")
    assert (path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("link", [".gkd", ".gkd/last", ".gkd/runs"])
def test_no_link_is_followed_to_another_place(tmp_path: Path, link: str) -> None:
    theirs, here = tmp_path / "theirs", tmp_path / "here"
    theirs.mkdir()
    a_run(theirs, None, "data")
    (theirs / ".gitignore").write_text("*.log\n")
    here.mkdir()
    if link != ".gkd":
        a_run(here, None, "data")
    if link == ".gkd/last":
        (here / link).rename(tmp_path / "away")
    (here / link).symlink_to(theirs / link if link != ".gkd/runs" else theirs)
    before = everything(theirs)
    with pytest.raises(ReportRefusedError, match="is a symbolic link"):
        ReportDir(here)
    assert everything(theirs) == before


@pytest.mark.parametrize(
    "part", ["report.json", "report.json.part", "output", "stacks"]
)
def test_a_link_among_the_parts_is_left(tmp_path: Path, part: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("mine")
    path = a_run(tmp_path, "out")
    (path / part).unlink(missing_ok=True)
    (path / part).symlink_to(theirs / "file" if "." in part else theirs)
    with pytest.raises(ReportRefusedError, match=part):
        ReportDir(tmp_path, "out")
    assert everything(theirs) == {"file": "mine"}


def test_the_way_to_an_absolute_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to("disk")
    made = a_run(tmp_path, str(tmp_path / "results/report"))
    assert made == tmp_path / "disk/report"


@pytest.mark.parametrize("link", [False, True])
def test_a_gitignore_of_the_users_is_kept(tmp_path: Path, link: bool) -> None:
    (tmp_path / ".gkd").mkdir()
    mine = tmp_path / "mine" if link else tmp_path / ".gkd/.gitignore"
    mine.write_text("*.log\n")
    if link:
        (tmp_path / ".gkd/.gitignore").symlink_to(mine)
    a_run(tmp_path)
    assert mine.read_text() == "*.log\n"


def test_the_default_is_not_tracked_by_git(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert (tmp_path / ".gkd/.gitignore").read_text() == "*\n"


# -- several runs ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "runs"), [(None, ".gkd/runs"), ("out", "out/runs")])
def test_the_last_few_reports_are_kept(
    tmp_path: Path, name: str | None, runs: str
) -> None:
    for number in range(KEPT + 3):
        last = a_run(tmp_path, name, "data", started=str(number))
    kept = sorted((tmp_path / runs).iterdir())
    told = [json.loads((path / "report.json").read_text()) for path in kept]
    assert [one["started"] for one in told] == [str(n + 2) for n in range(KEPT)]
    assert all((path / "output/data/1.txt").exists() for path in kept)
    assert json.loads((last / "report.json").read_text())["started"] == str(KEPT + 2)


def test_the_paths_in_a_kept_report_lead_to_its_own_files(tmp_path: Path) -> None:
    a_run(tmp_path, None, "data")
    a_run(tmp_path, None, "data")
    (kept,) = (tmp_path / ".gkd/runs").iterdir()
    (stage,) = json.loads((kept / "report.json").read_text())["stages"]
    assert stage["stacks"] == [str(kept / "stacks/data/1.txt")]


def test_a_kept_report_with_a_file_of_the_users_is_never_removed(
    tmp_path: Path,
) -> None:
    a_run(tmp_path, None, "data")
    a_run(tmp_path, None, "data")
    (kept,) = (tmp_path / ".gkd/runs").iterdir()
    (kept / "notes.txt").write_text("mine")
    for _ in range(KEPT + 2):
        a_run(tmp_path, None, "data")
    assert (kept / "notes.txt").read_text() == "mine"
    assert (kept / "report.json").exists()


def test_what_lies_beside_the_kept_reports_is_left(tmp_path: Path) -> None:
    theirs = tmp_path / ".gkd/runs/20010101-000000-0"
    theirs.mkdir(parents=True)
    (theirs / "report.json").write_text("{}")
    for _ in range(KEPT + 2):
        a_run(tmp_path, None, "data")
    assert everything(theirs) == {"report.json": "{}"}


SWAPS = """
import os, pathlib, shutil, time
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    print("said")
    exec(os.environ["SWAP"])
    time.sleep(0.7)  # until the report is written again
    assert False

@pytest.mark.gkd_stage("hangs", timeout=1)
def test_hangs():
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "swap",
    [
        "os.rename('.gkd/last', 'was'); os.symlink('../job', '.gkd/last')",
        "os.rename('.gkd', 'was'); os.symlink('job', '.gkd'); os.mkdir('job/last')",
        "os.rename('.gkd/last', 'was'); shutil.copytree('job', '.gkd/last')",
        "[os.symlink('../../job/' + one, '.gkd/last/' + one)"
        " for one in ('output', 'stacks')]",
        "os.mkdir('.gkd/last/output'); "
        "os.symlink('../../../job/output/probe', '.gkd/last/output/probe')",
    ],
)
def test_what_a_stage_puts_in_the_place_of_its_report_is_left_alone(
    job: Path, tmp_path: Path, swap: str
) -> None:
    for name in ("probe", "hangs"):
        (job / "output" / name).mkdir()
        (job / "output" / name / "stage.log").write_text("mine")
    before = everything(job)
    (tmp_path / "test_swaps.py").write_text(SWAPS)
    args = ("-p", "no:cacheprovider", "--gkd-stages=probe,hangs", "test_swaps.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *args],
        **options(tmp_path, {"SWAP": swap}),
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed" in done.stdout
    assert "could not be" in done.stdout  # written, or kept
    is_there = "os.rename" not in swap
    assert ("gkd: report in .gkd/last/report.html" in done.stdout) == is_there
    if (job / "last").is_dir():
        (job / "last").rmdir()  # the swap's own, and empty
    assert everything(job) == before
    if "copytree" in swap:
        assert before.items() <= everything(tmp_path / ".gkd/last").items()


@pytest.mark.parametrize(
    "swap",
    [
        "shutil.rmtree('.gkd')",
        "shutil.rmtree('.gkd'); gkd.output_dir",
        # Of one that hangs stacks are kept.
        "time.sleep(1.2); shutil.rmtree('.gkd'); time.sleep(600)",
    ],
)
def test_after_a_stage_has_removed_it_the_directory_is_a_reports_again(
    tmp_path: Path, swap: str
) -> None:
    (tmp_path / "test_swaps.py").write_text(SWAPS.replace("timeout=60", "timeout=3"))
    args = ("-p", "no:cacheprovider", "--gkd-stages=probe", "test_swaps.py")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *args],
            **options(tmp_path, {"SWAP": swap}),
            timeout=120,
        )
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
        told = json.loads((tmp_path / ".gkd/last/report.json").read_text())
        is_hung = "600" in swap
        assert told["stages"][0]["outcome"] == ("timeout" if is_hung else "failed")
        assert bool(told["stages"][0]["stacks"]) == is_hung


@pytest.mark.parametrize("args", [(), ("--gkd-report=out",)])
def test_a_run_beside_another_one_leaves_its_report_alone(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    path = tmp_path / ("out" if args else ".gkd/last") / "report.json"
    may_end = tmp_path / "may-end"
    first = subprocess.Popen(
        command(*args), **options(tmp_path, {"WAIT_FOR": str(may_end)})
    )
    try:
        while not path.exists() or "child.log" not in str(everything(path.parent)):
            assert first.poll() is None
        second = run(tmp_path, *args, FAILS="1")
        assert second.returncode == pytest.ExitCode.TESTS_FAILED
        assert "another run is writing its report" in second.stdout
        assert json.loads(path.read_text())["ended"] is None
    finally:
        may_end.touch()
        first.communicate(timeout=300)
    assert first.returncode == 0
    assert json.loads(path.read_text())["stages"][0]["outcome"] == "passed"
    (other,) = tmp_path.glob("out/runs/*" if args else ".gkd/runs/*")
    told = json.loads((other / "report.json").read_text())
    assert told["stages"][0]["outcome"] == "failed"
    assert f"report: {other.relative_to(tmp_path)}/report.json" in second.stdout


def test_of_many_that_begin_at_once_each_has_a_directory(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from pytest_gkd.run.report_directory import ReportDir; "
        "made = ReportDir(pathlib.Path.cwd()); print(made.path, flush=True); "
        "sys.stdin.read(); made.close()"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    threads = [threading.Timer(60, one.kill) for one in runs]
    for thread in threads:
        thread.start()
    paths = [one.stdout.readline() for one in runs if one.stdout]
    for one, thread in zip(runs, threads, strict=True):
        one.communicate()
        thread.cancel()
    assert [one.returncode for one in runs] == [0] * 8
    assert len(set(paths)) == 8
    assert f"{tmp_path}/.gkd/last\n" in paths


# -- for this user alone ---------------------------------------------------------------


@pytest.fixture
def open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_to_all")
def test_nothing_of_a_report_can_be_read_by_others(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    last = tmp_path / ".gkd/last"
    assert (last / "output/probe/stage.log").exists()
    modes = {path: path.stat().st_mode for path in [last, *last.rglob("*")]}
    assert len(modes) > 5
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_a_file_that_is_the_users_elsewhere_keeps_its_mode(tmp_path: Path) -> None:
    mine = tmp_path / "model.safetensors"
    mine.write_text("dear")
    mine.chmod(0o644)
    made = ReportDir(tmp_path, "out")
    report(made.path, "data")
    (made.path / "output/data/hard").hardlink_to(mine)
    (made.path / "output/data/soft").symlink_to(mine)
    (made.path / "output/data/own").write_text("x")
    (made.path / "output/data/own").chmod(0o644)
    made.close()
    assert mine.stat().st_mode & 0o777 == 0o644
    assert (made.path / "output/data/own").stat().st_mode & 0o777 == 0o600


def test_what_a_job_wrote_beside_a_report_keeps_its_mode(tmp_path: Path) -> None:
    made = ReportDir(tmp_path, "out")
    report(made.path, "nccl")
    mine = made.path / "output/data/deep/train.jsonl"
    flat = made.path / "output/notes.txt"
    mine.parent.mkdir(parents=True)
    before = {}
    for path, mode in ((mine, 0o644), (flat, 0o644), (mine.parent, 0o755)):
        path.exists() or path.write_text("dear")
        path.chmod(mode)
        before[path] = path.stat().st_mode
    made.close()
    assert {path: path.stat().st_mode for path in before} == before
    assert (made.path / "output/nccl").stat().st_mode & 0o777 == 0o700


def test_an_empty_directory_that_was_named_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o755)
    a_run(tmp_path, "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_a_directory_is_restored_whole_whoever_looks_meanwhile(tmp_path: Path) -> None:
    path, failed, over = tmp_path / "a/last", [], threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                restore(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        with contextlib.suppress(FileNotFoundError):
            path.rename(tmp_path / str(number))
    over.set()
    for thread in threads:
        thread.join()
    assert failed == []


def told_to_another_run(base: Path) -> str:
    """The notes of a run that begins in another process, and ends with a report."""
    code = (
        "import pathlib; from pytest_gkd.run.report_directory import ReportDir; "
        "made = ReportDir(pathlib.Path.cwd()); print(made.notes); "
        "(made.path / 'report.json').write_text('theirs')"
    )
    other = [sys.executable, "-c", code]
    return subprocess.run(
        other, cwd=base, capture_output=True, text=True, check=True
    ).stdout


def test_a_report_stays_held_when_its_directory_is_looked_at(tmp_path: Path) -> None:
    with contextlib.closing(ReportDir(tmp_path, None)) as made:
        restore(made.path)
        told = told_to_another_run(tmp_path)
    assert "another run is writing its report" in told


@pytest.mark.parametrize("by", ["the run", "a worker"])
def test_a_directory_that_was_made_anew_is_held(tmp_path: Path, by: str) -> None:
    with contextlib.closing(ReportDir(tmp_path, None)) as made:
        shutil.rmtree(tmp_path / ".gkd")
        if by == "a worker":
            restore(made.path)
        made.restore(made.path)
        (made.path / "report.json").write_text("mine")
        told = told_to_another_run(tmp_path)
        made.restore(made.path)
    assert "another run is writing its report" in told
    assert (made.path / "report.json").read_text() == "mine"
    assert (tmp_path / ".gkd/.gitignore").read_text() == "*\n"


def test_another_runs_report_in_its_place_is_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(ReportDir(tmp_path, None)) as made:
        shutil.rmtree(tmp_path / ".gkd")
        told_to_another_run(tmp_path)
        with pytest.raises(OSError, match="another run"):
            made.restore(made.path)


FILLS = """
import os, pathlib
import pytest

if os.environ.get("FILLS"):
    with open("filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    print("said")
    (gkd.output_dir / "child.log").write_text("said")
"""


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_after_a_full_disk_the_next_run_has_its_directory(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(FILLS)
    pytest_ = shlex.join(command())
    script = (
        f"mount -t tmpfs -o size=100k disk {tmp_path}/disk && cd {tmp_path}/disk && "
        f"cp ../test_probe.py . && FILLS=1 {pytest_}; rm filler; {pytest_}"
    )
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "the report could not be written: [Errno 28]" in done.stdout
    assert "1 failed" in done.stdout
    assert "1 passed" in done.stdout, done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("written", [None, '{"stages": []}'])
def test_what_a_run_claims_is_moved_and_nothing_else(
    tmp_path: Path, written: str | None
) -> None:
    with contextlib.closing(ReportDir(tmp_path, None)) as made:
        report(made.path, "data", "gw0")
        (made.path / "report.json").unlink()
        if written is not None:
            (made.path / "report.json").write_text(written)
        (made.path / "output/gw0").rename(made.path / "output/session")
        made.claim(["data", "nccl[2]/deep"])
        assert "another run is writing" in told_to_another_run(tmp_path)
    path = made.path
    (path / "output/dear").mkdir()
    with pytest.raises(ReportRefusedError, match="output/dear is not part of"):
        ReportDir(tmp_path)
    (path / "output/dear").rmdir()
    for _ in range(2):
        a_run(tmp_path, None, "tokenizer")
    (kept,) = tmp_path.glob(".gkd/runs/*/output/data")
    for _ in range(KEPT + 1):
        a_run(tmp_path)
    assert not kept.exists()


def test_a_full_disk_leaves_no_half_made_directories(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            restore(tmp_path / "last")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match="File too large"):
            ReportDir(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / ".gkd/.gitignore").exists()  # an empty one ignores nothing
    a_run(tmp_path)
