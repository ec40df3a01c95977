"""Turns pytest's configuration into a run: selection, settings, workers, plugins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import abilities, faultspecs, gpus, own_rules, plan, settings
from pytest_gkd.context import StageContext
from pytest_gkd.controller import StageController
from pytest_gkd.journal import EventWriter, VerdictReader
from pytest_gkd.rules import RuleError, load
from pytest_gkd.rundir import RunDir, temporary_name
from pytest_gkd.settings import OPTIONS, Settings, SettingsError
from pytest_gkd.specs import BY_NAME, STAGES
from pytest_gkd.worker import CONTEXT, IN_STAGE, StageWorker, stage_file, stages_dir

DEFAULT_REPORT = ".gkd/last"
REPORT_PARTS = ("report.json", "stacks", "output")
PREPARED = pytest.StashKey["Prepared"]()


@dataclass(frozen=True)
class Selection:
    """Which stages were asked for, and how.

    ``names`` is None for every stage found. ``only`` is set when just stages were
    asked for, so that other tests are left out. ``own_files`` are the user's.
    """

    names: tuple[str, ...] | None
    builtin: tuple[str, ...]
    only: bool
    own_files: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """What the controlling process decided before pytest was configured."""

    settings: Settings
    run_dir: RunDir
    report_dir: Path
    workers: int
    notes: tuple[str, ...]
    rules: tuple[Path, ...]


def select(config: pytest.Config) -> Selection | None:
    """The stages that the command line or the ini asks for, None for none."""
    raw, origin = config.option.gkd_stages, "--gkd-stages"
    if raw is None and config.getini("gkd_stages"):
        raw, origin = config.getini("gkd_stages"), "gkd_stages in the ini file"
    paths = tuple(config.args) if _paths_given(config) else ()
    builtin_paths = [arg for arg in paths if _is_builtin(arg)]
    own = tuple(arg for arg in paths if arg not in builtin_paths)
    if raw is not None:
        if os.path.sep in raw or (raw and Path(raw.split("::")[0]).exists()):
            raise SettingsError(
                f"{origin}: {raw!r} was taken for stage names. Write "
                f"{origin}=all {raw} to run every stage and the tests in {raw}"
            )
        names = settings.read_stage_names(raw, origin)
        own += tuple(config.getini("gkd_stage_files"))
        if "all" in names:
            return Selection(None, tuple(BY_NAME), True, own)
        unknown = [name for name in names if name not in BY_NAME]
        if unknown and not own:
            raise settings.unknown_stage(unknown[0], origin, BY_NAME)
        chosen = tuple(name for name in BY_NAME if name in names)
        return Selection(names, chosen, True, own)
    if builtin_paths:
        chosen = tuple(
            stage.name
            for stage in STAGES
            if any(_covers(arg, stage.name) for arg in builtin_paths)
        )
        return Selection(None, chosen, False, own)
    chosen = plan.mentioned(config.option.keyword or "")
    return Selection(None, chosen, False, tuple(config.args)) if chosen else None


def _paths_given(config: pytest.Config) -> bool:
    return config.args_source == config.ArgsSource.ARGS


def _is_builtin(arg: str) -> bool:
    path = Path(arg.split("::")[0]).absolute()
    return path == stages_dir() or path.parent == stages_dir()


def _covers(arg: str, name: str) -> bool:
    path = Path(arg.split("::")[0]).absolute()
    return path in (stages_dir(), stage_file(name))


def prepare(config: pytest.Config) -> None:
    """In the controlling process, before pytest-xdist reads its options.

    Raises pytest.UsageError for every value that cannot be used.
    """
    try:
        selection = select(config)
        if selection is None or _only_asks(config):
            return
        _refuse_nesting()
        _check_paths(config, selection)
        read = read_settings(config)
        budgets(config, None if selection.own_files else BY_NAME)
        _check_inject(read, selection)
        rules = _own_rules(config)
        report_dir = _report_dir(config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    workers, notes = _workers(config, selection)
    try:
        run_dir = RunDir(report_dir)
    except OSError as error:
        raise pytest.UsageError(
            f"a run needs a directory for temporary files, and none can be used: "
            f"{error.strerror or error}. Name one: TMPDIR=DIR pytest ..."
        ) from None
    config.add_cleanup(run_dir.discard)  # also when pytest stops before the run begins
    made = not (read.student and read.teacher and read.train_files)
    notes += (*run_dir.notes, *abilities.lacking(makes_models=made))
    config.stash[PREPARED] = Prepared(read, run_dir, report_dir, workers, notes, rules)


def _own_rules(config: pytest.Config) -> tuple[Path, ...]:
    """The users' rules, read once here so that a bad one ends the run at once."""
    try:
        named = (config.rootpath / name for name in config.getini("gkd_rules"))
        found = (*own_rules.installed(), *named)
        load(found)
    except (RuleError, LookupError) as error:
        raise SettingsError(f"gkd_rules: {error}") from None
    return found


