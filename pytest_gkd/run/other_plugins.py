"""Stages beside plugins that repeat tests, fork for them or limit their time."""

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
    """Seconds after which pytest-timeout interrupts a stage that got no more time."""
    return stage.budget_s + GENTLE_AFTER_S


@dataclass(eq=False)
class RunOnce:
    """Runs a stage in the place of plugins that would repeat it, or fork for it.

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

    ``ends_at`` is when that is due (clock.monotonic()), which may move; ``isolated``
    says that the controller holds the budget as well.
    """

    stage_of: StageOf
    ends_at: Callable[[PlannedStage], float]
    isolated: bool

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """pytest-timeout's clock for a stage, without its dump of every thread.

        That reads the sources of all that is on the stack, from a disk that may be what
        the stage hangs on; the controller takes the stacks, from outside. A limit that
        the stage's author has set, in a marker of pytest-timeout's, stays as it is.
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
                # In vain by now, or all have stood still: then the controller, which
                # holds the budget as well, is to say for how long.
                arm(STOPPED_S)
                return
            left_s = self.ends_at(stage) - monotonic()
            # A little early, by what came before its clock began to run; or imports got
            # on, or it has a verdict already. The signal has ended a wait in C that
            # would not have ended, so that it may not go unheeded once the budget is
            # over.
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
            return None  # pytest-timeout's own
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True
