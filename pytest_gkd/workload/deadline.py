"""Bounds a call that itself knows no bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import exit_reasons

T = TypeVar("T")
U = TypeVar("U")

# How long the other of two processes has, after one failed, to say why; longer where
# that one has only noticed the other: on a slow machine its reason comes late.
GRACE_S = 2.0
GRACE_SHARE = 0.1

# What gloo and its store say on the side that is left behind, or left waiting.
GONE_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
SILENT_SIGNS = ("Timed out waiting", "wait timeout after", "Timed out after")


class Call(Generic[T]):
    """A function that runs in a thread of its own from now on.

    The thread is a daemon: one that never returns does not hold the interpreter at
    its exit. ``concurrent.futures`` would join it there. ``what`` names the call in
    messages, such as ``the weight broadcast``.
    """

    def __init__(
        self,
        function: Callable[[], T],
        what: str,
        changed: threading.Condition | None = None,
    ) -> None:
        self.what = what
        self.error: BaseException | None = None
        self.is_done = False
        self._changed = changed or threading.Condition()
        self._result: list[T] = []
        self._function = function
        threading.Thread(target=self._run, name=f"gkd: {what}", daemon=True).start()

    def _run(self) -> None:
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(self._function())
        except BaseException as raised:  # raised again in result()
            error = raised
        with self._changed:
            self._result, self.error, self.is_done = result, error, True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_done, seconds)

    def result(self, budget_s: float, cause: str) -> T:
        """The function's result, or the exception that it raised.

        Raises StageFault ``cause`` when it has not returned after ``budget_s``; it
        goes on running, so whatever it works on must not be used again.
        """
        if not self.join(budget_s):
            raise late_fault(
                [self.what], f"had not finished after {budget_s:.1f} s", cause
            )
        if self.error is not None:
            raise self.error
        return self._result[0]


def within(budget_s: float, function: Callable[[], T], what: str, cause: str) -> T:
    """``function()``, given up after ``budget_s`` with StageFault ``cause``."""
    return Call(function, what).result(budget_s, cause)


def both(
    first: tuple[str, Callable[[], T]],
    second: tuple[str, Callable[[], U]],
    budget_s: float,
    cause: str,
) -> tuple[T, U]:
    """The results of two functions, each named, that need each other at the same time.

    When one of sender and receiver fails, the other may never return; so its failure
    is raised after a short grace, and of two failures that which does not merely tell
    of the other side's. Raises StageFault ``cause`` after ``budget_s``.
    """
    changed = threading.Condition()
    left = Call(first[1], first[0], changed)
    right = Call(second[1], second[0], changed)
    calls: tuple[Call[T], Call[U]] = (left, right)
    deadline = monotonic() + budget_s

    def settled() -> bool:
        failed = any(call.error is not None for call in calls)
        return failed or all(call.is_done for call in calls)

    with changed:
        changed.wait_for(settled, budget_s)
    if any(call.error is not None for call in calls):
        raised = [str(call.error) for call in calls if call.error is not None]
        grace_s = GRACE_S
        if all(tells_of_peer(text) for text in raised):
            grace_s = max(GRACE_S, GRACE_SHARE * budget_s)
        grace_until = min(deadline, monotonic() + grace_s)
        for call in calls:
            call.join(max(0.0, grace_until - monotonic()))
    late = [call.what for call in calls if not call.is_done]
    errors = [call.error for call in calls if call.error is not None]
    if errors:
        error = root(errors)
        if not late or not any(sign in str(error) for sign in SILENT_SIGNS):
            raise error
        gave_up = f"the other side gave up with {type(error).__name__}: {error}"
        raise late_fault(late, f"makes no progress; {gave_up}", cause) from error
    if late:
        raise late_fault(late, f"had not finished after {budget_s:.1f} s", cause)
    return left.result(0.0, cause), right.result(0.0, cause)


def late_fault(late: list[str], how: str, cause: str) -> StageFault:
    """The fault of calls that do not return; a stopped process is named first."""
    found = exit_reasons.stopped()
    held = "".join(f"{one}: " for one in found[:1])
    return StageFault(
        cause,
        f"{held}{' and '.join(late)} {how}",
        facts={"waited_for": late, **exit_reasons.stopped_facts(found)},
    )


def root(errors: list[BaseException]) -> BaseException:
    """Of the errors of processes that talk to each other, the one behind the rest."""
    causes = [error for error in errors if not tells_of_peer(str(error))]
    chosen = (causes or errors)[0]
    for other in errors:
        if other is not chosen:
            chosen.add_note(f"the other side said: {other}")
    return chosen


def tells_of_peer(text: str) -> bool:
    """Whether an error's text only says that the other process is gone or silent."""
    return any(sign in text for sign in (*GONE_SIGNS, *SILENT_SIGNS))
