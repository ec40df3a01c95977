"""Turns pytest's configuration into a run: the request, workers, plugins."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from pytest_gkd import language, sanitize, typed_json
from pytest_gkd.diagnosis import own_rules
from pytest_gkd.options import REPORT, RULES, Settings, SettingsError
from pytest_gkd.processes import gpus, host_capabilities
from pytest_gkd.processes.heartbeat import Standstill
from pytest_gkd.report.record import DIRECTORY
from pytest_gkd.run import (
    option_origins,
    selection,
    surroundings,
    user_language,
    user_settings,
)
from pytest_gkd.run.assignment import SAFE_PATH, Assignment, Link, Preparation
from pytest_gkd.run.events import EventWriter, verdict_on
from pytest_gkd.run.report_directory import ReportDir, ReportRefusedError, restore
from pytest_gkd.run.run_directory import RunDir, temporary_name
from pytest_gkd.run.selection import Request, Selection
from pytest_gkd.run.worker import CONTEXT, StageWorker
from pytest_gkd.stage_api import StageContext
from pytest_gkd.stage_events import Collected, Event
from pytest_gkd.stage_specs import BY_NAME


@dataclass(frozen=True)
class Prepared:
    """What was requested; ``run`` is None if pytest only has to show something."""

    request: Request
    run: Preparation | None = None


def prepare(config: pytest.Config) -> Prepared | None:
    """Set up a run in the controlling process, before xdist reads its options.

    None if no stage is requested. Raises pytest.UsageError for every unusable value.
    """
    try:
        user_language.use(config)
        selected = selection.select(config)
        if selected is None:
            return None
        shows_only = _only_asks(config)
        read = Settings()
        if not shows_only:
            surroundings.refuse_nesting()
            surroundings.refuse_surroundings()
            surroundings.refuse_plans(config)
            selection.check_paths(config, selected)
            read = user_settings.read(config)
        request = Request(selected, selection.budgets(config), read)
        if not selected.own_files:
            request.check_names()
        if shows_only:
            return Prepared(request)
        user_settings.check_inject(read, selected)
        read = user_settings.decide_shrink(read, selected.builtin)
        request = dataclasses.replace(request, settings=read)
        rules = _own_rules(config)
        report = _report_dir(config)
    except SettingsError as error:
        raise pytest.UsageError(language.tr_filled(str(error))) from None
    config.add_cleanup(report.close)
    workers, notes = _workers(config, selected)
    notes += selection.left_out(config, selected)
    notes += surroundings.hear_of_children(config)
    cards: tuple[str, ...] = ()
    if read.gpus:
        from pytest_gkd.gpu_report import result_files

        cards = tuple(card.name for card in gpus.usable().cards)
        notes += result_files.unverified(cards)
    try:
        run_dir = RunDir(report.path)
    except OSError as error:
        problem = sanitize.line(error.strerror or str(error))
        told = (
            "a run needs a directory for temporary files, and none is usable: "
            f"{problem}. Name one: TMPDIR=DIR pytest ..."
        )
        raise pytest.UsageError(language.tr_filled(told)) from None
    config.add_cleanup(run_dir.discard)  # even if pytest stops before the run begins
    made = not (read.student and read.teacher and read.train_files)
    notes += (
        *report.notes,
        *run_dir.notes,
        *host_capabilities.lacking(makes_models=made),
    )
    made_for = Preparation(run_dir, report, workers, notes, rules, cards)
    return Prepared(request, made_for)


def _own_rules(config: pytest.Config) -> tuple[Path, ...]:
    """Rule files of installed packages and of the user; a bad one ends the run here."""
    named = option_origins.given(config, RULES)
    own = [named.base / name for name in named.value or ()]
    return (
        *_read_rules("rules of an installed package", own_rules.installed),
        *_read_rules(named.origin, lambda: own),
    )


def _read_rules(origin: str, find: Callable[[], list[Path]]) -> list[Path]:
    try:
        found = find()
    except LookupError as error:
        raise SettingsError(f"{origin}: {error}") from None
    if found:
        from pytest_gkd.diagnosis.catalogue import RuleError, read_rule

        try:
            for path in found:
                read_rule(path)
        except RuleError as error:
            raise SettingsError(f"{origin}: {error}") from None
    return found


def _only_asks(config: pytest.Config) -> bool:
    """Whether pytest will show something and run nothing (--help, --collect-only)."""
    fixtures = ("showfixtures", "show_fixtures_per_test")
    names = ("help", "version", "markers", "collectonly", "cacheshow", *fixtures)
    return any(getattr(config.option, name, False) for name in names)


def _workers(
    config: pytest.Config, selection: Selection
) -> tuple[int, tuple[str, ...]]:
    """How many worker processes to start, 0 for none, and notes about it."""
    reason = one_process(config, config.option)
    if reason:
        config.option.numprocesses, config.option.dist = 0, "no"
        unheld = "budgets are not enforced from outside, and a hang in native code is"
        return 0, (f"{reason}: {unheld} not ended",)
    asked = config.option.numprocesses
    lanes = {BY_NAME[name].lane for name in selection.builtin}
    wanted = max(1, len(lanes) + bool(selection.own_files))
    if isinstance(asked, int):
        wanted = asked
    if config.option.maxprocesses:
        wanted = min(wanted, config.option.maxprocesses)
    config.option.numprocesses = wanted
    config.option.dist = "load"
    # A worker is replaced each time a stage has to be ended.
    config.option.maxworkerrestart = config.option.maxworkerrestart or "1000"
    return wanted, ()


def one_process(config: pytest.Config, option: argparse.Namespace) -> str:
    """Why the stages run in pytest's own process; empty if they have workers."""
    named = ("xdist", "xdist.plugin")  # loaded by its entry point, or by -p
    if not any(config.pluginmanager.hasplugin(name) for name in named):
        return "pytest-xdist is switched off"
    for name, value in (("--pdb", option.usepdb), ("--trace", option.trace)):
        if value:
            return f"one process ({name})"
    return "one process (-n0)" if option.numprocesses == 0 else ""


