"""Counts the processes that the kernel's OOM killer has ended.

The kernel counts them for the whole machine, even as seen from a container (proc(5),
/proc/vmstat), and for each cgroup (``oom_kill`` in memory.events with version 2, see
admin-guide/cgroup-v2.rst, in memory.oom_control with version 1, since Linux 4.13).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.processes import cgroup

VMSTAT = Path("/proc/vmstat")
KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # largest record of the kernel's log (Linux 3.5 to 6.17, printk)


def kills(file: Path = VMSTAT) -> int | None:
    """The count in one of these files; None if the kernel does not provide it."""
    try:
        text = file.read_text()
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Count:
    """Both counts at one time; ``group`` is that of this process's own cgroup."""

    machine: int | None
    group: int | None

    @classmethod
    def now(cls) -> Count:
        """Takes well below a millisecond."""
        file = cgroup.memory_events()
        return cls(kills(), kills(file) if file else None)

    @property
    def is_known(self) -> bool:
        """Whether the kernel counts at all."""
        return self.machine is not None or self.group is not None

    def since(self) -> tuple[int, str]:
        """How many have been added since, as a number and in words; the group's first.

        With version 1 a group's count excludes the groups below it.
        """
        now = Count.now()
        for before, after, whose in (
            (self.group, now.group, "of pytest's control group"),
            (self.machine, now.machine, "on this machine"),
        ):
            if before is not None and after is not None and after > before:
                more = after - before
                return more, (
                    f"meanwhile the kernel ended {more} process(es) {whose} for lack "
                    "of memory"
                )
        return 0, ""


def kernels_words(pid: int) -> str:
    """The last line in the kernel's log about killing this process.

    Empty if the log is not readable, or in a container, where the kernel knows the
    process by another pid.
    """
    said = re.compile(rf"(?:[Oo]ut of memory|oom).*Killed process {pid} \(.*")
    return next(reversed([*kernels_lines(said)]), "")


def kernels_lines(said: re.Pattern[str], since_s: float = 0.0) -> list[str]:
    """What ``said`` matches in the kernel's log, from ``since_s`` after boot on.

    Empty if the log may not be read.
    """
    found: list[str] = []
    try:
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        while True:
            try:
                record = os.read(log, RECORD_BYTES).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # the next record has been overwritten
            if not record:
                return found
            # "priority,number,microseconds,flags;text" (Documentation/ABI/dev-kmsg)
            head, _, text = record.partition("\n")[0].partition(";")
            at = head.split(",")[2:3]
            line = said.search(text)
            if line and (not at or int(at[0]) / 1e6 >= since_s):
                found.append(line[0])
    except (OSError, ValueError):  # no more records, or reading is not permitted
        return found
    finally:
        os.close(log)
