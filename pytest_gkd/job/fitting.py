"""Whether a job's roles fit its GPUs, and the smallest change with which they do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pytest_gkd.columns import padded
from pytest_gkd.job import memory, model_files, models, served_memory
from pytest_gkd.job.engine_memory import GIB, Engine
from pytest_gkd.job.findings import CheckError, Finding, note
from pytest_gkd.job.memory import Job, Row
from pytest_gkd.job.models import Model
from pytest_gkd.job.served_memory import Served
from pytest_gkd.language import tr, tr_filled

MACHINE = "--machine"
SHARES = ("gpu_memory_utilization", "teacher_gpu_memory_utilization")
AMOUNTS = (
    "context_parallel_size",
    "samples_per_prompt",
    "train_batch_size",
    "ppo_mini_batch_size",
    "max_tokens_per_gpu",
    "micro_batch_size",
    "loss_topk",
    "lora_rank",
    "tensor_parallel_size",
    "rollout_gpus",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "teacher_gpus",
    "teacher_tensor_parallel_size",
    "teacher_max_model_len",
    "teacher_max_num_batched_tokens",
    "sync_bucket_megabytes",
    "max_length",
    "max_prompt_length",
    "max_response_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "loss_beta",
    "loss_lambda",
)
MOST_OF_ANYTHING = 1e12
UNITS = {"B": 1, "MIB": 1 << 20, "GIB": GIB, "MB": 10**6, "GB": 10**9}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.IGNORECASE)
# A job too large by more than this fraction is judged wrong; below, the plan may be.
CERTAIN = 0.1
SHARE_STEP = 0.05
MOST_CHANGES = 3
# Consequences of a change that have no key of their own.
COUNTED = {"trainer_gpus", "rollout_gpus"}
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """What the job is to run on; ``memory`` is that of each GPU in bytes."""

    nodes: int | None = None
    gpus: int | None = None
    memory: int | None = None

    @property
    def all_gpus(self) -> int:
        """The GPUs of all nodes; 0 if that is not known."""
        return (self.nodes or 1) * (self.gpus or 0)


ANY = Machine()


def machine(text: str) -> Machine:
    """``nodes=2,gpus=8,memory=79.1GiB``, each of them once or not at all.

    Raises CheckError for anything else.
    """
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        amount = _amount(name, value)
        if name in found or not amount:
            raise CheckError(
                f"{MACHINE}={text}: {part} is not understood; expected for example "
                "nodes=2,gpus=8,memory=79.1GiB, with the memory of one GPU"
            )
        found[name] = amount
    return Machine(**found)


def _amount(name: str, value: str) -> int:
    """A count or an amount of bytes; 0 for anything else."""
    if name in ("nodes", "gpus"):
        return int(value) if value.isdecimal() else 0
    size = SIZE.fullmatch(value) if name == "memory" else None
    return int(float(size[1]) * UNITS.get(size[2].upper(), 0)) if size else 0


# -- jobs --------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How a framework's jobs are turned into the input of the plan.

    ``job`` makes that input from the values, the student, a teacher that the trainer or
    an engine holds, and a GPU's memory; it raises CheckError if something cannot be
    determined. ``keys`` are the framework's names of values that may be changed,
    several if all of them must be, with the framework's value if it differs ("KEY=cpu",
    "KEY=zero{}" with the value in it). ``facts`` are added to the values: what else the
    job says, such as ``teacher_inside``, whether the trainer's processes hold the
    teacher. ``roles`` are the paths of further models by their roles; ``job`` finds
    them in the values as ``models``. ``servers`` are those that the job's script
    starts.
    """

    job: Callable[[Values, Model, Model | None, int | None], Job]
    keys: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, Any] = {}
    roles: Mapping[str, Any] = {}
    servers: tuple[Served, ...] = ()


def checked(values: Values) -> Values:
    """The same. Raises CheckError for invalid amounts and shares."""
    for name in AMOUNTS:
        value = values.get(name)
        if value is not None and not (
            isinstance(value, int | float) and 0 <= value < MOST_OF_ANYTHING
        ):
            raise CheckError(f"{name} is {str(value)[:60]}")
    for name in SHARES:
        value = values.get(name)
        if value is not None and not (
            isinstance(value, float | int) and 0 < value <= 1
        ):
            raise CheckError(f"{name} is {str(value)[:60]}, and no share of a GPU")
    return values


