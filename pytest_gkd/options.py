"""What the user asked for: one table of options, one frozen Settings, clear errors."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd.stage_specs import BY_NAME, LAYOUTS

LOSSES = ("topk", "full")


class SettingsError(ValueError):
    """A value of the user's that cannot be used; the text says what to do."""

    def __init__(self, text: str) -> None:
        # Not at the top: a run without stages has no use for it.
        from pytest_gkd import sanitize

        super().__init__(sanitize.text(text))


@dataclass(frozen=True)
class Option:
    """One option with its ini twin: ``--gkd-world-size`` and ``gkd_world_size``.

    ``kind`` is how the value is read: ``text``, ``count`` (a whole number above 0),
    ``number`` (zero or more), ``list`` (repeatable), ``flag``, or one of ``choices``.
    """

    name: str
    kind: str
    default: Any
    metavar: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--gkd-" + self.name.replace("_", "-")

    @property
    def ini(self) -> str:
        """The spelling in the ini file, also the attribute on ``config.option``."""
        return "gkd_" + self.name


OPTIONS: tuple[Option, ...] = (
    Option(
        "student",
        "text",
        None,
        "PATH",
        "model directory or hub id of the student (default: a tiny model made here)",
    ),
    Option(
        "teacher",
        "text",
        None,
        "PATH",
        "model directory or hub id of the teacher (default: a tiny model made here)",
    ),
    Option(
        "train_files",
        "list",
        (),
        "FILE",
        "parquet, JSON, CSV or Arrow file of prompts, directory or glob of them, or a "
        "dataset's name on the hub; repeatable, or separated by commas",
    ),
    Option(
        "prompt_column",
        "text",
        None,
        "NAME",
        "column that holds the prompt, as text or as chat messages "
        "(default: the first known one, such as prompt, messages, question, query, "
        "instruction with its input)",
    ),
    Option(
        "max_prompt_length",
        "count",
        1024,
        "TOKENS",
        "longer prompts are filtered out, as the training job does",
    ),
    Option("batch_size", "count", 4, "N", "prompts in the training step"),
    Option(
        "max_new_tokens",
        "count",
        16,
        "TOKENS",
        "length of the student's rollouts in the training step",
    ),
    Option(
        "loss",
        "choice",
        "topk",
        "KIND",
        "topk: forward KL over the teacher's top-k log-probabilities, as verl's GKD; "
        "full: generalized Jensen-Shannon divergence over the whole vocabulary, as TRL",
        choices=LOSSES,
    ),
    Option(
        "top_k", "count", 64, "K", "log-probabilities taken from the teacher per token"
    ),
    Option(
        "beta",
        "number",
        0.5,
        "B",
        "GKD's interpolation for the full loss: 0 is forward KL, 1 is reverse KL",
    ),
    Option("temperature", "number", 1.0, "T", "softmax temperature of the loss"),
    Option(
        "learning_rate",
        "number",
        None,
        "LR",
        "AdamW's, in the training step "
        "(default: 1e-5, or 1e-3 for the tiny models made here)",
    ),
    Option(
        "layout",
        "choice",
        "auto",
        "LAYOUT",
        "where trainer and engine live: colocated, split, ray, or auto",
        choices=("auto", *LAYOUTS),
    ),
    Option(
        "world_size",
        "count",
        None,
        "N",
        "ranks of the all-reduce (default: every visible GPU, or 2 without one)",
    ),
    Option(
        "min_bus_bandwidth",
        "number",
        0.0,
        "GB/S",
        "fail the nccl stage when its best bus bandwidth is below this (GB/s)",
    ),
    Option(
        "gpu_memory_utilization",
        "number",
        None,
        "FRACTION",
        "share of a GPU's memory given to the rollout engine "
        "(default: 0.85 of GPUs that it has to itself, else 0.3)",
    ),
    Option(
        "tensor_parallel_size",
        "count",
        1,
        "N",
        "GPUs that the rollout engine is spread over",
    ),
    Option(
        "trust_remote_code",
        "flag",
        False,
        "",
        "run code that comes with the model repositories",
    ),
    Option(
        "full_budget",
        "flag",
        False,
        "",
        "let a stage that is proven to be stuck use up its budget all the same",
    ),
    Option(
        "inject",
        "text",
        None,
        "FAULT",
        "break something on purpose, to see that the stages find it; gkd faults lists "
        "what can be broken",
    ),
)


