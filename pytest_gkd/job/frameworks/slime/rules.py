"""What slime and miles themselves refuse, or do differently from what is written.

If no other source is named, a rule is from slime_validate_args and miles_validate_args
(slime/utils/arguments.py 0.2.4 to 0.3.1, miles/utils/arguments.py 0.1.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pytest_gkd import sanitize
from pytest_gkd.job import model_files
from pytest_gkd.job.arguments import MISSING
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import ray_start, recorded_options
from pytest_gkd.job.frameworks.recorded_options import CONFLICT, Rule, UnsureError
from pytest_gkd.job.frameworks.sglang_server import DEVICES, Server
from pytest_gkd.job.frameworks.slime.options import Known

HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")  # noqa: S104  compared with
REWARD = "rollout.on_policy_distillation.reward_func"
# config.json's names and Megatron's: _hf_validate_args
# (slime/backends/megatron_utils/arguments.py 0.3.1; hf_validate_args of miles 0.1.0).
ALIKE = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layernorm_epsilon",
}
DENSE = {"intermediate_size": "ffn_hidden_size"}
MOE_KEYS = {
    *("moe_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts")
}
BRIDGE = "megatron_to_hf_mode"


def _world(v: Known) -> int:
    return int(v["actor_num_nodes"] * v["actor_num_gpus_per_node"])


def _model(v: Known) -> int:
    """Megatron's total_model_size."""
    return int(
        v["tensor_model_parallel_size"]
        * v["pipeline_model_parallel_size"]
        * v["context_parallel_size"]
    )


def _samples(v: Known) -> int:
    return int(v["rollout_batch_size"] * v["n_samples_per_prompt"])


def _trains(v: Known) -> bool:
    return not v["debug_rollout_only"] and v["train_backend"] == "megatron"


def _has_fixed_batches(v: Known) -> bool:
    """Whether a rollout's samples are split into steps of --global-batch-size."""
    return bool(
        _trains(v)
        and not v.is_given("num_steps_per_rollout")
        and not v.is_given("use_dynamic_global_batch_size")
        and not v.is_given("custom_convert_samples_to_train_data_path")
        and v["global_batch_size"]
    )


def _serves(v: Known) -> bool:
    """Whether engines for the rollout are started here."""
    return (
        not v["debug_train_only"]
        and v["load_debug_rollout_data"] is None
        and not v.is_given("rollout_external_engine_addrs")
        and not v.is_given("rollout_external")
        and not v.is_given("sglang_config")
    )


