"""What has a run left at its end, and how is all of it ended?"""

from __future__ import annotations

import os
from collections.abc import Collection

import psutil

from pytest_gkd import process, sweep
from pytest_gkd.rundir import RunDir
from pytest_gkd.tracker import Tracker


class Closing:
    """Ends what is below this process, but for what was there ``before`` the run.

    ``adopts`` is False where orphans do not become children of this process; they are
    then looked for by the run's mark.
    """

    def __init__(self, home: RunDir, tracker: Tracker, before: set[int]) -> None:
        self.adopts = True
        self._home = home
        self._tracker = tracker
        self._before = before

    def end_all(self, workers: Collection[int]) -> list[str]:
        """End the ``workers`` and what they left; a line for each of the latter."""
        ended: list[str] = []
        for pid in workers:
            ended += process.stop(pid, itself=True)[0]
        for child in self.left():
            if child.pid not in workers:
                ended.append(process.describe(child))
                ended += process.stop(child.pid, itself=True)[0]
        if not self.adopts:
            search = self._home.search(self._before)
            ended += [str(one) for one in sweep.end(search).ended]
        return ended

    def end_late(self) -> None:
        """End what turned up since, and reap what has died."""
        for child in self.left():
            process.stop(child.pid, itself=True)
        for child in process.children(os.getpid()):
            if child.pid not in self._before and not process.alive(child):
                process.reap(child.pid)

    def left(self) -> list[psutil.Process]:
        """The run's processes that are alive."""
        below = process.descendants(os.getpid())
        return [p for p in below if p.pid not in self._before and process.alive(p)]

    def sweep_memory(self, *, tell: bool) -> list[str]:
        """Remove shared memory and Ray's directories; notes on what was there.

        ``tell`` also what was left alone, and why.
        """
        notes = []
        removed, kept = sweep.remove_segments(self._tracker.segments)
        for folder in self._tracker.folders:
            if sweep.remove_folder(folder) == "":
                removed.append(folder.path)
        if removed:
            notes.append(f"removed what was left: {'; '.join(removed)}")
        if tell:
            notes += [f"left alone: {text}" for text in kept]
        return notes