def number(values: Values, *names: str) -> list[int]:
    found = [values.get(name) for name in names]
    for name, value in zip(names, found, strict=True):
        if type(value) is not int or value < 1:
            raise CheckError(f"{name} is {'not certain' if value is None else value}")
    return [value for value in found if value is not None]


def sampling_engine(
    values: Values,
    student: Model,
    length: int,
    *,
    share: float,
    sequences: int,
    **own: Any,
) -> Engine:
    """A rollout's engine, for rows of ``length``: the engines divide a batch's samples
    among them, up to ``sequences`` at once; ``share`` is the framework's default.
    """
    gpus, batch, samples = number(
        values, "rollout_gpus", "train_batch_size", "samples_per_prompt"
    )
    tensor = values.get("tensor_parallel_size") or 1
    pipeline = values.get("pipeline_parallel_size") or 1
    at_once = math.ceil(batch * samples * tensor * pipeline / gpus)
    return Engine(
        student,
        gpus=gpus,
        tensor=tensor,
        pipeline=pipeline,
        share=values.get("gpu_memory_utilization") or share,
        length=values.get("max_model_len") or length,
        sequences=min(sequences, at_once),
        **own,
    )


# -- changes -----------------------------------------------------------------------


def candidates(values: Values) -> Iterator[dict[str, Any]]:
    """Changes that lower some phase, from the cheapest to more GPUs."""
    stage = values.get("zero_stage")
    stage = values.get("default_stage") if stage is None else stage
    if type(stage) is int:
        yield from ({"zero_stage": more} for more in range(stage + 1, 4))
    for name, wanted in (
        ("recompute", True),
        ("free_cache_engine", True),
        ("trainer_sleeps", True),
        ("offload_param", True),
        ("offload_optimizer", True),
    ):
        if values.get(name) in (None, not wanted):
            yield {name: wanted}
    for name in ("gpu_memory_utilization", "teacher_gpu_memory_utilization"):
        own = values.get(name)
        if isinstance(own, float):
            steps = [round(SHARE_STEP * step, 2) for step in range(2, 20)]
            for share in sorted(steps, key=lambda step: abs(step - own)):
                yield {name: share}
    floor = sum(
        values.get(n) or 0 for n in ("max_prompt_length", "max_response_length")
    )
    for name, least in (
        ("teacher_max_num_batched_tokens", 512),
        ("max_num_batched_tokens", 512),
        ("max_tokens_per_gpu", floor),
        ("micro_batch_size", 1),
    ):
        yield from ({name: size} for size in _halves(values.get(name), least))
    if values.get("trainer_strategy") == "fsdp2" and not values.get("offload_policy"):
        yield {"offload_policy": True}
    yield from _smaller_rows(values)
    for name, most in (
        ("context_parallel_size", "trainer_gpus"),
        ("train_tensor_parallel_size", "trainer_gpus"),
        ("teacher_tensor_parallel_size", "teacher_gpus"),
        ("tensor_parallel_size", "rollout_gpus"),
    ):
        size, limit = values.get(name), min(values.get(most) or 0, 8)
        while isinstance(size, int) and 2 * size <= limit:
            size *= 2
            yield {name: size}
    for factor in (2, 4, 8):
        nodes = (values.get("nodes") or 1) * factor
        gpus = (values.get("trainer_gpus") or 1) * factor
        yield {"nodes": nodes, "trainer_gpus": gpus, "rollout_gpus": gpus}


