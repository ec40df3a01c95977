"""OpenRLHF: its training programs below openrlhf.cli."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from pathlib import Path

from pytest_gkd.job import releases
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import accelerate
from pytest_gkd.job.frameworks.openrlhf import options as openrlhf_options
from pytest_gkd.job.frameworks.openrlhf import plan as openrlhf_plan
from pytest_gkd.job.frameworks.openrlhf import rules as openrlhf_rules
from pytest_gkd.job.frameworks.openrlhf.options import Known
from pytest_gkd.job.frameworks.reading import UNKNOWN, Reading, derived, names
from pytest_gkd.job.frameworks.recorded_options import UnsureError, parser
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given
from pytest_gkd.job.releases import Release

NAME = "openrlhf"
PROGRAM = re.compile(r"openrlhf\.cli\.train_\w+|(?:.*/)?openrlhf/cli/train_\w+\.py")
ROLLOUT = "train_ppo_ray"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def is_own(keys: AbstractSet[str]) -> bool:
    """It has no configuration files."""
    return False


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start, and what the release makes of its options."""
    table = launch.name
    whose = f"OpenRLHF {release}"
    if table not in release.schema:
        word = launch.command.words[0]
        text = f"{whose} has no program {table}"
        fault = Finding(UNKNOWN, "error", text, word.file, word.line, table)
        unknown = Given("undetermined", needs=frozenset({text}))
        return Reading([], {"student": unknown}, [fault])
    taken = parser(release, table)
    found = openrlhf_options.parsed(taken, whose, launch)
    known = Known(release, taken, launch, found.said)
    findings = [*found.findings, *known.missing(), *known.sizes()]
    if table == ROLLOUT:
        values, recipe = _values(known), openrlhf_plan.recipe(known)
        findings += openrlhf_rules.judged(known)
    else:
        started = accelerate.started(
            launch.before,
            Path(launch.command.file).parent,
            releases.beside(release, "accelerate").release,
        )
        values, recipe = _offline(known, started), openrlhf_plan.offline(known, table)
        findings += openrlhf_rules.offline(known, started.processes)
    return Reading(
        openrlhf_options.said(known, found.said),
        values,
        openrlhf_options.named(known, findings),
        recipe=recipe,
    )


def _dtype(known: Known) -> Given:
    """The dtype that the trainer computes in."""
    if known.has("param_dtype"):
        given = known.find("param_dtype")
        return derived(known.option("param_dtype"), lambda d: DTYPES.get(d, d), given)
    given = known.find("bf16")
    if not given.needs and not given.value:
        # Actor: torch_dtype="auto" (openrlhf/models/actor.py 0.8.11).
        needs = frozenset({"torch_dtype in the model's config.json"})
        return Given("undetermined", None, None, needs, "without --bf16")
    return derived("--bf16", lambda _: "bfloat16", given)


def _values(known: Known) -> dict[str, Given]:
    """All values of train_ppo_ray on one path through the script."""
    find, option = known.find, known.option
    table = names(NAME) | names(f"{NAME}-memory")
    values = {k: find(key) for k, key in table.items() if known.has(key)}
    longest = find("max_len")
    if known.has("max_new_tokens"):
        values["max_response_length"] = find("max_new_tokens")
    else:  # up to 0.8
        parts = find("prompt_max_len"), find("generate_max_len")
        values["max_prompt_length"], values["max_response_length"] = parts
        longest = derived(
            "--max_len, or else --prompt_max_len + --generate_max_len",
            lambda own, prompt, answer: own or prompt + answer,
            longest,
            *parts,
        )
    if truncation := _truncation(known):
        values["truncation"] = truncation
    # create_vllm_engines (openrlhf/trainer/ray/vllm_engine.py)
    values["max_model_len"] = longest
    values["rollout_engine"] = Given("default", "vllm", expression="the only one")
    values["dtype"] = Given("default", "bfloat16", expression="always so in vLLM")
    values["load_format"] = Given("default", "auto", expression="vLLM's own default")
    values["train_dtype"] = _dtype(known)
    values["sequence_packing"] = derived(
        f"{option('packing_samples')}, {option('ring_attn_size')} or "
        f"{option('use_dynamic_batch')}",
        lambda own, ring, dynamic: own or ring > 1 or dynamic,
        find("packing_samples"),
        find("ring_attn_size"),
        find("use_dynamic_batch"),
    )
    values["placement"] = derived(
        f"{option('colocate_all_models')} without {option('async_train')}",
        lambda shares, apart: "colocated" if shares and not apart else "split",
        find("colocate_all_models"),
        find("async_train"),
    )
    for role, name in (
        *(("actor", "trainer"), ("rollout", "rollout"), ("ref", "reference")),
        *(("critic", "critic"), ("reward", "reward")),
    ):
        values[f"{name}_gpus"] = _counted(known, role)
    values["total_gpus"] = _counted(known, "total")
    return values


def _truncation(known: Known) -> Given | None:
    """What happens to a prompt that is too long; not for agents up to 0.8."""
    if known.has("max_new_tokens"):  # openrlhf/utils/agent.py, from 0.9
        how = "its only way (with images it is an error)"
        return Given("default", "left", expression=how)
    if known.is_given("agent_func_path"):
        return None
    # experience_maker.py, tokenize_fn: truncation=True, and no truncation side is set.
    side = "the tokenizer's truncation_side, right unless its files say left"
    return Given("default", "right", expression=side)


def _counted(known: Known, role: str) -> Given:
    """How many GPUs a role has, including shared ones; 0 without that role."""
    keys = [key for key in openrlhf_rules.gpu_keys(role) if known.has(key)]
    try:
        count = openrlhf_rules.gpus(known, role)
    except UnsureError:
        needs = frozenset[str]().union(*(known.find(key).needs for key in keys))
        needs = needs or frozenset({"options that are right"})
        return Given("undetermined", None, None, needs)
    source = "user" if any(known.is_given(key) for key in keys) else "default"
    expression = " * ".join(map(known.option, keys[:2]))
    if not count:
        expression = f"none by {known.option(keys[0 if role == 'rollout' else 2])}"
    if role == "total":
        expression = "all roles, each GPU that they share once"
    return Given(source, count, None, frozenset(), expression)


def _offline(known: Known, started: accelerate.Started) -> dict[str, Given]:
    """All values of a program without a rollout."""
    table = names(f"{NAME}-offline")
    values = {k: known.find(key) for k, key in table.items() if known.has(key)}
    values["train_dtype"] = _dtype(known)
    values["nodes"] = started.machines
    values["gpus_per_node"] = started.each or started.processes
    values["trainer_gpus"] = values["total_gpus"] = started.processes
    return values
