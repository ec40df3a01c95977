"""The controller's side of its exchange with the guardian."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from pytest_gkd.processes import background, guardian, tree
from pytest_gkd.processes.guardian_start import GOODBYE_LIMIT_S, Guardian
from pytest_gkd.processes.heartbeat import Sign
from pytest_gkd.report import render
from pytest_gkd.run.recorder import Recorder, extend
from pytest_gkd.run.run_directory import RunDir
from pytest_gkd.run.watchdog import Watchdog
from pytest_gkd.run.worker_watch import COLLECT_BUDGET_S

# What the guardian reports; each number only grows.
HEARD = (Sign.WAITED_S, Sign.RESUMED, Sign.GAVE_UP_S)


@dataclass
class GuardianWatch:
    """Tells the guardian the deadlines, reacts to what it did, and replaces it.

    ``before`` holds the processes that are not the run's, such as a new guardian.
    ``ended`` holds the names of the workers that the guardian has ended.
    """

    home: RunDir
    watchdog: Watchdog
    recorder: Recorder
    before: set[int]
    ended: set[str] = field(default_factory=set)
    _heard: dict[Sign, float] = field(default_factory=dict)
    _replacing: Future[None] | None = None

    def on_tick(self, now: float) -> None:
        """Read its reports, tell it the deadlines, and replace it if it is gone."""
        guard = self.home.guardian
        if guard is None:
            return
        self.hear()
        stood_s = guard.stood_still_s(now)
        if stood_s and self._replacing is None:
            self._wait_longer(guard, stood_s)
        guard.beat(self._due(now))
        if self._replacing is not None:
            if not self._replacing.done():
                return
            replaced, self._replacing = self._replacing, None
            replaced.result()
        why = guard.problem()
        if why:
            work = partial(self._replace, guard, why)
            self._replacing = background.begin("gkd-guardian", work)

    def on_heard(self, now: float) -> None:
        """Tell it the deadlines that the events just read have brought."""
        if self.home.guardian is not None:
            self.home.guardian.expect_by(self._due(now))

    def _due(self, now: float) -> float:
        to_come = [s.budget_s for s in self.recorder.record.stages if s.started is None]
        return self.watchdog.due(now, min([*to_come, COLLECT_BUDGET_S]))

    def _wait_longer(self, guard: Guardian, seconds: float) -> None:
        """Extend the deadlines after the whole run was suspended for ``seconds``."""
        guard.pulse[Sign.STOOD_S] += seconds
        self.watchdog.wait_longer(seconds)
        for record in self.recorder.record.stages:
            if record.started is not None and record.duration_s is None:
                extend(record, "stops", record.extra_s.get("stops", 0.0) + seconds)
        self.recorder.note(
            f"pytest and its guardian stood still for {render.seconds(seconds)} (a "
            "paused container or a suspended job?): the deadlines were extended by as "
            "much"
        )

    def _replace(self, guard: Guardian, why: str) -> None:
        try:
            guard.replace()
        except OSError:
            return  # tried again at the next tick
        with self.watchdog.lock:
            # Like its predecessor, it is not one of the run's processes.
            self.before.add(guard.pid)
            self.watchdog.spared.add(guard.pid)
            self.recorder.note(f"its guardian {why} and was replaced (now {guard.pid})")

    def hear(self) -> None:
        """Record what it has done meanwhile, which this process could not notice."""
        if self.home.guardian is None:
            return
        with self.watchdog.lock:
            before = self._heard
            self._heard = {sign: self.home.guardian.pulse[sign] for sign in HEARD}
            new = {sign: at - before.get(sign, 0.0) for sign, at in self._heard.items()}
            waited_s = new[Sign.WAITED_S]
            if waited_s:
                self.watchdog.wait_longer(waited_s)
                self.recorder.note(
                    "pytest was stopped at its terminal for "
                    f"{render.seconds(waited_s)}: its workers kept running, and their "
                    "deadlines were extended by as much"
                )
            if new[Sign.RESUMED]:
                self.recorder.note(
                    "pytest was stopped by a signal (SIGSTOP) when a budget was over; "
                    "its guardian resumed it (SIGCONT)"
                )
            if new[Sign.GAVE_UP_S]:
                workers = self.watchdog.workers.items()
                dead = {n for n, w in workers if tree.is_dead(w.pid, w.start)}
                self.ended |= dead
                self.recorder.note(self.stood_still())

    def stood_still(self) -> str:
        """The message about workers that it has ended."""
        still_s = self._heard[Sign.GAVE_UP_S]
        return f"{guardian.stood_still(still_s)}: its guardian ended the workers"

    def end(self) -> None:
        """Tell the guardian that no more deadlines apply."""
        if self.home.guardian is not None:
            self.home.guardian.beat(float("inf"))
        if self._replacing is not None:
            wait([self._replacing], GOODBYE_LIMIT_S)
