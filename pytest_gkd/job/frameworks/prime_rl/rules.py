"""prime-rl's own rules, each with the function in its sources that it is from.

Read in the main branch at 559b4477, below packages/prime-rl-configs/src/prime_rl/;
other files named are below src/prime_rl/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks.prime_rl.keys import Classes, Settings, Uncertain

CONFLICT = "config.invalid-combination"
CUSTOM = ("custom", "auto")
IN_MEMORY = ("nccl", "nixl")
# utils/validation.py, propagate_shared_fields: shared keys, and the keys that they set.
BOTH = ("trainer", "orchestrator")
LOGGED = (*BOTH, "inference")
WANDB = ("project", "entity", "name", "group", "tags", "offline")
SHARED: dict[str, tuple[str, ...]] = {
    "model.name": (
        "trainer.model.name",
        "inference.vllm.model",
        "orchestrator.model.name",
    ),
    "model.vlm": ("trainer.model.vlm", "orchestrator.model.vlm"),
    "log.level": tuple(f"{one}.log.level" for one in LOGGED),
    "log.json_logging": tuple(f"{one}.log.json_logging" for one in LOGGED),
    "ckpt.output_dir": ("trainer.ckpt.output_dir",),
    **{
        f"ckpt.{name}": tuple(f"{one}.ckpt.{name}" for one in BOTH)
        for name in ("interval", "keep_last", "keep_interval")
    },
    **{
        f"monitors.wandb.{name}": tuple(f"{one}.monitors.wandb.{name}" for one in BOTH)
        for name in WANDB
    },
    "monitors.file.path": tuple(f"{one}.monitors.file.path" for one in BOTH),
    "monitors.prime.name": ("orchestrator.monitors.prime.name",),
    "tokenizer.name": tuple(f"{one}.tokenizer.name" for one in BOTH),
    "tokenizer.trust_remote_code": tuple(
        f"{one}.tokenizer.trust_remote_code" for one in BOTH
    ),
    "tokenizer.chat_template": (
        *(f"{one}.tokenizer.chat_template" for one in BOTH),
        "inference.vllm.chat_template",
    ),
    "rollout_transport": tuple(f"{one}.rollout_transport" for one in BOTH),
    "max_steps": tuple(f"{one}.max_steps" for one in BOTH),
    "seq_len": ("trainer.model.seq_len", "orchestrator.seq_len"),
    "slurm": ("inference.slurm",),
}
# Sections of which only the presence is passed to the roles.
PRESENT = {
    "ckpt": BOTH,
    "monitors.wandb": BOTH,
    "monitors.file": BOTH,
    "monitors.prime": ("orchestrator",),
}


def propagated(settings: Settings, classes: Classes) -> list[Finding]:
    """Copy the shared keys to the roles that lack them; return contradictions."""
    found = []

    def fill(target: str, shared: str, *, is_whole: bool = True) -> None:
        if classes.knows(RL, target) and classes.knows(RL, shared):
            filled(settings, target, shared, is_whole=is_whole)

    for shared, targets in SHARED.items():
        value = settings.get(shared)
        if value is None:
            continue
        for target in targets:
            own = settings.get(target)
            is_judged = "propagate_shared_fields" in classes.checks
            if own is not None and is_judged and not _is_same(own, value):
                text = (
                    f"{target} is {_shown(own)}, and the shared {shared} is "
                    f"{_shown(value)}: prime-rl refuses it; set one of them "
                    "(propagate_shared_fields)"
                )
                found.append(_finding(settings, text, target))
        for target in targets:
            fill(target, shared)
    # The roles share the table, and its type is that of their default.
    transport = settings.get("rollout_transport")
    if isinstance(transport, dict) and "type" not in transport:
        word = settings.word("rollout_transport")
        settings.put("rollout_transport.type", "zmq", word)
    template = "trainer.tokenizer.chat_template"
    fill("inference.vllm.chat_template", template)
    for shared, targets in PRESENT.items():
        value = settings.get(shared)
        if isinstance(value, dict) or value == "None":
            for target in targets:
                fill(f"{target}.{shared}", shared, is_whole=False)
    return found


def _is_same(one: Any, other: Any) -> bool:
    return one == other or isinstance(one, Uncertain) or isinstance(other, Uncertain)


def filled(
    settings: Settings, target: str, shared: str, *, is_whole: bool = True
) -> None:
    """Copy a shared key to a role's key, if the role exists and lacks it.

    Unless ``is_whole``, a section is only created, empty.
    """
    value, (role, *parts) = settings.get(shared), target.split(".")
    node = settings.tree.get(role)
    for part in parts:
        if not isinstance(node, dict):
            return
        node = node.get(part, {})
    if value is not None and node == {} and settings.get(target) is None:
        is_empty = isinstance(value, dict) and not is_whole
        settings.put(target, {} if is_empty else value, settings.word(shared))


def _shown(value: Any) -> str:
    return "set" if isinstance(value, dict) else str(value)[:60]


class NotCertainError(Exception):
    """A value that a rule needs is not known."""


class View:
    """A section of a class, by its own keys, including its classes' defaults."""

    def __init__(
        self, settings: Settings, classes: Classes, top: str, name: str, key: str
    ) -> None:
        self._settings, self._classes, self._top = settings, classes, top
        self._name, self._start = name, f"{key}." if key else ""

    def __call__(self, key: str) -> Any:
        """A value; None if its section is absent. Raises NotCertainError.

        It also raises for a key that this release does not have.
        """
        if not self._classes.knows(self._name, key):
            raise NotCertainError
        found = self._classes.find(self._settings, self._top, f"{self._start}{key}")
        if found is None:
            return None
        if found.needs:
            raise NotCertainError
        return found.value

    def whole(self, key: str) -> int:
        """An integer; another type is reported as a wrong type."""
        value = self(key)
        if type(value) is not int:
            raise NotCertainError
        return value

    def is_given(self, key: str) -> bool:
        """Whether the user gives it."""
        return self._settings.get(f"{self._start}{key}") is not None

    def has(self, key: str) -> bool:
        """Whether it exists and is not None."""
        return self(key) is not None