RULES: tuple[Rule[Known], ...] = (
    Rule(
        "rollout_temperature",
        lambda v: v.is_at_least("0.3.1") and v["rollout_temperature"] <= 0,
        "--rollout-temperature is {rollout_temperature}, and slime refuses what is not "
        "above 0",
    ),
    Rule(
        "use_opd",
        lambda v: v["use_opd"] and v["opd_type"] is None,
        "--use-opd requires --opd-type: sglang, for a teacher behind --rm-url, or "
        "megatron, for one from --opd-teacher-load",
        MISSING,
    ),
    Rule(
        "opd_type",
        lambda v: (
            v["use_opd"] and v["opd_type"] == "megatron" and not v["opd_teacher_load"]
        ),
        "--opd-type megatron requires --opd-teacher-load",
        MISSING,
    ),
    Rule(
        "opd_teacher_load opd_type",
        lambda v: v["use_opd"] and v["opd_type"] == "sglang" and v["opd_teacher_load"],
        "--opd-teacher-load is refused with --opd-type sglang, whose teacher is behind "
        "--rm-url",
    ),
    Rule(
        "opd_teacher_load",
        lambda v: not v["use_opd"] and v["opd_teacher_load"],
        "--opd-teacher-load is refused without --use-opd",
    ),
    Rule(
        "opd_type opd_kl_coef",
        lambda v: (
            not v["use_opd"]
            and not v["opd_teacher_load"]
            and (v["opd_type"] or v.is_given("opd_kl_coef"))
        ),
        "nothing is distilled without --use-opd: the other --opd options count for "
        "nothing",
        level="warning",
    ),
    # reward_func posts to args.rm_url (slime/rollout/on_policy_distillation.py 0.3.1),
    # and loss.py raises without the teacher's log-probabilities.
    Rule(
        "use_opd opd_type custom_rm_path",
        lambda v: (
            v["use_opd"]
            and v["opd_type"] == "sglang"
            and str(v["custom_rm_path"] or "").endswith(REWARD)
            and not v["rm_url"]
            and not v.is_given("opd_teacher_urls")
        ),
        "the teacher's server is not named: --rm-url http://IP:PORT/generate",
        MISSING,
    ),
    Rule(
        "use_opd opd_type",
        lambda v: (
            v["use_opd"]
            and v["opd_type"] == "sglang"
            and not v["custom_rm_path"]
            and not v["custom_reward_post_process_path"]
            and not v["custom_generate_function_path"]
            and not v.is_given("rollout_function_path")
        ),
        "nothing queries the teacher: the loss raises without its log-probabilities; "
        "add --custom-rm-path and --custom-reward-post-process-path of "
        "slime.rollout.on_policy_distillation (reward_func, post_process_rewards)",
        MISSING,
    ),
    Rule(
        "custom_rm_path",
        lambda v: (
            str(v["custom_rm_path"] or "").endswith(REWARD)
            and not v["custom_reward_post_process_path"]
        ),
        "the teacher's answer is not a reward: add --custom-reward-post-process-path "
        "of slime.rollout.on_policy_distillation.post_process_rewards",
        MISSING,
    ),
    Rule(
        "rm_type",
        lambda v: v["rm_type"] == "remote_rm" and not v["rm_url"],
        "--rm-type remote_rm has no --rm-url to ask",
        MISSING,
    ),
    Rule(
        "use_kl_loss kl_coef",
        lambda v: (v["kl_coef"] or v["use_kl_loss"]) and not v["ref_load"],
        "--use-kl-loss and --kl-coef require the reference model: --ref-load",
        MISSING,
    ),
    # load_checkpoint asserts it (slime/backends/megatron_utils/model.py 0.3.1).
    Rule(
        "load",
        lambda v: (
            _trains(v)
            # In this mode the weights of --hf-checkpoint are used instead.
            and not (v.has(BRIDGE) and v[BRIDGE] == "bridge")
            and not v["load"]
            and not v["ref_load"]
            and not v["pretrained_checkpoint"]
        ),
        "there are no initial weights: neither --load nor --ref-load is given",
        MISSING,
    ),
    Rule(
        "eval_interval",
        lambda v: (
            v["eval_interval"] is not None
            and not v["eval_prompt_data"]
            and not v["eval_config"]
        ),
        "--eval-interval requires --eval-prompt-data NAME PATH",
        MISSING,
    ),
    Rule(
        "eval_prompt_data",
        lambda v: (
            not v["eval_config"]
            and len(v["eval_prompt_data"] or ()) > 1
            and len(v["eval_prompt_data"]) % 2
        ),
        "--eval-prompt-data takes pairs of a name and a path",
    ),
    Rule(
        "save_interval",
        lambda v: v["save_interval"] is not None and v["save"] is None,
        "--save-interval requires --save",
        MISSING,
    ),
    Rule(
        "kl_coef kl_loss_coef",
        lambda v: v["kl_coef"] and v["kl_loss_coef"],
        "--kl-coef {kl_coef} and --kl-loss-coef {kl_loss_coef}: only one may be set",
    ),
    Rule(
        "advantage_estimator",
        lambda v: (
            str(v["advantage_estimator"]).startswith("reinforce_plus_plus")
            and not v["normalize_advantages"]
        ),
        "--advantage-estimator {advantage_estimator} requires --normalize-advantages",
    ),
    Rule(
        "use_tis use_rollout_logprobs",
        lambda v: v["use_tis"] and v["use_rollout_logprobs"],
        "--use-rollout-logprobs and --use-tis are mutually exclusive",
    ),
    Rule(
        "get_mismatch_metrics",
        lambda v: v["get_mismatch_metrics"] and v["custom_tis_function_path"] is None,
        "--get-mismatch-metrics requires --custom-tis-function-path",
        MISSING,
    ),
    Rule(
        "use_dynamic_batch_size",
        lambda v: v["use_dynamic_batch_size"] and v["max_tokens_per_gpu"] is None,
        "--use-dynamic-batch-size requires --max-tokens-per-gpu",
        MISSING,
    ),
    Rule(
        "max_tokens_per_gpu",
        lambda v: v["max_tokens_per_gpu"] and not v["use_dynamic_batch_size"],
        "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size",
        level="warning",
    ),
    Rule(
        "balance_by_flops",
        lambda v: v["balance_by_flops"] and not v["use_dynamic_batch_size"],
        "--balance-by-flops requires --use-dynamic-batch-size",
    ),
    Rule(
        "debug_train_only debug_rollout_only",
        lambda v: v["debug_rollout_only"] and v["debug_train_only"],
        "--debug-rollout-only and --debug-train-only are mutually exclusive",
    ),
    Rule(
        "num_steps_per_rollout global_batch_size",
        lambda v: (
            v["num_steps_per_rollout"]
            and v["global_batch_size"]
            and v["global_batch_size"] != _samples(v) // v["num_steps_per_rollout"]
        ),
        "--global-batch-size {global_batch_size} is not --rollout-batch-size "
        "{rollout_batch_size} * --n-samples-per-prompt {n_samples_per_prompt} / "
        "--num-steps-per-rollout {num_steps_per_rollout}",
    ),
    # build_dp_schedule asserts it (slime/utils/dp_schedule.py 0.3.1); in earlier
    # releases and in miles the rollout raises ValueError.
    Rule(
        "rollout_batch_size n_samples_per_prompt global_batch_size",
        lambda v: _has_fixed_batches(v) and _samples(v) < v["global_batch_size"],
        "a rollout has {rollout_batch_size} * {n_samples_per_prompt} samples, too few "
        "for a step of --global-batch-size {global_batch_size}",
    ),
    Rule(
        "rollout_batch_size n_samples_per_prompt global_batch_size",
        lambda v: (
            _has_fixed_batches(v)
            and _samples(v) > v["global_batch_size"]
            and _samples(v) % v["global_batch_size"]
        ),
        "a rollout has {rollout_batch_size} * {n_samples_per_prompt} samples, which "
        "--global-batch-size {global_batch_size} does not divide: the rest is dropped",
        level="warning",
    ),
    Rule(
        "over_sampling_batch_size",
        lambda v: (v["over_sampling_batch_size"] or 1 << 60) < v["rollout_batch_size"],
        "--over-sampling-batch-size {over_sampling_batch_size} is below "
        "--rollout-batch-size {rollout_batch_size}",
    ),
    Rule(
        "num_rollout",
        lambda v: v["num_rollout"] is None and v["num_epoch"] is None,
        "neither --num-rollout nor --num-epoch is given",
        MISSING,
    ),
    Rule(
        "num_epoch",
        lambda v: v["num_rollout"] is not None and v["num_epoch"] is not None,
        "--num-epoch has no effect beside --num-rollout",
        level="warning",
    ),
    Rule(
        "enable_mtp_training",
        lambda v: v["enable_mtp_training"] and not v["mtp_num_layers"],
        "--enable-mtp-training requires --mtp-num-layers",
        MISSING,
    ),
    Rule(
        "rollout_max_context_len rollout_max_prompt_len",
        lambda v: (
            v["rollout_max_context_len"] is not None
            and v["rollout_max_prompt_len"] is not None
            and v["rollout_max_prompt_len"] >= v["rollout_max_context_len"]
        ),
        "--rollout-max-prompt-len {rollout_max_prompt_len} leaves no room in "
        "--rollout-max-context-len {rollout_max_context_len} for a response",
    ),
    Rule(
        "freeze_params_name_list only_train_params_name_list",
        lambda v: v["only_train_params_name_list"] and v["freeze_params_name_list"],
        "--only-train-params-name-list and --freeze-params-name-list are mutually "
        "exclusive",
    ),
    Rule(
        "update_weight_transport update_weight_disk_dir",
        lambda v: (
            v["update_weight_transport"] == "disk" and not v["update_weight_disk_dir"]
        ),
        "--update-weight-transport disk requires --update-weight-disk-dir",
        MISSING,
    ),
    Rule(
        "update_weight_mode colocate",
        lambda v: v["update_weight_mode"] == "delta" and v["colocate"],
        "--update-weight-mode delta is refused with --colocate",
    ),
    Rule(
        "update_weight_mode update_weight_transport",
        lambda v: (
            v["update_weight_mode"] == "delta"
            and v["update_weight_transport"] != "disk"
        ),
        "--update-weight-mode delta requires --update-weight-transport disk",
    ),
    Rule(
        "update_weight_mode",
        lambda v: (
            v["update_weight_mode"] == "delta"
            and not v["update_weight_local_checkpoint_dir"]
        ),
        "--update-weight-mode delta requires --update-weight-local-checkpoint-dir",
        MISSING,
    ),
    # train_async.py
    Rule(
        "colocate",
        lambda v: v["colocate"] and "train_async" in v.launch.program,
        "train_async.py refuses --colocate: the rollout goes on while it trains",
    ),
    # Summing the GPUs is a TypeError (slime/ray/placement_group.py).
    Rule(
        "rollout_num_gpus",
        lambda v: (
            not v["debug_train_only"]
            and v["load_debug_rollout_data"] is None
            and not v["colocate"]
            and v["rollout_num_gpus"] is None
            and not v.is_given("rollout_external_engine_addrs")
            and not v.is_given("rollout_external")
        ),
        "without --colocate the rollout needs --rollout-num-gpus",
        MISSING,
    ),
    # slime/ray/rollout.py: engines = GPUs // min(GPUs per engine, GPUs per node).
    Rule(
        "rollout_num_gpus_per_engine rollout_num_gpus",
        lambda v: (
            _serves(v) and 0 < _rollout_gpus(v) < v["rollout_num_gpus_per_engine"]
        ),
        "the rollout has fewer GPUs than --rollout-num-gpus-per-engine "
        "{rollout_num_gpus_per_engine}",
    ),
    Rule(
        "rollout_num_gpus_per_engine rollout_num_gpus",
        lambda v: (
            _serves(v)
            and _rollout_gpus(v) > v["rollout_num_gpus_per_engine"]
            and _rollout_gpus(v) % v["rollout_num_gpus_per_engine"]
        ),
        "--rollout-num-gpus-per-engine {rollout_num_gpus_per_engine} does not divide "
        "the rollout's GPUs: the rest is idle",
        level="warning",
    ),
    # slime/backends/sglang_utils/arguments.py, validate_args.
    Rule(
        "rollout_num_gpus_per_engine sglang_pp_size",
        lambda v: (
            v.name == "slime"
            and v["sglang_pp_size"] > 1
            and v["rollout_num_gpus_per_engine"] % v["sglang_pp_size"]
        ),
        "--rollout-num-gpus-per-engine {rollout_num_gpus_per_engine} is not a multiple "
        "of SGLang's pipeline parallel size {sglang_pp_size}",
    ),
    Rule(
        "sglang_dp_size",
        lambda v: v["sglang_dp_size"] > 1 and not v["sglang_enable_dp_attention"],
        "SGLang's data parallel size {sglang_dp_size} requires "
        "--sglang-enable-dp-attention",
    ),
    # sglang/srt/server_args.py: tp_size % dp_size == 0 under DP attention.
    Rule(
        "rollout_num_gpus_per_engine sglang_dp_size",
        lambda v: (
            v["sglang_enable_dp_attention"]
            and v["sglang_dp_size"] > 1
            and v["rollout_num_gpus_per_engine"]
            // max(1, v["sglang_pp_size"])
            % v["sglang_dp_size"]
        ),
        "SGLang's data parallel size {sglang_dp_size} does not divide the "
        "{rollout_num_gpus_per_engine} GPUs of an engine",
    ),
    # Megatron's own: megatron/training/arguments.py, validate_args, and
    # megatron/core/transformer/transformer_config.py at the commits in the Dockerfiles.
    Rule(
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size",
        lambda v: _trains(v) and _world(v) % _model(v),
        "the trainer has {actor_num_nodes} * {actor_num_gpus_per_node} GPUs, no "
        "multiple of tensor {tensor_model_parallel_size} * pipeline "
        "{pipeline_model_parallel_size} * context {context_parallel_size} parallel",
    ),
    # megatron/core/parallel_state.py, for the groups of experts.
    Rule(
        "expert_model_parallel_size expert_tensor_parallel_size",
        lambda v: (
            _trains(v)
            and v["expert_model_parallel_size"] > 1
            and _world(v)
            % (
                v["expert_model_parallel_size"]
                * v["pipeline_model_parallel_size"]
                * (v["expert_tensor_parallel_size"] or v["tensor_model_parallel_size"])
            )
        ),
        "the trainer has {actor_num_nodes} * {actor_num_gpus_per_node} GPUs, no "
        "multiple of expert parallel {expert_model_parallel_size} * its tensor "
        "parallel {expert_tensor_parallel_size} * pipeline parallel "
        "{pipeline_model_parallel_size}",
    ),
    Rule(
        "expert_model_parallel_size num_experts",
        lambda v: (
            _trains(v)
            and v["expert_model_parallel_size"] > 1
            and (
                not v["num_experts"]
                or v["num_experts"] % v["expert_model_parallel_size"]
            )
        ),
        "--expert-model-parallel-size {expert_model_parallel_size} does not divide "
        "--num-experts {num_experts}",
    ),
    Rule(
        "tensor_model_parallel_size num_attention_heads",
        lambda v: (
            _trains(v)
            and v["num_attention_heads"]
            and v["num_attention_heads"] % v["tensor_model_parallel_size"]
        ),
        "--tensor-model-parallel-size {tensor_model_parallel_size} does not divide "
        "--num-attention-heads {num_attention_heads}",
    ),
    Rule(
        "tensor_model_parallel_size num_query_groups",
        lambda v: (
            _trains(v)
            and v["group_query_attention"]
            and v["num_query_groups"] % v["tensor_model_parallel_size"]
            and v["tensor_model_parallel_size"] % v["num_query_groups"]
        ),
        "--num-query-groups {num_query_groups} and --tensor-model-parallel-size "
        "{tensor_model_parallel_size}: neither divides the other",
    ),
    Rule(
        "pipeline_model_parallel_size num_layers",
        lambda v: (
            _trains(v)
            and v["num_layers"]
            and v["num_layers"] % v["pipeline_model_parallel_size"]
            and not any(
                v[key]
                for key in (
                    "decoder_first_pipeline_num_layers",
                    "decoder_last_pipeline_num_layers",
                    "pipeline_model_parallel_layout",
                    "num_layers_per_virtual_pipeline_stage",
                    "num_virtual_stages_per_pipeline_rank",
                    "account_for_embedding_in_pipeline_split",
                    "account_for_loss_in_pipeline_split",
                )
            )
        ),
        "--pipeline-model-parallel-size {pipeline_model_parallel_size} does not divide "
        "--num-layers {num_layers}; say how with --decoder-last-pipeline-num-layers",
    ),
    Rule(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        lambda v: (
            _trains(v)
            and v["pipeline_model_parallel_size"] == 1
            and (
                v["decoder_first_pipeline_num_layers"] is not None
                or v["decoder_last_pipeline_num_layers"] is not None
            )
        ),
        "--decoder-first- and --decoder-last-pipeline-num-layers are refused without "
        "pipeline parallelism",
    ),
    Rule(
        "recompute_granularity recompute_method",
        lambda v: (
            _trains(v)
            and v["recompute_granularity"] == "selective"
            and v["recompute_method"]
        ),
        "--recompute-method is refused with --recompute-granularity selective",
    ),
    # build_dp_schedule: "each step needs at least one sample per rank".
    Rule(
        "global_batch_size",
        lambda v: (
            _trains(v)
            and v["global_batch_size"]
            and not _world(v) % _model(v)
            and v["global_batch_size"] < _world(v) // _model(v)
        ),
        "a step of --global-batch-size {global_batch_size} has fewer samples than "
        "there are data parallel ranks",
    ),
)


