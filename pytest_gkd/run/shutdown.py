"""Ends everything that is left at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Collection

import psutil

from pytest_gkd.processes import cleanup, procfs, tree
from pytest_gkd.processes.manifest_writer import ManifestWriter
from pytest_gkd.run.run_directory import RunDir

# For each worker, and for everything that they left behind.
END_LIMIT_S = 5.0


class Shutdown:
    """Ends the descendants of this process, except those that are not the run's.

    Not the run's are those that existed ``before`` it, and those that this process
    itself started, for a plugin or a conftest.py. ``adopts`` is False if orphans do not
    become children of this process; they are then found by the run's id.
    """

    def __init__(
        self, home: RunDir, manifest_writer: ManifestWriter, before: set[int]
    ) -> None:
        self.adopts = True
        self._home = home
        self._manifest_writer = manifest_writer
        self._before = before

    def end_all(
        self, workers: Collection[tuple[int, int | None]]
    ) -> tuple[list[str], list[str]]:
        """End the ``workers`` (pid and start time) and what they left behind.

        One line for each process left behind, and one for each that could not be ended.
        """
        ended: list[str] = []
        for pid, start in workers:
            found = tree.stop(
                pid,
                itself=True,
                start=start,
                before=self._manifest_writer.note_memory,
                limit_s=END_LIMIT_S,
            )
            ended += found[0]
        more, left = self._end_below()
        ended += more
        if not self.adopts:
            result = cleanup.end(self._home.search(self._before))
            ended += [str(one) for one in result.ended]
            left += [f"{one}: {why}" for one, why in result.left]
        return ended, left

    def end_late(self) -> list[str]:
        """End what has appeared since, and reap zombies; what could not be ended."""
        _, left = self._end_below()
        for child in procfs.table().values():
            is_ours = child.pid not in self._before and not tree.is_plugins(child)
            if child.ppid == os.getpid() and is_ours and child.state in procfs.DEAD:
                tree.reap(child.pid)
        return left

    def _end_below(self) -> tuple[list[str], list[str]]:
        return tree.stop(
            os.getpid(),
            itself=False,
            spare=self._before,
            own=tree.is_plugins,
            before=self._manifest_writer.note_memory,
            limit_s=END_LIMIT_S,
        )

    def left(self) -> list[psutil.Process]:
        """The run's processes that are still alive."""
        return tree.of_run(self._before)

    def theirs(self) -> list[str]:
        """One line for each live process that plugins have started since."""
        return [
            tree.describe(child)
            for child in tree.children(os.getpid())
            if child.pid not in self._before and tree.alive(child)
        ]

    def remove_memory(self, *, tell: bool) -> list[str]:
        """Remove shared memory and Ray's directories; notes on what was removed.

        And on a manifest that is incomplete. With ``tell``, also on what was left
        alone, and why.
        """
        notes = []
        if self._manifest_writer.problem:
            notes.append(
                "the list of what this run created is incomplete, and gkd clean would "
                f"miss some of it: {self._manifest_writer.problem}"
            )
        removed, kept = cleanup.remove_segments(self._manifest_writer.segments)
        for folder in self._manifest_writer.folders:
            if cleanup.remove_folder(folder) == "":
                removed.append(folder.path)
        if removed:
            notes.append(f"removed what was left: {'; '.join(removed)}")
        if tell:
            notes += [f"left alone: {text}" for text in kept]
            unclaimed = cleanup.unused(self._manifest_writer.unclaimed())
            if unclaimed:
                notes.append(
                    "new in /dev/shm since this run began, used by no process, not "
                    f"known to be this run's: {'; '.join(unclaimed)}. A process that "
                    "is killed while creating one leaves it behind; remove it if no "
                    "job needs it"
                )
        return notes
