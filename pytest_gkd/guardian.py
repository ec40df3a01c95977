"""The process that outlives a run's pytest process: ends what a killed run left.

Started by guard.py, without site-packages. It waits for one byte, the goodbye, and
ends. When the pytest process goes without it (SIGKILL, out of memory, a crash), it
ends every process of the run, removes its shared memory and its directory, and says
so in its report.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from pathlib import Path

from pytest_gkd import created, procfs, sanitize, sweep
from pytest_gkd.clock import monotonic
from pytest_gkd.journal import write_json

GOODBYE = b"g"
NAME = "gkd-guardian"  # at most 15 characters (prctl(2), PR_SET_NAME)
POLL_S = 0.005
SLOW_POLL_S = 0.5
QUICK_S = 1.0


def main(run_dir: str, pid: int, life: int, creations: int, link: str) -> None:
    """Guard the run of process ``pid``; ``life`` is the read end of a pipe from it.

    ``creations`` is the run's list, open: it must be there even if somebody clears the
    directory.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # It ends when the pytest process does, and not before.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        # killall python must not take it along.
        Path("/proc/self/comm").write_text(NAME)
    here = procfs.stat(pid)
    start = here.start if here else 0
    if said_goodbye(life, pid, start):
        os._exit(0)  # the pytest process waits for it
    with os.fdopen(creations, encoding="utf-8", errors="replace") as file:
        found = created.read(file.read())
    if found.run is not None:
        clean(found, found.run, Path(run_dir))
    if link:
        Path(link).unlink(missing_ok=True)


def said_goodbye(life: int, pid: int, start: int) -> bool:
    """Wait until the pytest process has said goodbye (True) or is gone (False)."""
    waits = select.poll()
    waits.register(life, select.POLLIN)
    handle = _handle(pid)
    if handle is not None:
        waits.register(handle, select.POLLIN)
    while True:
        waits.poll()
        # Whatever woke us: what it said last is in the pipe, also after its death.
        if select.select([life], [], [], 0)[0]:
            if os.read(life, 1) == GOODBYE:
                return True
            break  # the pipe is closed
        if not procfs.is_alive(pid, start):
            return False
    # The pipe of a dying process closes a little before it is gone. One that closed
    # its files and lives on is not gone, and its run is not ours to end.
    quick_until = monotonic() + QUICK_S
    while procfs.is_alive(pid, start):
        time.sleep(POLL_S if monotonic() < quick_until else SLOW_POLL_S)
    return False


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a container that refuses it: the pipe remains
        return None


def clean(found: created.Created, run: created.RunLine, run_dir: Path) -> None:
    """End and remove all of it, then say so in the run's report."""
    result = sweep.end(sweep.Search(run, found.processes, ()))
    late = sweep.newcomers(found, result.held)
    removed, kept = sweep.remove_segments([*found.segments, *late])
    for folder in found.folders:
        sweep.remove_folder(folder)
    notes = [f"its guardian ended {len(result.ended)} process(es)"]
    notes += [f"removed what it left: {text}" for text in removed]
    notes += [f"could not remove {text}" for text in kept]
    notes += [f"could not end {process}: {why}" for process, why in result.left]
    _tell(Path(run.report), run, [str(process) for process in result.ended], notes)
    sweep.remove_tree(run_dir)


def _tell(path: Path, run: created.RunLine, ended: list[str], notes: list[str]) -> None:
    try:
        report = json.loads(path.read_text("utf-8"))
        if report["started"] != run.started:
            return  # another run's by now
        if not report["ended"]:
            report["interrupted"] = "killed"
            report["notes"].append(
                f"the pytest process {run.pid} was killed: this ends where it stood"
            )
        report["notes"] += sanitize.data(notes)
        report["cleaned"] += sanitize.data(ended)
        write_json(path, report)
    except (OSError, ValueError, KeyError, TypeError):
        return  # it was not written yet, or its disk is full: there is nobody to tell
