"""The process that outlives a run's pytest process, to clean up after a killed run.

Started by guardian_start.py, without site-packages. It waits for one byte, the goodbye,
and exits. If the pytest process goes without saying it (SIGKILL, out of memory, a
crash), it ends every process of the run, removes its shared memory and directory, and
says so in its report. Meanwhile it checks that the pytest process, which enforces every
budget, keeps running (see ``Watch``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from pytest_gkd import language, sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.files import write_json
from pytest_gkd.processes import cleanup, manifest, procfs
from pytest_gkd.processes.heartbeat import GOODBYE, LOOK_S, Pulse, Sign

NAME = "gkd-guardian"  # at most 15 characters (prctl(2), PR_SET_NAME)
POLL_S = 0.005
QUICK_S = 1.0


def main(
    run_dir: str,
    pid: int,
    life: int,
    manifest_file: int,
    pulse: int,
    link: str,
    still_limit_s: float,
    shown: str,
) -> None:
    """Guard the run of process ``pid``; ``life`` is the read end of a pipe from it.

    ``manifest_file`` is the run's manifest, already open, so that it stays readable
    even if somebody clears the directory. ``pulse`` is the descriptor of a ``Pulse``;
    for ``still_limit_s`` see ``Watch``. ``shown`` is the user's language.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # It ends when the pytest process does, not before.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        # killall python must not kill it, too.
        Path("/proc/self/comm").write_text(NAME)
    here = procfs.stat(pid)
    start = here.start if here else 0
    with os.fdopen(manifest_file, "rb") as file:

        def give_up(still_s: float) -> None:
            language.use(shown)
            end_workers(_read(file), pid, still_s)

        watch = Watch(pid, start, Pulse(pulse), give_up, still_limit_s)
        if said_goodbye(life, pid, start, watch):
            os._exit(0)  # the pytest process waits for it
        found = _read(file)
    if found.run is not None:
        clean(found, found.run, Path(run_dir))
    if link:
        Path(link).unlink(missing_ok=True)


def _read(file: BinaryIO) -> manifest.Manifest:
    file.seek(0)
    return manifest.read(file.read())


class Watch:
    """Checks that the pytest process runs, by its state and its heartbeat.

    If it was stopped at a terminal (Ctrl-Z), it is up to the user to continue it.
    Without a terminal, as in CI, it gets SIGCONT as soon as one of its budgets is over.
    If it then makes no progress for ``still_limit_s`` seconds, ``give_up`` is called
    with the seconds it has stood still, and again at each look until it progresses.
    """

    def __init__(
        self,
        pid: int,
        start: int,
        pulse: Pulse,
        give_up: Callable[[float], None],
        still_limit_s: float,
    ) -> None:
        self._pid = pid
        self._start = start
        self._pulse = pulse
        self._give_up = give_up
        self._still_limit_s = still_limit_s
        self._beat = pulse[Sign.BEAT]
        self._last = monotonic()
        # Counted only while this process ran itself: both may have been suspended.
        self._still_s = self._overdue_s = 0.0

    def look(self, now: float) -> None:
        """Take one look; called twice a second."""
        pulse = self._pulse
        pulse[Sign.GUARD_BEAT] += 1
        here = procfs.stat(self._pid)
        if here is None or here.start != self._start:
            return
        seen_s = min(now - self._last, 2 * LOOK_S)
        is_users = here.state == procfs.STOPPED and here.terminal != 0
        if is_users:
            pulse[Sign.WAITED_S] += now - self._last
        if is_users or here.state == "t" or pulse[Sign.BEAT] != self._beat:
            self._beat = pulse[Sign.BEAT]
            self._still_s = self._overdue_s = 0.0
        else:
            self._still_s += seen_s
            if now > pulse[Sign.DUE]:
                self._overdue(here, seen_s)
        self._last = now

    def _overdue(self, here: procfs.Stat, seen_s: float) -> None:
        """Handle a pytest process without progress that has overrun a budget."""
        self._overdue_s += seen_s
        if here.state == procfs.STOPPED:
            self._pulse[Sign.RESUMED] += 1
            procfs.send(self._pid, self._start, signal.SIGCONT)
        if self._overdue_s > self._still_limit_s:
            self._pulse[Sign.GAVE_UP_S] = self._still_s
            self._give_up(self._still_s)


