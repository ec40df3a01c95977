"""A job as its smallest meaningful run, in its framework's own syntax."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd import sanitize
from pytest_gkd.job import documents
from pytest_gkd.job.check import ADDED, Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.frameworks.reading import UNKNOWN

TABLE = Path(__file__).parent / "frameworks/smallest.toml"
SHORT = 64  # tokens of a response
# What a failure may hang on stays as it is, and is told.
KEPT = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "train_tensor_parallel_size",
    "zero_stage",
    "fsdp_version",
    "offload_param",
    "offload_optimizer",
    "load_format",
    "dtype",
    "rollout_engine",
    "placement",
    "gpu_memory_utilization",
    "lora_rank",
    "loss",
)
GIVEN_LATER = "the command line"


class Change(NamedTuple):
    """An override, as the framework reads it, and the reason for it."""

    text: str
    why: str


@dataclass
class DebugConfig:
    """What makes a job small, and what it keeps.

    ``left`` says what could not be made small, and why, and what is wrong with it all
    the same; ``reaches`` whether the script
    hands arguments of its own on to the job.
    """

    framework: str
    release: str
    script: str
    lines: list[int]
    changes: list[Change]
    kept: dict[str, Any]
    left: list[str]
    reaches: bool

    def to_json(self) -> dict[str, Any]:
        """As ``gkd debug-config --format=json`` prints it."""
        changes = [change._asdict() for change in self.changes]
        return {"schema": 1, **asdict(self), "changes": changes}

    def arguments(self) -> str:
        """All changes in one line, quoted for a shell."""
        return shlex.join(change.text for change in self.changes)


def smallest(check: Callable[..., Checked]) -> DebugConfig:
    """The smallest run of the job that ``check`` reads.

    It is called with further arguments for the script, or ``added`` to the start
    itself. Raises CheckError where the framework's syntax for it is not known.
    """
    found = check()
    table = tomllib.loads(TABLE.read_text("utf-8"))
    if found.framework not in table:
        raise CheckError(
            f"{found.script} is a job of {found.framework}; known is what makes one of "
            f"{', '.join(table)} small"
        )
    values = {name: value.value for name, value in found.values.items()}
    rows, sizes = table[found.framework], _sizes(values)
    left = [row["note"] for row in rows if "note" in row]
    rows = [row for row in rows if "set" in row]
    anyhow = {"batch": 1, "samples": 1, **sizes}
    tried = check(added=[row["set"].format(**anyhow) for row in rows])
    # What this job's program does not have.
    strange = {
        finding.line - 1
        for finding in tried.findings
        if finding.file == ADDED and finding.cause == UNKNOWN
    }
    changes, unsure = list[Change](), list[str]()
    for row in (row for number, row in enumerate(rows) if number not in strange):
        try:
            changes.append(Change(row["set"].format(**sizes), row["why"]))
        except KeyError:
            unsure.append(row["set"].partition("=")[0])
    if unsure:
        reason = "how many GPUs train is not certain"
        left.append(f"{', '.join(unsure)} as they are: {reason}")
    texts = [change.text for change in changes]
    small = check(added=texts)
    left += [
        f"error in it: {finding.message}"
        for finding in small.findings
        if finding.level == "error"
    ]
    given = {value.file for value in check(texts).values.values()}
    return DebugConfig(
        found.framework,
        found.release,
        found.script,
        found.lines,
        changes,
        {name: values[name] for name in KEPT if values.get(name) is not None},
        left,
        GIVEN_LATER in given,
    )


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """What the placeholders stand for, as far as it is certain."""
    response, gpus, samples = (
        value if type(value) is int and value > 0 else None
        for value in map(
            values.get, ("max_response_length", "trainer_gpus", "samples_per_prompt")
        )
    )
    sizes = {"tokens": min(SHORT, response or SHORT)}
    if gpus:
        sizes["batch"] = gpus // math.gcd(gpus, samples or 1)
        sizes["samples"] = sizes["batch"] * (samples or 1)
    return sizes


def text(small: DebugConfig) -> str:
    """For people: each override with its reason, then how to run it."""
    script = sanitize.line(small.script)
    told = [f"{script} as its smallest run, for {small.framework} {small.release}"]
    width = max(len(change.text) for change in small.changes)
    told += [f"  {change.text:{width}}  {change.why}" for change in small.changes]
    kept = ", ".join(f"{name} {value}" for name, value in small.kept.items())
    told.append(sanitize.line(f"kept, as a failure may hang on them: {kept}"))
    told += map(sanitize.line, small.left)
    if Path(small.script).suffix in documents.SUFFIXES:
        told.append(f"run: give these to the program that reads {script}, behind it")
    elif small.reaches:
        again = f"gkd debug-config {script} --format=args"
        told.append(f"run: bash {script} $({again})")
    else:
        lines = ", ".join(map(str, small.lines))
        told.append(
            f"{script} hands no arguments of its own on: add these to the command in "
            f"line {lines}"
        )
    return "\n".join(told)
