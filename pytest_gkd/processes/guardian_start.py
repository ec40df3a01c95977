"""Starts a run's guardian (see guardian.py) and says goodbye to it at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs
from pytest_gkd.processes.heartbeat import GOODBYE, LOOK_S, Pulse, Sign
from pytest_gkd.processes.procfs import RUN_ID

CODE = "GKD_GUARDIAN"
GOODBYE_LIMIT_S = 2.0
# A pytest process that makes no progress for so long, with a budget over, is given up:
# its guardian ends the workers. A guardian that stands still half as long is replaced.
STILL_LIMIT_S = 60.0
# Neither of them runs for so long but where something stops both: four looks.
STOOD_LEAST_S = 2.0


class Guardian:
    """The guardian of one run, as the pytest process sees it."""

    def __init__(self, run_dir: Path, manifest_file: Path, link: Path | None) -> None:
        """Start it; it comes up beside what this process does next.

        ``manifest_file`` is the run's list, there also when ``run_dir`` is not.
        Raises OSError where no process can be started.
        """
        self._run_dir = run_dir
        self._manifest_file = manifest_file
        self._link = link
        self._over = self._dismissed = False
        self._life: int | None = None
        self.pulse = Pulse.begin()
        self._asked, self._beats = float("inf"), 0.0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        with contextlib.ExitStack() as opened:
            manifest_file = os.open(self._manifest_file, os.O_RDONLY)
            opened.callback(os.close, manifest_file)
            theirs, self._life = os.pipe()
            opened.callback(os.close, theirs)
            try:
                self._process = self._begin(theirs, manifest_file)
            except OSError:
                self._close_life()
                raise

    def _begin(self, theirs: int, manifest_file: int) -> subprocess.Popen[bytes]:
        """``theirs`` is the read end of the pipe, ``manifest_file`` the list, open."""
        pulse = self.pulse.descriptor
        self._beat, self._moved = self.pulse[Sign.GUARD_BEAT], monotonic()
        place = str(Path(__file__).parent.parent.parent)
        link = str(self._link or "")
        # The code goes by the environment: a command line that names pytest would be
        # hit by whoever runs pkill -f pytest, which is when a guardian is needed.
        code = (
            f"import sys; sys.path.insert(0, {place!r}); "
            "from pytest_gkd.processes.guardian import main; "
            f"main({str(self._run_dir)!r}, {os.getpid()}, {theirs}, {manifest_file}, "
            f"{pulse}, {link!r}, {STILL_LIMIT_S})"
        )
        environ = {name: text for name, text in os.environ.items() if name != RUN_ID}
        run_it = f"import os; exec(os.environ[{CODE!r}])"
        return subprocess.Popen(
            [sys.executable, "-ISB", "-c", run_it, self._run_dir.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs, manifest_file, pulse],
            start_new_session=True,
            cwd="/",
            env={**environ, CODE: code},
        )

    def beat(self, due: float) -> None:
        """This process makes progress, and must at ``due`` (``clock.monotonic()``)."""
        if not self._over:
            self.pulse[Sign.BEAT] += 1
            self.pulse[Sign.DUE] = due

    def stood_still_s(self, now: float) -> float:
        """For how long this process and its guardian both did not run, since the last
        call, as where a container is paused or a job is suspended; else 0."""
        beats = self.pulse[Sign.GUARD_BEAT]
        gap_s, ran_s = now - self._asked, (beats - self._beats) * LOOK_S
        self._asked, self._beats = now, beats
        stood = gap_s > max(STOOD_LEAST_S, 2 * ran_s) and self._process.poll() is None
        if stood:
            self._moved = now
        return gap_s if stood else 0.0

    def replace(self) -> None:
        """Start another one in its place, which may block.

        Raises OSError where no process can be started.
        """
        self._process.kill()  # its own child, which nobody else waits for
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_LIMIT_S)
        self._close_life()
        self._start()
        if self._dismissed:
            self._dismiss()

    def problem(self) -> str:
        """Why another one is needed; empty for one that works, and at the end."""
        if self._over:
            return ""
        if self._process.poll() is not None:
            return "was killed"
        here = procfs.stat(self._process.pid)
        if here is not None and here.state == procfs.STOPPED:
            return "was stopped by a signal"
        now, beat = monotonic(), self.pulse[Sign.GUARD_BEAT]
        if beat != self._beat:
            self._beat, self._moved = beat, now
        return "stood still" if now > self._moved + STILL_LIMIT_S / 2 else ""

    def _close_life(self) -> None:
        if self._life is not None:
            with contextlib.suppress(OSError):  # somebody has closed all there were
                os.close(self._life)
        self._life = None

    def leave(self) -> None:
        """Say nothing: it ends what is left once this process is gone."""
        if not self._over:
            self._over = True
            self.pulse.close()

    def goodbye(self) -> None:
        """The run has ended by itself: the guardian goes, and has gone on return."""
        if self._over:
            return
        self._over = self._dismissed = True
        self.pulse.close()
        self._dismiss()

    def _dismiss(self) -> None:
        if self._life is not None:
            with contextlib.suppress(OSError):  # it was killed
                os.write(self._life, GOODBYE)
        self._close_life()
        try:
            self._process.wait(GOODBYE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
