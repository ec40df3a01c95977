"""Turns pytest's configuration into a run: selection, settings, workers, plugins."""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import fault_specs, sanitize
from pytest_gkd import options as settings
from pytest_gkd.diagnosis import own_rules
from pytest_gkd.diagnosis.catalogue import RuleError, load
from pytest_gkd.gpu_report import result_files
from pytest_gkd.options import OPTIONS, Settings, SettingsError
from pytest_gkd.processes import gpus, host_capabilities
from pytest_gkd.processes.heartbeat import Standstill
from pytest_gkd.run import keyword_selection, option_origins
from pytest_gkd.run.controller import SAFE_PATH, StageController
from pytest_gkd.run.events import EventPaths, EventWriter, VerdictReader
from pytest_gkd.run.report_directory import (
    DEFAULT,
    ReportDir,
    ReportRefusedError,
    restore,
)
from pytest_gkd.run.run_directory import RunDir, temporary_name
from pytest_gkd.run.worker import CONTEXT, IN_STAGE, StageWorker, stage_file, stages_dir
from pytest_gkd.stage_api import StageContext
from pytest_gkd.stage_specs import BY_NAME, STAGES

# Measured: with 36 two lanes begin to fall over.
LEAST_FILES = 48
LEAST_FILE_BYTES = 16 << 20  # outputs of stages are kept up to some megabytes
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
    report: ReportDir
    workers: int
    notes: tuple[str, ...]
    rules: tuple[Path, ...]


def select(config: pytest.Config) -> Selection | None:
    """The stages that the command line or the ini asks for, None for none."""
    asked = option_origins.given(config, "gkd_stages")
    raw, origin = asked.value, asked.origin
    if config.option.gkd_stages is None:
        raw = raw or None
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
        own += tuple(_stage_files(config))
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
    chosen = keyword_selection.chosen(config, config.option)
    return Selection(None, chosen, False, tuple(config.args)) if chosen else None


def _stage_files(config: pytest.Config) -> list[str]:
    return option_origins.files(option_origins.given(config, "gkd_stage_files"))


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
        _refuse_surroundings()
        _refuse_plans(config)
        _check_paths(config, selection)
        read = read_settings(config)
        budgets(config, None if selection.own_files else BY_NAME)
        _check_inject(read, selection)
        rules = _own_rules(config)
        report = _report_dir(config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    config.add_cleanup(report.close)
    workers, notes = _workers(config, selection)
    notes += _hear_of_children(config)
    if read.gpus:
        notes += result_files.unverified(card.name for card in gpus.usable().cards)
    try:
        run_dir = RunDir(report.path)
    except OSError as error:
        raise pytest.UsageError(
            "a run needs a directory for temporary files, and none can be used: "
            f"{sanitize.line(error.strerror or str(error))}. Name one: "
            "TMPDIR=DIR pytest ..."
        ) from None
    config.add_cleanup(run_dir.discard)  # also when pytest stops before the run begins
    made = not (read.student and read.teacher and read.train_files)
    notes += (
        *report.notes,
        *run_dir.notes,
        *host_capabilities.lacking(makes_models=made),
    )
    config.stash[PREPARED] = Prepared(read, run_dir, report, workers, notes, rules)


def _own_rules(config: pytest.Config) -> tuple[Path, ...]:
    """The users' rules, read once here so that a bad one ends the run at once."""
    named = option_origins.given(config, "gkd_rules")
    try:
        own = (named.base / name for name in named.value)
        found = (*own_rules.installed(), *own)
        load(found)
    except (RuleError, LookupError) as error:
        raise SettingsError(f"{named.origin}: {error}") from None
    return found


def _refuse_nesting() -> None:
    inside = os.environ.get(IN_STAGE)
    if inside:
        raise SettingsError(
            f"stages were asked for inside the running stage {inside!r} (the "
            f"variable {IN_STAGE} is set). A stage may not start stages."
        )


def _refuse_surroundings() -> None:
    """Where no process could be found, or nothing that is made could be used."""
    try:
        here = Path("/proc/self").readlink()
        status = Path("/proc/self/status").read_text()
    except OSError:
        raise SettingsError(
            "processes are found in /proc, and no such file system is there: "
            "mount -t proc proc /proc"
        ) from None
    if here != Path(str(os.getpid())):
        raise SettingsError(
            f"/proc is that of another PID namespace (this process is {os.getpid()} "
            f"here and {here} there), so that no process could be found by it. Mount "
            "one of its own, for example by unshare --mount-proc"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        raise SettingsError(
            f"the limit of open files is {files}, and a run itself needs "
            f"{LEAST_FILES}. Raise it: ulimit -n 65536"
        )
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit_bytes < LEAST_FILE_BYTES:
        raise SettingsError(
            f"the file size limit is {limit_bytes >> 10} KiB, and a run itself needs "
            f"{LEAST_FILE_BYTES >> 20} MiB, its stages 1 GiB. Lift it: ulimit -f "
            "unlimited (gkd explain env.file-size-limit)"
        )
    # Before Linux 4.7, and in gVisor, it is not told.
    umask = status.partition("\nUmask:")[2].split()
    mask = int(umask[0], 8) if umask else 0
    if mask & 0o700:
        raise SettingsError(
            f"the umask {mask:04o} takes from you what you make yourself, so that no "
            "report could be written. Set another one: umask 077"
        )


def _hear_of_children(config: pytest.Config) -> tuple[str, ...]:
    # Who starts this process may have it ignored, and all that it starts inherits that
    # (signal(7)): the kernel then keeps no exit status (waitpid(2)).
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN
    ):
        return ()
    old = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore() -> None:
        signal.signal(signal.SIGCHLD, old)

    config.add_cleanup(restore)
    return (
        "SIGCHLD was ignored, by what started pytest; not in this run, since no exit "
        "status of a process could be had. A job that is started so has none",
    )


def _refuse_plans(config: pytest.Config) -> None:
    option = config.option
    for name, is_given in (
        ("--setup-plan", option.setupplan),
        ("--setup-only", option.setuponly),
    ):
        if is_given:
            raise SettingsError(
                f"{name} runs no test, so that no stage would have a verdict: leave "
                f"the stages out, or write --setup-show in the place of {name}"
            )
    if option.trace and not _has_terminal(config):
        raise SettingsError(
            "--trace needs a terminal: a debugger whose input has ended leaves the "
            "stage out, which would then have passed"
        )


def _has_terminal(config: pytest.Config) -> bool:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)  # the rest of it is at this moment
    return sys.stdin is not None and sys.stdin.isatty()