def judged(v: Known) -> Iterator[Finding]:
    """All that is wrong with a start, as far as its values are certain."""
    checks = (_addresses, _devices, _ray, _shape, _tokenizers, _absent, _others)
    return recorded_options.judged(v, RULES, checks)


def _rollout_gpus(v: Known) -> int:
    own = v["rollout_num_gpus"]
    if v["colocate"] and (own is None or not v.is_at_least("0.3.0")):
        return _world(v)
    if own is None:
        raise UnsureError("rollout_num_gpus")
    return int(own)


# -- the teacher's server ----------------------------------------------------------


def _urls(v: Known) -> list[str]:
    """The URLs at which the teachers are queried; miles names several as NAME=URL."""
    if v.is_given("opd_teacher_urls"):
        return [str(pair).partition("=")[2] for pair in v["opd_teacher_urls"] or ()]
    return [str(v["rm_url"])] if v["rm_url"] else []


def teacher_places(v: Known) -> list[tuple[str, int]]:
    """The hosts and ports of the teachers; empty if they are not certain."""
    try:
        found = []
        for url in _urls(v):
            parts = urlsplit(url)
            if parts.hostname:
                found.append((parts.hostname, parts.port or 80))
    except (UnsureError, ValueError):
        return []
    return list(dict.fromkeys(found))


