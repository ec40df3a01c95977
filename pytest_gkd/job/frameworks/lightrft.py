"""LightRFT: its example programs, which train and roll out in the same processes.

They have OpenRLHF's options. Rules are those of its main branch at 49e62cb6; if no
other source is named, of StrategyBase.setup_distributed
(lightrft/strategy/strategy_base.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pytest_gkd.job import releases
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import accelerate, lightrft_plan, recorded_options
from pytest_gkd.job.frameworks.openrlhf import options as openrlhf_options
from pytest_gkd.job.frameworks.openrlhf.options import COMMON, ROLLOUT, Known, absent
from pytest_gkd.job.frameworks.reading import UNKNOWN, Reading, derived, names
from pytest_gkd.job.frameworks.recorded_options import CONFLICT, Rule, parser
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given
from pytest_gkd.job.releases import Release

NAME = "lightrft"
PROGRAM = re.compile(r"(?P<common>(?:.*/)?train_(?:colocate|grm_vl|srm_al|srm_vl)\.py)")
OWN = {"--micro_train_batch_size", "--engine_tp_size", "--engine_mem_util"}
ENGINES = ("vllm", "sglang")
FIRST = "gsm8k_geo3k/train_colocate.py"
RULES: tuple[Rule[Known], ...] = (
    *ROLLOUT,
    Rule(
        "engine_type",
        lambda v: v["engine_type"] not in ENGINES,
        "{--engine_type} {engine_type}: known values are vllm and sglang",
    ),
    # get_advantage_calculator (lightrft/trainer/advantage_calculator.py) has none of
    # these.
    Rule(
        "advantage_estimator",
        lambda v: v["advantage_estimator"] == "reinforce++",
        "{--advantage_estimator} reinforce++ is accepted but not implemented: the "
        "first rollout ends in a ValueError",
    ),
    # main of examples/gsm8k_geo3k/train_colocate.py
    Rule(
        "use_kl_loss advantage_estimator",
        lambda v: (
            v.launch.program.endswith(FIRST)
            and v["use_kl_loss"]
            and v["advantage_estimator"] in ("gae", "cpgd")
        ),
        "{--use_kl_loss} with {--advantage_estimator} {advantage_estimator}: the "
        "program warns of it by warnings.warn without import warnings, a NameError",
        level="warning",
    ),
)


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a program of this name is LightRFT's, judged by its options."""
    return bool(keys & OWN)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start, and what the release makes of its options."""
    place = Path(launch.program)
    table = f"{place.parent.name}/{place.name}"
    tables = list(release.schema)
    is_example = table in tables
    if not is_example:  # a copy, which may have options of its own
        alike = [name for name in tables if name.endswith(f"/{place.name}")]
        tables = alike or [
            name for name in tables if name.endswith("train_colocate.py")
        ]
    taken = parser(release, *([table] if is_example else tables))
    whose = f"LightRFT {release}"
    found = openrlhf_options.parsed(taken, whose, launch)
    known = Known(release, taken, launch, found.said)
    started = accelerate.started(
        launch.before,
        Path(launch.command.file).parent,
        releases.beside(release, "accelerate").release,
    )
    rolls_out = known.has("rollout_batch_size")
    findings = [*found.findings, *known.missing(), *known.sizes()]
    if not is_example:
        findings = [_softened(finding) for finding in findings]
    findings += recorded_options.judged(
        known, RULES if rolls_out else COMMON, (absent,)
    )
    world = started.processes
    if type(world.value) is int:
        rules = _of_world(world.value)
        findings += recorded_options.judged(
            known, [rule for rule in rules if all(map(known.has, rule.keys.split()))]
        )
    return Reading(
        openrlhf_options.said(known, found.said),
        _values(known, started, rolls_out=rolls_out),
        openrlhf_options.named(known, findings),
        recipe=lightrft_plan.recipe(known) if rolls_out else None,
    )


def _softened(finding: Finding) -> Finding:
    is_unknown = finding.cause == UNKNOWN and finding.key.startswith("--")
    return finding._replace(level="warning") if is_unknown else finding


def _of_world(world: int) -> Iterator[Rule[Known]]:
    """What must divide the number of processes, and what it must divide."""
    yield Rule(
        "train_batch_size micro_train_batch_size",
        lambda v: v["train_batch_size"] % (v["micro_train_batch_size"] * world),
        "{--train_batch_size} {train_batch_size} is not a multiple of "
        f"{{--micro_train_batch_size}} {{micro_train_batch_size}} * {world} processes",
    )
    yield Rule(
        "sp_size",
        lambda v: world % v["sp_size"],
        f"{{--sp_size}} {{sp_size}} does not divide {world} processes",
    )
    # create_sub_group (lightrft/strategy/utils/distributed_util.py)
    yield Rule(
        "engine_tp_size",
        lambda v: world % v["engine_tp_size"],
        f"{{--engine_tp_size}} {{engine_tp_size}} does not divide {world} processes",
    )
    # train of train_colocate.py: each process loads rollout_batch_size // world, and
    # DataLoader refuses 0.
    yield Rule(
        "rollout_batch_size",
        lambda v: v["rollout_batch_size"] < world,
        f"{{--rollout_batch_size}} {{rollout_batch_size}} has no prompt for each of "
        f"{world} processes",
    )
    yield Rule(
        "rollout_batch_size",
        lambda v: v["rollout_batch_size"] > world and v["rollout_batch_size"] % world,
        f"{{--rollout_batch_size}} {{rollout_batch_size}} is not a multiple of {world} "
        "processes: the rest is not rolled out",
        level="warning",
    )
    # FSDPV2Strategy (lightrft/strategy/fsdp/fsdpv2.py)
    yield Rule(
        "initial_model_shard_size fsdp",
        lambda v: (
            v["fsdp"]
            and v["initial_model_shard_size"]
            and v["init_kl_coef"]
            and world % v["initial_model_shard_size"]
        ),
        f"{{--initial_model_shard_size}} {{initial_model_shard_size}} does not divide "
        f"{world} processes",
        CONFLICT,
    )


def _values(
    known: Known, started: accelerate.Started, *, rolls_out: bool
) -> dict[str, Given]:
    """All values of the job on one path through the script."""
    find = known.find
    table = names(NAME) | names(f"{NAME}-memory")
    values = {k: find(key) for k, key in table.items() if known.has(key)}
    if known.has("train_data"):
        values["train_files"] = find("train_data")
    fsdp = find("fsdp") if known.has("fsdp") else Given("default", False)
    values["trainer_strategy"] = derived(
        "--fsdp", lambda on: "fsdp" if on else "deepspeed", fsdp
    )
    values["zero_stage"] = derived(
        "--zero_stage, without --fsdp",
        lambda on, stage: None if on else stage,
        fsdp,
        find("zero_stage"),
    )
    values["nodes"] = started.machines
    values["gpus_per_node"] = started.each or started.processes
    values["trainer_gpus"] = values["total_gpus"] = started.processes
    if rolls_out:
        # get_vllm_engine_for_rollout, get_sglang_engine_for_rollout
        values["dtype"] = derived(
            "--bf16", lambda on: "bfloat16" if on else "float16", find("bf16")
        )
        values["max_model_len"] = derived(
            "--prompt_max_len + --generate_max_len for vLLM, the model's for SGLang",
            _longest,
            find("engine_type"),
            find("prompt_max_len"),
            find("generate_max_len"),
        )
        values["placement"] = Given("default", "colocated", expression="always")
        # lightrft/trainer/fast_exp_maker.py: truncation=True, and no truncation side is
        # set.
        side = "the tokenizer's truncation_side, right unless its files say left"
        values["truncation"] = Given("default", "right", expression=side)
        values["rollout_gpus"] = started.processes
    return values


def _longest(engine: Any, prompt: int, answer: int) -> int | None:
    return prompt + answer if engine == "vllm" else None