def _check_paths(config: pytest.Config, selection: Selection) -> None:
    # The workers would find this out one by one, each in its own way.
    in_ini = option_origins.given(config, "gkd_stage_files").origin
    listed = _stage_files(config)
    for name in selection.own_files:
        origin = in_ini if name in listed else "command line"
        file = name.split("::")[0]
        bases = (config.invocation_params.dir, config.rootpath)
        if not any((base / file).exists() for base in bases):
            raise SettingsError(
                f"{origin}: file or directory not found: {file!r} (looked in "
                f"{' and '.join(dict.fromkeys(str(base) for base in bases))})"
            )


def _only_asks(config: pytest.Config) -> bool:
    """Whether pytest will show something and run nothing (--help, --collect-only)."""
    fixtures = ("showfixtures", "show_fixtures_per_test")
    names = ("help", "version", "markers", "collectonly", "cacheshow", *fixtures)
    return any(getattr(config.option, name, False) for name in names)


def _workers(
    config: pytest.Config, selection: Selection
) -> tuple[int, tuple[str, ...]]:
    """How many worker processes to start, 0 for none; and what to say about it."""
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
    """Why the stages run in pytest's own process; empty where they have workers."""
    named = ("xdist", "xdist.plugin")  # by its entry point, and by -p
    if not any(config.pluginmanager.hasplugin(name) for name in named):
        return "pytest-xdist is switched off"
    for name, value in (("--pdb", option.usepdb), ("--trace", option.trace)):
        if value:
            return f"one process ({name})"
    return "one process (-n0)" if option.numprocesses == 0 else ""


def read_settings(config: pytest.Config) -> Settings:
    """Options over ini over defaults, with what ``auto`` stands for on this machine."""
    found_in = {
        option.name: option_origins.given(config, option.ini) for option in OPTIONS
    }
    origin = {name: one.origin for name, one in found_in.items()}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        one = found_in[option.name]
        value = settings.read_value(option, one.value, one.origin)
        if option.name == "train_files":
            value = tuple(option_origins.files(dataclasses.replace(one, value=value)))
        elif option.name in ("student", "teacher") and value:
            value = option_origins.model(value, one.base)
        values[option.name] = value
    if values["beta"] > 1:
        raise SettingsError(
            f"{origin['beta']}: {values['beta']:g} is not a number between 0 and 1"
        )
    if values["temperature"] == 0:
        raise SettingsError(f"{origin['temperature']}: '0' is not a number above 0")
    share = values["gpu_memory_utilization"]
    if share is not None and not 0 < share <= 1:
        raise SettingsError(
            f"{origin['gpu_memory_utilization']}: {share!r} "
            "is not a fraction above 0 and up to 1"
        )
    if values["learning_rate"] is None:
        # Measured on a 135M pretrained student: 1e-4 and above makes one repeated
        # batch's loss rise, 1e-5 makes it fall; random tiny weights need larger steps.
        values["learning_rate"] = 1e-5 if values["student"] else 1e-3
    if values["inject"]:
        values |= _fault(values["inject"], origin["inject"]).settings
    usable = gpus.usable()
    cpus = len(os.sched_getaffinity(0))
    values["layout"], values["layout_why"] = settings.choose_layout(
        values["layout"],
        usable.ranks,
        has_ray=_is_installed("ray"),
        exclusive=usable.exclusive,
        tensor_parallel_size=values["tensor_parallel_size"],
    )
    values["gpu_memory_utilization"] = settings.choose_memory(
        values["gpu_memory_utilization"],
        values["layout"],
        usable.ranks,
        values["tensor_parallel_size"],
    )
    values["world_size"], values["world_size_why"] = settings.choose_world_size(
        values["world_size"], usable.ranks, cpus, origin["world_size"]
    )
    named = {name: one.origin for name, one in found_in.items() if one.value}
    return Settings(
        **values,
        gpus=len(usable.cards),
        gpus_why=usable.why,
        bfloat16=usable.bfloat16,
        exclusive=usable.exclusive,
        cpus=cpus,
        origins=named,
    )