def teachers(v: Known) -> list[Server]:
    """This script's servers for the teachers' queries; empty unless all are known."""
    places = teacher_places(v)
    by_port = {server.find("port").value: server for server in v.servers}
    found = [by_port.get(port) for host, port in places if host in HERE]
    known = [server for server in found if server is not None]
    return known if len(known) == len(places) else []


def _distills(v: Known) -> bool:
    return bool(v["use_opd"] and v["opd_type"] == "sglang")


def _addresses(v: Known) -> Iterator[Finding]:
    """A teacher that is queried where no server of this script listens."""
    if not _distills(v):
        return
    key = "opd_teacher_urls" if v.is_given("opd_teacher_urls") else "rm_url"
    ports = [server.find("port") for server in v.servers]
    listening = [port.value for port in ports]
    for host, port in teacher_places(v):
        is_known = ports and not any(given.needs for given in ports)
        if host in HERE and is_known and port not in listening:
            some = ", ".join(map(str, listening))
            text = (
                f"the teacher is queried on port {port}, its server listens on {some}"
            )
            yield v.fault(CONFLICT, "error", text, key)
    for url in _urls(v):
        if str(v["custom_rm_path"] or "").endswith(REWARD):
            try:
                path = urlsplit(url).path
            except ValueError:
                text = f"{url[:80]} is not an address"
                yield v.fault(CONFLICT, "error", text, key)
                continue
            # It posts input_ids, which only SGLang's own /generate takes.
            if not path.endswith("/generate"):
                text = (
                    f"the teacher is queried at {url[:80]}; SGLang answers at /generate"
                )
                yield v.fault(CONFLICT, "error", text, key)
    answer = v["rollout_max_response_len"]
    for server in teachers(v):
        if server.command.waits:
            word = server.command.words[0]
            text = "the script waits for the teacher's server to end: add & after it"
            yield Finding(CONFLICT, "error", text, word.file, word.line, "")
        length = server.find("context_length").value
        if length and answer and length <= answer:
            text = (
                f"the teacher takes {length} tokens (--context-length), and an answer "
                f"alone may have --rollout-max-response-len {answer}"
            )
            yield v.fault(CONFLICT, "error", text, "rollout_max_response_len")