class Rule(NamedTuple):
    """What ``refused`` says about a section of the class, reported at ``key``.

    ``source`` is the function that refuses it.
    """

    section: str
    key: str
    source: str
    text: str
    refused: Callable[[View], Any]


MODEL, TRAINER = "ModelConfig__at__trainer", "TrainerConfig"
ORCHESTRATOR, INFERENCE = "OrchestratorConfig", "InferenceConfig"
RL, SFT = "RLConfig", "SFTConfig"


def _is_foreign(v: View) -> bool:
    """Whether the model is not in prime-rl's own implementation."""
    return v("impl") not in CUSTOM


def _scheduler(v: View) -> bool:
    kind, steps = v("scheduler.type"), v("max_steps")
    if kind == "linear":
        warm, decay = (
            v.whole("scheduler.warmup_steps"),
            v.whole("scheduler.decay_steps"),
        )
        return warm == decay == 0 or (
            decay > 0 and (steps is None or warm + decay > steps)
        )
    return kind == "cosine" and (
        steps is None or v.whole("scheduler.warmup_steps") >= steps
    )


def _expert_group(v: View) -> bool:
    """trainer/parallel_dims.py: EP uses the GPUs that share one copy."""
    gpus, model = _trainer_gpus(v), "trainer.model"
    context, copies = v.whole(f"{model}.cp"), v.whole(f"{model}.dp_replicate")
    expert = v(f"{model}.ep")
    if type(expert) is not int or expert <= 1 or gpus % (copies * context):
        return False
    shards = gpus // (copies * context)
    return bool(expert % context or shards * context % expert)


def _trainer_gpus(v: View) -> int:
    if v("deployment.type") == "multi_node":
        each = v.whole("deployment.gpus_per_node")
        return v.whole("deployment.num_train_nodes") * each
    return v.whole("deployment.num_train_gpus")


def _copies(v: View) -> bool:
    split = v.whole("trainer.model.cp") * v.whole("trainer.model.dp_replicate")
    if v.is_given("deployment.nodes_per_fsdp_group"):
        return False  # it sets dp_replicate
    return split > 0 and _trainer_gpus(v) % split != 0