def _refuse_nesting() -> None:
    inside = os.environ.get(IN_STAGE)
    if inside:
        raise SettingsError(
            f"stages were asked for inside the running stage {inside!r} (the "
            f"variable {IN_STAGE} is set). A stage may not start stages."
        )


def _check_paths(config: pytest.Config, selection: Selection) -> None:
    # The workers would find this out one by one, each in its own way.
    listed = [(arg, "command line") for arg in selection.own_files]
    for name, origin in listed:
        file = name.split("::")[0]
        bases = (config.invocation_params.dir, config.rootpath)
        if not any((base / file).exists() for base in bases):
            raise SettingsError(
                f"{origin}: file or directory not found: {file!r} (looked in "
                f"{' and '.join(dict.fromkeys(str(base) for base in bases))})"
            )


def _only_asks(config: pytest.Config) -> bool:
    """Whether pytest will show something and run nothing (--help, --collect-only)."""
    names = ("help", "version", "markers", "showfixtures", "collectonly", "cacheshow")
    return any(getattr(config.option, name, False) for name in names)


def _workers(
    config: pytest.Config, selection: Selection
) -> tuple[int, tuple[str, ...]]:
    """How many worker processes to start, 0 for none; and what to say about it."""
    asked = getattr(config.option, "numprocesses", None)
    unheld = "budgets are not enforced from outside, and a hang in native code is not"
    if not config.pluginmanager.hasplugin("xdist"):
        return 0, (f"pytest-xdist is switched off: {unheld} ended",)
    if asked == 0 or config.option.usepdb:
        config.option.numprocesses, config.option.dist = 0, "no"
        reason = "--pdb" if config.option.usepdb else "-n0"
        return 0, (f"one process ({reason}): {unheld} ended",)
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


