"""A job as its smallest meaningful run, in its framework's own syntax."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pytest_gkd import sanitize
from pytest_gkd.job import documents
from pytest_gkd.job.check import Checked, Value
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.frameworks.reading import UNKNOWN
from pytest_gkd.job.launch import ADDED
from pytest_gkd.language import tr, tr_filled

TABLE = Path(__file__).parent / "frameworks/smallest.toml"
SHORT = 64  # tokens of a response
# A failure may depend on these: they stay as they are, and the output says so.
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
# Their programs read keys from a file alone, none from the command line.
FILE_ALONE = ("roll",)
# Models that each take their share of a batch, the trained one first.
TRAINED_ON = ("trainer_gpus", "critic_gpus", "reference_gpus", "reward_gpus")
# Placeholders' values where only the names of the options count.
ANYHOW = dict.fromkeys(("batch", "samples", "ranks", "rank_samples", "group"), 1)


class Change(NamedTuple):
    """An override, as the framework reads it, and the reason for it."""

    text: str
    why: str


@dataclass
class DebugConfig:
    """The changes that make a job small, and what it keeps.

    ``left`` says what could not be made small, and why, and what is still wrong with
    it; ``reaches`` whether the script passes its own arguments on to the job. ``file``
    holds the job's keys if its framework reads them from nowhere else.
    """

    framework: str
    release: str
    script: str
    lines: list[int]
    changes: list[Change]
    kept: dict[str, Any]
    left: list[str]
    reaches: bool
    file: str = ""

    def to_json(self) -> dict[str, Any]:
        """As ``gkd debug-config --format=json`` prints it."""
        changes = [change._asdict() for change in self.changes]
        return {"schema": 1, **asdict(self), "changes": changes}

    def arguments(self) -> str:
        """All changes in one line, quoted for a shell."""
        return shlex.join(w for change in self.changes for w in change.text.split())

    def inheriting(self) -> str:
        """A file beside ``file`` that inherits from it and makes the changes.

        YAML of printable ASCII: anything else in a name is escaped.
        """
        tree: dict[str, Any] = {"defaults": [Path(self.file).stem, "_self_"]}
        for change in self.changes:
            key, _, value = change.text.partition("=")
            *above, last = key.split(".")
            part = tree
            for name in above:
                part = part.setdefault(name, {})
            part[last] = documents.value_of(value)
        text: str = yaml.safe_dump(tree, sort_keys=False)
        return text


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
    known = _certain(found)
    rows, sizes = table[found.framework], _sizes(known, found.values)
    left = [row["note"] for row in rows if "note" in row]
    rows = [
        row
        for row in rows
        if "set" in row and all(_has(known, one) for one in row.get("when", ()))
    ]
    by_key = {(row["set"].partition("=")[0], "mends" in row): row for row in rows}
    rows = [*by_key.values()]
    strange = {-1}
    while strange:  # of an unknown section only the first key is reported
        tried = check(added=[row["set"].format(**{**ANYHOW, **sizes}) for row in rows])
        # Options that this job's program does not have.
        strange = {
            finding.line - 1
            for finding in tried.findings
            if finding.file == ADDED and finding.cause == UNKNOWN
        }
        rows = [row for number, row in enumerate(rows) if number not in strange]
    changes, unsure = list[Change](), list[str]()
    for row in (row for row in rows if "mends" not in row):
        try:
            changes.append(Change(row["set"].format(**sizes), row["why"]))
        except KeyError:
            unsure.append(row["set"].partition("=")[0])
    if unsure:
        what = "GPUs train" if "group" in sizes else "samples a prompt has"
        reason = f"how many {what} cannot be determined"
        left.append(f"{', '.join(unsure)} as they are: {reason}")
    texts = [change.text for change in changes]
    small = check(added=texts)
    wrong = _wrong(small) - _wrong(found)
    mending = [row for row in rows if row.get("mends") in wrong]
    if mending:
        changes += [Change(row["set"].format(**sizes), row["why"]) for row in mending]
        texts = [change.text for change in changes]
        small = check(added=texts)
    left += [
        f"error in it: {finding.message}"
        for finding in small.findings
        if finding.level == "error"
    ]
    try:
        given = check(" ".join(texts).split()).values.values()
    except CheckError:  # with these as its own arguments the script starts nothing
        given = {}.values()
    return DebugConfig(
        found.framework,
        found.release,
        found.script,
        found.lines,
        changes,
        {name: value for name, value in _certain(small).items() if name in KEPT},
        left,
        GIVEN_LATER in {value.file for value in given},
        _file(found) if found.framework in FILE_ALONE else "",
    )


def _file(found: Checked) -> str:
    """The file that most values are from."""
    places = Counter(value.file for value in found.values.values())
    files = [
        name for name, _ in places.most_common() if name.endswith((".yaml", ".yml"))
    ]
    return files[0] if files else "CONFIG.yaml"


def _has(known: Mapping[str, Any], condition: str) -> bool:
    """Whether there is a certain value of a name, or, as in ``name > 1``, several."""
    name, several, _ = condition.partition(" > 1")
    return name in known and (not several or known[name] > 1)


def _certain(found: Checked) -> dict[str, Any]:
    return {
        name: value.value
        for name, value in found.values.items()
        if value.source != "undetermined" and value.value is not None
    }


def _wrong(found: Checked) -> set[str]:
    """The keys that errors are about."""
    return {one.key for one in found.findings if one.level == "error"}


def _sizes(known: Mapping[str, Any], told: Mapping[str, Value]) -> dict[str, int]:
    """The values of the placeholders, as far as they are certain."""
    response, samples, *roles = (
        value if type(value) is int and value > 0 else None
        for value in map(
            known.get, ("max_response_length", "samples_per_prompt", *TRAINED_ON)
        )
    )
    sizes = {"tokens": min(SHORT, response or SHORT)}
    given = told.get("samples_per_prompt")
    if given is None or given.source != "undetermined":
        sizes["group"] = samples or 1
    if roles[0] and "group" in sizes:
        gpus = math.lcm(*(count for count in roles if count))
        sizes["ranks"] = gpus
        sizes["rank_samples"] = gpus * sizes["group"]
        sizes["batch"] = gpus // math.gcd(gpus, sizes["group"])
        sizes["samples"] = sizes["batch"] * sizes["group"]
    return sizes


def text(small: DebugConfig) -> str:
    """For people: each override with its reason, then how to run it."""
    script = sanitize.line(small.script)
    release = f"{small.framework} {small.release}"
    told = [tr_filled(f"{script} as its smallest run, for {release}")]
    width = max((len(change.text) for change in small.changes), default=0)
    told += [f"  {one.text:{width}}  {tr(one.why)}" for one in small.changes]
    kept = ", ".join(f"{name} {value}" for name, value in small.kept.items())
    rest = [f"kept, as a failure may hang on them: {kept}", *small.left]
    told += [sanitize.line(tr_filled(line)) for line in rest]
    if small.file:
        name = sanitize.line(small.file)
        told.append(
            tr_filled(
                "run: keys are read of the file alone. Save this beside "
                f"{name}, and give its name (without .yaml) as --config_name:"
            )
        )
        told += [f"  {line}" for line in small.inheriting().splitlines()]
    elif Path(small.script).suffix in documents.SUFFIXES:
        behind = f"run: give these to the program that reads {script}, behind it"
        told.append(tr_filled(behind))
    elif small.reaches:
        told.append(
            tr("run: bash {script} $(gkd debug-config {script} --format=args)").format(
                script=script
            )
        )
    else:
        lines = ", ".join(map(str, small.lines))
        told.append(
            tr_filled(
                f"{script} does not pass its own arguments on: add these to the "
                f"command on line {lines}"
            )
        )
    return "\n".join(told)