def _sources_twice(v: View) -> bool:
    names = []
    for one in v("source") or []:
        env = one.get("env") if isinstance(one, dict) else None
        taskset = env.get("taskset") if isinstance(env, dict) else None
        own = taskset.get("id") if isinstance(taskset, dict) else None
        name = one.get("name", own) if isinstance(one, dict) else None
        if isinstance(name, str) and not (isinstance(env, dict) and "id" in env):
            names.append(name)
    return len(names) != len(set(names))


def _has_foreign_source(v: View) -> bool:
    return bool(v("sampling.source") != "policy")


def _too_few(name: str) -> Callable[[View], bool]:
    def refused(v: View) -> bool:
        value = v(f"concurrency.{name}")
        return type(value) is int and value < v.whole("group_size")

    return refused


def _above_most(name: str) -> Callable[[View], bool]:
    def refused(v: View) -> bool:
        own, most = v(name), v("max_inflight")
        return type(own) is int and type(most) is int and own > most

    return refused


def _model_names(v: View) -> bool:
    own = v("orchestrator.model.name")
    if v.has("inference"):
        return bool(v("inference.vllm.model") != own)
    name = str(v("trainer.model.name"))
    return name != own and not name.startswith("Jackmin108/")


def _templates(v: View) -> bool:
    own = v("trainer.tokenizer.chat_template")
    others = [v("orchestrator.tokenizer.chat_template")]
    if v.has("inference"):
        others.append(v("inference.vllm.chat_template"))
    return any(other != own for other in others)


def _checkpoints(v: View) -> bool:
    has = [v.has(f"{one}.ckpt") for one in BOTH]
    return has[0] != has[1] or v("trainer.ckpt.interval") != v(
        "orchestrator.ckpt.interval"
    )


def _projects(v: View) -> bool:
    has = [v.has(f"{one}.monitors.wandb") for one in BOTH]
    keys = [f"{one}.monitors.wandb.project" for one in BOTH]
    return has[0] != has[1] or v(keys[0]) != v(keys[1])


def _lora_differs(name: str) -> Callable[[View], bool]:
    def refused(v: View) -> bool:
        own = v(f"orchestrator.model.lora.{name}")
        trained = v(f"trainer.model.lora.{name}")
        return v.has("trainer.model.lora") and own is not None and own != trained

    return refused


def _is_quantized(v: View) -> bool:
    key = "weight_broadcast.quantize_in_weight_transfer"
    return v("weight_broadcast.type") == "nccl" and bool(v(key))


def _infer_gpus(v: View) -> bool:
    if v("deployment.type") == "multi_node" or not v.has("inference"):
        return False
    tensor = v.whole("inference.vllm.tensor_parallel_size")
    return tensor > 0 and v.whole("deployment.num_infer_gpus") % tensor != 0


def _is_multi(v: View) -> bool:
    return bool(v("deployment.type") == "multi_node")


def _no_infer_nodes(v: View) -> bool:
    return _is_multi(v) and v("deployment.num_infer_nodes") == 0


def _routes_experts(v: View) -> bool:
    keys = (
        "trainer.enable_router_replay",
        "inference.vllm.enable_return_routed_experts",
    )
    return v.has("inference") and any(v(key) for key in keys)


def _run_directory(role: str) -> Callable[[View], bool]:
    def refused(v: View) -> bool:
        key = f"{role}.output_dir"
        name = v("run.dir") or v("run.name")
        return v.is_given(key) and v(key) != f"{v('output_dir')}/{name}"

    return refused


def _resume_place(v: View) -> bool:
    place = v("dir")
    name = str(place).rstrip("/").rpartition("/")[2]
    return place is not None and not re.fullmatch(r"step_\d+", name)


def _offload(v: View) -> bool:
    others = bool(v("optim_cpu_offload")), bool(v.has("full_offload"))
    others = others[0], others[1] and v("full_offload") is not False
    return all(others) or bool(v("fsdp_cpu_offload") and any(others))


