"""Starts a run's guardian (see guardian.py) and says goodbye to it at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from pytest_gkd.created import LIST
from pytest_gkd.procfs import MARK

CODE = "GKD_GUARDIAN"
GOODBYE = b"g"
GOODBYE_LIMIT_S = 2.0


class Guard:
    """The guardian of one run, as the pytest process sees it."""

    def __init__(self, run_dir: Path, link: Path | None) -> None:
        """Start it; it comes up beside what this process does next.

        Raises OSError where no process can be started.
        """
        self._run_dir = run_dir
        self._link = link
        self._over = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        creations = os.open(self._run_dir / LIST, os.O_RDONLY)
        theirs, self._life = os.pipe()
        place = str(Path(__file__).parent.parent)
        link = str(self._link or "")
        # The code goes by the environment: a command line that names pytest would be
        # hit by whoever runs pkill -f pytest, which is when a guardian is needed.
        code = (
            f"import sys; sys.path.insert(0, {place!r}); "
            "from pytest_gkd.guardian import main; "
            f"main({str(self._run_dir)!r}, {os.getpid()}, {theirs}, {creations}, "
            f"{link!r})"
        )
        environ = {name: text for name, text in os.environ.items() if name != MARK}
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-ISB",
                    "-c",
                    f"import os; exec(os.environ[{CODE!r}])",
                    self._run_dir.name,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs, creations],
                start_new_session=True,
                cwd="/",
                env={**environ, CODE: code},
            )
        except OSError:
            os.close(self._life)
            raise
        finally:
            os.close(theirs)
            os.close(creations)

    def restart_if_gone(self) -> bool:
        """Start another one if somebody has killed it; whether that was so."""
        if self._over or self._process.poll() is None:
            return False
        with contextlib.suppress(OSError):
            os.close(self._life)
        self._start()
        return True

    def leave(self) -> None:
        """Say nothing: it ends what is left once this process is gone."""
        self._over = True

    def goodbye(self) -> None:
        """The run has ended by itself: the guardian goes, and has gone on return."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(OSError):  # it was killed
            os.write(self._life, GOODBYE)
        with contextlib.suppress(OSError):
            os.close(self._life)
        try:
            self._process.wait(GOODBYE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