def said_goodbye(life: int, pid: int, start: int, watch: Watch) -> bool:
    """Wait until the pytest process says goodbye (True) or is gone (False)."""
    waits = select.poll()
    waits.register(life, select.POLLIN)
    handle = procfs.handle(pid)
    if handle is not None:  # else the pipe remains
        waits.register(handle, select.POLLIN)
    while True:
        if not waits.poll(1000 * LOOK_S):
            watch.look(monotonic())
            continue
        # Whatever woke us, its last word is in the pipe, even after its death.
        if select.select([life], [], [], 0)[0]:
            if os.read(life, 1) == GOODBYE:
                return True
            break  # the pipe is closed
        if not procfs.is_alive(pid, start):
            return False
    # The pipe of a dying process closes a little before it is gone. A process that
    # closed its files but lives on is not gone, and its run is not ours to end.
    quick_until = monotonic() + QUICK_S
    while procfs.is_alive(pid, start):
        is_quick = monotonic() < quick_until
        time.sleep(POLL_S if is_quick else LOOK_S)
        if not is_quick:
            watch.look(monotonic())
    return False


def clean(found: manifest.Manifest, run: manifest.RunLine, run_dir: Path) -> None:
    """End and remove all that is left of the run, then note it in its report."""
    result = cleanup.end(cleanup.Search(run, found.processes, ()))
    late = cleanup.newcomers(found, result.held)
    removed, kept = cleanup.remove_segments([*found.segments, *late])
    for folder in found.folders:
        cleanup.remove_folder(folder)
    notes = [f"its guardian ended {len(result.ended)} process(es)"]
    notes += [f"removed what it left: {text}" for text in removed]
    notes += [f"could not remove {text}" for text in kept]
    notes += [f"could not end {process}: {why}" for process, why in result.left]
    _tell(Path(run.report), run, [str(process) for process in result.ended], notes)
    cleanup.remove_tree(run_dir)


def end_workers(found: manifest.Manifest, pid: int, still_s: float) -> None:
    """End everything that the stalled pytest process started, and report it."""
    if found.run is None:
        return
    search = cleanup.Search(found.run, found.processes, ())
    ended = [str(one) for one in cleanup.end(search).ended]
    if not ended:
        return
    text = f"{stood_still(still_s)}: its guardian ended {len(ended)} process(es)"
    _tell(Path(found.run.report), found.run, ended, [text])
    with contextlib.suppress(OSError):  # it may be closed, or full
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
        stderr = os.open(f"/proc/{pid}/fd/2", flags)
        os.write(stderr, f"\ngkd: {language.tr_filled(text)}\n".encode())
        os.close(stderr)


def stood_still(still_s: float) -> str:
    """The message about a pytest process that was given up on."""
    return f"pytest stood still for {still_s:.0f} s and no longer enforced any budget"


def _tell(
    path: Path, run: manifest.RunLine, ended: list[str], notes: list[str]
) -> None:
    try:
        report = json.loads(path.read_text("utf-8"))
        if report["started"] != run.started:
            return  # the report is another run's by now
        if not report["ended"] and not procfs.is_alive(run.pid, run.start):
            report["interrupted"] = "killed"
            report["notes"].append(
                f"the pytest process {run.pid} was killed: the report ends there"
            )
        report["notes"] += sanitize.data(notes)
        report["cleaned"] += sanitize.data(ended)
        write_json(path, report)
    except (OSError, ValueError, KeyError, TypeError):
        return  # not written yet, or the disk is full; there is nobody to tell