def read_settings(config: pytest.Config) -> Settings:
    """Options over ini over defaults, with what ``auto`` stands for on this machine."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        raw, origin = getattr(config.option, option.ini), option.flag
        if raw in (None, False, []):
            raw, origin = config.getini(option.ini), f"{option.ini} in the ini file"
        values[option.name] = settings.read_value(option, raw, origin)
    if values["beta"] > 1:
        raise SettingsError(
            f"--gkd-beta: {values['beta']:g} is not a number between 0 and 1"
        )
    if values["temperature"] == 0:
        raise SettingsError("--gkd-temperature: '0' is not a number above 0")
    if not 0 < values["gpu_memory_utilization"] <= 1:
        raise SettingsError(
            f"--gkd-gpu-memory-utilization: {values['gpu_memory_utilization']!r} is "
            "not a fraction above 0 and up to 1"
        )
    if values["learning_rate"] is None:
        # Measured on a 135M pretrained student: 1e-4 and above makes one repeated
        # batch's loss rise, 1e-5 makes it fall; random tiny weights need larger steps.
        values["learning_rate"] = 1e-5 if values["student"] else 1e-3
    if values["inject"]:
        values |= _fault(values["inject"]).settings
    found = gpus.usable()
    cpus = len(os.sched_getaffinity(0))
    values["layout"], values["layout_why"] = settings.choose_layout(
        values["layout"], found
    )
    values["world_size"], values["world_size_why"] = settings.choose_world_size(
        values["world_size"], found, cpus
    )
    return Settings(**values, gpus=found, cpus=cpus)


def _fault(name: str) -> faultspecs.FaultSpec:
    try:
        return faultspecs.find(name)
    except faultspecs.UnknownFaultError as error:
        raise SettingsError(
            f"--gkd-inject: {error} docs/faults.md lists them all."
        ) from None


def _check_inject(read: Settings, selection: Selection) -> None:
    if read.inject is None:
        return
    stage = _fault(read.inject).stage
    if stage not in selection.builtin:
        raise SettingsError(
            f"--gkd-inject: {read.inject!r} strikes in stage {stage}, which was not "
            f"asked for ({', '.join(selection.builtin) or 'no built-in stage was'})"
        )


def budgets(
    config: pytest.Config, known: Mapping[str, Any] | None
) -> tuple[Mapping[str, float], ...]:
    """Budgets from the command line, then from the ini; ``known`` None: any name."""
    given = [(entry, "--gkd-timeout") for entry in config.option.gkd_timeout]
    in_ini = [
        (entry, "gkd_timeout in the ini file") for entry in config.getini("gkd_timeout")
    ]
    return tuple(settings.read_timeouts(table, known) for table in (given, in_ini))


def _report_dir(config: pytest.Config) -> Path:
    raw, origin = config.option.gkd_report, "--gkd-report"
    if not raw:
        raw, origin = config.getini("gkd_report"), "gkd_report in the ini file"
    path = config.invocation_params.dir / (raw or DEFAULT_REPORT)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in REPORT_PARTS:
            part = path / name
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        probe = path / "report.json.part"
        probe.write_text("")
        probe.unlink()
        if not raw:
            (path.parent / ".gitignore").write_text("*\n")
    except OSError as error:
        raise SettingsError(
            f"{origin if raw else 'the default of --gkd-report'}: cannot write the "
            f"report to {str(path)!r}: {error.strerror}. Name a directory that can be "
            "written, for example --gkd-report=/tmp/gkd-report"
        ) from None
    return path


def register(config: pytest.Config) -> None:
    """Register what this process is: controller, worker, or both in one."""
    handed = getattr(config, "workerinput", {}).get("gkd")
    prepared = config.stash.get(PREPARED, None)
    try:
        selection = select(config)
        if selection is None:
            return
        tables = budgets(config, None)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    files = [str(stage_file(name)) for name in selection.builtin]
    keeps_args = _paths_given(config) or not selection.only
    others = [arg for arg in config.args if not _is_builtin(arg)] if keeps_args else []
    own = config.getini("gkd_stage_files") if selection.only else []
    config.args = [*others, *(str(config.rootpath / file) for file in own), *files]
    if handed is not None:
        context = StageContext(
            Settings.from_json(handed["settings"]),
            Path(handed["run_dir"]),
            Path(handed["report_dir"]),
        )
        events = context.run_dir / "events"
        worker_id = config.workerinput["workerid"]  # type: ignore[attr-defined]
        worker = StageWorker(
            context,
            selection.names,
            tables,
            only=selection.only,
            isolated=True,
            emit=EventWriter(events / f"{worker_id}.jsonl").write,
            verdict=VerdictReader(context.run_dir / "verdicts.jsonl").outcome,
        )
        worker.isolate(
            context.run_dir / "armed",
            context.run_dir / temporary_name(worker_id),
            guarded=handed["guarded"],
        )
    elif prepared is not None:
        controller = StageController(
            config,
            prepared.settings,
            prepared.run_dir,
            prepared.report_dir,
            workers=prepared.workers,
            notes=prepared.notes,
            rules=prepared.rules,
        )
        config.pluginmanager.register(controller, "gkd-controller")
        if prepared.workers:
            return
        context = StageContext(
            prepared.settings, prepared.run_dir.path, prepared.report_dir
        )
        worker = StageWorker(
            context,
            selection.names,
            tables,
            only=selection.only,
            isolated=False,
            emit=controller.on_event,
            verdict=controller.verdict,
        )
    else:  # --collect-only and the like
        context = StageContext(Settings(), Path(), Path())
        worker = StageWorker(
            context,
            selection.names,
            tables,
            only=selection.only,
            isolated=False,
            emit=_refuse,
            verdict=lambda name: None,
        )
    config.stash[CONTEXT] = context
    config.pluginmanager.register(worker, "gkd-worker")


def _refuse(event: dict[str, Any]) -> None:
    if event.get("error"):
        raise pytest.UsageError(event["error"])


def context(config: pytest.Config, tmp_path_factory: Any) -> StageContext:
    """The run's context, or a plain one where a stage runs as an ordinary test."""
    found = config.stash.get(CONTEXT, None)
    if found is not None:
        return found
    try:
        read = read_settings(config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    base: Path = tmp_path_factory.mktemp("gkd")
    return StageContext(read, run_dir=base, report_dir=base / "report")