RULES: tuple[Rule, ...] = (
    # configs/trainer.py
    Rule(
        MODEL,
        "trust_remote_code",
        "trust_remote_code_only_with_hf",
        "trust_remote_code needs impl hf or auto",
        lambda v: v("trust_remote_code") and v("impl") == "custom",
    ),
    Rule(
        MODEL,
        "vlm",
        "vlm_only_with_custom_impl",
        "vlm needs impl = custom",
        lambda v: v.has("vlm") and v("impl") != "custom",
    ),
    Rule(
        MODEL,
        "cp_style",
        "vlm_cp_requires_ulysses",
        "vlm with cp needs cp_style = ulysses",
        lambda v: v.has("vlm") and v.whole("cp") > 1 and v("cp_style") != "ulysses",
    ),
    Rule(
        MODEL,
        "cp",
        "validate_cp",
        "cp needs impl custom or auto",
        lambda v: v.whole("cp") > 1 and _is_foreign(v),
    ),
    Rule(
        MODEL,
        "ac.mode",
        "selective_ac_only_with_custom_impl",
        "ac.mode = selective needs impl custom or auto",
        lambda v: v("ac.mode") == "selective" and _is_foreign(v),
    ),
    Rule(
        MODEL,
        "optim_cpu_offload",
        "cpu_offload_mutual_exclusion",
        "only one of fsdp_cpu_offload, optim_cpu_offload (which is on by default) and "
        "full_offload may be on",
        _offload,
    ),
    Rule(
        MODEL,
        "attn",
        "flash_attention_4_only_with_custom_impl",
        "attn auto (the default) or flash_attention_4 needs impl custom or auto",
        lambda v: v("attn") in ("flash_attention_4", "auto") and _is_foreign(v),
    ),
    Rule(
        MODEL,
        "quantization",
        "quantization_only_with_custom_impl",
        "quantization needs impl custom or auto",
        lambda v: v.has("quantization") and _is_foreign(v),
    ),
    Rule(
        MODEL,
        "ep_comm_backend",
        "validate_ep_comm_backend",
        "ep_comm_backend = deepep needs ep above 1",
        lambda v: (
            v("ep_comm_backend") != "torch" and type(v("ep")) is int and v("ep") <= 1
        ),
    ),
    Rule(
        MODEL,
        "quantization",
        "mxfp8_only_with_torch_ep_backend",
        "quantization mxfp8 needs ep_comm_backend = torch",
        lambda v: v("quantization.type") == "mxfp8" and v("ep_comm_backend") != "torch",
    ),
    *(
        rule
        for section in (TRAINER, SFT)
        for rule in (
            Rule(
                section,
                "optim.type",
                "full_optimizer_offload_requires_supported_optimizer",
                "model.full_offload needs the optimizer adamw or sign_sgd",
                lambda v: (
                    v("model.full_offload") not in (None, False)
                    and v("optim.type") not in ("adamw", "sign_sgd")
                ),
            ),
            Rule(
                section,
                "model.optimization_dtype",
                "vlms_require_bfloat16",
                "vlm needs optimization_dtype and reduce_dtype = bfloat16",
                lambda v: (
                    v.has("model.vlm")
                    and (v("model.optimization_dtype"), v("model.reduce_dtype"))
                    != ("bfloat16", "bfloat16")
                ),
            ),
            Rule(
                section,
                "model.lora",
                "vlm_freeze_incompatible_with_lora",
                "LoRA and vlm.freeze_vision_encoder = false are mutually exclusive",
                lambda v: (
                    v.has("model.lora")
                    and v("model.vlm.freeze_vision_encoder") is False
                ),
            ),
            Rule(
                section,
                "trace_path",
                "dont_do_massive_traces",
                "trace_path needs max_steps below 10",
                lambda v: (
                    v("trace_path") and (v("max_steps") is None or v("max_steps") >= 10)
                ),
            ),
            Rule(
                section,
                "scheduler",
                "validate_scheduler",
                "the scheduler's warmup and decay must fit in max_steps, which must be "
                "given, and a linear one needs either of them",
                _scheduler,
            ),
            Rule(
                section,
                "optim.type",
                "validate_opt_and_fsdp_offload",
                "muon and fsdp_cpu_offload are mutually exclusive",
                lambda v: v("optim.type") == "muon" and v("model.fsdp_cpu_offload"),
            ),
            Rule(
                section,
                "model.ep",
                "ep_only_with_custom_impl",
                "ep needs impl custom or auto",
                lambda v: (
                    v("model.ep") not in (1, "auto") and v("model.impl") not in CUSTOM
                ),
            ),
        )
    ),
    Rule(
        TRAINER,
        "weight_broadcast.type",
        "validate_lora_broadcast",
        "LoRA needs weight_broadcast.type = filesystem",
        lambda v: v.has("model.lora") and v("weight_broadcast.type") in IN_MEMORY,
    ),
    Rule(
        TRAINER,
        "enable_router_replay",
        "router_replay_only_with_custom_impl",
        "enable_router_replay needs model.impl custom or auto",
        lambda v: v("enable_router_replay") and v("model.impl") not in CUSTOM,
    ),
    Rule(
        "ActivationCheckpointConfig",
        "targets",
        "validate_selective_targets",
        "mode = selective needs at least one of targets",
        lambda v: v("mode") == "selective" and v("targets") == [],
    ),
    # configs/shared.py
    Rule(
        "ResumeConfig",
        "dir",
        "validate_step_xor_dir",
        "step and dir are mutually exclusive",
        lambda v: v.has("step") and v.has("dir"),
    ),
    Rule(
        "ResumeConfig",
        "dir",
        "validate_step_xor_dir",
        "dir must end in step_NUMBER",
        _resume_place,
    ),
    # configs/algorithm.py
    Rule(
        "FrozenModelConfig",
        "base_url",
        "require_explicit_endpoint",
        "a teacher needs its base_url: only the model that is trained is served",
        lambda v: not v.is_given("base_url"),
    ),
    *(
        Rule(
            f"{name}AlgoConfig",
            "sampling.source",
            "validate_sampling_source",
            "only the algorithm sft may sample from another model than the policy",
            _has_foreign_source,
        )
        for name in ("GRPO", "Echo", "MaxRL", "RAE", "HierarchicalGRPO", "OPD", "OPSD")
    ),
    Rule(
        "SFTAlgoConfig",
        "sampling.source",
        "require_frozen_source",
        "the algorithm sft needs a teacher: sampling.source with name and base_url",
        lambda v: v("sampling.source") == "policy",
    ),
    Rule(
        "EchoRolesConfig",
        "system",
        "require_a_role",
        "at least one role must be there",
        lambda v: not any(map(v.has, ("system", "user", "assistant", "tool"))),
    ),
    # configs/orchestrator.py
    Rule(
        ORCHESTRATOR,
        "token_batch_size",
        "resolve_batching",
        "batch_size and token_batch_size are mutually exclusive",
        lambda v: v.has("batch_size") and v.has("token_batch_size"),
    ),
    Rule(
        ORCHESTRATOR,
        "batch_size",
        "resolve_batching",
        "batch_size (128 where it is not given) must be a multiple of group_size",
        lambda v: (
            not v.has("token_batch_size")
            and (v("batch_size") or 128) % max(v.whole("group_size"), 1)
        ),
    ),
    *(
        Rule(
            ORCHESTRATOR,
            f"concurrency.{name}",
            "resolve_batching",
            f"concurrency.{name} must be at least group_size",
            _too_few(name),
        )
        for name in ("max_inflight", "initial_inflight")
    ),
    *(
        Rule(
            "ConcurrencyConfig",
            name,
            "validate_bounds",
            f"{name} must not be above max_inflight",
            _above_most(name),
        )
        for name in ("initial_inflight", "min_inflight")
    ),
    *(
        Rule(
            section,
            "source",
            "validate_unique_env_names",
            "each source needs a name of its own",
            _sources_twice,
        )
        for section in ("TrainConfig", "EvalConfig", "EvalsEvalConfig")
    ),
    *(
        Rule(
            section,
            "source",
            "validate_non_empty_sources",
            "an eval section needs at least one source",
            lambda v: v("source") in (None, [], ...),
        )
        for section in ("EvalConfig", "EvalsEvalConfig")
    ),
    *(
        Rule(
            section,
            "env",
            "validate_env",
            "a source needs env = { taskset = { id = ... } } and no name agg",
            lambda v: not v.is_given("env") or v("name") == "agg",
        )
        for section in ("TrainSourceConfig", "EvalSourceConfig")
    ),
    Rule(
        "AdvRangeGateConfig",
        "reject_min",
        "validate_range",
        "reject_min must not be above reject_max",
        lambda v: v("reject_min") > v("reject_max"),
    ),
    # configs/inference.py
    Rule(
        INFERENCE,
        "slurm",
        "validate_multi_node_requires_slurm",
        "a deployment on several nodes needs slurm",
        lambda v: v("deployment.type") != "single_node" and not v.has("slurm"),
    ),
    Rule(
        INFERENCE,
        "router.type",
        "validate_llmd_no_routed_experts",
        "the router llm-d and vllm.enable_return_routed_experts are mutually exclusive",
        lambda v: (
            v("router.type") == "llm-d" and v("vllm.enable_return_routed_experts")
        ),
    ),
    Rule(
        INFERENCE,
        "router",
        "validate_router_deployment",
        "the router llm-d needs a deployment on several nodes, and such a deployment a "
        "router",
        lambda v: (
            (v("router.type") == "llm-d" and v("deployment.type") == "single_node")
            or (not v.has("router") and v("deployment.type") != "single_node")
        ),
    ),
    Rule(
        INFERENCE,
        "vllm.enable_prefix_caching",
        "auto_setup_kv_cache_offload",
        "kv_cache_offload needs vllm.enable_prefix_caching",
        lambda v: (
            v.has("kv_cache_offload") and v("vllm.enable_prefix_caching") is False
        ),
    ),
    *(
        Rule(
            f"{kind}KVCacheOffloadConfig",
            "cpu",
            "valid_tiers",
            "kv_cache_offload needs a cpu tier",
            lambda v: not v.has("cpu"),
        )
        for kind in ("Native", "Mooncake")
    ),
    Rule(
        "VllmConfig",
        "max_lora_rank",
        "auto_setup_max_lora_rank",
        "vLLM takes max_lora_rank up to 512",
        lambda v: v.has("max_lora_rank") and v("max_lora_rank") > 512,
    ),
    # configs/rl.py
    Rule(
        "SharedWandbConfig",
        "offline",
        "validate_not_offline",
        "the shared monitors.wandb.offline must be false",
        lambda v: v("offline"),
    ),
    Rule(
        "SingleNodeDeploymentConfig__at__rl",
        "num_train_gpus",
        "validate_gpu_count",
        "num_train_gpus + num_infer_gpus are more than gpus_per_node",
        lambda v: (
            v.whole("num_train_gpus") + v.whole("num_infer_gpus")
            > v.whole("gpus_per_node")
        ),
    ),
    Rule(
        RL,
        "deployment.num_infer_nodes",
        "auto_setup_infer_nodes",
        "deployment.num_infer_nodes must be inference.deployment.num_nodes",
        lambda v: (
            _is_multi(v)
            and v("inference.deployment.type") == "multi_node"
            and v("deployment.num_infer_nodes")
            not in (None, v("inference.deployment.num_nodes"))
        ),
    ),
    Rule(
        RL,
        "slurm",
        "validate_deployment",
        "deployment.type = multi_node needs slurm",
        lambda v: _is_multi(v) and not v.has("slurm"),
    ),
    Rule(
        RL,
        "inference",
        "validate_deployment",
        "deployment.num_infer_nodes above 0 needs an inference section",
        lambda v: (
            _is_multi(v)
            and (v("deployment.num_infer_nodes") or 0) > 0
            and not v.has("inference")
        ),
    ),
    Rule(
        RL,
        "inference",
        "validate_deployment",
        "deployment.num_infer_nodes = 0 and an inference section cannot be combined",
        lambda v: _no_infer_nodes(v) and v.has("inference"),
    ),
    Rule(
        RL,
        "trainer.data.fake",
        "validate_deployment",
        "deployment.num_infer_nodes = 0 needs trainer.data.fake",
        lambda v: _no_infer_nodes(v) and not v.has("trainer.data.fake"),
    ),
    Rule(
        RL,
        "weight_broadcast",
        "validate_quantize_in_weight_transfer",
        "weight_broadcast.quantize_in_weight_transfer needs an inference section and "
        "trainer.model.impl = custom",
        lambda v: (
            _is_quantized(v)
            and not (v.has("inference") and v("trainer.model.impl") == "custom")
        ),
    ),
    *(
        Rule(
            RL,
            f"{role}.output_dir",
            "auto_setup_run_dir",
            f"{role}.output_dir must be output_dir / run.name: set those instead",
            _run_directory(role),
        )
        for role in BOTH
    ),
    Rule(
        RL,
        "orchestrator.model.name",
        "validate_shared_model_name",
        "orchestrator.model.name must be the model that is served: "
        "inference.vllm.model, else trainer.model.name",
        _model_names,
    ),
    Rule(
        RL,
        "tokenizer.chat_template",
        "validate_shared_tokenizer",
        "the chat_template must be the same for all roles: set the shared one",
        _templates,
    ),
    Rule(
        RL,
        "orchestrator.max_steps",
        "validate_shared_max_steps",
        "max_steps of trainer and orchestrator must be the same: set the shared one",
        lambda v: v("trainer.max_steps") != v("orchestrator.max_steps"),
    ),
    Rule(
        RL,
        "orchestrator.seq_len",
        "validate_shared_seq_len",
        "orchestrator.seq_len must not be above trainer.model.seq_len",
        lambda v: v.whole("trainer.model.seq_len") < v.whole("orchestrator.seq_len"),
    ),
    Rule(
        RL,
        "orchestrator.ckpt",
        "validate_shared_ckpt_config",
        "trainer and orchestrator need the same ckpt, with the same interval: set the "
        "shared one",
        _checkpoints,
    ),
    Rule(
        RL,
        "orchestrator.monitors.wandb",
        "validate_shared_wandb_config",
        "trainer and orchestrator need the same monitors.wandb: set the shared one",
        _projects,
    ),
    Rule(
        RL,
        "weight_broadcast.type",
        "auto_setup_weight_broadcast",
        "LoRA needs weight_broadcast.type = filesystem",
        lambda v: (
            v.has("trainer.model.lora") and v("weight_broadcast.type") in IN_MEMORY
        ),
    ),
    Rule(
        RL,
        "rollout_transport.type",
        "auto_setup_rollout_transport",
        "rollout_transport.type of trainer and orchestrator must be the same",
        lambda v: (
            v("trainer.rollout_transport.type")
            != v("orchestrator.rollout_transport.type")
        ),
    ),
    Rule(
        RL,
        "inference.vllm.enable_eplb",
        "validate_eplb_requires_quantized_weight_transfer",
        "inference.vllm.enable_eplb needs weight_broadcast nccl with "
        "quantize_in_weight_transfer",
        lambda v: v("inference.vllm.enable_eplb") and not _is_quantized(v),
    ),
    *(
        Rule(
            RL,
            f"orchestrator.model.lora.{name}",
            "auto_setup_lora",
            f"orchestrator.model.lora.{name} must be that of trainer.model.lora",
            _lora_differs(name),
        )
        for name in ("rank", "alpha")
    ),
    Rule(
        RL,
        "inference.router.type",
        "validate_llmd_no_routed_experts",
        "the router llm-d cannot return routed experts (trainer.enable_router_replay)",
        lambda v: (
            v("inference.router.type") == "llm-d"
            and not v("inference.vllm.enable_return_routed_experts")
            and _routes_experts(v)
        ),
    ),
    Rule(
        RL,
        "inference.router",
        "validate_multi_node_requires_router",
        "deployment.type = multi_node needs inference.router",
        lambda v: _is_multi(v) and v.has("inference") and not v.has("inference.router"),
    ),
    Rule(
        RL,
        "inference.kv_cache_offload",
        "validate_router_replay_without_kv_offload",
        "trainer.enable_router_replay excludes inference.kv_cache_offload",
        lambda v: (
            v("trainer.enable_router_replay") and v.has("inference.kv_cache_offload")
        ),
    ),
    Rule(
        RL,
        "inference.kv_cache_offload.type",
        "validate_mooncake_offload_requires_slurm",
        "kv_cache_offload.type = mooncake needs slurm",
        lambda v: (
            v("inference.kv_cache_offload.type") == "mooncake" and not v.has("slurm")
        ),
    ),
    Rule(
        RL,
        "deployment.num_infer_gpus",
        "auto_setup_deployment",
        "deployment.num_infer_gpus must be a multiple of "
        "inference.vllm.tensor_parallel_size",
        _infer_gpus,
    ),
    *(
        Rule(
            section,
            "deployment.nodes_per_fsdp_group",
            "auto_setup_deployment",
            "deployment.num_train_nodes must be a multiple of nodes_per_fsdp_group",
            lambda v: (
                _is_multi(v)
                and v.has("deployment.nodes_per_fsdp_group")
                and v.whole("deployment.num_train_nodes")
                % max(v.whole("deployment.nodes_per_fsdp_group"), 1)
            ),
        )
        for section in (RL, SFT)
    ),
    Rule(
        RL,
        "trainer.model.cp",
        "trainer/parallel_dims.py",
        "the trainer's GPUs must be a multiple of cp * dp_replicate",
        _copies,
    ),
    Rule(
        RL,
        "trainer.model.ep",
        "trainer/parallel_dims.py",
        "ep must be a multiple of cp, and divide the trainer's GPUs / dp_replicate",
        _expert_group,
    ),
    # configs/sft.py
    Rule(
        "SingleNodeDeploymentConfig__at__sft",
        "num_train_gpus",
        "validate_gpu_count",
        "num_train_gpus is more than gpus_per_node",
        lambda v: v.whole("num_train_gpus") > v.whole("gpus_per_node"),
    ),
    Rule(
        SFT,
        "slurm",
        "validate_deployment",
        "deployment.type = multi_node needs slurm",
        lambda v: _is_multi(v) and not v.has("slurm"),
    ),
    Rule(
        SFT,
        "inference",
        "auto_setup_online_eval",
        "an inference section is only for evals: it needs an eval section",
        lambda v: v.has("inference") and not v.has("eval"),
    ),
    *(
        Rule(
            section,
            "micro_batch_size",
            "validate_batch_size",
            "batch_size must be a multiple of micro_batch_size",
            lambda v: v.whole("batch_size") % max(v.whole("micro_batch_size"), 1),
        )
        for section in ("SFTDataConfig", "FakeDataConfig")
    ),
    Rule(
        SFT,
        "data.seq_len",
        "validate_cp_seq_len",
        "data.seq_len must be a multiple of model.cp",
        lambda v: v.whole("data.seq_len") % max(v.whole("model.cp"), 1),
    ),
    Rule(
        SFT,
        "data.micro_batch_size",
        "validate_cp_micro_batch_size",
        "model.cp needs data.micro_batch_size = 1",
        lambda v: v.whole("model.cp") > 1 and v.whole("data.micro_batch_size") != 1,
    ),
)


