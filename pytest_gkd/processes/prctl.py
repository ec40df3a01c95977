"""Parent-death signal and child subreaper (Linux's prctl(2))."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Looked up now, so that a freshly forked child only has to call it.
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that none is lost.

    Even a daemon that double-forked and wiped its environment then stays in the tree.
    False if the kernel has no such call (not Linux).
    """
    return _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies.

    The trigger is the death of the parent's *thread* that forked it, and whatever this
    process has started lives on; a guardian is therefore better. A parent that is
    already gone goes unnoticed: check that ``os.getppid()`` is still its pid.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
