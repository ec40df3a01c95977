"""Starts a run's guardian (see guardian.py) and dismisses it at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from pytest_gkd import language
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs
from pytest_gkd.processes.heartbeat import GOODBYE, LOOK_S, Pulse, Sign
from pytest_gkd.processes.procfs import RUN_ID

CODE = "GKD_GUARDIAN"
GOODBYE_LIMIT_S = 2.0
# If a pytest process makes no progress for this long with a budget overrun, its
# guardian ends the workers. A guardian that stalls for half as long is replaced.
STILL_LIMIT_S = 60.0
# If neither ran for this long (four looks), something stopped both of them.
STOOD_LEAST_S = 2.0


class Guardian:
    """The guardian of one run, as the pytest process sees it."""

    def __init__(self, run_dir: Path, manifest_file: Path, link: Path | None) -> None:
        """Start it; it comes up while this process goes on.

        ``manifest_file`` is the run's manifest, readable even if ``run_dir`` is gone.
        Raises OSError if no process can be started.
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
        """``theirs`` is the pipe's read end, ``manifest_file`` the open manifest."""
        pulse = self.pulse.descriptor
        self._beat, self._moved = self.pulse[Sign.GUARD_BEAT], monotonic()
        place = str(Path(__file__).parent.parent.parent)
        link = str(self._link or "")
        # The code is passed in the environment: with pytest in its command line, the
        # guardian would die of pkill -f pytest, which is just when it is needed.
        code = (
            f"import sys; sys.path.insert(0, {place!r}); "
            "from pytest_gkd.processes.guardian import main; "
            f"main({str(self._run_dir)!r}, {os.getpid()}, {theirs}, {manifest_file}, "
            f"{pulse}, {link!r}, {STILL_LIMIT_S}, {language.current()!r})"
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
        """Report progress; the next is due by ``due`` (``clock.monotonic()``)."""
        if not self._over:
            self.pulse[Sign.BEAT] += 1
        self.expect_by(due)

    def expect_by(self, due: float) -> None:
        """Say when progress is due, without reporting any."""
        if not self._over:
            self.pulse[Sign.DUE] = due

    def stood_still_s(self, now: float) -> float:
        """For how many seconds since the last call neither this process nor its
        guardian ran, as in a paused container or a suspended job; else 0."""
        beats = self.pulse[Sign.GUARD_BEAT]
        gap_s, ran_s = now - self._asked, (beats - self._beats) * LOOK_S
        self._asked, self._beats = now, beats
        stood = gap_s > max(STOOD_LEAST_S, 2 * ran_s) and self._process.poll() is None
        if stood:
            self._moved = now
        return gap_s if stood else 0.0

    def replace(self) -> None:
        """Start another one in its place; may block.

        Raises OSError if no process can be started.
        """
        self._process.kill()  # its own child, which nobody else waits for
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_LIMIT_S)
        self._close_life()
        self._start()
        if self._dismissed:
            self._dismiss()

    def problem(self) -> str:
        """Why it needs replacing; empty while it works, and at the end of the run."""
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
            with contextlib.suppress(OSError):  # somebody has closed all descriptors
                os.close(self._life)
        self._life = None

    def leave(self) -> None:
        """Do not say goodbye: it ends what is left once this process is gone."""
        if not self._over:
            self._over = True
            self.pulse.close()

    def goodbye(self) -> None:
        """Dismiss the guardian of a run that ended by itself; it is gone on return."""
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
