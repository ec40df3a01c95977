"""What ms-swift itself refuses, or does differently from what is written.

Files named are those of ms-swift 4.6.0; 4.5.3 has the same rules there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pytest_gkd.job import script_file
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks.ms_swift.job import Server, Start, visible
from pytest_gkd.job.overrides import Given

CONFLICT = "config.invalid-combination"
MISSING = "config.missing-value"
HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")  # noqa: S104
# rlhf_args.py: _check_padding_free, _check_sequence_parallel
UNPADDED = ("grpo", "dpo", "kto", "gkd")
IN_SEQUENCE = ("grpo", "dpo")
FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Read by json_parse_to_dict, which repairs invalid JSON by guessing (json_repair).
AS_JSON = (
    *("vllm_engine_kwargs", "vllm_limit_mm_per_prompt", "vllm_speculative_config"),
    *("model_kwargs", "columns", "gradient_checkpointing_kwargs"),
    *("lr_scheduler_kwargs", "megatron_extra_kwargs"),
)


def findings(start: Start) -> Iterator[Finding]:
    """All faults of a start, and of what its script starts besides."""
    yield from _common(start)
    if start.is_megatron:
        yield from _megatron(start)
    else:
        yield from _processes(start)
    if start.algorithm.value in ("gkd", "grpo"):
        yield from _rollout(start)
        yield from _teacher(start)
        if not start.is_megatron:
            yield from _generations(start)
        if start.algorithm.value == "gkd":
            yield from _gkd(start)
        else:
            yield from _grpo(start)
    yield from _servers(start)


def _fault(
    start: Start | Server, key: str, text: str, level: str = "error", cause: str = ""
) -> Finding:
    """A fault of a key, at the line where that is given."""
    word = start.job.find(key).word
    file, line = start.command.file, start.command.line
    if word is not None and word.line:
        file, line = word.file, word.line
    return Finding(cause or CONFLICT, level, text, file, line, key)


def _number(given: Given) -> int | None:
    return given.value if type(given.value) is int else None


# -- every training ----------------------------------------------------------------


def _common(start: Start) -> Iterator[Finding]:
    get = start.value
    dataset, cached = start.get("dataset"), start.get("cached_dataset")
    if not (dataset.value or cached.value or dataset.needs or cached.needs):
        # sft_args.py and megatron/arguments/sft_args.py, __post_init__
        yield _fault(start, "dataset", "no --dataset is given", cause=MISSING)
    kind = start.algorithm.value
    for key in ("packing", "padding_free"):
        if start.is_megatron or get(key) is not True:
            continue
        if kind not in (*UNPADDED, "sft", "pt", None):
            yield _fault(start, key, f"--rlhf_type {kind} takes no --{key}")
        implementation = start.get("attn_impl")
        is_flash = implementation.needs or implementation.value in FLASH
        # sft_args.py, _check_padding_free
        if get(key) is True and not start.is_megatron and not is_flash:
            text = (
                f"--{key} needs --attn_impl flash_attn (it is {implementation.value})"
            )
            yield _fault(start, key, text)
    tuner, rank = start.get("tuner_type"), start.get("lora_rank")
    if tuner.value == "full" and rank.source == "user":
        text = "--lora_rank is never read: tuner_type is full, so nothing is LoRA"
        yield _fault(start, "lora_rank", text, "warning")
    for key in AS_JSON:
        given = start.get(key)
        text = given.value if isinstance(given.value, str) else ""
        if given.source == "user" and text and not script_file.exists(text):
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                told = f"--{key} {text[:60]} is not JSON; ms-swift guesses a repair"
                yield _fault(start, key, told, "warning")


def _processes(start: Start) -> Iterator[Finding]:
    """``swift``: processes compared with GPUs, and combinations that it refuses."""
    get = start.value
    seen = visible(start.environment)
    per_node = start.variable("NPROC_PER_NODE")
    count = 1 if per_node.value is None and not per_node.needs else _number(per_node)
    if start.is_launched or seen is None:
        count = None
    if count and seen and len(seen) % count:
        # swift/utils/env.py, is_mp: an assertion
        yield _fault(
            start, "",
            f"NPROC_PER_NODE={count} and {len(seen)} GPUs in CUDA_VISIBLE_DEVICES: "
            "ms-swift expects both to be equal",
        )  # fmt: skip
    elif count and seen and len(seen) // count > 1:
        # With several GPUs per process the model is split by layers (device_map), which
        # these refuse: sft_args.py (_init_deepspeed, _init_fsdp), rlhf_args.py
        # (_check_grpo, _check_gkd), trainers/arguments.py (__post_init__).
        uses = start.algorithm.value in ("grpo", "gkd") and get("use_vllm") is True
        for key in ("deepspeed", "fsdp", "use_liger_kernel"):
            if get(key) and get("use_ray") is not True:
                yield _fault(start, key, _split(f"--{key}", len(seen), count))
        if uses:
            yield _fault(start, "use_vllm", _split("vLLM", len(seen), count))
    if get("deepspeed") and get("fsdp"):
        yield _fault(start, "fsdp", "--fsdp and --deepspeed are mutually exclusive")
    ways = _number(start.get("sequence_parallel_size"))
    if ways and ways > 1 and start.program == "swift rlhf":
        kind, world = start.algorithm.value, _number(start.processes())
        if kind and kind not in IN_SEQUENCE:
            text = f"--rlhf_type {kind} takes no --sequence_parallel_size above 1"
            yield _fault(start, "sequence_parallel_size", text)
        elif world and world % ways:
            text = f"--sequence_parallel_size {ways} does not divide {world} processes"
            yield _fault(start, "sequence_parallel_size", text)
    ratio, steps = get("warmup_ratio"), get("warmup_steps")
    # trainers/arguments.py, _handle_hf_removed_args
    if ratio and steps:
        text = "--warmup_ratio and --warmup_steps are mutually exclusive"
        yield _fault(start, "warmup_ratio", text)
    elif isinstance(ratio, float) and ratio >= 1:
        text = f"--warmup_ratio {ratio:g} is refused: write steps as --warmup_steps"
        yield _fault(start, "warmup_ratio", text)


def _split(what: str, gpus: int, count: int) -> str:
    return (
        f"{what} cannot be combined with {gpus} GPUs for {count} process(es), which "
        f"splits the model by layers: set NPROC_PER_NODE={gpus}"
    )


# -- rollout -----------------------------------------------------------------------


def _rollout(start: Start) -> Iterator[Finding]:
    get = start.value
    mode, uses = start.get("vllm_mode"), start.get("use_vllm")
    if mode.needs or uses.needs or start.ray:
        return
    # rlhf_args.py, _init_rollout; megatron/trainers/rollout_mixin.py
    if mode.value and uses.value is False:
        text = f"--vllm_mode {mode.value} without --use_vllm true is refused"
        yield _fault(start, "vllm_mode", text)
    elif uses.value is True and not mode.value:
        text = "with vLLM, --vllm_mode is needed: colocate or server"
        yield _fault(start, "use_vllm", text, cause=MISSING)
    hosts, urls = start.get("vllm_server_host"), start.get("vllm_server_base_url")
    if mode.value == "server" and not hosts.needs and not urls.needs:
        if not hosts.value and not urls.value:
            text = (
                "--vllm_mode server needs --vllm_server_host or --vllm_server_base_url"
            )
            yield _fault(start, "vllm_mode", text, cause=MISSING)
        ports = get("vllm_server_port")
        if hosts.value and ports and len(hosts.value) != len(ports):
            # rlhf_trainers/vllm_client.py
            text = f"{len(hosts.value)} --vllm_server_host and {len(ports)} ports"
            yield _fault(start, "vllm_server_host", text)
    if mode.value != "colocate":
        return
    ways, world = _number(start.get("vllm_tensor_parallel_size")), start.processes()
    if ways and type(world.value) is int and world.value % ways:
        # rlhf_trainers/rollout_mixin.py, megatron/trainers/rollout_mixin.py
        text = (
            f"--vllm_tensor_parallel_size {ways}: no divisor of {world.value} processes"
        )
        yield _fault(start, "vllm_tensor_parallel_size", text)
    longest = _number(start.get("vllm_max_model_len"))
    prompt, response = (
        _number(start.get(key)) for key in ("max_length", "max_completion_length")
    )
    if longest and prompt and response and longest < prompt + response:
        # infer_engine/infer_engine.py, set_default_max_tokens
        yield _fault(
            start, "vllm_max_model_len",
            f"--vllm_max_model_len {longest} is less than --max_length {prompt} and "
            f"--max_completion_length {response} together: long prompts get shorter "
            "responses, or are refused",
            "warning",
        )  # fmt: skip


def _generations(start: Start) -> Iterator[Finding]:
    """Generation batches (rlhf_trainers/arguments.py, _init_generation_batch...)."""
    total, steps = start.get("generation_batch_size"), start.get("steps_per_generation")
    size, world = start.get("per_device_train_batch_size"), start.processes()
    accumulation = start.accumulation()
    given = (total, steps, size, world, accumulation)
    if any(one.needs for one in given):
        return
    one = size.value * world.value
    sizes = {"per_device_train_batch_size": size, "steps_per_generation": steps}
    for key, count in sizes.items():
        if count.value is not None and count.value < 1:
            yield _fault(
                start, key, f"--{key} {count.value} is refused: it must be at least 1"
            )
            return
    if total.value and steps.value and total.value != one * steps.value:
        text = (
            f"--generation_batch_size {total.value} is not {one} * {steps.value} steps"
        )
        yield _fault(start, "generation_batch_size", text)
    elif total.value and one and total.value % one:
        yield _fault(
            start, "generation_batch_size",
            f"--generation_batch_size {total.value} is not a multiple of {size.value} "
            f"samples on {world.value} processes",
        )  # fmt: skip
    all_of = total.value or one * (steps.value or accumulation.value)
    number = _number(start.get("num_generations"))
    if start.algorithm.value != "grpo" or not number or number == 1:
        return
    if all_of % number:
        yield _fault(
            start, "num_generations",
            f"--num_generations {number} does not divide the {all_of} responses of a "
            f"generation ({size.value} on {world.value} processes, "
            f"{all_of // one} times)",
        )  # fmt: skip
    evaluates = start.value("val_dataset") or start.value("split_dataset_ratio")
    strategy = start.get("eval_strategy")
    size = start.get("per_device_eval_batch_size")
    own = start.get("num_generations_eval")
    if not evaluates or strategy.value == "no" or size.needs or own.needs:
        return
    number = own.value or number
    if size.value * world.value % number:
        yield _fault(
            start, "per_device_eval_batch_size",
            f"--per_device_eval_batch_size {size.value} on {world.value} processes is "
            f"not a multiple of {number} generations",
        )  # fmt: skip


# -- teacher -----------------------------------------------------------------------


def _teacher(start: Start) -> Iterator[Finding]:
    """rlhf_args.py and megatron_args.py: _check_teacher, _check_gkd, _check_opd_rl."""
    kind = start.algorithm.value
    teacher, server = start.get("teacher_model"), start.get("teacher_model_server")
    has_teacher = bool(teacher.value or server.value or teacher.needs or server.needs)
    liger = start.value("use_liger_kernel") is True
    if teacher.value and server.value:
        text = "--teacher_model and --teacher_model_server are mutually exclusive"
        yield _fault(start, "teacher_model_server", text)
    if server.value and start.ray:
        text = "--teacher_model_server cannot be combined with Ray"
        yield _fault(start, "teacher_model_server", text)
    if liger and not start.is_megatron:
        if kind == "gkd" and not has_teacher:
            text = "self-distillation (no teacher is given) has no liger kernel"
            yield _fault(start, "use_liger_kernel", text)
        if kind == "grpo" and has_teacher:
            text = "GRPO with a teacher cannot be combined with --use_liger_kernel"
            yield _fault(start, "use_liger_kernel", text)
    if kind == "grpo" and has_teacher and not start.value("reward_funcs"):
        models = start.get("reward_model")
        if (
            start.value("dynamic_sample") is True
            and not start.get("reward_funcs").needs
        ):
            text = "--dynamic_sample needs --reward_funcs"
            yield _fault(start, "dynamic_sample", text)
        if start.value("scale_rewards") == "gdpo" and not models.value:
            text = "--scale_rewards gdpo needs --reward_funcs"
            yield _fault(start, "scale_rewards", text)


def _gkd(start: Start) -> Iterator[Finding]:
    get = start.value
    topk, server = start.get("gkd_logits_topk"), start.get("teacher_model_server")
    if server.value and topk.value is None and not topk.needs:
        yield _fault(
            start, "teacher_model_server",
            "--teacher_model_server needs --gkd_logits_topk: a server tells the "
            "probabilities of so many tokens, not of all",
            cause=MISSING,
        )  # fmt: skip
    if type(topk.value) is int and topk.value <= 0:
        text = f"--gkd_logits_topk {topk.value} is refused: it counts tokens"
        yield _fault(start, "gkd_logits_topk", text)
    if get("seq_kd") is True:
        yield _fault(start, "seq_kd", "--seq_kd true is refused: it is not implemented")
    if start.is_megatron:
        return
    if topk.value and get("use_liger_kernel") is True:
        text = "--gkd_logits_topk cannot be combined with --use_liger_kernel"
        yield _fault(start, "gkd_logits_topk", text)
    if get("async_generate") is True:
        text = "--async_generate is refused by GKD"
        yield _fault(start, "async_generate", text)
    # TRL 0.29.1, experimental/gkd/gkd_config.py, __post_init__
    for key in ("lmbda", "beta"):
        value = get(key)
        if isinstance(value, float) and not 0 <= value <= 1:
            yield _fault(start, key, f"--{key} {value:g} is not between 0 and 1")
    if get("lmbda") == 0 and get("use_vllm") is True:
        text = "--use_vllm with --lmbda 0: nothing is generated, vLLM only takes memory"
        yield _fault(start, "use_vllm", text, "warning")


def _grpo(start: Start) -> Iterator[Finding]:
    """rlhf_args.py, _init_grpo and _check_teacher; megatron_args.py, _init_grpo."""
    get = start.value
    number = start.get("num_generations")
    teacher = [start.get(k) for k in ("teacher_model", "teacher_model_server")]
    has_teacher = any(t.value or t.needs for t in teacher)
    if number.value == 1 and not has_teacher and not start.is_megatron:
        text = "GRPO without a teacher needs --num_generations above 1"
        yield _fault(start, "num_generations", text)
    strategy = get("truncation_strategy")
    if strategy not in ("left", "delete", None):
        text = f"GRPO takes --truncation_strategy left or delete, not {strategy}"
        yield _fault(start, "truncation_strategy", text)
    cache = start.get("soft_cache_length")
    is_set = cache.value is not None or cache.needs
    if "soft_overlong" in (get("reward_funcs") or ()) and not is_set:
        text = "the reward soft_overlong needs --soft_cache_length"
        yield _fault(start, "reward_funcs", text, cause=MISSING)
    if get("async_generate") is True:
        if start.is_megatron:
            text = "--async_generate is refused by Megatron's GRPO"
            yield _fault(start, "async_generate", text)
        elif get("vllm_mode") == "colocate":
            text = "--async_generate needs --vllm_mode server"
            yield _fault(start, "async_generate", text)
    if start.is_megatron and get("use_vllm") is False and not start.ray:
        yield _fault(start, "use_vllm", "Megatron's GRPO needs --use_vllm true")


# -- Megatron ----------------------------------------------------------------------


def _megatron(start: Start) -> Iterator[Finding]:
    """megatron/arguments/megatron_args.py: _init_distributed, validate_batch_..."""
    world, one = _number(start.processes()), _number(start.model_parallel())
    limit = _number(start.get("save_total_limit"))
    if limit is not None and limit < 2:
        text = f"--save_total_limit {limit} is refused: at least 2 are kept"
        yield _fault(start, "save_total_limit", text)
    if not world or not one:
        return
    if world % one:
        yield _fault(
            start, "tensor_model_parallel_size",
            f"tensor * pipeline * context parallel size is {one}: it does not divide "
            f"{world} processes (NPROC_PER_NODE * NNODES)",
        )  # fmt: skip
        return
    replicas = world // one
    total, micro = (
        _number(start.get(k)) for k in ("global_batch_size", "micro_batch_size")
    )
    if not total or not micro:
        return
    if total % (micro * replicas):
        yield _fault(
            start, "global_batch_size",
            f"--global_batch_size {total} is not a multiple of --micro_batch_size "
            f"{micro} on {replicas} replicas ({world} processes / {one})",
        )  # fmt: skip
        return
    if start.algorithm.value not in ("gkd", "grpo"):
        return
    number = 1 if start.algorithm.value == "gkd" else start.value("num_generations")
    all_of, steps = (
        start.get("generation_batch_size"),
        start.get("steps_per_generation"),
    )
    if all_of.needs or steps.needs or type(number) is not int or number < 1:
        return
    generated = all_of.value or total * (steps.value or 1)
    if all_of.value and steps.value and generated != total * steps.value:
        text = (
            f"--generation_batch_size {generated} is not {total} * {steps.value} steps"
        )
        yield _fault(start, "generation_batch_size", text)
    elif generated % total:
        text = f"--generation_batch_size {generated} is not a multiple of {total}"
        yield _fault(start, "generation_batch_size", text)
    elif generated % number:
        text = f"--num_generations {number} does not divide {generated} responses"
        yield _fault(start, "num_generations", text)
    elif (prompts := generated // number) % (replicas * micro):
        yield _fault(
            start, "num_generations" if number > 1 else "global_batch_size",
            f"a generation has {prompts} prompts ({generated} responses / {number}): "
            f"not a multiple of --micro_batch_size {micro} on {replicas} replicas",
        )  # fmt: skip


# -- several commands of one script ------------------------------------------------


def _servers(start: Start) -> Iterator[Finding]:
    ports: dict[int, Server] = {}
    for server in start.servers:
        port = server.port
        before = ports.setdefault(port, server) if port else server
        if before is not server:
            # utils/utils.py, find_free_port: swift's servers take the next free one.
            then = "fails" if server.name == "vllm serve" else "takes another silently"
            yield _fault(
                server, "port",
                f"port {port} is that of {before.name} on line {before.command.line}, "
                f"too: this {server.name} {then}",
            )  # fmt: skip
        if server.blocks and _is_here(start, server.kind):
            text = f"{server.name} blocks the lines below it: add & after it"
            yield _fault(server, "", text)
        yield from _rollout_server(start, server)
        yield from _teacher_server(start, server)
        yield from _shared(start, server)
    for kind, key in (("teacher", "teacher_server"), ("rollout", "rollout_server")):
        yield from _address(start, kind, key)


def _address(start: Start, kind: str, key: str) -> Iterator[Finding]:
    """Whether the trainer connects to where a server of its script listens."""
    servers = [server for server in start.servers if server.kind == kind]
    values = start.values()
    host, port = (values.get(f"{key}_{part}") for part in ("ip", "port"))
    if (
        not servers
        or host is None
        or port is None
        or any(s.port is None for s in servers)
    ):
        return
    asked = port.value if isinstance(port.value, list) else [port.value]
    listening = {server.port for server in servers}
    away = [number for number in asked if number not in listening]
    if away and all(isinstance(n, int) for n in asked) and _is_here(start, kind):
        option = "teacher_model_server" if kind == "teacher" else "vllm_server_port"
        first = servers[0]
        yield _fault(
            start, option,
            f"the {kind} is queried on port {away[0]}, and {first.name} on line "
            f"{first.command.line} listens on {first.port}",
        )  # fmt: skip


def _is_here(start: Start, kind: str) -> bool:
    """Whether the trainer looks for that server on its own machine."""
    key = "teacher_server_ip" if kind == "teacher" else "rollout_server_ip"
    value = start.values().get(key)
    hosts = value.value if value and isinstance(value.value, list) else None
    return value is not None and {*(hosts or [value.value])} <= {*HERE}


def _rollout_server(start: Start, server: Server) -> Iterator[Finding]:
    if server.kind != "rollout":
        return
    find = server.job.find
    needed, seen = _number(server.gpus()), visible(server.command.environment)
    if needed and seen is not None and len(seen) < needed:
        # arguments/deploy_args.py, _check_device_count
        text = f"swift rollout needs {needed} GPUs and sees {len(seen)}"
        yield _fault(server, "vllm_data_parallel_size", text)
    elif needed and seen is not None and len(seen) > needed:
        yield _fault(
            server, "vllm_data_parallel_size",
            f"swift rollout sees {len(seen)} GPUs and uses {needed}: set "
            "--vllm_data_parallel_size",
            "warning",
        )  # fmt: skip
    theirs, own = find("model"), start.get("model")
    if theirs.value and own.value and theirs.value != own.value:
        text = f"swift rollout serves {theirs.value}, and {own.value} is trained"
        yield _fault(server, "model", text, "warning")
    rank, most = (
        _number(one) for one in (start.get("lora_rank"), find("vllm_max_lora_rank"))
    )
    is_lora = find("vllm_enable_lora").value and start.value("tuner_type") == "lora"
    if is_lora and rank and most and rank > most:
        text = f"--vllm_max_lora_rank {most} is less than --lora_rank {rank}"
        yield _fault(server, "vllm_max_lora_rank", text)


def _teacher_server(start: Start, server: Server) -> Iterator[Finding]:
    if server.kind != "teacher" or start.algorithm.value != "gkd":
        return
    topk, most = (
        start.value("gkd_logits_topk"),
        _number(server.job.find("max_logprobs")),
    )
    if start.value("teacher_model_server") and topk and most and topk > most:
        yield _fault(
            server, "max_logprobs",
            f"{server.name} tells {most} tokens' probabilities at most, and "
            f"--gkd_logits_topk asks for {topk}: raise max_logprobs",
        )  # fmt: skip


def _shared(start: Start, server: Server) -> Iterator[Finding]:
    """GPUs that are given to two commands."""
    others: list[Any] = [start, *(s for s in start.servers if s is not server)]
    own = visible(server.command.environment)
    for other in others:
        theirs = visible(other.command.environment)
        if other is not start and start.servers.index(other) < start.servers.index(
            server
        ):
            continue
        shared = sorted(own & theirs) if own and theirs else []
        if shared:
            name = start.program if other is start else other.name
            # NCCL between the trainer and a rollout on one GPU fails; a teacher only
            # shares its memory.
            is_rollout = server.kind == "rollout" and other is start
            if other is start and not _is_here(start, server.kind):
                continue  # the script is meant for several machines
            yield _fault(
                server, "",
                f"GPU {', '.join(shared)} is given to {server.name}, and to {name} on "
                f"line {other.command.line}",
                "error" if is_rollout else "warning",
            )  # fmt: skip
