"""What ROLL accepts but treats differently than it looks, and keys without effect.

Read at 8eb27cc2 (0.3.0 and the main branch of August 2026); paths are below roll/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pytest_gkd.job.frameworks.roll.job import Look, all_gpus, nodes
from pytest_gkd.job.looking import Fault, NotCertainError
from pytest_gkd.options import near

UNREAD = "counts for nothing"
# Values that pure on-policy distillation sets, whatever is given.
PURE = {
    "adv_estimator": "reinforce",
    "gamma": 0,
    "critic_warmup": 0,
    "use_kl_loss": False,
    "add_token_level_kl": False,
}


def _is_users(look: Look, key: str) -> bool:
    return look.said.has(key)


# -- keys that count for nothing ---------------------------------------------------


def _sections(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, PPOConfig._handle_opd_mapping."""
    if not look.is_ppo:
        return
    if look.is_pure:
        for name in ("actor_train", "actor_infer", "reference", "critic"):
            if look.said.is_section(name):
                other = name.replace("actor", "student")
                own = "teacher" if name == "reference" else other
                more = "" if name == "critic" else f"; {own} takes its place"
                yield name, f"{name} {UNREAD} in pure on-policy distillation{more}"
        return
    start = "start_onpolicy_distill_pipeline.py"
    for name in ("student_train", "student_infer"):
        if look.said.is_section(name):
            yield name, f"{name} {UNREAD} without is_pure_opd, which {start} sets"
    if look.said.is_section("teacher") and not look.is_on("use_opd"):
        yield "teacher", f"teacher {UNREAD} without use_opd=true, or {start}"


def _packing(look: Look) -> Iterator[Fault]:
    """distributed/strategy/megatron_strategy.py reads it under use_sequence_packing."""
    for worker in look.workers():
        key, flag = f"{worker}.sequence_packing_args", f"{worker}.use_sequence_packing"
        if look.said.is_section(key) and not _is_users(look, flag):
            yield key, f"{key} {UNREAD}: {flag} is not given, and is false"
        if look.is_on(flag) and look.strategy(worker).startswith("fsdp2"):
            yield flag, f"{flag}=true {UNREAD} under FSDP2; Megatron packs"


def _batching(look: Look) -> Iterator[Fault]:
    for worker in look.workers():
        for way in ("train", "infer"):
            key = f"{worker}.max_tokens_per_microbatch_in_{way}"
            flag = f"{worker}.use_dynamic_batching_in_{way}"
            if _is_users(look, key) and not _is_users(look, flag):
                yield key, f"{key} {UNREAD}: {flag} is not given, and is false"


def _steps(look: Look) -> Iterator[Fault]:
    """set_max_steps of each configuration."""
    key = f"{look.trainer}.training_args.max_steps"
    if _is_users(look, key):
        own = (
            "the epochs" if look.root in ("DistillConfig", "SFTConfig") else "max_steps"
        )
        yield key, f"{key} {UNREAD}: ROLL sets it by {own}"


def strange(look: Look, strategy: str, known: Collection[str]) -> Iterator[Fault]:
    """Keys of workers' strategy_config unknown to their strategy, with similar
    names.
    """
    for worker in look.workers():
        if look.strategy(worker).startswith(strategy):
            start = f"{worker}.strategy_args.strategy_config"
            for name in look.said.below(start):
                if name not in known:
                    yield f"{start}.{name}", f"{name}{near(name, known)}"


def _fsdp(look: Look) -> Iterator[Fault]:
    """distributed/strategy/fsdp2_strategy.py reads its strategy_config by names."""
    for key, name in strange(look, "fsdp2", look.schema.get("fsdp2", ())):
        yield key, f"{key} {UNREAD}: FSDP2 reads no {name}"


# -- what is done otherwise --------------------------------------------------------