def _smaller_rows(values: Values) -> Iterator[dict[str, Any]]:
    """Fewer rows at once in proportionally more steps; the batch size stays."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows, steps = (values.get(name) for name in names)
    for size in _halves(rows, 1):
        if type(rows) is int and type(steps) is int and rows % size == 0:
            yield dict(zip(names, (size, steps * rows // size), strict=True))


def _halves(size: Any, least: int) -> Iterator[int]:
    while isinstance(size, int) and size // 2 >= max(least, 1):
        size //= 2
        yield size


def excess(rows: list[Row]) -> int:
    """Bytes over the limit, summed over all rows."""
    over = (row.total - row.available for row in rows if row.available is not None)
    return sum(max(one, 0) for one in over)


def mended(
    recipe: Recipe, values: Values, student: Model, teacher: Model | None, on: Machine
) -> dict[str, Any]:
    """The first change with which everything fits, each tried by the same plan; else
    several, chosen greedily. Empty if none helps.
    """
    changed: dict[str, Any] = {}
    room = on.memory
    left = excess(_planned(recipe, values, student, teacher, room))
    for _ in range(MOST_CHANGES):
        now = {**values, **changed}
        best, least = {}, left
        for change in candidates(now):
            if not change.keys() - COUNTED <= recipe.keys.keys():
                continue
            more = change.get("trainer_gpus", 0) - (now.get("trainer_gpus") or 0)
            wanted = (now.get("total_gpus") or 0) + more
            if "nodes" in change and on.all_gpus and wanted > on.all_gpus:
                continue
            try:
                rows = _planned(recipe, {**now, **change}, student, teacher, room)
            except CheckError:
                continue
            over = excess(rows)
            if not over:
                return changed | change
            if over < least:
                best, least = change, over
        if not best:
            return {}
        changed, left = changed | best, least
    return {}


# -- the report --------------------------------------------------------------------


def judge(
    values: Values,
    recipes: Sequence[Recipe | None],
    on: Machine,
    file: str,
    line: int,
    unplanned: str,
) -> tuple[list[Row], str, list[Finding]]:
    """The plan of a job, why there is none, and what is wrong with it.

    ``recipes`` are those of all paths through the script; the findings point to
    ``line`` in ``file``. ``unplanned`` is why there is no recipe.
    """
    told = list(_too_many(values, on, file, line))
    room, recipe = on.memory, recipes[0]
    if recipe is None:
        return [], unplanned, told
    if any(other != recipe for other in recipes):
        text = "what it depends on is not the same on all paths through the script"
        return [], text, told
    values = {**values, **recipe.facts}
    served = [_served(of, room, file, line) for of in recipe.servers]
    own = [row for found, _ in served for row in found]
    told += [finding for _, found in served for finding in found]
    if values.get("doubt"):
        return own, values["doubt"], told
    try:
        student = _model(values, "student")
        has_teacher = values.get("teacher_gpus") or values.get("teacher_inside")
        teacher = _model(values, "teacher") if has_teacher else None
        models = {role: _read(role, path) for role, path in recipe.roles.items()}
        values["models"] = models
        rows = _planned(recipe, values, student, teacher, room)
    except CheckError as error:
        return own, str(error), told
    every = [model for model in (student, teacher, *models.values()) if model]
    for doubtful, text in (
        (
            any(model.is_rough for model in every),
            "the activations of this kind of attention are counted roughly",
        ),
        (
            any(model.is_multimodal for model in every),
            "the activations of a vision or audio tower are not counted: the plan is "
            "that of text alone",
        ),
    ):
        if doubtful:
            told.append(note(f"memory plan: {text}", file, line))
    bad = [row for row in rows if row.verdict == "does-not-fit"]
    if bad and room is not None:
        change = mended(recipe, values, student, teacher, on)
        told += [
            _finding(row, _advice(change, values, recipe), file, line) for row in bad
        ]
    return [*rows, *own], "", told


def _served(
    of: Served, room: int | None, file: str, line: int
) -> tuple[list[Row], list[Finding]]:
    """The rows of a server, and what is wrong with it, or why there are none."""
    try:
        engine = served_memory.engine(of, _read(of.role, of.model))
    except CheckError as error:
        return [], [note(f"memory plan: the {of.role} has none: {error}", file, line)]
    found = served_memory.rows(of, engine, room)
    bad = [row for row in found if row.verdict == "does-not-fit"]
    advice = "No change of its sizes that was tried makes it fit"
    if bad and room is not None:
        change = served_memory.mended(of, engine, room)
        advice = f"With {change} it fits" if change else advice
    return found, [_finding(row, advice, file, line) for row in bad]


def _planned(
    recipe: Recipe,
    values: Values,
    student: Model,
    teacher: Model | None,
    room: int | None,
) -> list[Row]:
    return memory.plan(recipe.job(checked(values), student, teacher, room))


def _too_many(values: Values, on: Machine, file: str, line: int) -> Iterator[Finding]:
    wanted, there = values.get("total_gpus"), on.all_gpus
    if on.nodes is None and values.get("nodes") not in (None, 1):
        return  # gpus=8 alone may mean the GPUs of each of several nodes
    if isinstance(wanted, int) and there and wanted > there:
        text = f"the job needs {wanted} GPUs, and {MACHINE} has {there}"
        yield Finding("ray.no-resources", "error", text, file, line, "")


def _model(values: Values, role: str) -> Model:
    return _read(role, values.get(role))


def _read(role: str, named: Any) -> Model:
    paths = named if isinstance(named, list) else [named]
    found = []
    for path in paths:
        place = model_files.directory(path)
        if place is None:
            said = path if isinstance(path, str) else "not certain"
            where = "has no config.json here or in the hub's cache"
            raise CheckError(f"the {role} is {said}, which {where}")
        found.append(models.read(place))
    return max(found, key=lambda model: model.elements)


def _finding(row: Row, advice: str, file: str, line: int) -> Finding:
    available = row.available or 0
    largest = sorted(row.bytes.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in largest)
    over = row.total - available
    is_start = row.phase == "engine start"
    where = "its share of the GPU" if is_start else "each of its GPUs"
    text = (
        f"{row.role} does not fit in {row.phase}: {_gib(row.total)} of the "
        f"{_gib(available)} of {where}, {_gib(over)} too much; "
        f"largest: {parts}. {advice}"
    )
    level = "error" if over > CERTAIN * available else "warning"
    cause = "vllm.kv-cache" if is_start else "cuda.oom"
    return Finding(cause, level, text, file, line, "")


def _advice(change: Mapping[str, Any], values: Values, recipe: Recipe) -> str:
    if not change:
        return "No change of its sizes that was tried makes it fit"
    told = [
        f"{_setting(key, value)} (now {values.get(name)})"
        for name, value in change.items()
        for key in recipe.keys.get(name, ())
    ]
    return f"With {' and '.join(told)} all fits"


def _setting(key: str, value: Any) -> str:
    """A change as the framework spells it; a command-line flag has no value."""
    if value is True and key.startswith("--"):
        return key
    return key.format(value) if "=" in key else f"{key}={value}"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def to_json(rows: list[Row]) -> list[dict[str, Any]]:
    """As in ``gkd check --format=json``."""
    return [asdict(row) for row in rows]


def lines(rows: list[Row], reason: str) -> list[str]:
    """The fullest phase of each role, and every one that does not fit; or why there is
    no plan.
    """
    if not rows:
        return [tr_filled(f"no memory plan: {reason}")]
    unplanned = [f"no memory plan but of servers: {reason}"] if reason else []
    worst = {
        row.role: row
        for row in sorted(rows, key=lambda row: row.total)
        if row.phase != "engine start"
    }
    shown = [r for r in rows if r in worst.values() or r.verdict == "does-not-fit"]
    told = ["memory of a GPU, planned:"]
    if rows[0].available is None:
        told = [f"memory of a GPU, planned (is it enough? {MACHINE}=memory=80GiB):"]
    told = [tr_filled(line) for line in unplanned + told]
    for row in shown:
        of = ""
        if row.available and row.verdict:
            of = tr(" of {room}: {verdict}")
            of = of.format(room=_gib(row.available), verdict=tr(row.verdict))
        role, phase = padded(tr_filled(row.role), 15), padded(tr_filled(row.phase), 20)
        told.append(f"  {role}  {phase}  {_gib(row.total)}{of}")
        parts = sorted(row.bytes.items(), key=lambda part: -part[1])
        listed = (f"{tr_filled(name)} {_gib(size)}" for name, size in parts[:4])
        told.append(f"  {'':15}    {tr(', ').join(listed)}")
    return told
