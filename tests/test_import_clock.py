"""Imports that get on have time of their own; one that hangs is found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_plugin import Run

from pytest_gkd.options import Settings
from pytest_gkd.processes.import_clock import FOLDER, STARTUP, ImportClock
from pytest_gkd.run.worker import StageWorker
from pytest_gkd.stage_api import EXTRA_LIMIT_S, StageContext
from pytest_gkd.stage_events import Event, Extra

# A package on a slow disk: many modules, none of which is quick.
MODULES, MODULE_S = 12, 0.4
PROBE = """
import time
import pytest

@pytest.mark.gkd_stage("probe", timeout={budget_s})
def test_probe(gkd):
    {work}
"""


def package(place: Path, *, hangs_at: int | None = None) -> None:
    """``slow_package`` imports its modules one in another, as packages do."""
    folder = place / "slow_package"
    folder.mkdir()
    for number in range(MODULES):
        after = f"from slow_package import part{number + 1}\n"
        text = f"import time; time.sleep({MODULE_S})\n"
        if number == hangs_at:
            text = "import threading; threading.Event().wait()\n"
        if number + 1 < MODULES:
            text += after
        (folder / f"part{number}.py").write_text(text)
    (folder / "__init__.py").write_text("from slow_package import part0\n")


def run(place: Path, work: str, budget_s: float = 2.0, *args: str) -> dict[str, Any]:
    text = PROBE.format(work=work, budget_s=budget_s)
    (place / "test_probe.py").write_text(text)
    done = Run(place, "--gkd-stages=probe", "test_probe.py", *args)
    (stage,) = done.report["stages"]
    return {**stage, "text": " ".join(done.text.split())}


@pytest.mark.parametrize("args", [(), ("-n0",), ("-p", "no:timeout")])
def test_a_stage_is_not_failed_for_imports_that_get_on(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    package(tmp_path)
    stage = run(tmp_path, "import slow_package; time.sleep(1)", 3.0, *args)
    assert stage["outcome"] == "passed", stage["text"]
    assert stage["duration_s"] > stage["budget_s"]
    assert stage["facts"]["extra_s"]["imports"] >= MODULES * MODULE_S - 1
    assert "s: slow file system or cold cache" in stage["text"]


def test_what_is_no_import_is_held_to_the_budget_all_the_same(tmp_path: Path) -> None:
    package(tmp_path)
    stage = run(tmp_path, "import slow_package; time.sleep(60)")
    assert stage["outcome"] == "timeout"
    assert stage["duration_s"] < 40
    assert "not finished within 2 s and" in stage["message"]
    assert "s for imports" in stage["message"]
    assert "slow file system or cold cache" in stage["text"]
    assert stage["diagnosis"] is None


def test_an_import_that_hangs_is_found_as_such(tmp_path: Path) -> None:
    package(tmp_path, hangs_at=4)
    # Long enough that the first of the two looks finds it where the second one does,
    # also where the machine is so busy that what is told arrives seconds later.
    stage = run(tmp_path, "import slow_package", 12.0)
    assert stage["outcome"] == "timeout"
    assert stage["diagnosis"]["cause"] == "env.import-stuck", stage["text"]
    assert stage["duration_s"] < 60


def test_the_time_on_top_is_bounded() -> None:
    said: list[Event] = []
    gkd = StageContext(Settings(), Path(), Path(), emit=said.append)
    gkd.begin("probe", 10.0)
    gkd.allow("imports", 5.0)
    gkd.allow("imports", 4.0)  # the clock only goes on
    gkd.allow("imports", 1e9)
    assert [event.s for event in said if isinstance(event, Extra)] == [
        5.0,
        EXTRA_LIMIT_S["imports"],
    ]
    assert gkd.remaining_s() <= 10 + EXTRA_LIMIT_S["imports"]
    gkd.begin("after", 10.0)
    assert gkd.remaining_s() <= 10


def test_a_sum_just_below_nothing_is_granted_as_nothing(tmp_path: Path) -> None:
    sent: list[Event] = []
    context = StageContext(Settings(), tmp_path, tmp_path)
    link: Any = SimpleNamespace(emit=sent.append)
    request: Any = None
    worker = StageWorker(request, context, link, tmp_path / "made", isolated=False)
    worker.imported_s = 0.1 + 0.2
    worker.importing(0.3)  # between two stages
    assert [event.s for event in sent if isinstance(event, Extra)] == [0.0]


def test_the_clock_counts_what_imports_take_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    told: list[float] = []
    clock = ImportClock(told.append)
    clock.start()
    try:
        importlib.import_module("slow_package")
        spent = clock.seconds()
        importlib.import_module("slow_package")  # it is there
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("slow_package.absent")
    finally:
        clock.stop()
    assert spent >= MODULES * MODULE_S
    assert told == sorted(told)
    assert len(told) >= 3
    assert clock.seconds() < spent + 1


def test_a_traceback_of_a_failed_import_does_not_show_the_clock(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('no such symbol')\n")
    stage = run(tmp_path, "import broken", 20.0, "-v")
    assert "no such symbol" in stage["message"]
    assert "_watched" not in stage["text"]


@pytest.mark.parametrize(
    "work",
    [
        "subprocess.run([sys.executable, '-c', 'import slow_package'], check=True)",
        # Spawned by what was spawned, with a file of its own for the start.
        "subprocess.run([sys.executable, '-c', 'import subprocess, sys; "
        'subprocess.run([sys.executable, "-c", "import slow_package"])\'])',
        "import multiprocessing; "
        "p = multiprocessing.get_context('fork').Process("
        "target=__import__, args=['slow_package']); p.start(); p.join()",
    ],
    ids=["child", "grandchild", "fork"],
)
def test_imports_in_what_a_stage_starts_have_time_too(
    tmp_path: Path, work: str
) -> None:
    package(tmp_path)
    stage = run(tmp_path, "import subprocess, sys; " + work, 3.0)
    assert stage["outcome"] == "passed", stage["text"]
    assert stage["duration_s"] > stage["budget_s"]
    assert stage["facts"]["extra_s"]["imports"] <= stage["duration_s"]
    assert "s: slow file system or cold cache" in stage["text"]


def test_imports_at_the_same_time_count_once(tmp_path: Path) -> None:
    package(tmp_path)
    three = (
        "import subprocess, sys; "
        "[p.wait() for p in [subprocess.Popen([sys.executable, '-c', "
        "'import slow_package']) for _ in range(3)]]; time.sleep(60)"
    )
    stage = run(tmp_path, three, 5.0)
    assert stage["outcome"] == "timeout"
    assert stage["facts"]["extra_s"]["imports"] <= stage["duration_s"] - 5


def test_an_import_that_hangs_in_a_child_is_given_no_time(tmp_path: Path) -> None:
    package(tmp_path, hangs_at=2)
    work = "subprocess.run([sys.executable, '-c', 'import slow_package'])"
    stage = run(tmp_path, f"import subprocess, sys; {work}", 8.0)
    assert stage["outcome"] == "timeout"
    assert stage["duration_s"] < 30
    assert stage["diagnosis"]["cause"] == "env.import-stuck", stage["text"]


def test_a_sitecustomize_of_the_users_own_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.user_was_here = True\n")
    told = tmp_path / "told"
    told.mkdir()
    places = [str(STARTUP), str(tmp_path), str(Path(STARTUP).parent.parent)]
    environ = {**os.environ, "PYTHONPATH": ":".join(places), FOLDER: str(told)}
    code = "import sys, json, decimal; print(json.dumps([sys.user_was_here, sys.path]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    was_here, path = json.loads(done.stdout)
    assert was_here
    assert str(STARTUP) not in path
    assert done.stderr == ""


@pytest.mark.parametrize("more", ["", "raise ImportError('no', name='other')"])
def test_a_python_without_this_package_starts_as_ever(
    tmp_path: Path, more: str
) -> None:
    if more:
        (tmp_path / "sitecustomize.py").write_text(more)
    places = f"{STARTUP}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print('pytest_gkd' in sys.modules)"],
        cwd="/",
        env={"PYTHONPATH": places, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in ("True", "False")
    assert ("Error in sitecustomize" in done.stderr) == bool(more)
