"""Where in a job a traceback was raised, told by the functions on the way."""

from __future__ import annotations

from pytest_gkd.diagnosis.patterns import Pattern

# How far around a line its traceback is looked for.
BEFORE, AFTER = 60_000, 20_000

# A frame as Python, rich's boxes and faulthandler print it.
_FRAME = Pattern(
    rb"(?:File \"(?P<file>[^\"\r\n]+)\", line \d+,? in|(?P<boxed>[\w./-]+\.py):\d+ in)"
    rb" (?P<function>[\w.<>]+)"
)
_START = Pattern(rb"Traceback \(most recent call last\)")
# What starts anew: after it frames belong to the exception that came of the first one.
_CHAINED = Pattern(
    rb"During handling of the above exception|was the direct cause of the following"
)
# An exception's own line: it ends the frames.
_RAISED = Pattern(
    rb"(?m)^[^\r\n]{0,200}?\b[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Fault)\b"
    rb"(?::|\s*$)"
)

# The innermost function that is in this table tells the phase. Those of verl
# (trainer/ppo/ray_trainer.py, workers/), TRL (trainer/, generation/), ms-swift
# (rlhf_trainers/), slime (backends/megatron_utils/actor.py, ray/), NeMo-RL
# (algorithms/, models/policy/), OpenRLHF (trainer/ray/), vLLM (v1/engine/core.py,
# v1/worker/), transformers, accelerate, DeepSpeed, Ray and datasets.
_PHASES = {
    "config": """
        __post_init__ _validate_config check_vocab_equality compose_config
        hydra_main parse_args parse_args_into_dataclasses validate_config
    """,
    "data": """
        _create_dataloader _map_single _prepare_dataset _prepare_split
        _read_files_and_tokenize collate_fn create_rl_dataset
        create_rl_sampler doc2len get_train_dataloader load_dataset
        maybe_filter_out_long_prompts prepare_datasets tokenize_fn
        tokenize_function
    """,
    "ray-init": """
        connect_or_create_cluster connect_to_cluster init_ray ray_init
        start_ray_processes
    """,
    "actor-init": """
        _build_model_optimizer _load_checkpoint _load_from_checkpoint
        _new_process_group_helper _prepare_deepspeed
        create_colocated_worker_cls create_resource_pool from_pretrained
        init_distributed init_model init_model_from_pretrained
        init_process_group init_workers initialize_megatron load_checkpoint
        load_other_checkpoint prepare_model setup_distributed
    """,
    "rollout-init": """
        _build_rollout _init_vllm _init_vllm_deferred _initialize_kv_caches
        _prepare_vllm _prepare_vllm_engine compile_or_warm_up_model
        create_engine_config create_vllm_engines determine_available_memory
        from_engine_args from_vllm_config init_device init_hybrid
        init_rollout_engines init_standalone initialize_from_config
        launch_server launch_servers wait_for_engine_startup
    """,
    "teacher-init": """
        _init_teacher _setup_teacher init_teacher load_teacher_model
        start_teacher_servers
    """,
    "weight-sync": """
        _init_vllm_sync_group _load_state_dict_to_vllm _move_adapter_to_vllm
        _move_model_to_vllm _push_param_to_vllm _sync_fsdp_params_to_vllm
        broadcast_to_vllm broadcast_weights_for_collective init_communicator
        init_weights_update_group nccl_reshard_refit push_weights
        receive_tensor receive_weights refit_policy_generation rollout_mode
        send_weights stream_weights_via_ipc_zmq sync_rollout_weights
        sync_weights update_named_param update_params update_weights
        update_weights_from_ipc update_weights_from_tensor
    """,
    "generation": """
        _generate _generate_and_score_completions _generate_single_turn
        _process_engine_step _rollout_samples _run_agent_loop agent_loop
        execute_model generate generate_on_policy_outputs generate_rollout
        generate_samples generate_sequences make_experience rollout
        run_multi_turn_rollout step_with_batch_queue
    """,
    "teacher": """
        _fetch_and_assemble_teacher_logprobs _fetch_teacher_logprobs
        _infer_teacher_requests compute_teacher_log_prob
        compute_teacher_logprobs get_prompt_topk_logprobs
        get_sequence_logprobs get_teacher_knowledge get_teacher_logprobs
        get_topk_logits
    """,
    "training-step": """
        _compute_loss _compute_old_log_prob _fully_shard_backward
        _get_per_token_logps_and_entropies _optimizer_step backward
        clip_grad_norm_ compute_log_prob compute_loss compute_ref_log_prob
        forward_backward_batch forward_backward_no_pipelining
        generalized_jsd_loss get_logprobs get_reference_policy_logprobs
        optimizer_step ppo_train train_actor train_batch train_critic
        train_mini_batch train_one_step train_step training_step
        update_actor update_critic update_policy
    """,
    "checkpoint": """
        _save_checkpoint _save_model _save_optimizer_and_scheduler
        async_save dist_checkpointing_save save_best_checkpoint
        save_checkpoint save_file save_logs_and_checkpoints save_model
        save_pretrained save_state
    """,
}
_PHASE_OF = {name: phase for phase, names in _PHASES.items() for name in names.split()}


def phase_of(text: bytes, at: int) -> str:
    """The phase that the traceback around a place of the text was raised in.

    Of chained exceptions the first counts, since the others came of it. Empty where
    there is no traceback, or none of its functions tells.
    """
    low = max(0, at - BEFORE)
    window = text[low : at + AFTER]
    starts = [match.start() for match in _START.finditer(window, 0, at - low + 1)]
    if not starts:
        return ""
    begin = starts[-1]
    while (
        len(starts) > 1 and _CHAINED.search(window, starts[-2], starts[-1]) is not None
    ):
        starts.pop()
        begin = starts[-1]
    raised = _RAISED.search(window, begin + 34)
    end = raised.start() if raised else None
    names = [
        match[b"function"].decode() for match in _FRAME.finditer(window, begin, end)
    ]
    phases = (_PHASE_OF.get(name.rpartition(".")[2]) for name in reversed(names))
    return next(filter(None, phases), "")
