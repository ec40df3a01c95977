"""The user's options: one table of them, one frozen Settings, clear errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gkd import time_spans
from pytest_gkd.near_names import near_names
from pytest_gkd.stage_specs import BY_NAME, LAYOUTS

LOSSES = ("topk", "full")
LANGUAGES = ("en", "zh")
FEW, AUTO = "few", "auto"


class SettingsError(ValueError):
    """An unusable value from the user; the text says what to do."""

    def __init__(self, text: str) -> None:
        # Not at the top: a run without stages does not need it.
        from pytest_gkd import sanitize

        super().__init__(sanitize.text(text))


@dataclass(frozen=True)
class Option:
    """An option with its ini counterpart: ``--gkd-world-size``, ``gkd_world_size``.

    ``kind`` is how the value is parsed: ``text``, ``count`` (a whole number above 0),
    ``number`` (zero or more), ``list`` (repeatable), ``flag``, or one of ``choices``.
    ``bare`` is the value of the flag alone, empty if a value must follow.
    """

    name: str
    kind: str
    default: Any
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    bare: str = ""

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--gkd-" + self.name.replace("_", "-")

    @property
    def ini(self) -> str:
        """The spelling in the ini file and the attribute of ``config.option``."""
        return "gkd_" + self.name

    def told(self, tr: Callable[[str], str] = str) -> str:
        """What it is, its choices and its default; ``tr`` translates."""
        choices = f" [{', '.join(self.choices)}]" if self.choices else ""
        default = tr(" (default: {value})").format(value=self.default)
        return tr(self.help) + choices + (default if self.default else "")


_KINDS = {"int": "count", "float": "number", "bool": "flag", "tuple[str, ...]": "list"}
_SAME = object()


def _option(
    metavar: str,
    text: str,
    default: Any = None,
    *,
    unset: Any = _SAME,
    choices: tuple[str, ...] = (),
    bare: str = "",
) -> Any:
    """A setting that is also an option, with its ``default``.

    ``unset`` is the option's own default if the run resolves it to an actual value.
    """
    own = default if unset is _SAME else unset
    told = {"default": own, "metavar": metavar, "help": text, "choices": choices}
    told["bare"] = bare
    return field(default=default, metadata=told)


@dataclass(frozen=True)
class Settings:
    """Every choice a run depends on, with the reason if we made it for the user.

    Fields with a help text are options. ``device`` is ``cpu`` or ``cuda``; ``gpus``
    counts the CUDA devices of this process, ``bfloat16`` says whether all of them
    support it, ``exclusive`` whether any accepts only one process at a time.
    ``*_why`` say in words why ``layout``, ``shrink``, ``world_size`` and ``gpus`` have
    their values. ``origins`` says where values given by the user came from.
    ``launch_dir`` is where ``launch`` is run, absolute.
    ``job`` is what ``gkd check --format=json`` says about the job's own configuration.
    Temperatures and fractions are plain numbers, lengths are in tokens.
    """

    student: str | None = _option(
        "PATH",
        "model directory or hub id of the student (default: a tiny model made here)",
    )
    teacher: str | None = _option(
        "PATH",
        "model directory or hub id of the teacher (default: a tiny model made here)",
    )
    shrink: str | None = _option(
        "LAYERS",
        "run on copies of student and teacher with their first LAYERS layers; few "
        "(also without a value): enough for one of each kind; auto: few if the full "
        "models do not fit this machine",
        bare=FEW,
    )
    shrink_weights: str = _option(
        "KIND",
        "weights of the copies: real (those of the layers kept) or random",
        "real",
        choices=("real", "random"),
    )
    train_files: tuple[str, ...] = _option(
        "FILE",
        "parquet, JSON, CSV or Arrow file of prompts, directory or glob of them, or a "
        "dataset's name on the hub; repeatable, or separated by commas",
        (),
    )
    prompt_column: str | None = _option(
        "NAME",
        "column that holds the prompt, as text or as chat messages "
        "(default: the first known one, such as prompt, messages, question, query, "
        "instruction with its input)",
    )
    max_prompt_length: int = _option(
        "TOKENS", "longer prompts are filtered out, as the training job does", 1024
    )
    batch_size: int = _option("N", "prompts in the training step", 4)
    max_new_tokens: int = _option(
        "TOKENS", "length of the student's rollouts in the training step", 16
    )
    loss: str = _option(
        "KIND",
        "topk: forward KL over the teacher's top-k log-probabilities, as verl's GKD; "
        "full: generalized Jensen-Shannon divergence over the whole vocabulary, as TRL",
        "topk",
        choices=LOSSES,
    )
    top_k: int = _option("K", "log-probabilities taken from the teacher per token", 64)
    beta: float = _option(
        "B",
        "GKD's interpolation for the full loss: 0 is forward KL, 1 is reverse KL",
        0.5,
    )
    temperature: float = _option("T", "softmax temperature of the loss", 1.0)
    learning_rate: float = _option(
        "LR",
        "AdamW's, in the training step "
        "(default: 1e-5, or 1e-3 for the tiny models made here)",
        1e-3,
        unset=None,
    )
    layout: str = _option(
        "LAYOUT",
        "where trainer and engine live: colocated, split, ray, or auto",
        "colocated",
        unset="auto",
        choices=("auto", *LAYOUTS),
    )
    world_size: int = _option(
        "N",
        "ranks of the all-reduce (default: every visible GPU, or 2 without one)",
        2,
        unset=None,
    )
    min_bus_bandwidth: float = _option(
        "GB/S",
        "fail the nccl stage when its best bus bandwidth is below this (GB/s)",
        0.0,
    )
    gpu_memory_utilization: float = _option(
        "FRACTION",
        "share of a GPU's memory given to the rollout engine "
        "(default: 0.85 of GPUs that it has to itself, else 0.3)",
        0.3,
        unset=None,
    )
    tensor_parallel_size: int = _option(
        "N", "GPUs that the rollout engine is spread over", 1
    )
    trust_remote_code: bool = _option(
        "", "run code that comes with the model repositories", default=False
    )
    launch: str | None = _option(
        "COMMAND",
        "the job's own command, a line for the shell, as the last stage: it runs under "
        "gkd watch until its first training step is done; give its smallest form "
        "(gkd debug-config prints one)",
    )
    full_budget: bool = _option(
        "",
        "let a stage use its whole budget even when it is proven to be stuck",
        default=False,
    )
    inject: str | None = _option(
        "FAULT",
        "break something on purpose, to see that the stages find it; gkd faults lists "
        "what can be broken",
    )
    launch_dir: str = ""
    layout_why: str = ""
    shrink_why: str = ""
    world_size_why: str = ""
    gpus: int = 0
    gpus_why: str = ""
    bfloat16: bool = True
    exclusive: bool = False
    cpus: int = 1
    origins: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, Any] | None = None

    def origin(self, name: str) -> str:
        """Where a value came from, for messages: its flag, or its ini name and file."""
        return self.origins.get(name, "--gkd-" + name.replace("_", "-"))

    @property
    def device(self) -> str:
        """``cuda`` if a GPU is visible, else ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]


