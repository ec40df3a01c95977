"""``with phase("weight-sync", timeout_s=600):``: phase marks in the user's own program.

A marked phase writes one line to standard error when it begins and one when it ends:
``GKD-PHASE`` and a JSON object, which ``gkd diagnose`` and ``gkd watch`` read. It does
so only under ``gkd watch`` or with ``GKD_MARKS=1``; otherwise a phase costs less than
2 us. This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

SIGN = "GKD-PHASE "
# Set by ``gkd watch`` for the job and everything it starts: the watch's directory.
WATCHED = "PYTEST_GKD_WATCH"
ASKED = "GKD_MARKS"
_FOREVER = float("inf")
LONGEST = 100  # characters in a name
BEGIN, END, LATE = "begin", "end", "late"

_Function = TypeVar("_Function", bound=Callable[..., Any])
_open: ContextVar[tuple[str, ...]] = ContextVar("gkd_phases", default=())
_ON = bool(os.environ.get(WATCHED) or os.environ.get(ASKED, "0") not in ("", "0"))


class phase:  # noqa: N801 - used as a statement, like contextlib.suppress
    """Marks a phase of the job, as a context manager or a function decorator.

    ``name`` is one of ``gkd diagnose``'s phases (``weight-sync``, ``generation``,
    ``teacher``, ``training-step``, ``checkpoint``, ...) or any other text of at most
    100 characters. After ``timeout_s`` seconds in it, this process's stacks are written
    to standard error, and those of the others by ``gkd watch`` or, without it, by a
    helper process; the phase goes on. Phases may be nested, and entered by several
    threads and asyncio tasks; exceptions pass through. Raises TypeError or ValueError
    for an invalid name or time.
    """

    __slots__ = ("_ends", "_token", "name", "timeout_s")

    def __init__(self, name: str, timeout_s: float | None = None) -> None:
        if type(name) is not str or not 0 < len(name) <= LONGEST:
            raise _bad_name(name)
        if timeout_s is not None and not (
            isinstance(timeout_s, (int, float)) and 0 < timeout_s < _FOREVER
        ):
            raise ValueError(
                f"phase({name!r}, timeout_s={timeout_s!r}): expected a number of "
                "seconds above 0, or nothing for no limit"
            )
        self.name = name
        self.timeout_s = timeout_s

    def __enter__(self) -> phase:
        if _ON:
            self._begin()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if _ON:
            self._end(kind)

    def __call__(self, function: _Function) -> _Function:
        """Mark every call of a function, whether plain, ``async`` or a generator."""
        import inspect

        wrapper: Any
        if inspect.iscoroutinefunction(function):

            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with phase(self.name, self.timeout_s):
                    return await function(*args, **kwargs)

        elif inspect.isasyncgenfunction(function):

            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with phase(self.name, self.timeout_s):
                    async for one in function(*args, **kwargs):
                        yield one

        elif inspect.isgeneratorfunction(function):

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with phase(self.name, self.timeout_s):
                    return (yield from function(*args, **kwargs))

        else:

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with phase(self.name, self.timeout_s):
                    return function(*args, **kwargs)

        made: Any = functools.wraps(function)(wrapper)
        return made  # type: ignore[no-any-return]

    # -- only if marks are enabled -----------------------------------------------------

    def _begin(self) -> None:
        above = _open.get()
        self._token = _open.set((*above, self.name))
        more: dict[str, Any] = {"in": list(above)} if above else {}
        if self.timeout_s is not None:
            more["timeout_s"] = self.timeout_s
        _write(self.name, BEGIN, **more)
        self._ends = None
        if self.timeout_s is not None:
            self._ends = _deadlines.add(self.name, self.timeout_s)

    def _end(self, kind: Any) -> None:
        _deadlines.remove(self._ends)
        # A generator may be closed in a different context than it began in, and a mark
        # may be entered twice.
        with contextlib.suppress(ValueError, RuntimeError):
            _open.reset(self._token)
        _write(self.name, END, **({"error": kind.__name__} if kind else {}))


def _bad_name(name: Any) -> Exception:
    text = f"phase({name!r}"[: LONGEST * 2]
    if type(name) is not str:
        if callable(name):
            return TypeError(f"{text}): give the phase a name, as @phase('generation')")
        return TypeError(f"{text}): expected the name of a phase, a string")
    return ValueError(f"{text}): expected a name of 1 to {LONGEST} characters")


def _write(name: str, event: str, **more: Any) -> None:
    """Write one line in one call, so that lines of several processes do not mix."""
    told: dict[str, Any] = {"phase": name, "event": event, "t": round(time.time(), 3)}
    told["pid"] = os.getpid()
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        told["rank"] = int(rank)
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        told["thread"] = thread.name[:LONGEST]
    line = f"{SIGN}{json.dumps({**told, **more})}\n"
    with contextlib.suppress(OSError):  # stderr is closed, or its reader is gone
        os.write(2, line.encode())


class _Deadlines:
    """A thread of this process that reports phases that take too long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, tuple[float, str, float]] = {}
        self._next = 0
        self._thread: threading.Thread | None = None

    def add(self, name: str, timeout_s: float) -> int:
        with self._changed:
            self._next += 1
            at = time.monotonic() + timeout_s
            self._open[self._next] = (at, name, timeout_s)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gkd phase deadlines", daemon=True
                )
                self._thread.start()
            self._changed.notify()
            return self._next

    def remove(self, number: int | None) -> None:
        if number is not None:
            with self._changed:
                self._open.pop(number, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [n for n, (at, _, _) in self._open.items() if at <= now]
                told = [self._open.pop(number)[1:] for number in late]
                if not told:
                    ends = (at for at, _, _ in self._open.values())
                    left = min(ends, default=None)
                    # An hour at most, as the timeout of a lock is limited.
                    self._changed.wait(left and min(left - now, 3600.0))
            for name, timeout_s in told:
                _tell(name, timeout_s)


_deadlines = _Deadlines()


def _after_fork() -> None:
    """Start afresh in a fork, which lacks its parent's threads but not their locks."""
    global _deadlines
    _deadlines = _Deadlines()


os.register_at_fork(after_in_child=_after_fork)


def _tell(name: str, timeout_s: float) -> None:
    """Report that a phase is late, and dump the stacks."""
    import faulthandler

    _write(name, LATE, timeout_s=timeout_s)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file=2, all_threads=True)
    if os.environ.get(WATCHED):
        return  # the watcher handles the other processes
    import subprocess

    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "pytest_gkd.watch.late_phase", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
