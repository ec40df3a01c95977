"""What starts the trainer's processes: accelerate, torchrun, deepspeed or python.

Rules are those of accelerate 1.15.0: src/accelerate/commands/launch.py
(_validate_launch_command, launch_command), src/accelerate/utils/launch.py and
src/accelerate/commands/config/config_args.py.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents
from pytest_gkd.job.arguments import MISSING, MOST_NEAR, UNKNOWN, Option, parsed
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Word
from pytest_gkd.options import near

CONFLICT = "config.invalid-combination"
TORCHRUN = ("torchrun", "torch.distributed.run")
NAMES = ("accelerate", *TORCHRUN, "deepspeed")
# Values of distributed_type with which one process is started, whatever num_processes.
ALONE = ("NO", "no", None, False)
PARALLEL = "parallelism_config_"
COUNT = "the number of GPUs of the machine"


@dataclass
class Started:
    """How a launcher starts a job.

    ``given`` are its settings by name, ``values`` those by the names of ``gkd check``;
    ``processes`` is the world size, ``each`` the processes per machine if the launcher
    is told; ``release`` is accelerate's.
    """

    release: Release
    name: str = "python"
    given: dict[str, Override] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    processes: Given = field(default_factory=lambda: Given("default", 1))
    machines: Given = field(default_factory=lambda: Given("default", 1))
    each: Given | None = None

    @property
    def whose(self) -> str:
        """The release of accelerate that judges, for messages."""
        return f"accelerate {self.release}"

    def find(self, key: str, default: Any = None) -> Given:
        """A setting of the launcher."""
        said = self.given.get(key)
        if said is None:
            return Given("default", default)
        source = "undetermined" if said.needs else "user"
        return Given(source, said.value, said.word, said.needs)


def options(release: Release) -> dict[str, Option]:
    """The options of ``accelerate launch``."""
    return {name: Option(**given) for name, given in release.schema["launch"].items()}


def is_own(keys: Iterable[str]) -> bool:
    """Whether a file with these keys is a configuration of accelerate."""
    return "distributed_type" in keys


def started(before: Sequence[Word], place: Path, release: Release) -> Started:
    """What the words before the program make of it.

    ``place`` is the folder in which relative paths are looked up, besides the current
    one.
    """
    names = [posixpath.basename(word.text.value or "") for word in before]
    number = max((n for n, name in enumerate(names) if name in NAMES), default=None)
    if number is None:
        return Started(release)
    rest = list(before[number + 1 :])
    if names[number] != "accelerate":
        return _other(Started(release, names[number]), rest)
    if rest and rest[0].text.value == "launch":
        rest.pop(0)
    if rest and rest[-1].text.value in ("-m", "--module"):
        rest.pop()
    whose = f"accelerate {release}"
    read = parsed(rest, options(release), whose, abbreviations=False)
    return configured(read.said, place, release, read.findings)


def configured(
    said: Iterable[Override],
    place: Path,
    release: Release,
    findings: Iterable[Finding] = (),
    shipped: dict[str, Any] | None = None,
) -> Started:
    """What accelerate's settings mean, including the configuration file they name.

    ``shipped`` are the shipped configurations that ``--accelerate_config`` may name.
    """
    found = Started(release, "accelerate", findings=list(findings))
    own = {one.key: one for one in said if one.key}
    file = own.get("config_file") or own.get("accelerate_config")
    if file is not None and not file.needs:
        named = str(file.value)
        path = existing(named, place)
        if path is not None:
            add_file(found, path)
        elif named in (shipped or {}):
            for key, value in flat((shipped or {})[named]):
                found.given[key] = Override("", key, value, NOBODY, file.word)
        elif named.startswith("/"):
            text = f"accelerate's configuration {named} does not exist"
            found.findings.append(_finding(MISSING, "error", text, file))
        else:
            file = file._replace(needs=frozenset({f"{named}, which is not found"}))
    found.given |= own
    count(found, file)
    return found


def add_file(found: Started, path: Path) -> None:
    """Add what a configuration file of accelerate says."""
    try:
        settings = documents.settings(path)
    except CheckError as error:
        text = f"accelerate's configuration cannot be read: {error}"
        found.findings.append(Finding(MISSING, "error", text, str(path), 0, ""))
        return
    known, seen = found.release.schema["config"], set()
    for setting in settings:
        above, _, key = setting.key.rpartition(".")
        top = setting.key.partition(".")[0]
        if top not in known and top not in seen:
            hint = near(top, known) if len(found.findings) < MOST_NEAR else "."
            text = f"{found.whose} refuses {path}: it has no key {top}{hint}"
            found.findings.append(_finding(UNKNOWN, "error", text, setting))
        seen.add(top)
        if above == "fsdp_config" and not key.startswith("fsdp"):
            key = f"fsdp_{key}"
        found.given[key] = setting._replace(key=key)
    if "distributed_type" not in found.given:
        text = f"{found.whose} refuses {path}: it has no distributed_type"
        found.findings.append(Finding(MISSING, "error", text, str(path), 0, ""))


def flat(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a configuration by the last part of their keys."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value)
        else:
            yield key, value


def existing(named: str, place: Path) -> Path | None:
    """A file that is certainly the one meant: absolute, beside the script, or here."""
    for path in (place / named, Path(named)):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


# -- processes ---------------------------------------------------------------------


def count(
    found: Started, file: Override | None = None, *, is_configured: bool = False
) -> None:
    """How many processes accelerate starts, with or without a configuration file."""
    found.machines = found.find("num_machines", 1)
    found.processes = found.find("num_processes", -1)
    if file is not None and file.needs:
        needs = Given("undetermined", None, file.word, file.needs)
        for name in ("machines", "processes"):
            if getattr(found, name).source == "default":
                setattr(found, name, needs)
        return
    kind = found.find("distributed_type").value
    flags = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
    has_file = is_configured or file is not None
    is_alone = has_file and kind in ALONE
    if is_alone and not any(found.find(flag).value for flag in flags):
        many = found.processes
        if type(many.value) is int and many.value > 1:
            text = (
                f"num_processes is {many.value}, and distributed_type is {kind}: "
                "accelerate starts one process; give --multi_gpu, or a configuration "
                "for several"
            )
            where = found.given["num_processes"]
            found.findings.append(_finding(CONFLICT, "warning", text, where))
        found.processes = Given("user", 1, many.word, NOBODY, "distributed_type: NO")
    elif found.processes.value == -1:
        if file is not None and kind is not None:
            text = (
                f"num_processes is not in {file.value}: {found.whose} then requires it"
            )
            found.findings.append(_finding(MISSING, "error", text, file))
        found.processes = Given("undetermined", needs=frozenset({COUNT}))
    _check_shape(found)


def _check_shape(found: Started) -> None:
    processes, machines = found.processes.value, found.machines.value
    if type(processes) is not int or type(machines) is not int or machines < 1:
        return
    where = found.given.get("num_processes") or found.given.get("num_machines")
    if processes % machines and where is not None:
        # accelerate/utils/launch.py, prepare_multi_gpu_env: num_processes //
        # num_machines are started on each.
        text = (
            f"{processes} processes cannot be spread over {machines} machines evenly: "
            f"accelerate starts {processes // machines} on each, and waits for "
            f"{processes} forever"
        )
        found.findings.append(_finding(CONFLICT, "error", text, where))
    sharding = [
        found.find(f"{PARALLEL}{name}_size", 1).value
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    ]
    product = 1
    for size in sharding:
        product *= size if type(size) is int and size > 0 else 1
    # accelerate/parallelism_config.py, ParallelismConfig._validate_accelerator.
    if product > 1 and product != processes and where is not None:
        text = (
            f"parallelism_config asks for {product} processes (dp_replicate * dp_shard "
            f"* tp * cp * sp), and {processes} are started"
        )
        found.findings.append(_finding(CONFLICT, "error", text, where))


def _other(found: Started, words: list[Word]) -> Started:
    """The processes of torchrun and deepspeed."""
    if found.name in TORCHRUN:
        # torch/distributed/run.py: the defaults are --nproc-per-node 1 and --nnodes
        # 1:1.
        count = _option(words, "nproc_per_node", 1)
        found.machines = _option(words, "nnodes", 1)
    else:
        # deepspeed/launcher/runner.py: -1 means all there are.
        count = _option(words, "num_gpus", -1)
        found.machines = _option(words, "num_nodes", 1)
        if any(word.text.shape.startswith(("-H", "--hostfile")) for word in words):
            found.machines = Given("undetermined", needs=frozenset({"the hostfile"}))
    found.each = None if count.value == -1 else count
    sizes = [count.value, found.machines.value]
    needs = count.needs | found.machines.needs
    if not needs and (type(sizes[0]) is not int or sizes[0] < 0):
        needs = frozenset({COUNT})
    if needs or type(sizes[1]) is not int:
        needs = needs or frozenset({f"the number of nodes, {sizes[1]}"})
        found.processes = Given("undetermined", None, count.word, needs)
    else:
        found.processes = Given(count.source, sizes[0] * sizes[1], count.word)
    return found


def _option(words: Sequence[Word], name: str, default: int) -> Given:
    """The value of a launcher's option, as an integer if it is one."""
    for number, word in enumerate(words):
        spelled, equals, inline = word.text.shape.partition("=")
        if spelled.lstrip("-").replace("-", "_") != name:
            continue
        value = word if equals else next(iter(words[number + 1 :]), word)
        needs = value.text.needs
        text = inline if equals else value.text.shape
        read: Any = int(text) if text.isdecimal() and len(text) < 9 else text
        source = "undetermined" if needs else "user"
        return Given(source, None if needs else read, word, needs)
    return Given("default", default)


def _finding(cause: str, level: str, text: str, where: Override) -> Finding:
    word = where.word
    return Finding(cause, level, text, word.file, word.line, where.key)