# Every ini key but gkd_keyword; those that are options too have the same name there.
INI_NAMES = (
    *("gkd_stages", "gkd_timeout", "gkd_report", "gkd_stage_files", "gkd_rules"),
    *(option.ini for option in OPTIONS),
)


@dataclass(frozen=True)
class Settings:
    """Every choice a run depends on, with the reason where we made it for the user.

    ``device`` is ``cpu`` or ``cuda``; ``gpus`` counts the CUDA devices of this
    process, ``bfloat16`` says whether all of them compute in it, ``exclusive`` whether
    one takes a single process at a time. ``*_why`` say in words why ``layout``,
    ``world_size`` and ``gpus`` have the value they have. ``origins`` holds where the
    values that were given came from. Temperatures and fractions are plain numbers,
    lengths are in tokens.
    """

    student: str | None = None
    teacher: str | None = None
    train_files: tuple[str, ...] = ()
    prompt_column: str | None = None
    max_prompt_length: int = 1024
    batch_size: int = 4
    max_new_tokens: int = 16
    loss: str = "topk"
    top_k: int = 64
    beta: float = 0.5
    temperature: float = 1.0
    learning_rate: float = 1e-3
    layout: str = "colocated"
    layout_why: str = ""
    world_size: int = 2
    world_size_why: str = ""
    min_bus_bandwidth: float = 0.0
    gpu_memory_utilization: float = 0.3
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    full_budget: bool = False
    inject: str | None = None
    gpus: int = 0
    gpus_why: str = ""
    bfloat16: bool = True
    exclusive: bool = False
    cpus: int = 1
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Who gave a value, for messages: its flag, or its ini name and file."""
        return self.origins.get(name, "--gkd-" + name.replace("_", "-"))

    @property
    def device(self) -> str:
        """``cuda`` when a GPU is visible, else ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of ``to_json``."""
        values = dict(data)
        values["train_files"] = tuple(values["train_files"])
        return cls(**values)


def near(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for at most three near names, else a full stop."""
    found = difflib.get_close_matches(word, list(known), n=3)
    if not found:
        return "."
    return "; did you mean " + " or ".join(repr(name) for name in found) + "?"


def read_value(option: Option, raw: Any, origin: str) -> Any:
    """One raw value (from ``origin``, such as ``--gkd-top-k``) as its kind.

    Raises SettingsError naming the value, its origin and what was expected.
    """
    if raw is None or raw == "" or raw == []:
        return option.default
    if option.kind == "list":
        parts = raw if isinstance(raw, (list, tuple)) else [raw]
        return tuple(p.strip() for part in parts for p in part.split(",") if p.strip())
    if option.kind == "choice":
        if raw not in option.choices:
            raise SettingsError(
                f"{origin}: {raw!r} is not one of {', '.join(option.choices)}"
                f"{near(str(raw), option.choices)}"
            )
        return raw
    if option.kind == "count":
        return _number(raw, origin, int, "a whole number above 0", lambda n: n > 0)
    if option.kind == "number":
        return _number(raw, origin, float, "a number, 0 or more", lambda n: n >= 0)
    if option.kind == "flag":
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in ("1", "true", "yes", "on"):
            return True
        if str(raw).lower() in ("0", "false", "no", "off"):
            return False
        raise SettingsError(f"{origin}: {raw!r} is neither true nor false")
    return str(raw)


def _number(
    raw: Any,
    origin: str,
    kind: Callable[[Any], Any],
    expected: str,
    holds: Callable[[Any], bool],
) -> Any:
    try:
        value = kind(raw)
    except ValueError:
        raise SettingsError(f"{origin}: {raw!r} is not {expected}") from None
    if not holds(value) or value != value or value == float("inf"):
        raise SettingsError(f"{origin}: {raw!r} is not {expected}")
    return value