def _pure(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, PPOConfig._apply_opd_config."""
    for key, value in PURE.items() if look.is_pure else ():
        if _is_users(look, key) and look(key) != value:
            line = f"{key}={look(key)} is written over: pure on-policy distillation"
            yield key, f"{line} sets it to {value}"


def _models(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, PPOConfig; distill_config.py; dpo_config.py."""
    workers = [look.trainer, look.rollout, *look.teachers()[:1]]
    if (look.is_ppo and not look.teachers()) or look.root == "DPOConfig":
        workers.append("reference")
    for worker in filter(None, workers):
        key, used = f"{worker}.model_args.model_name_or_path", look.path_key(worker)
        own = look(key)
        if used != key and own is not None and own != look(used):
            line = f"{key}={own} is written over by {used} = {look(used)}"
            why = "trainer, rollout and teacher or reference do not all have a model"
            yield key, f"{line}: {why if look.is_ppo else 'not both have a model'}"


def _teacher(look: Look) -> Iterator[Fault]:
    for worker in look.teachers():
        path = look.path(worker)
        if path is not None and path == look.path(look.trainer):
            key = look.path_key(worker)
            yield (
                key,
                f"{worker} is {path}, as the student: it is distilled from itself",
            )


def _nodes(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, BaseConfig: device_mapping and the machine decide."""
    found, said = nodes(look), look.whole("num_nodes")
    if _is_users(look, "num_nodes") and found and found != said:
        each = look.whole("num_gpus_per_node")
        line = f"num_nodes = {said} is written over: device_mapping needs "
        yield "num_nodes", f"{line}{all_gpus(look)} GPUs, so {found} nodes of {each}"


def _twice(look: Look) -> Iterator[Fault]:
    for worker in look.workers():
        try:
            several = [
                n for n, count in Counter(look.gpus(worker)).items() if count > 1
            ]
        except NotCertainError:
            continue
        if several:
            key = f"{worker}.device_mapping"
            yield key, f"{key} has GPU {several[0]} more than once"


def _async(look: Look) -> Iterator[Fault]:
    """pipeline/rlvr/rlvr_config.py, __post_init__."""
    if look.root != "RLVRConfig" or not look.number("async_generation_ratio"):
        return
    infer = set(look.gpus(look.rollout))
    others = [look.trainer, *(look.teachers() or ["reference"])]
    others += [w for w in look.workers() if w.startswith(("critic", "rewards."))]
    shared = [w for w in others if w != look.rollout and infer & set(look.gpus(w))]
    if shared:
        line = f"{look.rollout} shares GPUs with {', '.join(shared)}"
        key = f"{look.rollout}.device_mapping"
        yield key, f"{line}: with async_generation_ratio they run at the same time"


def _lengths(look: Look) -> Iterator[Fault]:
    """What is generated must fit into the engine."""
    if not look.rollout:
        return
    name = {"vllm": "max_model_len", "sglang": "context_length"}.get(
        look.strategy(look.rollout)
    )
    most = look.part(look.rollout, name) if name else None
    if type(most) is int and look.longest() > most:
        key = f"{look.rollout}.strategy_args.strategy_config.{name}"
        line = f"sequences have up to {look.longest()} tokens, which is more than "
        yield key, f"{line}{key} = {most}"


def _packed(look: Look) -> Iterator[Fault]:
    """utils/sequence_packing.py; utils/dynamic_batching.py."""
    longest = look.longest()
    for worker in look.workers():
        pairs = [
            (f"{worker}.use_dynamic_batching_in_{way}", f"{worker}.{name}_in_{way}")
            for name in ("max_tokens_per_microbatch",)
            for way in ("train", "infer")
        ]
        start = f"{worker}.sequence_packing_args.max_packed_sequence_length"
        flag = f"{worker}.use_sequence_packing"
        pairs += [(flag, f"{start}_{way}") for way in ("train", "forward")]
        for flag, key in pairs:
            most = look(key)
            if look.is_on(flag) and type(most) is int and 0 < most < longest:
                line = f"{key} = {most}, and sequences have up to {longest} tokens"
                yield key, f"{line}: ROLL ends at the first one that is longer"


def _generating(look: Look) -> Iterator[Fault]:
    """pipeline/rlvr/rlvr_config.py and agentic_config.py, __post_init__."""
    if not look.is_ppo:
        return
    start = f"{look.rollout}.generating_args"
    is_rlvr = look.root == "RLVRConfig"
    used = look("num_return_sequences_in_group") if is_rlvr else 1
    by = "num_return_sequences_in_group" if is_rlvr else "agentic jobs"
    wanted = {"num_return_sequences": (used, by)}
    if is_rlvr:
        response = look.longest() - look.whole("prompt_length")
        wanted["max_new_tokens"] = (response, "sequence_length - prompt_length")
    for name, (value, by) in wanted.items():
        key = f"{start}.{name}"
        if _is_users(look, key) and look(key) != value:
            yield key, f"{key} = {look(key)} is written over with {value} by {by}"


def _transfer(look: Look) -> Iterator[Fault]:
    """pipeline/distill/logits_transfer_group.py, make_comm_plan."""
    if look.root != "DistillConfig":
        return
    ours, theirs = look.replicas("student"), look.replicas("teacher")
    if max(ours, theirs) % min(ours, theirs):
        line = f"the teacher has {theirs} data-parallel ranks and the student {ours}"
        yield "teacher.device_mapping", f"{line}: one must be a multiple of the other"


def _not_there(look: Look) -> Iterator[Fault]:
    keys = [look.path_key(w) for w in (look.trainer, *look.teachers())]
    for key in dict.fromkeys([*keys, f"{look.trainer}.data_args.file_name"]):
        value = look(key)
        for one in value if isinstance(value, list) else [value]:
            is_path = isinstance(one, str) and one.startswith("/") and "\0" not in one
            if is_path and not Path(one).exists():
                yield key, f"{key}: {one} is not there, on this machine"


Rule = Callable[[Look], Iterator[Fault]]
UNREAD_KEYS: tuple[Rule, ...] = (_sections, _packing, _batching, _steps, _fsdp)
DOUBTFUL: tuple[Rule, ...] = (
    _pure,
    _models,
    _teacher,
    _nodes,
    _twice,
    _async,
    _lengths,
    _packed,
    _generating,
    _transfer,
    _not_there,
)
