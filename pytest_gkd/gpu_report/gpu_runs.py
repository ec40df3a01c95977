"""``gkd gpu-report``: run everything that needs a GPU, and keep the results.

Every run is a separate pytest with its own report, below a directory of ours. Its
results, limited to what ``result_files.FORM`` lists, go into one file.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from pytest_gkd import fault_specs
from pytest_gkd.clock import monotonic
from pytest_gkd.gpu_report import result_files, result_page
from pytest_gkd.language import marked, tr_filled
from pytest_gkd.options import BESIDE_THE_ENGINE, choose_layout
from pytest_gkd.processes import gpus, host_capabilities, prctl
from pytest_gkd.report.record import REPORT
from pytest_gkd.stage_specs import BY_NAME, LAYOUTS, OF_EVERY_JOB

# Caches of compiled kernels: Triton, TorchInductor, torch's extensions, FlashInfer,
# vLLM, DeepGEMM and the driver, each set by the variable its documentation names.
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "VLLM_CACHE_ROOT",
    "DG_JIT_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
# Meant for the user's own CI step, not for the runs of a report.
NOT_HANDED_ON = ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS")
# On top of the stages' budgets: imports from a slow disk, and the end of a run.
BESIDE_S = 600.0
ENDS = ((signal.SIGINT, 90.0), (signal.SIGTERM, 60.0), (signal.SIGKILL, 10.0))
SETTLE_S = 10.0
NOT_ASKED_FOR = marked("left out by --only")
ONE_PROCESS = marked("each GPU takes one process at a time")
# Names of runs, as --only takes them.
ONE_GPU, LOSS_FULL, BUSY_GPU = "split on one gpu", "loss full", "busy gpu"
NCCL_TESTS = "all_reduce_perf"
NCCL_TESTS_S = 300.0


class NotHereError(LookupError):
    """The command cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Run:
    """One pytest run: its stages and options, and its name in the file.

    ``caches`` names the directory of compiled kernels, shared by runs that are to reuse
    each other's. ``visible`` replaces CUDA_VISIBLE_DEVICES.
    """

    name: str
    stages: tuple[str, ...] = OF_EVERY_JOB
    options: tuple[str, ...] = ()
    layout: str | None = None
    cold_or_warm: str | None = None
    fault: str | None = None
    caches: str = "caches"
    visible: str | None = None
    files: tuple[str, ...] = ()
    budget_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """The most seconds that it may take, by its stages' budgets."""
        gpu = sum(BY_NAME[name].budget(1) for name in self.stages if name in BY_NAME)
        return gpu + self.budget_s