def read_timeouts(
    entries: Iterable[tuple[str, str]], known: Iterable[str] | None
) -> dict[str, float]:
    """``NAME=SECONDS`` entries, each with its origin, as a table of budgets.

    ``all=SECONDS`` stands under the key ``all``. A later entry wins. ``known`` is
    None while stages of the user's own are still to be found. Raises SettingsError
    for an unknown stage, and for seconds that are not a number above 0.
    """
    names = None if known is None else [*known, "all"]
    budgets: dict[str, float] = {}
    for entry, origin in entries:
        name, equals, seconds = entry.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(
                f"{origin}: {entry!r} is not NAME=SECONDS, for example nccl=90"
            )
        if names is not None and name not in names:
            raise SettingsError(
                f"{origin}: there is no stage {name!r}{near(name, names)} "
                f"Stages: {', '.join(names)}"
            )
        budgets[name] = _number(
            seconds.strip(),
            f"{origin} ({name})",
            float,
            "a number of seconds above 0",
            lambda n: n > 0,
        )
    return budgets


def read_stage_names(raw: str, origin: str) -> tuple[str, ...]:
    """``a,b`` as names, in the user's order; ``all`` is every stage found."""
    names = tuple(part.strip() for part in raw.split(",") if part.strip())
    if not names:
        raise SettingsError(
            f"{origin}: no stage named. Leave the value out for all stages, or name "
            f"some: {', '.join(BY_NAME)}"
        )
    return names


def unknown_stage(name: str, origin: str, known: Iterable[str]) -> SettingsError:
    """The error for a stage that neither we nor the user's files have."""
    names = [*BY_NAME, *sorted(set(known) - set(BY_NAME))]
    return SettingsError(
        f"{origin}: there is no stage {name!r}{near(name, names)} "
        f"Stages found: {', '.join(names)}. A stage of your own is found in the files "
        "given on the command line or in gkd_stage_files."
    )


# Processes that hold a GPU besides the engine's ranks: trainer and teacher.
BESIDE_THE_ENGINE = {"colocated": 0, "split": 1, "ray": 2}


def choose_layout(
    asked: str,
    gpus: int,
    *,
    has_ray: bool,
    exclusive: bool = False,
    tensor_parallel_size: int = 1,
) -> tuple[str, str]:
    """The layout to run and, in words, why.

    vLLM works without Ray. ``exclusive`` says that a GPU takes one process at a time.
    """
    if asked != "auto":
        return asked, "asked for"
    if gpus == 0:
        return "colocated", "no GPU is visible"
    if gpus == 1 and exclusive:
        return "colocated", "one GPU is visible, which takes one process at a time"
    if gpus == 1:
        return "split", "one GPU is visible"
    if not has_ray:
        return "split", f"{gpus} GPUs are visible and Ray is not installed"
    if exclusive and gpus < tensor_parallel_size + BESIDE_THE_ENGINE["ray"]:
        return "split", f"{gpus} GPUs are visible, each for one process at a time"
    return "ray", f"{gpus} GPUs are visible"


# vLLM's own default is 0.9 or more; the rest is for what others keep on such a GPU.
OWN_GPU_SHARE = 0.85
SHARED_GPU_SHARE = 0.3


def choose_memory(
    asked: float | None, layout: str, gpus: int, tensor_parallel_size: int
) -> float:
    """The engine's share of a GPU's memory: most of one that the trainer is not on."""
    if asked is not None:
        return asked
    alone = layout != "colocated" and gpus > tensor_parallel_size
    return OWN_GPU_SHARE if alone else SHARED_GPU_SHARE


def choose_world_size(
    asked: int | None, gpus: int, cpus: int, origin: str = "--gkd-world-size"
) -> tuple[int, str]:
    """The ranks of the all-reduce and, in words, why.

    Raises SettingsError when more ranks are asked for than the machine can hold: one
    rank per GPU where there are GPUs (NCCL refuses two ranks on one device), else 8
    per core, above which start-up alone outlasts the stage's budget.
    """
    if asked is None:
        if gpus:
            return gpus, "every visible GPU"
        return 2, "the default without a GPU"
    if gpus and asked > gpus:
        raise SettingsError(
            f"{origin}: {asked} ranks, but this machine shows {gpus} GPU(s), and NCCL "
            f"refuses two on one device. Use --gkd-world-size={gpus} or fewer, "
            "or check CUDA_VISIBLE_DEVICES."
        )
    if not gpus and asked > 8 * cpus:
        raise SettingsError(
            f"{origin}: {asked} ranks, but this machine has no GPU and {cpus} CPU "
            f"core(s), which can hold {8 * cpus} at most. "
            f"Use --gkd-world-size={8 * cpus} or fewer."
        )
    return asked, "asked for"
