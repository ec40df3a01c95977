"""Renders the page of GPU results, from gpu-results/ and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gkd import fault_specs
from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.gpu_report.result_files import BUSY, Result, as_expected, outcomes

NOTE = "<!-- Made by python tools/pages.py from gpu-results/; do not edit. -->"
NOT_RUN = "not run"
# The driver's own memory use may differ by this much between two looks.
GIVEN_BACK_MIB = 64
# The fault in which ranks wait for a late one, which flight recorders show.
LATE_RANK = "nccl:rank-late"
INTRO = f"""
What has been run on a GPU, with versions, and what has not yet. Every line below is a
function of the files in [gpu-results](../gpu-results/README.md), which `gkd gpu-report`
writes; nothing is inferred from CPU runs. The code paths for CUDA were written from the
sources of vLLM 0.21 to 0.33 and of PyTorch 2.11 to 2.15, and what is not named below is
untried.

The header of `pytest --gkd-stages` says "GPU paths not yet verified on this kind of
machine" until a file shows all seven stages pass on each kind of GPU that is visible. A
file matches by the product's name as the driver gives it (`NVIDIA H100 80GB HBM3`);
driver, versions, memory and links may differ.

Memory is given back when no GPU has over {GIVEN_BACK_MIB} MiB more in use after a run
than before it.
"""

COLUMNS = (
    *("run", "ended", "seconds", "engine start s", "compiling s", "push s", "tokens/s"),
    *("bus GB/s", "memory"),
)
Run = Mapping[str, Any]
# True or False for what a file shows, None if it does not say.
Verdict = bool | None


@dataclass(frozen=True)
class Check:
    """One row of the table; ``rule`` says in words what counts as shown."""

    title: str
    judge: Callable[[Result], Verdict]
    rule: str = "the stage passed"

    def cell(self, results: Sequence[Result]) -> str:
        """The machines on which it was seen, and those on which it failed.

        Of several files of one machine the last that says anything about it counts.
        """
        verdicts = [(one.machine, self.judge(one)) for one in results]
        last = dict(pair for pair in verdicts if pair[1] is not None)
        shown = [machine for machine, seen in last.items() if seen]
        shown += [f"FAILED on {machine}" for machine, seen in last.items() if not seen]
        return "; ".join(shown) or NOT_RUN


def _any(verdicts: Iterator[Verdict]) -> Verdict:
    """False on any failure, else True if anything was seen, else None."""
    told = [one for one in verdicts if one is not None]
    return all(told) if told else None


def _stage(run: Run, name: str) -> Mapping[str, Any] | None:
    """A stage that passed or failed, on a GPU and without an injected fault."""
    if run["fault"] or not run["gpus"]:
        return None
    outcomes = ("passed", "failed", "timeout")
    found = (one for one in run["stages"] if one["name"] == name)
    return next((one for one in found if one["outcome"] in outcomes), None)


def _stages(
    *names: str, layout: str = "", given: Callable[[Run], bool] = lambda run: True
) -> Callable[[Result], Verdict]:
    """Whether these stages passed in every run in ``layout`` that meets ``given``."""

    return lambda result: _any(
        stage["outcome"] == "passed"
        for run in result.runs
        if layout in ("", run["layout"]) and given(run)
        for name in names
        if (stage := _stage(run, name)) is not None
    )


def _fact(run: Run, stage: str, name: str) -> Any:
    found = _stage(run, stage)
    return found["facts"].get(name) if found else None


def _by(transport: str) -> Callable[[Run], bool]:
    return lambda run: (
        transport
        == (_fact(run, "weight_sync", "transport") or _fact(run, "vllm", "transport"))
    )


def _has_bus(run: Run) -> bool:
    ranks = _fact(run, "nccl", "world_size") or 0
    return _fact(run, "nccl", "backend") == "nccl" and ranks > 1


def _both_losses(result: Result) -> Verdict:
    verdicts: dict[str, list[bool]] = {}
    for run in result.runs:
        stage = _stage(run, "training_step")
        if stage and _fact(run, "vllm", "engine_dtype") == "bfloat16":
            loss = stage["facts"].get("loss") or ""
            verdicts.setdefault(loss, []).append(stage["outcome"] == "passed")
    if not all(all(found) for found in verdicts.values()):
        return False
    return True if {"topk", "full"} <= verdicts.keys() else None


def _ray(result: Result) -> Verdict:
    names = ("weight_sync", "training_step")
    parts = {_stages(name, layout="ray")(result) for name in names}
    return False if False in parts else None if None in parts else True


def given_back(run: Run) -> Verdict:
    """Whether every GPU has as much free memory after a run as before it."""
    pairs = list(zip(run["used_before_mib"], run["used_after_mib"], strict=False))
    if not pairs:
        return None
    return all(after - before <= GIVEN_BACK_MIB for before, after in pairs)


def _memory(result: Result) -> Verdict:
    return _any(given_back(run) for run in result.runs if run["gpus"])


def _fault(spec: FaultSpec) -> Callable[[Result], Verdict]:
    return lambda result: _any(
        as_expected(run)
        for run in result.runs
        if run["fault"] == spec.name and run["gpus"] >= spec.gpus
    )


def _recorders(result: Result) -> Verdict:
    late = [run for run in result.runs if run["fault"] == LATE_RANK and run["gpus"]]
    return _any(any(one["flight_recorder"] for one in run["stages"]) for run in late)


def checks() -> Iterator[Check]:
    """The rows of the table, in order."""
    yield Check(
        "environment: driver, CUDA, compute capability, busy GPU",
        _stages("environment"),
    )
    yield Check(
        "vllm: CUDA engine, greedy tokens and log-probabilities against the reference "
        "forward pass",
        _stages("vllm"),
    )
    yield Check(
        "nccl: backend NCCL, values and bus bandwidth",
        _stages("nccl", given=_has_bus),
        "the stage passed with two GPUs or more",
    )
    yield Check(
        "weight_sync: colocated (loading in place)",
        _stages("weight_sync", layout="colocated"),
    )
    for where, transport in (
        ("one GPU (CUDA IPC)", "cuda-ipc"),
        ("two or more GPUs (NCCL)", "nccl"),
    ):
        yield Check(
            f"weight_sync: split on {where}",
            _stages("weight_sync", layout="split", given=_by(transport)),
            f"the stage passed, transport {transport}",
        )
    yield Check("weight_sync and training_step: ray", _ray, "both passed")
    yield Check(
        "training_step in bfloat16, both losses",
        _both_losses,
        "it passed with loss topk and with loss full",
    )
    yield Check(
        "memory given back after every stage", _memory, "after every run of stages"
    )
    for spec in fault_specs.load().values():
        if spec.gpus:
            rule = "found as [docs/faults.md](faults.md) says"
            yield Check(f"fault {spec.name}", _fault(spec), rule)
    yield Check(
        "a busy GPU keeps a stage from being called stuck (NVML utilisation)",
        _stages(BUSY),
        "a stage that slept for a minute while kernels ran was not ended",
    )
    yield Check(
        "flight recorders of NCCL ranks compared",
        _recorders,
        f"the verdict on fault {LATE_RANK} rests on them",
    )


def page(results: Sequence[Result]) -> str:
    """The page for these files."""
    lines = ["# Results on GPUs", "", NOTE, INTRO]
    lines += ["| check | seen when | on |", "|---|---|---|"]
    lines += [f"| {c.title} | {c.rule} | {c.cell(results)} |" for c in checks()]
    for result in results:
        lines += ["", *_machine(result)]
    return "\n".join([*lines, ""])


def _machine(result: Result) -> Iterator[str]:
    data = result.data
    yield f"## {result.machine}"
    yield ""
    whole = "" if data["complete"] else "; interrupted before its end"
    yield f"From [{result.name}](../gpu-results/{result.name}), {data['date']}{whole}."
    yield ""
    for kind in data["gpus"]:
        mode = ", exclusive process" if kind["exclusive"] else ""
        mig = kind["mig_instances"]
        mode += f", {mig} MIG instance(s)" if mig is not None else ""
        memory = kind["memory_mib"]
        size = f"{memory} MiB" if memory else "memory unknown"
        size += f", compute capability {kind['capability']}"
        yield f"- {kind['count']} x {kind['name']}: {size}{mode}"
    links = ", ".join(f"{n} by {way}" for way, n in data["links"].items())
    yield f"- pairs of GPUs: {links or 'none'}"
    yield f"- driver {data['driver']} (CUDA {data['cuda'] or 'unknown'})"
    versions = ", ".join(f"{name} {one}" for name, one in data["versions"].items())
    yield f"- {versions}"
    tests = data["nccl_tests_gb_s"]
    best = f"{max(tests.values()):g} GB/s" if tests else "not measured"
    yield f"- best bus bandwidth of nccl-tests' all_reduce_perf: {best}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    yield from (_row(run) for run in data["runs"])
    for name, why in data["not_run"].items():
        yield f"| {name} | not run: {why} |" + " |" * (len(COLUMNS) - 2)


def _row(run: Run) -> str:
    bus = _fact(run, "nccl", "bus_bandwidth_gb_s") or {}
    facts = (
        _fact(run, "vllm", "engine_start_s"),
        _fact(run, "vllm", "compile_s"),
        _fact(run, "weight_sync", "push_s"),
        _fact(run, "vllm", "tokens_per_s"),
        max(bus.values(), default=None),
    )
    memory = {True: "given back", False: "KEPT", None: "-"}[given_back(run)]
    good = as_expected(run) and run["gpus"]
    cells = [
        run["name"],
        "as expected" if good else f"NOT as expected: {outcomes(run)}",
        f"{run['seconds']:.0f}",
        *("-" if fact is None else f"{fact:g}" for fact in facts),
        memory,
    ]
    return f"| {' | '.join(cells)} |"