@dataclass(frozen=True)
class PlannedRuns:
    """What runs on a machine, and what does not, with the reason."""

    runs: tuple[Run, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        return sum(run.limit_s for run in self.runs)


def plan(usable: gpus.Usable, *, has_ray: bool, may_mount: bool) -> PlannedRuns:
    """Everything that this machine can run: layouts, losses, a busy GPU, faults."""
    left_out: dict[str, str] = {}
    runs: list[Run] = []

    def add(new: Iterable[Run], why_not: str = "") -> None:
        if why_not:
            left_out.update((run.name, why_not) for run in new)
        else:
            runs.extend(new)

    fits = _layouts(usable, has_ray)
    for layout in LAYOUTS:
        add(passes(layout, layout), fits[layout])
    mig = _has_mig(usable)
    if usable.ranks > 1 and (usable.exclusive or not mig):
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        one_gpu = passes(ONE_GPU, "split", visible=first)
        add(one_gpu, ONE_PROCESS if usable.exclusive else "")

    chosen, _ = choose_layout(
        "auto", usable.ranks, has_ray=has_ray, exclusive=usable.exclusive
    )
    both = ("vllm", "training_step")
    options = ("--gkd-loss=full", f"--gkd-layout={chosen}")
    add([Run(LOSS_FULL, both, options, chosen, caches=chosen)])
    probe = str(Path(__file__).with_name("busy_stage.py"))
    busy = Run(
        BUSY_GPU, (result_files.BUSY,), files=(probe,), caches=chosen, budget_s=100
    )
    untold = "under MIG the driver does not report how busy a GPU is"
    add([busy], untold if mig else "")
    for spec in fault_specs.load().values():
        if spec.gpus or spec.name == result_page.LATE_RANK:
            run = _fault(spec, str(spec.settings.get("layout", chosen)))
            add([run], _lacks(spec, usable, fits, may_mount=may_mount))
    return PlannedRuns(tuple(runs), left_out)


def _has_mig(usable: gpus.Usable) -> bool:
    return any(card.instances is not None for card in usable.cards)


def _layouts(usable: gpus.Usable, has_ray: bool) -> dict[str, str]:
    """Why a layout does not fit this machine, by layout; empty if it does."""
    found = {
        layout: ONE_PROCESS if usable.exclusive and usable.ranks < 1 + others else ""
        for layout, others in BESIDE_THE_ENGINE.items()
    }
    return found if has_ray else {**found, "ray": "Ray is not installed"}


def passes(name: str, layout: str, visible: str | None = None) -> list[Run]:
    """All stages in a layout, with cold caches and then with warm ones."""
    return [
        Run(
            f"{name}, {which}",
            options=(f"--gkd-layout={layout}",),
            layout=layout,
            cold_or_warm=which,
            caches=name.replace(" ", "-"),
            visible=visible,
        )
        for which in result_files.PASSES
    ]


def _lacks(
    spec: fault_specs.FaultSpec,
    usable: gpus.Usable,
    fits: Mapping[str, str],
    *,
    may_mount: bool,
) -> str:
    if "mounts" in spec.needs and not may_mount:
        return "needs the right to mount"
    if "shared-gpu" in spec.needs and usable.exclusive:
        return ONE_PROCESS
    ranks = 2 if spec.stage == "nccl" else spec.gpus
    if usable.ranks < ranks:
        return f"needs {ranks} GPUs"
    return fits.get(str(spec.settings.get("layout")), "")


def _fault(spec: fault_specs.FaultSpec, layout: str) -> Run:
    options = [f"--gkd-inject={spec.name}"]
    if spec.budget_s:
        options.append(f"--gkd-timeout={spec.stage}={spec.budget_s:g}")
    stages = (*spec.also_runs, spec.stage)
    name = f"fault {spec.name}"
    return Run(name, stages, (*options,), layout, fault=spec.name, caches=layout)


# -- one run -----------------------------------------------------------------------


def perform(run: Run, work: Path) -> tuple[dict[str, Any], bool]:
    """Execute a run below ``work``; its results, in the form of ``result_files.RUN``,
    and whether it was interrupted.
    """
    base = work / f"run{len(list(work.glob('run*')))}"
    base.mkdir()
    (base / "pytest.ini").write_text("[pytest]\n")  # keeps pytest from one further up
    for file in run.files:  # in their own directory pytest would find another ini
        shutil.copy(file, base)
    report = base / "report"
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        f"--gkd-stages={','.join(run.stages)}",
        f"--gkd-report={report}",
        *run.options,
        *(Path(file).name for file in run.files),
    ]
    before = used_mib()
    started = monotonic()
    interrupted = False
    with (base / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=base,
            env=environment(run, work),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal reaches it only through us, once.
            start_new_session=True,
            preexec_fn=prctl.die_with_parent,
        )
        try:
            child.wait(run.limit_s + BESIDE_S)
        except subprocess.TimeoutExpired:
            _end(child)
        except KeyboardInterrupt:
            interrupted = True
            _end(child)
    seconds = round(monotonic() - started, 1)
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # it ended before writing a report
        found = json.loads((report / REPORT).read_text("utf-8"))
    try:
        after = _settled(before)
    except KeyboardInterrupt:
        interrupted, after = True, used_mib()
    done = {
        "name": run.name,
        "layout": found.get("settings", {}).get("layout", run.layout),
        "pass": run.cold_or_warm,
        "fault": run.fault,
        "gpus": found.get("settings", {}).get("gpus", 0),
        "seconds": seconds,
        "exit": child.returncode,
        "used_before_mib": before,
        "used_after_mib": after,
        "stages": [result_files.stage(one) for one in found.get("stages", ())],
    }
    return done, interrupted