def judged(
    settings: Settings,
    classes: Classes,
    top: str,
    sections: Iterable[tuple[str, str]],
    whose: str,
) -> Iterator[Finding]:
    """What prime-rl refuses in the given sections, and what it truncates."""
    for name, key in sections:
        view = View(settings, classes, top, name, key)
        start = f"{key}." if key else ""
        for rule in RULES:
            is_there = rule.source in classes.checks or not rule.source.isidentifier()
            if rule.section != name or not is_there:
                continue
            try:
                is_refused = rule.refused(view)
            except (NotCertainError, TypeError):  # a wrong type is already reported
                continue
            if is_refused:
                where = f"{start}{rule.key}"
                above = f" (in {key})" if key else ""
                text = f"{rule.text}{above}: {whose} refuses it ({rule.source})"
                yield _finding(settings, text, where)
    if top == RL:
        yield from _lengths(settings, View(settings, classes, top, top, ""))


def _lengths(settings: Settings, view: View) -> Iterator[Finding]:
    """configs/orchestrator.py, seq_len: longer samples are truncated."""
    key = "orchestrator.train.sampling.max_completion_tokens"
    try:
        answer, longest = view(key), view("orchestrator.seq_len")
        room = view("inference.vllm.max_model_len")
    except NotCertainError:
        return
    if type(answer) is not int:
        return
    if type(longest) is int and answer > longest:
        text = f"{key} = {answer} is more than orchestrator.seq_len = {longest}: "
        text = f"{text}longer samples are truncated"
        yield _finding(settings, text, key, "warning")
    if type(room) is int and answer >= room:
        text = f"{key} = {answer} leaves no room for a prompt in "
        text = f"{text}inference.vllm.max_model_len = {room}"
        yield _finding(settings, text, key, "warning")


def _finding(settings: Settings, text: str, key: str, level: str = "error") -> Finding:
    word = settings.word(key)
    file, line = (word.file, word.line) if word else ("", 0)
    return Finding(CONFLICT, level, text, file, line, key)
