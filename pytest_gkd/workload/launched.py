"""Runs the job's own command under ``gkd watch`` until its first training step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis.diagnose import telling_lines
from pytest_gkd.diagnosis.evidence import TextSource
from pytest_gkd.files import read_end
from pytest_gkd.processes import procfs, shell_line
from pytest_gkd.report.record import OUTPUT_BYTES
from pytest_gkd.stage_api import UNKNOWN, StageContext, StageFault
from pytest_gkd.watch import exits, verdict_file, watcher

LOG = "job.log"  # beside the watch's own directory: what the job printed
# Kept of the time for the watch's report and for ending the job, and its largest share.
REPORT_S, REPORT_SHARE = 90.0, 0.3
# Of that time silence may last so long before the job's processes are looked at.
SILENT_SHARE = 0.25
POLL_S = 0.2
# Of the variables that a run sets, those by which it knows what it has started.
OURS = "PYTEST_GKD_"


def run(gkd: StageContext) -> None:
    """Run ``gkd.settings.launch``; raises StageFault unless it ends well."""
    assert gkd.settings.launch  # the stage is only offered with a command
    gkd.step("starting the job")
    ends_at = monotonic() + gkd.working_s()
    watch = _begin(gkd, gkd.settings.launch)
    said = _listen(watch)
    told: dict[str, Any] = {}
    while watch.poll() is None and monotonic() < ends_at:
        told = _told(gkd, watch.pid) or told
        gkd.step(f"watching the job ({_state(told)})" if told else "starting the job")
        time.sleep(POLL_S)
    told = _told(gkd, watch.pid) or told
    if not told:
        words = " / ".join(said) or "it said nothing"
        raise StageFault(
            "internal.error", f"gkd watch ended with {watch.poll()}: {words}"
        )
    for name in ("first_step_s", "step", "phases_s", "watched_s"):
        gkd.fact(name, told[name])
    gkd.fact("verdict", told["verdict"])
    if told["log"]:
        with contextlib.suppress(OSError):  # a file system without links
            os.link(told["log"], gkd.output_dir / LOG)
    _judge(gkd, told, still_runs=watch.poll() is None)


def environment() -> dict[str, str]:
    """The environment in which the user started pytest, without what stages changed."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    found = procfs.environ(os.getppid() if is_worker else os.getpid())
    ours = {name: one for name, one in os.environ.items() if name.startswith(OURS)}
    return {**(found or os.environ), **ours}


def _begin(gkd: StageContext, line: str) -> subprocess.Popen[bytes]:
    left_s = gkd.working_s()
    watch_s = left_s - min(REPORT_S, REPORT_SHARE * left_s)
    look_s = min(watcher.LOOK_AFTER_S, SILENT_SHARE * watch_s)
    options = ["--until-step", f"--within={watch_s:.1f}", "--on-stuck=end"]
    options += [f"--look-after={look_s:.1f}", f"--dir={gkd.output_dir}"]
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "pytest_gkd", "watch", *options, "--"),
            *shell_line.words(line),
        ],
        cwd=gkd.settings.launch_dir or None,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _listen(watch: subprocess.Popen[bytes]) -> deque[str]:
    """The last lines of its standard error; its own words are printed as they come."""
    last: deque[str] = deque(maxlen=5)

    def read() -> None:
        assert watch.stderr is not None
        for line in watch.stderr:
            text = line[:1000].decode("utf-8", "replace").rstrip()
            last.append(text)
            if text.startswith("gkd: "):
                sys.stdout.write(f"{text}\n")

    threading.Thread(target=read, name="gkd-launch", daemon=True).start()
    return last


def _told(gkd: StageContext, pid: int) -> dict[str, Any]:
    place = next(gkd.output_dir.glob(f"*-{pid}"), None)
    return verdict_file.read(place) if place else {}


def _state(told: dict[str, Any]) -> str:
    where = f" in {told['phase']}" if told["phase"] not in ("", "unknown") else ""
    return f"{told['verdict']}{where}"


def _judge(gkd: StageContext, told: dict[str, Any], *, still_runs: bool) -> None:
    status, first_s = told["exit_status"], told["first_step_s"]
    if status == 0 or (first_s is not None and told["ended_for"] == "--until-step"):
        gkd.fact("summary", _summary(told, still_runs=still_runs))
        if first_s is None:
            gkd.note(
                "launch.no-step",
                "launch: the command ended by itself with 0, and nothing that it "
                "printed says that a training step was done: metrics with a step, or a "
                'mark (with phase("training-step"): from pytest_gkd import phase)',
            )
        return
    report = told["standstill"] or {}
    causes = told["causes"] or report.get("causes") or []
    waits = report.get("waits", ())
    if told["verdict"] == "dead":
        message = f"the job died: {'; '.join(told['why'])}"
    elif status == exits.STUCK or told["verdict"] == "stuck":
        who = waits[0] if waits else "; ".join(told["why"][:1])
        message = f"the job is {_state(told)} for {told['since_s']:.0f} s: {who}"
    else:
        late = report["why"][0] if report else "no training step was done"
        message = f"{late}: the job is {_state(told)}"
    evidence = tuple(_evidence(gkd, told, report))
    # Where it tells lines, it has read the whole log and found no cause.
    cause = UNKNOWN if told["telling"] else None
    cause = causes[0]["cause"] if causes else cause
    raise StageFault(cause, message, evidence=evidence)


def _summary(told: dict[str, Any], *, still_runs: bool) -> str:
    if told["first_step_s"] is None:
        return f"ended by itself with 0 after {told['watched_s']:g} s, no step seen"
    longest = sorted(told["phases_s"].items(), key=lambda one: -one[1])[:2]
    spent = ", ".join(f"{name} {seconds:g} s" for name, seconds in longest)
    text = f"first step after {told['first_step_s']:g} s"
    text += f" ({spent})" if spent else ""
    if still_runs:
        return f"{text}; did not end of SIGTERM in time"
    return text if told["ended_for"] else f"{text}; ended by itself with 0"


def _evidence(
    gkd: StageContext, told: dict[str, Any], report: dict[str, Any]
) -> Iterator[tuple[str, int | None, str]]:
    if told["report"]:
        place = Path(told["report"])
        if place.is_relative_to(gkd.report_dir):
            place = Path(os.path.relpath(place))
        yield "stacks", None, str(place)
    if told["verdict"] == "dead":
        if told["telling"] and not told["causes"]:
            yield from ((LOG, None, text) for text in told["telling"][:3])
            return
        with contextlib.suppress(OSError), (gkd.output_dir / LOG).open("rb") as file:
            text = sanitize.text(read_end(file, OUTPUT_BYTES))
            yield from telling_lines([TextSource(LOG, text)], 3)
        return
    for text in told["why"][:2]:
        yield "watch", None, text
    for text in report.get("waits", ())[told["verdict"] == "stuck" :][:3]:
        yield "waits", None, text
    for text in report.get("evidence", ())[:2]:
        yield "also", None, text
    if told["verdict"] == "stuck" and not report.get("causes"):
        for one in report.get("suspects", ())[:1]:
            yield "perhaps", None, f"{one['observation']} [{one['cause']}]"
            yield "next", None, f"{one['where']}: {one['command']}"