def _table() -> Iterable[Option]:
    for one in dataclasses.fields(Settings):
        if one.metadata:
            kind = "choice" if one.metadata["choices"] else _KINDS.get(str(one.type))
            yield Option(one.name, kind or "text", **one.metadata)


OPTIONS: tuple[Option, ...] = tuple(_table())

# Which stages run, and how; not settings of the stages. STAGE_FILES and RULES have no
# flag.
STAGES = Option(
    "stages",
    "text",
    None,
    "NAMES",
    "run the stages, all of them or those named: --gkd-stages=nccl,vllm",
    bare="all",
)
TIMEOUT = Option(
    "timeout",
    "list",
    None,
    "NAME=TIME",
    "a stage's budget, such as 90 (seconds), 20m or 1h; repeatable; all=TIME for every "
    "stage",
)
REPORT = Option(
    "report",
    "text",
    None,
    "DIR",
    "directory of report.json, stacks and output (default: .gkd/last)",
)
STAGE_FILES = Option(
    "stage_files",
    "list",
    None,
    "FILE",
    "files with stages of your own that --gkd-stages also runs",
)
CONFIG = Option(
    "config",
    "list",
    None,
    "FILE",
    "the job's launch script, configuration file or command: settings are taken from "
    "it, and the stage config checks it; repeatable, for its arguments KEY=VALUE",
)
FRAMEWORK = Option(
    "framework",
    "text",
    "",
    "NAME==RELEASE",
    "the job's framework and the release to check against (default: as gkd check)",
)
SET = Option("set", "list", None, "NAME=VALUE", "a variable set for the job's script")
RULES = Option("rules", "list", None, "FILE", "files with rules (causes) of your own")
LANG = Option(
    "lang",
    "choice",
    None,
    "LANG",
    "language of what is shown: en, or zh for Chinese (default: the locale's)",
    choices=LANGUAGES,
)
WITH_FLAG = (STAGES, TIMEOUT, REPORT, LANG, CONFIG, FRAMEWORK, SET, *OPTIONS)
# Every ini key except gkd_keyword.
WITH_INI = (*WITH_FLAG, STAGE_FILES, RULES)


def named(name: str) -> Option:
    """The option of that name."""
    return next(option for option in WITH_INI if option.name == name)


