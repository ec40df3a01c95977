"""Puts a deadline on calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import exit_reasons

T = TypeVar("T")
U = TypeVar("U")

# How long the other of two processes has, after one failed, to say why; longer if the
# first has only noticed the other's failure: on a slow machine the reason comes late.
GRACE_S = 2.0
GRACE_SHARE = 0.1

# The errors of gloo and its store on the side whose peer is gone or silent.
GONE_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
SILENT_SIGNS = ("Timed out waiting", "wait timeout after", "Timed out after")


def begun(function: Callable[[], T], what: str) -> Future[T]:
    """``function()``, started at once in a thread of its own.

    The thread is a daemon: one that never returns does not block interpreter exit,
    whereas an executor's threads are joined. ``what`` names the call, such as ``the
    weight broadcast``.
    """
    call: Future[T] = Future()

    def run() -> None:
        try:
            call.set_result(function())
        except BaseException as raised:  # raised again in result()
            call.set_exception(raised)

    threading.Thread(target=run, name=f"gkd: {what}", daemon=True).start()
    return call


def within(budget_s: float, function: Callable[[], T], what: str, cause: str) -> T:
    """The function's result, or the exception that it raised.

    Raises StageFault ``cause`` if it has not returned after ``budget_s``; it keeps
    running, so whatever it works on must not be used again.
    """
    call = begun(function, what)
    if not wait([call], budget_s).done:
        raise late_fault([what], f"had not finished after {budget_s:.1f} s", cause)
    return call.result()


def both(
    first: tuple[str, Callable[[], T]],
    second: tuple[str, Callable[[], U]],
    budget_s: float,
    cause: str,
) -> tuple[T, U]:
    """The results of two named functions that depend on each other.

    If one of sender and receiver fails, the other may never return; so the failure is
    raised after a short grace period, and of two failures the one that does not merely
    report the other. Raises StageFault ``cause`` after ``budget_s``.
    """
    left, right = begun(first[1], first[0]), begun(second[1], second[0])
    calls: dict[Future[Any], str] = {left: first[0], right: second[0]}
    until = monotonic() + budget_s
    done = wait(calls, budget_s, FIRST_EXCEPTION).done
    errors = [error for call in done if (error := call.exception())]
    if errors:
        grace_s = GRACE_S
        if all(tells_of_peer(str(error)) for error in errors):
            grace_s = max(GRACE_S, GRACE_SHARE * budget_s)
        wait(calls, max(0.0, min(until - monotonic(), grace_s)))
    late = [what for call, what in calls.items() if not call.done()]
    errors = [error for call in calls if call.done() and (error := call.exception())]
    if errors:
        error = root(errors)
        if not late or not any(sign in str(error) for sign in SILENT_SIGNS):
            raise error
        gave_up = f"the other side gave up with {type(error).__name__}: {error}"
        raise late_fault(late, f"makes no progress; {gave_up}", cause) from error
    if late:
        raise late_fault(late, f"had not finished after {budget_s:.1f} s", cause)
    return left.result(), right.result()


def late_fault(late: list[str], how: str, cause: str) -> StageFault:
    """The fault for calls that do not return; a stopped process is named first."""
    found = exit_reasons.stopped()
    held = "".join(f"{one}: " for one in found[:1])
    return StageFault(
        cause,
        f"{held}{' and '.join(late)} {how}",
        facts={"waited_for": late, **exit_reasons.stopped_facts(found)},
    )


def root(errors: list[BaseException]) -> BaseException:
    """Among the errors of communicating processes, the one that caused the others."""
    causes = [error for error in errors if not tells_of_peer(str(error))]
    chosen = (causes or errors)[0]
    for other in errors:
        if other is not chosen:
            chosen.add_note(f"the other side said: {other}")
    return chosen


def tells_of_peer(text: str) -> bool:
    """Whether an error's text only says that the peer is gone or silent."""
    return any(sign in text for sign in (*GONE_SIGNS, *SILENT_SIGNS))