def _total(v: Known) -> int:
    train = _world(v)
    if v["debug_train_only"] or v["load_debug_rollout_data"] is not None:
        return train
    rollout = _rollout_gpus(v)
    return max(train, rollout) if v["colocate"] else train + rollout


def _ray(v: Known) -> Iterator[Finding]:
    """More GPUs than Ray has."""
    if v["actor_num_nodes"] == 1:
        yield from ray_start.too_few(v.launch.beside, _total(v))


def _devices(v: Known) -> Iterator[Finding]:
    """A teacher's server on GPUs that Ray also gives to the job.

    Ray assigns the GPUs of a node from the first on.
    """
    found = ray_start.gpus(v.launch.beside)
    number = found[0] if found else 0
    total = _total(v)
    for server in v.servers:
        devices = server.devices() or ()
        word = server.command.environment.get(DEVICES)
        shared = [one for one in devices if one < min(total, number)]
        if word is None or not shared or v["actor_num_nodes"] != 1:
            continue
        text = (
            f"{DEVICES}={word.text.value}: the job takes GPU 0 to "
            f"{min(total, number) - 1}, so that the server and the job share "
            f"{', '.join(map(str, shared))}"
        )
        yield Finding(CONFLICT, "warning", text, word.file, word.line, DEVICES)