def refusal(config: pytest.Config, problem: str) -> pytest.UsageError:
    """What ends a run that was not prepared, in the user's language."""
    with contextlib.suppress(SettingsError):
        user_language.use(config)
    return pytest.UsageError(language.tr_filled(problem))


def _report_dir(config: pytest.Config) -> ReportDir:
    named = option_origins.given(config, REPORT)
    name, base, origin = named.value, named.base, named.origin
    if not name:
        base, origin = config.invocation_params.dir, "the default of --gkd-report"
    try:
        return ReportDir(base, name or None)
    except (OSError, ReportRefusedError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        wanted = base / (name or DIRECTORY)
        raise SettingsError(
            f"{origin}: cannot write the report to {str(wanted)!r}: {problem}. Name a "
            "directory of its own, for example --gkd-report=/tmp/gkd-report"
        ) from None


def register(config: pytest.Config, prepared: Prepared | None) -> None:
    """Register what this process is: controller, worker, or both in one."""
    handed = getattr(config, "workerinput", {}).get("gkd")
    told = None if handed is None else typed_json.loads(Assignment, handed)
    if told is not None:
        request, manifest_path = told.request, told.manifest_path
        context = StageContext(
            request.settings, told.run_dir, told.report_dir, restore=restore
        )
        link = Link(
            EventWriter(told.events).write,
            partial(verdict_on, told.verdicts),
            Standstill(told.pulse).seconds,
        )
    elif prepared is None:
        return
    elif prepared.run is None:
        request, manifest_path = prepared.request, Path()
        context = StageContext(request.settings, Path(), Path())
        link = Link(_refuse, lambda name: None)
    else:
        request, run = prepared.request, prepared.run
        # Imported here because no worker needs them.
        from pytest_gkd.run.controller import StageController
        from pytest_gkd.run.parts import RunParts

        if not run.workers:  # a stage in this process may break imports
            from pytest_gkd.diagnosis import diagnose  # noqa: F401
        parts = RunParts(config, request, run)
        config.pluginmanager.register(StageController(parts), "gkd-controller")
        manifest_path = run.directory.manifest.handle
        context = StageContext(
            request.settings,
            run.directory.path,
            run.report.path,
            restore=run.report.restore,
        )
        link = Link(parts.hear, parts.verdict)
    config.args = request.selection.args()
    if prepared is not None and prepared.run is not None and prepared.run.workers:
        return
    worker = StageWorker(
        request, context, link, manifest_path, isolated=told is not None
    )
    if told is not None:
        if told.safe_path is None:  # restored for what the stages start
            os.environ.pop(SAFE_PATH, None)
        worker.isolate(
            told.run_dir / "armed",
            told.run_dir / temporary_name(told.worker),
            guarded=told.pulse is not None,
        )
    config.stash[CONTEXT] = context
    config.pluginmanager.register(worker, "gkd-worker")


def _refuse(event: Event) -> None:
    if isinstance(event, Collected) and event.error:
        raise pytest.UsageError(language.tr_filled(event.error))


def context(request: pytest.FixtureRequest) -> StageContext:
    """The run's context, or a plain one if a stage runs as an ordinary test."""
    config = request.config
    found = config.stash.get(CONTEXT, None)
    if found is not None:
        return found
    try:
        read = user_settings.read(config)
    except SettingsError as error:
        raise pytest.UsageError(language.tr_filled(str(error))) from None
    base: Path = request.getfixturevalue("tmp_path_factory").mktemp("gkd")
    return StageContext(read, run_dir=base, report_dir=base / "report")