def near(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with up to three similar names, else a full stop."""
    match [repr(name) for name in near_names(word, known)]:
        case [one]:
            return f"; did you mean {one}?"
        case [one, two]:
            return f"; did you mean {one} or {two}?"
        case [one, two, three]:
            return f"; did you mean {one} or {two} or {three}?"
    return "."


TRUTH = {"1": True, "true": True, "yes": True, "on": True}
TRUTH |= {"0": False, "false": False, "no": False, "off": False}


def read_value(option: Option, raw: Any, origin: str) -> Any:
    """Parse one raw value (from ``origin``, such as ``--gkd-top-k``) by its kind.

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
        if str(raw).lower() not in TRUTH:
            raise SettingsError(f"{origin}: {raw!r} is neither true nor false")
        return TRUTH[str(raw).lower()]
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
        value = math.nan  # fails every condition
    if not holds(value) or value == math.inf:
        raise SettingsError(f"{origin}: {raw!r} is not {expected}")
    return value


def check_layers(raw: str, origin: str) -> None:
    """Raise SettingsError unless ``raw`` is a number of layers, few or auto."""
    if raw not in (FEW, AUTO):
        expected = f"a number of layers, {FEW} or {AUTO} (without a value it means "
        expected += f"{FEW}; write --gkd-shrink={FEW} if another argument follows)"
        _number(raw, origin, int, expected, lambda n: n > 0)


@dataclass(frozen=True)
class Budget:
    """The seconds given to a stage, or to ``all``, and where that was said."""

    stage: str
    seconds: float
    origin: str


def read_budgets(entries: Iterable[tuple[str, str]]) -> tuple[Budget, ...]:
    """Parse ``NAME=TIME`` entries, each with its origin; highest precedence first.

    A later entry wins, and one for a stage wins over one for ``all``. Raises
    SettingsError for what is no time above 0.
    """
    budgets: list[Budget] = []
    for entry, origin in entries:
        name, equals, seconds = (part.strip() for part in entry.partition("="))
        if not equals:
            raise SettingsError(
                f"{origin}: {entry!r} is not NAME=TIME, for example nccl=90"
            )
        value = time_spans.seconds(seconds)
        if value is None:
            raise SettingsError(
                f"{origin} ({name}): {seconds!r} is not a time above 0, such as 90 "
                "(seconds), 90s, 20m or 1h"
            )
        budgets.insert(0, Budget(name, value, origin))
    return tuple(sorted(budgets, key=lambda one: one.stage == "all"))


def read_stage_names(raw: str, origin: str) -> tuple[str, ...]:
    """Split ``a,b`` into names, in the user's order; ``all`` is every stage found."""
    names = tuple(part.strip() for part in raw.split(",") if part.strip())
    if not names:
        raise SettingsError(
            f"{origin}: no stage named. Leave the value out for all stages, or name "
            f"some: {', '.join(BY_NAME)}"
        )
    return names


def check_names(
    asked: Iterable[tuple[str, str]], known: Iterable[str] = BY_NAME
) -> None:
    """Raise SettingsError for a stage that neither we nor the user's files define.

    ``asked`` are names of stages, each with its origin.
    """
    found = [*BY_NAME, *sorted(set(known) - set(BY_NAME))]
    names = [*found, "all"]
    for name, origin in asked:
        if name not in names:
            raise SettingsError(
                f"{origin}: there is no stage {name!r}{near(name, names)} Stages "
                f"found: {', '.join(found)}; all means every stage. A stage of your "
                "own is found in the files given on the command line or in "
                "gkd_stage_files."
            )


# Processes that use a GPU besides the engine's ranks: trainer and teacher.
BESIDE_THE_ENGINE = {"colocated": 0, "split": 1, "ray": 2}


def choose_layout(
    asked: str,
    gpus: int,
    *,
    has_ray: bool,
    origin: str = "--gkd-layout",
    exclusive: bool = False,
    tensor_parallel_size: int = 1,
) -> tuple[str, str]:
    """The layout to run and the reason in words, or its ``origin``.

    vLLM works without Ray. ``exclusive``: a GPU accepts only one process at a time.
    """
    if asked != "auto":
        return asked, origin
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


# vLLM's own default is 0.9 or more; the rest is for what others hold on such a GPU.
OWN_GPU_SHARE = 0.85
SHARED_GPU_SHARE = 0.3


def choose_memory(
    asked: float | None, layout: str, gpus: int, tensor_parallel_size: int
) -> float:
    """The engine's share of a GPU's memory: most of it if the trainer is elsewhere."""
    if asked is not None:
        return asked
    alone = layout != "colocated" and gpus > tensor_parallel_size
    return OWN_GPU_SHARE if alone else SHARED_GPU_SHARE


def choose_world_size(
    asked: int | None, gpus: int, cpus: int, origin: str = "--gkd-world-size"
) -> tuple[int, str]:
    """The number of all-reduce ranks and the reason in words, or its ``origin``.

    Raises SettingsError if more ranks are requested than the machine can run: one per
    GPU if there are GPUs (NCCL refuses two ranks on one device), else 8 per core, above
    which startup alone exceeds the stage's budget.
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
            f"core(s), which can run {8 * cpus} at most. Use "
            f"--gkd-world-size={8 * cpus} or fewer."
        )
    return asked, origin