def environment(run: Run, work: Path) -> dict[str, str]:
    """The user's environment, with separate caches and without pytest's variables."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name not in NOT_HANDED_ON
    }
    for name in CACHES:
        place = work / "kernels" / run.caches / name.lower()
        place.mkdir(parents=True, exist_ok=True)
        mine[name] = str(place)
    # FlashInfer looks for prebuilt kernels in the same place, and downloads missing
    # ones, unless a package provides them (flashinfer/jit/env.py).
    if util.find_spec("flashinfer_cubin") is None:
        with contextlib.suppress(RuntimeError):  # there is no home directory
            base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
            place = base / ".cache/flashinfer/cubins"
            mine.setdefault("FLASHINFER_CUBIN_DIR", str(place))
    if run.visible is not None:
        mine["CUDA_VISIBLE_DEVICES"] = run.visible
    return mine


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a run, gracefully if possible; each further interrupt escalates one step."""
    for number, patience_s in ENDS:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.send_signal(number)
            child.wait(patience_s)
            return


def _each(cards: Iterable[gpus.Card]) -> tuple[gpus.Card, ...]:
    """Each GPU once, however many of its MIG instances are visible."""
    return tuple({card.index: card for card in cards}.values())


def used_mib() -> list[int]:
    """MiB in use on each GPU; empty if NVML does not say, as for a GB10, which shares
    the host's memory."""
    seen = gpus.visible(gpus.read(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    cards = _each(seen)
    if not all(card.total_bytes for card in cards):
        return []
    return [(card.total_bytes - card.free_bytes) >> 20 for card in cards]


def _settled(before: Sequence[int]) -> list[int]:
    """The memory in use, once it is back to ``before`` or after some seconds.

    A driver takes a moment to free the memory of a process that has just ended.
    """
    until = monotonic() + SETTLE_S
    while True:
        now = used_mib()
        grown = (a - b for b, a in zip(before, now, strict=False))
        if max(grown, default=0) <= result_page.GIVEN_BACK_MIB or monotonic() > until:
            return now
        time.sleep(0.25)


# -- nccl-tests --------------------------------------------------------------------


def nccl_tests(ranks: int, say: Callable[[str], None]) -> dict[str, float]:
    """Bus bandwidth by nccl-tests' all_reduce_perf, if it is on PATH.

    GB/s by size in bytes; empty without the program or with fewer than two GPUs. Also
    empty, with a message, if it failed, as it does on a wrong sum, too.
    """
    program = shutil.which(NCCL_TESTS)
    if program is None or ranks < 2:
        return {}
    say(program)
    sizes = ("-b", "4K", "-e", "1G", "-f", "4")
    try:
        done = subprocess.run(
            [program, *sizes, "-g", str(ranks)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=NCCL_TESTS_S,
            check=False,
            preexec_fn=prctl.die_with_parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(_below(f"left out: {error}"))
        return {}
    if done.returncode:
        say(_below(f"left out: it ended with {done.returncode}"))
        return {}
    return bandwidths(done.stdout.decode("utf-8", "replace"))


def bandwidths(table: str) -> dict[str, float]:
    """The out-of-place bus bandwidth of each row of nccl-tests' table.

    Rows end in time, algorithm bandwidth, bus bandwidth and errors, out of place and
    then in place (nccl-tests, src/common.cu).
    """
    found: dict[str, float] = {}
    for line in table.splitlines():
        words = line.split()
        if len(words) > 8 and words[0].isdigit():
            with contextlib.suppress(ValueError):
                found[words[0]] = float(words[-6])
    return found


# -- the report --------------------------------------------------------------------


def describe(usable: gpus.Usable) -> dict[str, Any]:
    """The machine: GPUs, the links between them, driver, versions."""
    machine = gpus.read()
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    cards = _each(usable.cards)
    for card in cards:
        instances = None
        if card.instances is not None:
            instances = sum(one.index == card.index for one in usable.cards)
        kind = {
            "name": card.name,
            "memory_mib": card.total_bytes >> 20 or None,
            "capability": ".".join(map(str, card.capability)),
            "exclusive": card.exclusive,
            "mig_instances": instances,
        }
        kinds.setdefault(tuple(kind.values()), {**kind, "count": 0})["count"] += 1
    return {
        "schema": result_files.SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpus": list(kinds.values()),
        "links": gpus.links(cards),
        "driver": machine.driver,
        "cuda": machine.cuda,
        "versions": {"python": platform.python_version(), **installed_versions()},
    }


def installed_versions() -> dict[str, str]:
    """The versions of the relevant packages, by name."""
    named = [(d.metadata["Name"] or "", d.version) for d in metadata.distributions()]
    # Of duplicates the first is imported, as in a venv on top of system packages.
    found = {name.lower(): version for name, version in reversed(named)}
    return {
        n: v for n, v in sorted(found.items()) if result_files.PACKAGES.fullmatch(n)
    }


class Report:
    """The result file, rewritten after every run; no existing file is ever touched."""

    def __init__(self, place: Path, head: Mapping[str, Any]) -> None:
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise NotHereError(
                f"the results cannot be written to {str(place)!r}: {error.strerror}. "
                "Name another directory: gkd gpu-report --output=DIR"
            ) from None
        self.path: Path | None = None
        self.found: dict[str, Any] = {
            **head,
            "complete": False,
            "runs": [],
            "not_run": {},
            "nccl_tests_gb_s": {},
        }
        self._place = place

    def write(self) -> Path:
        """Write what is known so far, limited to what the file may contain."""
        text = json.dumps(result_files.scrubbed(self.found), indent=1) + "\n"
        if self.path is None:
            self.path = self._claim()
        fd, part = tempfile.mkstemp(prefix=".gpu-report-", dir=self._place)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o644)  # it is meant to be shared
            file.write(text)
        Path(part).replace(self.path)
        return self.path

    def _claim(self) -> Path:
        """Create an unused name: a second report of the same kind is NAME-2.json."""
        name = result_files.file_name(self.found)
        path, number = self._place / f"{name}.json", 1
        while True:
            with contextlib.suppress(FileExistsError):
                path.open("x").close()
                return path
            number += 1
            path = self._place / f"{name}-{number}.json"


def check(usable: gpus.Usable) -> None:
    """Raise NotHereError if nothing can be run on a GPU."""
    if not usable.cards:
        machine = gpus.read()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        if usable.why:
            why, fix = usable.why, "Install the CUDA builds of torch and vLLM."
        elif machine.cards and all(card.instances == () for card in machine.cards):
            why = "MIG is on, and no GPU has an instance"
            fix = "As root, make one (nvidia-smi mig -lgip lists the profiles, "
            fix += "nvidia-smi mig -cgi PROFILE -C makes one) or turn MIG off "
            fix += "(nvidia-smi -mig 0)."
        elif machine.cards:
            why = f"CUDA_VISIBLE_DEVICES={shown} hides all {len(machine.cards)} GPU(s)"
            fix = "Set it to the indices of the GPUs to use, or unset it."
        elif machine.driver:
            why, fix = (
                f"the driver {machine.driver} shows no GPU",
                "Look at nvidia-smi -L.",
            )
        else:
            why = "no NVIDIA driver answers"
            fix = "In a container, start it with the GPUs (docker run --gpus all)."
        raise NotHereError(
            f"no GPU can be used: {why}. {fix} Without a GPU: pytest --gkd-stages"
        )
    versions = installed_versions()
    lack = [name for name in ("torch", "vllm") if name not in versions]
    if lack:
        raise NotHereError(
            f"{' and '.join(lack)} not installed in {sys.prefix}: run gkd from the "
            "environment of the training job"
        )


def narrowed(made: PlannedRuns, names: Sequence[str]) -> PlannedRuns:
    """The part of a plan that is asked for; everything if ``names`` is empty.

    A name is how runs begin: ``split`` has both of its passes, ``fault vllm`` every
    fault of that stage. Raises NotHereError for one that no run begins with.
    """
    for name in names:
        if not any(run.name.startswith(name) for run in made.runs):
            known = dict.fromkeys(run.name.partition(",")[0] for run in made.runs)
            raise NotHereError(
                f"--only: nothing to be run here begins with {name!r}; there are "
                + ", ".join(known)
            )
    if not names:
        return made
    runs = tuple(run for run in made.runs if run.name.startswith(tuple(names)))
    rest = {run.name: NOT_ASKED_FOR for run in made.runs if run not in runs}
    return PlannedRuns(runs, {**made.left_out, **rest})


def make(place: Path, say: Callable[[str], None], only: Sequence[str] = ()) -> bool:
    """Run everything, or ``only`` what is named, reporting progress; whether all of it
    ended as expected.

    Raises NotHereError before anything runs; KeyboardInterrupt after an interrupt, once
    the current run has ended and the results so far are written.
    """
    usable = gpus.usable()
    check(usable)
    has_ray = "ray" in installed_versions()
    made = plan(usable, has_ray=has_ray, may_mount=host_capabilities.may_mount())
    made = narrowed(made, only)
    report = Report(place, describe(usable))
    return fill(report, made, 1 if _has_mig(usable) else usable.ranks, say)


def fill(
    report: Report, made: PlannedRuns, ranks: int, say: Callable[[str], None]
) -> bool:
    """Run a plan and write the report; see ``make``."""
    work = Path(tempfile.mkdtemp(prefix="gkd-gpu-"))
    report.found["not_run"] = dict(made.left_out)
    say("\n".join(announced(made, report.found)))
    good = False
    try:
        with _interrupts():
            good = _fill(report, made, ranks, work, say)
    finally:
        shutil.rmtree(work / "kernels", ignore_errors=True)
        if report.path:
            say(_line(f"results in {report.path}"))
        if good:
            shutil.rmtree(work)
        else:
            say(_line(f"reports and output of the runs in {work}"))
    return good


def _fill(
    report: Report,
    made: PlannedRuns,
    ranks: int,
    work: Path,
    say: Callable[[str], None],
) -> bool:
    good = True
    for number, run in enumerate(made.runs, 1):
        say(f"[{number}/{len(made.runs)}] {run.name}")
        found, interrupted = perform(run, work)
        report.found["runs"].append(found)
        report.write()
        if interrupted:
            raise KeyboardInterrupt
        as_it_should = result_files.as_expected(found)
        kept = result_page.given_back(found) is False
        good = good and as_it_should and not kept
        say("\n".join(_told(found, as_it_should, kept)))
    report.found["nccl_tests_gb_s"] = nccl_tests(ranks, say)
    report.found["complete"] = True
    report.write()
    return good


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, respecting nohup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.getsignal(number) for number in numbers}
    for number, handler in old.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def announced(made: PlannedRuns, found: Mapping[str, Any]) -> Iterator[str]:
    """What is about to run, and how long it takes at most."""
    result = result_files.Result("", found)
    yield _line(f"{len(made.runs)} runs on {result.machine}:")
    names = "; ".join(run.name for run in made.runs)
    indent = " " * 5
    yield textwrap.fill(names, 80, initial_indent=indent, subsequent_indent=indent)
    for name, why in made.left_out.items():
        yield _line(f"not run: {name} ({why})")
    yield _line(f"{_duration(result, made)}; Ctrl-C keeps the results so far")


def _duration(result: result_files.Result, made: PlannedRuns) -> str:
    """How long it takes, from files for the same kind of GPU, else from the budgets."""
    limit = f"at most {made.limit_s / 60:.0f} minutes, by the budgets of the stages"
    names = {run.name for run in made.runs}
    with contextlib.suppress(result_files.ResultError):
        for one in result_files.load(result_files.directory()):
            known = {run["name"]: run["seconds"] for run in one.runs}
            if one.products == result.products and names <= known.keys():
                took_s = sum(known[name] for name in names)
                return f"about {took_s / 60:.0f} minutes, as in {one.name}; {limit}"
    return f"{limit}; how long it takes on this GPU is not known yet"


def _told(run: Mapping[str, Any], good: bool, kept: bool) -> Iterator[str]:
    word = "as expected" if good else "NOT as expected"
    yield _below(f"{word}: {result_files.outcomes(run)}; {run['seconds']:.0f} s")
    if kept:
        before, after = run["used_before_mib"], run["used_after_mib"]
        yield _below(f"memory was not given back: {before} MiB before, {after} after")


def _line(text: str) -> str:
    return f"gkd: {tr_filled(text)}"


def _below(text: str) -> str:
    """A line about the run before it."""
    return f"    {tr_filled(text)}"
