"""Parent-death signal and child subreaper (Linux' prctl(2))."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Looked up now: a child that was just forked does no more than call it.
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that none is lost.

    Even a daemon that forked twice and wiped its environment then stays in the tree.
    False where the kernel has no such call (not Linux).
    """
    return _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it goes.

    It goes with the parent's *thread* that did so; what this process has started lives
    on, which is why a guardian is the better way. A parent that is gone already is not
    noticed: see whether ``os.getppid()`` still is its pid.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
