"""What ROLL's pipelines refuse, each with the source that it is from.

Read at 8eb27cc2 (0.3.0 and the main branch of August 2026); paths are below roll/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pytest_gkd.job.frameworks.roll.job import Look
from pytest_gkd.job.looking import Fault
from pytest_gkd.options import near

TRANSFERS = ("ipc+nccl", "nccl-only", "ray")
VL = "_vl_"
ROLLOUT_ONLY = "start_rlvr_rollout_pipeline"


# -- distillation ------------------------------------------------------------------


def _opd(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, PPOConfig._handle_opd_mapping."""
    if not look.is_ppo:
        return
    mixed, given = look.is_on("use_opd"), look.said
    if look.is_pure and mixed:
        yield "use_opd", "use_opd=true is not for pure on-policy distillation"
    if (look.is_pure or mixed) and not given.is_section("teacher"):
        yield "teacher", "on-policy distillation needs the section teacher"
    for name in ("student_train", "student_infer") if look.is_pure else ():
        if not given.is_section(name):
            line = f"pure on-policy distillation needs the section {name}"
            yield name, f"{line}; actor_* and reference are not read"
    keys = ("device_mapping", "model_args.model_name_or_path")
    is_there = any(look(f"reference.{key}") is not None for key in keys)
    if mixed and not look.is_pure and is_there:
        yield "reference", "use_opd=true takes the teacher, and refuses a reference"


def _distill(look: Look) -> Iterator[Fault]:
    """pipeline/distill/distill_pipeline.py, logits_transfer_group.py."""
    if look.root != "DistillConfig":
        return
    key = "logits_transfer_backend"
    if look(key) not in TRANSFERS:
        known = f"known are {', '.join(TRANSFERS)}{near(str(look(key)), TRANSFERS)}"
        yield key, f"{key}={look(key)}: {known}"
    key = "student.data_args.file_name"
    files = look(key)
    if not files:
        yield key, f"{key} has to be given"
    elif look.program == "start_distill_pipeline" and isinstance(files, str):
        yield key, f"{key} = {files[:80]} has to be a list of files"
    key = "student.training_args.num_train_epochs"
    if look.program == "start_distill_pipeline" and type(look(key)) is not int:
        yield key, f"{key} = {look(key)} has to be a whole number"


# -- data and environments ---------------------------------------------------------


def _generating(look: Look) -> Iterator[Fault]:
    """pipeline/rlvr/rlvr_config.py and agentic_config.py, __post_init__."""
    if not look.is_ppo:
        return
    owners = [look.rollout]
    if look.root == "AgenticConfig":
        owners.append("train_env_manager")
    keys = [f"{owner}.generating_args" for owner in owners]
    if not any(look.config.has(key) and look(key) is not None for key in keys):
        yield keys[0], f"{' or '.join(keys)} has to be given"
    key = "validation.generating_args"
    is_given = look.said.is_section("validation") and look.root == "RLVRConfig"
    if is_given and look(key) is None:
        yield key, f"{key} has to be given where validation is"


def _domains(look: Look) -> Iterator[Fault]:
    """pipeline/rlvr/rlvr_pipeline.py and rlvr_vlm_pipeline.py, __init__."""
    if look.root != "RLVRConfig" or look.is_rollout:
        return
    key = f"{look.trainer}.data_args.domain_interleave_probs"
    domains = look.mapping(key)
    if not domains:
        yield key, f"{key} has to be given: the share of each domain"
    known = look.said.below("rewards")
    for domain in domains:
        if domain not in known:
            line = f"{key} has {domain}, and rewards has no section of that name"
            yield f"{key}.{domain}", f"{line}{near(str(domain), known)}"


def _templates(look: Look) -> Iterator[Fault]:
    """datasets/chat_template.py, get_chat_template."""
    known = look.schema.get("templates", ())
    wanted: dict[str, Any] = {}
    if look.root == "RLVRConfig":
        named = look.mapping("tag_to_template")
        wanted |= {f"tag_to_template.{tag}": name for tag, name in named.items()}
    if look.program and VL not in look.program and look.root != "AgenticConfig":
        own = f"{look.trainer}.data_args.template"
        key = "global_template" if look("global_template") else own
        wanted[key] = look(key)
    for key, name in wanted.items():
        if name is not None and name not in known:
            line = f"{key}={name}: ROLL has no such template"
            yield key, f"{line}{near(str(name), known)}"


