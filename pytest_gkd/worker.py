"""Runs stages in a worker process (or in-process): plan, needs, events, findings."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import plan, process, procfs, stacks
from pytest_gkd.context import StageContext
from pytest_gkd.fault import StageFault
from pytest_gkd.leftovers import Leftovers, may_outlive_it
from pytest_gkd.plan import PlannedStage, StageItem
from pytest_gkd.record import BLOCKED, FAILED, PASSED, SKIPPED, TIMEOUT
from pytest_gkd.settings import SettingsError, unknown_stage
from pytest_gkd.specs import BY_NAME
from pytest_gkd.watchdog import GENTLE_AFTER_S

# Set while a stage runs, for it and all it starts: stages inside a stage would start
# workers inside workers, without end.
IN_STAGE = "PYTEST_GKD_IN_STAGE"
CONTEXT = pytest.StashKey[StageContext]()
POLL_S = 0.02
OUTPUT_LIMIT = 4 * 1024 * 1024


def stages_dir() -> Path:
    """Where the built-in stages lie: in the wheel, or beside the package in a clone."""
    here = Path(__file__).parent
    inside = here / "stages"
    return inside if inside.is_dir() else here.parent / "stages"


def stage_file(name: str) -> Path:
    """The file of a built-in stage."""
    return stages_dir() / f"test_{name}.py"


class StageModule(pytest.Module):
    """A built-in stage file; its tests are found whatever the user's ini renames."""

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        return False


