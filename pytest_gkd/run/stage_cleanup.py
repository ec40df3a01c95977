"""Ends and removes what a stage left behind, before its worker's next stage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.processes import cleanup, manifest, procfs, tree
from pytest_gkd.processes.procfs import Identity

# Helpers that a library starts once for the whole process and keeps using.
HELPERS = re.compile(
    r"multiprocess(ing)?\.(resource_tracker|forkserver)|loky|_inductor/compile_worker"
)
# Fixtures of pytest and its plugins start nothing; ``gkd`` is one of them. In the wheel
# those of the stages are in the plugin's package, and they do.
NO_OWNERS = re.compile(r"_pytest|xdist|anyio|pytest_(?!gkd\.stages\b)")


@dataclass(frozen=True)
class Left:
    """One line for each process ended and for each shared memory file removed."""

    processes: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)


class StageCleanup:
    """Remembers what existed when a stage began; ``before`` holds the processes.

    ``manifest_path`` is the run's manifest (see ``manifest.ManifestFile``).
    """

    def __init__(self, manifest_path: Path) -> None:
        self._list = manifest_path
        self.before = {p.pid for p in tree.descendants(os.getpid())}
        self._segments = set(procfs.segments().values())
        self._held: set[Identity] = set()

    def end(self, stage: str) -> Left:
        """End what the stage started and did not end; remove its shared memory.

        Descendants of an older process are left to that process.
        """
        lines = []
        for found in self._left():
            lines.append(tree.describe(found))
            lines += tree.stop(found.pid, itself=True, before=self.note_memory)[0]
        return Left(list(dict.fromkeys(lines)), self._memory(stage))

    def note_memory(self, s: procfs.Stat) -> None:
        """Remember the shared memory of a stage's process about to be killed."""
        self._held |= procfs.held(s.pid, writing=True) or set()

    def _left(self) -> list[psutil.Process]:
        table = procfs.table()
        older = procfs.owned(self.before, table)
        mine = procfs.below([os.getpid()], table) - older - {os.getpid()}
        return [
            found
            for found in tree.descendants(os.getpid())
            if found.pid in mine
            and tree.alive(found)
            and not HELPERS.search(procfs.full_command(found.pid))
        ]

    def _memory(self, stage: str) -> list[str]:
        if not procfs.shares_memory():
            return []
        new = {
            name: identity
            for name, identity in procfs.segments().items()
            if identity not in self._segments
        }
        if not new:
            return []
        # Proof of ownership: held by what was ended, or already in the manifest.
        listed = manifest.read(self._list.read_bytes()).segments
        proven = self._held | {
            s.identity for s in listed if s.stage == stage and s.worker == os.getpid()
        }
        lines = [
            manifest.SegmentLine(name, *identity, stage, os.getpid())
            for name, identity in new.items()
            if identity in proven
        ]
        return cleanup.remove_segments(lines)[0]


def may_outlive_it(fixtures: Iterable[Any]) -> bool:
    """Whether a fixture of a wider scope may own what the stage started.

    ``fixtures`` are pytest's FixtureDefs. Such a fixture, say an engine shared by
    several stages, ends its own processes when its scope ends.
    """
    return any(
        fixture.scope != "function"
        and not NO_OWNERS.match(str(fixture.func.__module__))
        for fixture in fixtures
    )
