"""A run's own directory: created with its manifest and guardian, removed with them."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection
from pathlib import Path

from pytest_gkd.processes import cgroup, cleanup, manifest, procfs
from pytest_gkd.processes.guardian_start import Guardian
from pytest_gkd.report.record import REPORT

# With less, pytest itself cannot start; the stages check what they need themselves.
LEAST_FREE_BYTES = 1_000_000


def temporary_name(worker: str) -> str:
    """The directory for a worker's temporary files in the run's; short, for sockets.

    ``worker`` is pytest-xdist's name for it, such as gw0.
    """
    return worker.replace("gw", "t", 1)


class RunDir:
    """The directory, the manifest kept in it, and the guardian that outlives the run.

    ``notes``, for the header, say what could not be set up. ``started`` is ISO 8601.
    Raises OSError if no temporary directory can be used.
    """

    def __init__(self, report_dir: Path) -> None:
        place = Path(tempfile.gettempdir()).absolute()
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < LEAST_FREE_BYTES:
            text = f"{place} has {free_bytes / 1e6:.1f} MB left"
            raise OSError(errno.ENOSPC, text)
        self.path = Path(tempfile.mkdtemp(prefix=manifest.RUN_PREFIX, dir=place))
        (self.path / "armed").mkdir()
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.notes: list[str] = []
        run_id = uuid.uuid4().hex
        self.manifest = manifest.ManifestFile(self.path / manifest.LIST)
        report = str(report_dir / REPORT)
        self._line = manifest.this_run(run_id, report, self.started)
        self.manifest.add(self._line)
        self._link = manifest.note(self.path)
        self.guardian: Guardian | None = None
        try:
            self.guardian = Guardian(self.path, self.manifest.handle, self._link)
        except OSError as error:
            self.notes.append(
                f"no guardian process could be started ({error.strerror}): if this "
                "pytest is killed, run gkd clean afterwards"
            )
        self._old_run_id = os.environ.get(procfs.RUN_ID)
        self._open = True
        self.hand_on_mark(of_run=False)

    def hand_on_mark(self, *, of_run: bool) -> None:
        """Mark what this process starts from now on as the run's or as the user's."""
        if self._open:
            run_id = self._line.run_id
            os.environ[procfs.RUN_ID] = run_id if of_run else run_id + procfs.THEIRS

    def search(self, spare: Collection[int]) -> cleanup.Search:
        """A search for the run's processes wherever they are, except ``spare``."""
        found = manifest.read(self.manifest.handle.read_bytes())
        return cleanup.Search(self._line, found.processes, spare)

    def close(self, *, finished: bool = True) -> str:
        """Remove it and dismiss the guardian; the reason if anything is left.

        Unless ``finished``, processes are left: the guardian then stays, and ends them
        as soon as this process is gone.
        """
        if not self._open:
            return ""
        self._open = False
        if self._old_run_id is None:
            os.environ.pop(procfs.RUN_ID, None)
        else:
            os.environ[procfs.RUN_ID] = self._old_run_id
        for group in cgroup.of_run(self._line.groups, self._line.run_id):
            if finished:  # including one whose worker never reported
                cgroup.remove(group)
        self.manifest.close()
        problem = cleanup.remove_tree(self.path)
        if self.guardian is not None:
            if finished:
                self.guardian.goodbye()
            else:
                self.guardian.leave()
        if self._link is not None and not problem:
            with contextlib.suppress(OSError):
                self._link.unlink(missing_ok=True)
        return problem

    def discard(self) -> None:
        """Close it if the run did not reach its end."""
        self.close(finished=False)