class StageWorker:
    """Collects and runs stages, and says through ``emit`` what happens, as it happens.

    ``selected`` are the stages asked for, None for all found; ``only`` drops tests
    that are no stages. ``verdict`` gives another stage's outcome, None while open.
    """

    def __init__(
        self,
        context: StageContext,
        selected: Sequence[str] | None,
        budgets: Sequence[Mapping[str, float]],
        *,
        only: bool,
        isolated: bool,
        emit: Callable[[dict[str, Any]], None],
        verdict: Callable[[str], str | None],
    ) -> None:
        self.context = context
        self.plan: tuple[PlannedStage, ...] = ()
        self._selected = selected
        self._budgets = budgets
        self._only = only
        self._isolated = isolated
        self._emit = emit
        self._verdict = verdict
        self._by_nodeid: dict[str, PlannedStage] = {}
        self._started: dict[str, float] = {}
        self._before: set[int] = set()
        self._blocked: dict[str, list[str]] = {}
        self._parent = os.getppid()
        self._armed: Path | None = None
        self._leftovers: Leftovers | None = None
        context.emit = self._send

    def _send(self, event: dict[str, Any]) -> None:
        self._emit({**event, "t": time.monotonic()})

    def isolate(self, armed: Path, temporary: Path, *, guarded: bool) -> None:
        """Make this process a worker that can be ended with all it started.

        ``temporary`` becomes its directory for temporary files. ``guarded`` says that a
        guardian ends it should the controller be killed.
        """
        os.setsid()  # Ctrl-C is the controller's; it ends the workers itself
        process.become_subreaper()
        if not guarded:
            process.die_with_parent()
        self._armed = armed
        # Lanes share the cores: an idle OpenMP thread that spins takes them from the
        # other lane (measured: 0.07 s against 4 s for three tiny steps on 2 cores).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        here = procfs.stat(os.getpid())
        start = here.start if here else 0
        self._send({"event": "hello", "pid": os.getpid(), "start": start})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if self._armed is not None:
            # After pytest's own faulthandler plugin, which would write to the terminal.
            stacks.arm(self._armed)

    # -- collection ----------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        if module_path.parent != stages_dir():
            return None
        # One name for a stage wherever the package is installed.
        module: pytest.Module = StageModule.from_parent(
            parent, path=module_path, nodeid=f"stages/{module_path.name}"
        )
        return module

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        try:
            found = {item.nodeid: read_marker(item) for item in items}
            stages = [stage for stage in found.values() if stage is not None]
            if not session.testsfailed:  # else a file that could not be read has them
                self._check_names(config, [stage.name for stage in stages])
            self.plan = plan.build(stages, self._selected, self._budgets)
        except SettingsError as error:
            # The controller turns this into a usage error; here nothing may run.
            self._send({"event": "collected", "error": str(error), "plan": []})
            items.clear()
            return
        self._by_nodeid = {stage.nodeid: stage for stage in self.plan}
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            is_stage = found[item.nodeid] is not None
            keep = item.nodeid in self._by_nodeid if is_stage else not self._only
            (kept if keep else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        position = {stage.nodeid: at for at, stage in enumerate(self._run_order())}
        kept.sort(key=lambda item: position.get(item.nodeid, len(position)))
        items[:] = kept
        gentle = config.pluginmanager.hasplugin("timeout")
        for item in items:
            stage = self._by_nodeid.get(item.nodeid)
            if stage is not None and gentle:
                after_s = stage.budget_s + GENTLE_AFTER_S
                item.add_marker(pytest.mark.timeout(after_s, method="signal"))
            if item.path.parent == stages_dir():
                # torch's and vLLM's own deprecations are not the user's business.
                item.add_marker(pytest.mark.filterwarnings("ignore"))
        self._send(
            {
                "event": "collected",
                "error": None,
                "plan": [vars(stage) for stage in self.plan],
            }
        )

    def _run_order(self) -> list[PlannedStage]:
        return [stage for lane in plan.lanes(self.plan, 1) for stage in lane]

    def _check_names(self, config: pytest.Config, found: list[str]) -> None:
        if config.option.keyword or config.option.markexpr:
            return  # -k or -m may have dropped what the names mean
        known = {*BY_NAME, *found}
        for name in self._selected or ():
            if name not in known:
                raise unknown_stage(name, "--gkd-stages", known)
        for name in {name for table in self._budgets for name in table} - {"all"}:
            if name not in known:
                raise unknown_stage(name, "--gkd-timeout", known)

    # -- running -------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        stage = self._by_nodeid.get(item.nodeid)
        if stage is None:
            return (yield)
        os.environ[IN_STAGE] = stage.name
        try:
            return (yield)
        finally:
            del os.environ[IN_STAGE]
            self._end_leftovers(item, stage)
            self._send({"event": "closed", "stage": stage.name})

    def _end_leftovers(self, item: pytest.Item, stage: PlannedStage) -> None:
        """Before the next stage: what a fixture of a wider scope may own is its own."""
        before, self._leftovers = self._leftovers, None
        info = getattr(item, "_fixtureinfo", None)
        definitions = () if info is None else info.name2fixturedefs.values()
        if before is None or may_outlive_it(d for some in definitions for d in some):
            return
        left = before.end(stage.name)
        if left.processes or left.memory:
            self._send({"event": "left", "stage": stage.name, **vars(left)})

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        stage = self._by_nodeid.get(item.nodeid)
        if stage is not None:
            self._begin(item, stage)
        try:
            yield
        finally:
            if stage is not None:
                self._cut_output()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            if item.nodeid in self._by_nodeid:
                self._cut_output()

    def _cut_output(self) -> None:
        # pytest's capture, which these hooks lie within, has not read it yet.
        if self._isolated:
            cut_captured(captured_descriptors(), OUTPUT_LIMIT)

    def _begin(self, item: pytest.Item, stage: PlannedStage) -> None:
        blocked_by = self._await_needs(stage)
        if blocked_by:
            self._blocked[item.nodeid] = blocked_by
            pytest.skip(f"blocked by {', '.join(blocked_by)}")
        self._before = {p.pid for p in process.descendants(os.getpid())}
        self._leftovers = Leftovers(self.context.run_dir)
        self._started[item.nodeid] = time.monotonic()
        self.context.begin(stage.name, stage.budget_s)
        self._send(
            {
                "event": "start",
                "stage": stage.name,
                "budget_s": stage.budget_s,
                "captured": captured_descriptors() if self._isolated else [],
            }
        )

    def _await_needs(self, stage: PlannedStage) -> list[str]:
        """The needs that did not pass, once all of them have a verdict.

        No deadline: each need has its own, which the controller holds it to.
        """
        waiting = list(stage.needs)
        said = False
        while True:
            waiting = [need for need in waiting if self._verdict(need) is None]
            failed = [n for n in stage.needs if self._verdict(n) not in (None, PASSED)]
            if failed or not waiting:
                return failed
            if not said:
                said = True
                self._send({"event": "waiting", "stage": stage.name, "needs": waiting})
            if self._isolated and os.getppid() != self._parent:
                raise RuntimeError(
                    f"the pytest process {self._parent} is gone; nobody is left who "
                    f"could say how {', '.join(waiting)} ended"
                )
            time.sleep(POLL_S)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        stage = self._by_nodeid.get(item.nodeid)
        if stage is None:
            return report
        started = self._started.get(item.nodeid)
        duration_s = 0.0 if started is None else time.monotonic() - started
        found: dict[str, Any] = {
            "stage": stage.name,
            "outcome": self._outcome(report, stage, duration_s),
            "duration_s": duration_s,
            "blocked_by": self._blocked.get(item.nodeid, []),
            "fault": None,
            "error": "",
            "ended": [],
        }
        if call.excinfo is not None and not report.skipped:
            error = call.excinfo.value
            text = call.excinfo.exconly(tryshort=True)
            text = re.sub(r"^(?:\w+\.)+(?=\w+: )", "", text)
            found["error"] = without_count(text)
            if isinstance(error, StageFault):
                found["error"] = error.message
                found["fault"] = {
                    "cause": error.cause,
                    "facts": error.facts,
                    "evidence": [list(line) for line in error.evidence],
                }
        if found["outcome"] == TIMEOUT:
            # What it started would go on, and hold ports and memory of later stages.
            found["ended"], _ = process.stop(
                os.getpid(), itself=False, spare=self._before
            )
        report.gkd = found  # type: ignore[attr-defined]
        if report.when == "call" or not report.passed:
            told = ("outcome", "duration_s")
            known = {name: found[name] for name in told}
            self._send({"event": "finish", "stage": stage.name, **known})
        return report

    def _outcome(
        self, report: pytest.TestReport, stage: PlannedStage, duration_s: float
    ) -> str:
        if report.passed:
            return PASSED
        if report.skipped:
            return BLOCKED if report.nodeid in self._blocked else SKIPPED
        return TIMEOUT if duration_s >= stage.budget_s else FAILED

    # -- the end -------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if not self._isolated:
            return
        self._send({"event": "bye"})
        # Everything is delivered. The interpreter would spend seconds on taking torch
        # and vLLM down; the controller ends what this process has started.
        os._exit(0)


def cut_captured(descriptors: Iterable[int], limit_bytes: int) -> None:
    """Keep only the end of what was captured, where it is longer than ``limit_bytes``.

    pytest reads all of it into memory and sends it to the controller: for 1 GB that
    took over 20 s.
    """
    for number in descriptors:
        size_bytes = os.fstat(number).st_size
        if size_bytes <= limit_bytes:
            continue
        with open(os.dup(number), "rb+", buffering=0) as file:  # noqa: PTH123
            file.seek(size_bytes - limit_bytes)
            end = file.read(limit_bytes)
            note = f"({size_bytes - limit_bytes} bytes before this were dropped)\n"
            # The position is shared with descriptors 1 and 2, which write on from it.
            file.seek(0)
            file.truncate()
            file.write(note.encode() + end)


def without_count(text: str) -> str:
    """An exception's text without pydantic's first line, which only counts errors.

    And without the input that it then shows: all of vLLM's arguments.
    """
    text = re.sub(
        r"^ValidationError: \d+ validation errors? for \w+\n(?:\S+\n)?\s+"
        r"(?:\w+ error, )?(?=\S)",
        "ValidationError: ",
        text,
    )
    return re.sub(r" \[type=\w+, input_value=.*, input_type=\w+\]", "", text)


def captured_descriptors() -> list[int]:
    """pytest's own descriptors of the files that stdout and stderr go to, if any.

    1 and 2 point there only while a test runs; these do all the time, so that the
    controller can read what a stage printed however the stage ends.
    """
    found = []
    for stream in (1, 2):
        target = os.fstat(stream)
        for entry in Path("/proc/self/fd").iterdir():
            number = int(entry.name)
            try:
                here = os.fstat(number)
            except OSError:
                continue  # the directory's own descriptor
            if number > 2 and (here.st_dev, here.st_ino) == (
                target.st_dev,
                target.st_ino,
            ):
                found.append(number)
                break
    return found


def read_marker(item: pytest.Item) -> StageItem | None:
    """The stage that a test's ``gkd_stage`` marker describes, None without one.

    Raises SettingsError for a marker that cannot be read.
    """
    marker = item.get_closest_marker("gkd_stage")
    if marker is None:
        return None
    options = dict(marker.kwargs)
    lane, needs = options.pop("lane", None), options.pop("needs", None)
    timeout_s = options.pop("timeout", None)
    problem = ""
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        problem = "takes the stage's name"
    elif options:
        problem = f"does not know {', '.join(options)}; it knows lane, needs, timeout"
    elif needs is not None and (
        isinstance(needs, str) or not all(isinstance(need, str) for need in needs)
    ):
        problem = f"takes needs as a list of stage names, not {needs!r}"
    elif timeout_s is not None and (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, (int, float))
        or not 0 < timeout_s < float("inf")
    ):
        problem = f"takes timeout as seconds above 0, not {timeout_s!r}"
    if problem:
        raise SettingsError(f"{item.nodeid}: the marker gkd_stage {problem}")
    name = marker.args[0]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        name = f"{name}[{callspec.id}]"
    return StageItem(
        item.nodeid,
        name,
        lane,
        None if needs is None else tuple(needs),
        timeout_s,
    )
