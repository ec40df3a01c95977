"""What this machine lacks that a run would use, and what that costs."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pytest_gkd.files import cache_directory
from pytest_gkd.processes import procfs

CAP_SYS_PTRACE = 19
PTRACE_DETACH = 17
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def lacking(*, makes_models: bool) -> list[str]:
    """One line for each thing missing, with its cost; empty if nothing is.

    ``makes_models`` says that the run builds its tiny models and would cache them.
    """
    found = [_without_stacks()]
    if makes_models:
        found.append(_without_cache())
    return [line for line in found if line]


def py_spy() -> str | None:
    """The py-spy next to this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _without_stacks() -> str:
    if py_spy() is None:
        lack = "py-spy is not installed"
    elif not may_trace():
        lack = (
            "ptrace is not allowed here (in Docker, --cap-add=SYS_PTRACE allows it), "
            "so py-spy sees nothing"
        )
    else:
        return ""
    return f"{lack}: only the stage's own stack will be captured, not its children's"


def may_trace() -> bool:
    """Whether py-spy could attach to a process that is not its child.

    The rules are those of ptrace(2): a container's seccomp filter refuses the call
    itself; Yama's scope 1 allows only children, higher scopes even less.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Nothing is being traced, so a permitted call fails with ESRCH.
    libc.ptrace(PTRACE_DETACH, os.getpid(), None, None)
    if ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        return False
    try:
        scope = int(YAMA.read_text())
    except (OSError, ValueError):
        return True
    return scope == 0 or (scope < 3 and procfs.may(CAP_SYS_PTRACE))


@functools.cache
def may_mount() -> bool:
    """Whether a file system can be mounted in a namespace; most containers deny it."""
    command = ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False  # there is no such program


def _without_cache() -> str:
    place = cache_directory()
    if place is None:
        return "there is no home directory: the tiny models are rebuilt on every run"
    parts = (place, *place.parents)
    there = next(path for path in parts if path.exists())
    if os.access(there, os.W_OK) or any(place.glob("tiny-*")):
        return ""
    return f"{place} cannot be written: the tiny models are rebuilt on every run"
