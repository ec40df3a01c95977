"""Makes stages work with plugins that repeat tests, fork for them or limit them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from pytest_gkd.clock import monotonic
from pytest_gkd.run.worker_watch import GENTLE_AFTER_S, STOPPED_S
from pytest_gkd.stage_plan import PlannedStage

LEAST_S = 0.02
StageOf = Callable[[pytest.Item], PlannedStage | None]


def gentle_s(stage: PlannedStage) -> float:
    """Seconds after which pytest-timeout interrupts a stage without extra time."""
    return stage.budget_s + GENTLE_AFTER_S


@dataclass(eq=False)
class RunOnce:
    """Runs a stage itself, ahead of plugins that would repeat it or fork for it.

    A stage is judged once, in the process that its lane shares.
    """

    stage_of: StageOf

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if self.stage_of(item) is None:
            return None
        names = {"nodeid": item.nodeid, "location": item.location}
        item.ihook.pytest_runtest_logstart(**names)
        runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(**names)
        return True


@dataclass(eq=False)
class GentleTimeout:
    """Interrupts a stage inside its own process, by pytest-timeout's signal.

    ``ends_at`` is when that is due (clock.monotonic()), which may change; ``isolated``
    says that the controller enforces the budget, too.
    """

    stage_of: StageOf
    ends_at: Callable[[PlannedStage], float]
    isolated: bool

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Replace pytest-timeout's timer for a stage, without its dump of every thread.

        The dump reads the source of everything on the stack, from a disk that may be
        what the stage hangs on; the controller takes the stacks from outside. A limit
        that the stage's author set, with pytest-timeout's marker, is left alone.
        """
        stage = self.stage_of(item)
        in_main = threading.current_thread() is threading.main_thread()
        if stage is None or settings.timeout != gentle_s(stage) or not in_main:
            return None

        theirs = item.config.pluginmanager.getplugin("timeout")
        due = 0.0

        def arm(left_s: float) -> None:
            nonlocal due
            due = monotonic() + left_s
            signal.setitimer(signal.ITIMER_REAL, left_s)

        def ring(number: int, frame: object) -> None:
            __tracebackhide__ = True
            if self.isolated and monotonic() > due + STOPPED_S:
                # Too late, or everything was suspended; in that case the controller,
                # which enforces the budget, too, has to say for how long.
                arm(STOPPED_S)
                return
            left_s = self.ends_at(stage) - monotonic()
            # A little early, by what preceded the start of its clock; or it got more
            # time for imports, or already has a verdict. The signal may have broken a
            # wait in C that would never have ended, so once the budget is over it must
            # not be ignored.
            if left_s >= GENTLE_AFTER_S:
                arm(left_s)
            elif settings.disable_debugger_detection or not theirs.is_debugging():
                pytest.fail(f"still going after {settings.timeout:g} s", pytrace=False)

        signal.signal(signal.SIGALRM, ring)
        arm(max(self.ends_at(stage) - monotonic(), LEAST_S))
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        if self.stage_of(item) is None or hasattr(item, "cancel_timeout"):
            return None  # a timer of pytest-timeout's own
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True