def _is_installed(name: str) -> bool:
    """Whether a package is there, and not a directory of that name."""
    found = find_spec(name)
    return found is not None and found.origin is not None


def _fault(name: str, origin: str) -> fault_specs.FaultSpec:
    try:
        return fault_specs.find(name)
    except fault_specs.UnknownFaultError as error:
        raise SettingsError(f"{origin}: {error} gkd faults lists them all.") from None


def _check_inject(read: Settings, selection: Selection) -> None:
    if read.inject is None:
        return
    origin = read.origin("inject")
    stage = _fault(read.inject, origin).stage
    if stage not in selection.builtin:
        raise SettingsError(
            f"{origin}: {read.inject!r} targets stage {stage}, which is not "
            f"selected ({', '.join(selection.builtin) or 'no built-in stage is'})"
        )


def budgets(
    config: pytest.Config, known: Mapping[str, Any] | None
) -> tuple[Mapping[str, float], ...]:
    """Budgets from the command line, then from the ini; ``known`` None: any name."""
    given = [(entry, "--gkd-timeout") for entry in config.option.gkd_timeout]
    ini = option_origins.in_ini(config, "gkd_timeout")
    in_ini = [(entry, ini.origin) for entry in ini.value]
    return tuple(settings.read_timeouts(table, known) for table in (given, in_ini))


def _report_dir(config: pytest.Config) -> ReportDir:
    named = option_origins.given(config, "gkd_report")
    name, base, origin = named.value, named.base, named.origin
    if not name:
        base, origin = config.invocation_params.dir, "the default of --gkd-report"
    try:
        return ReportDir(base, name or None)
    except (OSError, ReportRefusedError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"{origin}: cannot write the report to {str(base / (name or DEFAULT))!r}: "
            f"{problem}. Name a directory of its own, for example "
            "--gkd-report=/tmp/gkd-report"
        ) from None


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
    own = _stage_files(config) if selection.only else []
    config.args = [*others, *own, *files]
    if handed is not None:
        context = StageContext(
            Settings.from_json(handed["settings"]),
            Path(handed["run_dir"]),
            Path(handed["report_dir"]),
            restore=restore,
        )
        pulse = Path(handed["pulse"]) if handed["pulse"] else None
        worker_id = config.workerinput["workerid"]  # type: ignore[attr-defined]
        worker = StageWorker(
            context,
            selection.names,
            tables,
            only=selection.only,
            isolated=True,
            emit=EventWriter(EventPaths(*map(Path, handed["events"]))).write,
            verdict=VerdictReader(Path(handed["verdicts"])).outcome,
            stood_still_s=Standstill(pulse).seconds,
            creations=Path(handed["creations"]),
        )
        if handed["safe_path"] is None:  # as it was, for what the stages start
            os.environ.pop(SAFE_PATH, None)
        worker.isolate(
            context.run_dir / "armed",
            context.run_dir / temporary_name(worker_id),
            guarded=pulse is not None,
        )
    elif prepared is not None:
        controller = StageController(
            config,
            prepared.settings,
            prepared.run_dir,
            prepared.report,
            workers=prepared.workers,
            notes=prepared.notes,
            rules=prepared.rules,
        )
        config.pluginmanager.register(controller, "gkd-controller")
        if prepared.workers:
            return
        context = StageContext(
            prepared.settings,
            prepared.run_dir.path,
            prepared.report.path,
            restore=prepared.report.restore,
        )
        worker = StageWorker(
            context,
            selection.names,
            tables,
            only=selection.only,
            isolated=False,
            emit=controller.hear,
            verdict=controller.verdict,
            stood_still_s=lambda: 0.0,
            creations=prepared.run_dir.creations.handle,
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
            stood_still_s=lambda: 0.0,
            creations=Path(),
        )
    config.stash[CONTEXT] = context
    config.pluginmanager.register(worker, "gkd-worker")


def _refuse(event: dict[str, Any]) -> None:
    if event.get("error"):
        raise pytest.UsageError(event["error"])


def context(request: pytest.FixtureRequest) -> StageContext:
    """The run's context, or a plain one where a stage runs as an ordinary test."""
    config = request.config
    found = config.stash.get(CONTEXT, None)
    if found is not None:
        return found
    try:
        read = read_settings(config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    base: Path = request.getfixturevalue("tmp_path_factory").mktemp("gkd")
    return StageContext(read, run_dir=base, report_dir=base / "report")