# -- files -------------------------------------------------------------------------


def _shape(v: Known) -> Iterator[Finding]:
    """The model's shape compared with its checkpoint's, as in _hf_validate_args."""
    place = v["hf_checkpoint"]
    if not place or not _trains(v):
        return
    config = model_files.config(place)
    pairs = dict(ALIKE) if MOE_KEYS & config.keys() else {**ALIKE, **DENSE}
    for theirs, ours in pairs.items():
        if theirs in config and v[ours] is not None and config[theirs] != v[ours]:
            message = (
                f"--{ours.replace('_', '-')} is {v[ours]}, and {theirs} in the "
                f"checkpoint's config.json is {config[theirs]}: {v.name} refuses it"
            )
            yield v.fault(CONFLICT, "error", message, ours)


def _tokenizers(v: Known) -> Iterator[Finding]:
    """A teacher with another tokenizer: it is sent the student's token ids."""
    if not _distills(v) or not v["hf_checkpoint"]:
        return
    for server in teachers(v):
        teacher = server.find("model_path").value
        said, _ = model_files.other_tokenizer(v["hf_checkpoint"], teacher)
        if said:
            text = (
                f"{said}: the teacher {teacher} is sent the student's token numbers, "
                "and nothing compares the two"
            )
            yield v.fault(CONFLICT, "warning", text, "hf_checkpoint", "rm_url")


def _absent(v: Known) -> Iterator[Finding]:
    """Paths that are not on this machine."""
    gone = []
    for key in ("hf_checkpoint", "ref_load", "opd_teacher_load", "prompt_data"):
        given = v.find(key)
        path = str(given.value or "")
        if path.startswith("/") and not Path(path.partition("@[")[0]).exists():
            gone.append((f"--{key.replace('_', '-')} {path}", key))
    if gone:
        some = ", ".join(option for option, _ in gone)
        text = f"not on this machine: {some}"
        yield v.fault(MISSING, "warning", text, *(key for _, key in gone))


def _others(v: Known) -> Iterator[Finding]:
    """Secrets in the file, and a configuration that overrides these options."""
    given = v.find("wandb_key")
    value = str(given.value or "")
    if value and sanitize.names_secret("--wandb-key", value):
        text = "whoever can read the script can read the key: export WANDB_API_KEY"
        yield v.fault(CONFLICT, "warning", text, "wandb_key")
    if v.is_given("custom_config_path"):
        text = "its keys override the options of the same names; it is not read here"
        yield v.fault("", "note", text, "custom_config_path")