def _environments(look: Look) -> Iterator[Fault]:
    """pipeline/agentic/agentic_config.py, __post_init__ and make_env_configs."""
    if look.root != "AgenticConfig":
        return
    known = look.mapping("custom_envs")
    for kind, batch_key in (("train", "rollout_batch_size"), ("val", "val_batch_size")):
        start = f"{kind}_env_manager"
        groups, group = (
            look.size(f"{start}.num_env_groups"),
            look.size(f"{start}.group_size"),
        )
        tags, parts = look(f"{start}.tags"), look(f"{start}.num_groups_partition")
        if not isinstance(tags, list) or not isinstance(parts, list):
            continue
        pairs = [(t, n) for t, n in zip(tags, parts, strict=False) if type(n) is int]
        pairs = [(str(tag), count) for tag, count in pairs]
        for tag in [tag for tag, _ in pairs if tag not in known]:
            line = f"{start}.tags has {tag}, and custom_envs has no such environment"
            yield f"{start}.tags", f"{line}{near(str(tag), known)}"
        total = sum(count for _, count in pairs)
        if total != groups:
            key = f"{start}.num_groups_partition"
            line = (
                f"the parts of {key} for the {len(pairs)} tags sum up to {total}, and "
            )
            yield key, f"{line}{start}.num_env_groups is {groups}"
        batch = look.whole(batch_key)
        if batch > 0 and batch % group:
            line = f"{batch_key} = {batch} must be a multiple of {start}.group_size"
            yield batch_key, f"{line} = {group}"
        elif kind == "val" and batch > 0 and batch % (groups * group):
            line = f"{batch_key} = {batch} must be a multiple of the {groups * group} "
            yield batch_key, f"{line}environments of {start}"


def _shared(look: Look) -> Iterator[Fault]:
    """pipeline/agentic/agentic_pipeline.py, _validate_partial_gpu_config."""
    is_judged = look.root == "AgenticConfig" and not look.is_rollout
    if not is_judged or not look.is_on("partial_gpu_mode"):
        return
    train, infer = set(look.gpus(look.trainer)), set(look.gpus(look.rollout))
    teachers = look.teachers()
    uses_ref = bool(teachers) or look.has_reference()
    ref = set(look.gpus((teachers or ["reference"])[0]))
    if uses_ref and len(teachers) < 2 and ref != train:
        key = f"{(teachers or ['reference'])[0]}.device_mapping"
        yield key, f"{key} must be the same as {look.trainer}.device_mapping"
    key, ratio = f"{look.rollout}.device_mapping", look.number("async_generation_ratio")
    if not train & infer:
        return
    if train < infer:
        if len(infer) // look.per_worker(look.rollout) < 2:
            yield key, f"{key} has one engine; two are needed to train on a part of it"
        if not ratio:
            line = (
                f"{look.trainer} is a part of {key}: that needs async_generation_ratio"
            )
            yield "async_generation_ratio", f"{line} above 0"
        return
    reward = look.gpus("reward") if look.said.is_section("reward") else []
    if len(train) != len(infer) + len(set(reward)):
        line = f"{look.trainer} has {len(train)} GPUs, {look.rollout} {len(infer)}"
        yield key, f"{line}: where they share some, the rollout and reward have as many"
    if ratio:
        line = (
            f"async_generation_ratio = {ratio} needs {look.rollout} on GPUs of its own"
        )
        yield "async_generation_ratio", f"{line}, or on more than {look.trainer}"


def _kinds(look: Look) -> Iterator[Fault]:
    """dpo_config.py; rlvr_rollout_pipeline.py."""
    if look.root == "DPOConfig":
        for worker in ("actor_train", "reference"):
            key = f"{worker}.use_sequence_packing"
            if look.is_on(key):
                yield key, f"{key}=true is not for DPO"
    if look.program == ROLLOUT_ONLY:
        start = f"{look.rollout}.strategy_args.strategy_config"
        if look.part(look.rollout, "load_format", "dummy") == "dummy":
            yield start, f"{start}.load_format must not be dummy: nothing sends weights"


Rule = Callable[[Look], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    _opd,
    _distill,
    _generating,
    _domains,
    _templates,
    _environments,
    _shared,
    _kinds,
)
