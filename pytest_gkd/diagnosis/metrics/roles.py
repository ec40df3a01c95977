"""What a metric measures, by its name in each framework.

Names: verl, trainer/ppo/metric_utils.py and utils/debug/metrics.py; TRL,
trainer/grpo_trainer.py and gkd_trainer.py; NeMo-RL, algorithms/; slime, ray/rollout.py;
prime-rl, trainer/rl/train.py; Megatron-LM, training/training.py; vLLM, v1/metrics.
"""

from __future__ import annotations

import functools
import re

# The first that fits. A name is in lower case with _ for spaces.
_ROLES = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("validation loss", r"^(?:eval|val|validation)[_/]loss$|^lm_loss_value$"),
        (
            "other",
            r"eval|valid|^val|val-|test_|/min$|/max$|_min$|best_"
            r"|(?:^|[/_])(?:min|max|last|lowest|previous)[/_]loss$",
        ),
        ("step time", r"(?:timing_s|timing|time)/step(?:_total)?$"),
        ("part of the step", r"^(?:timing_s|timing|time|timeperf)/"),
        ("learning rate", r"(?:^|[/_])(?:lr|learning_rate|lr-pg_\d+)$"),
        ("loss scale", r"loss_scale"),
        ("gradient norm", r"grad(?:ient)?[_.]*norm|^norm$"),
        ("groups of equal reward", r"frac_reward_zero_std"),
        ("explained variance", r"explained_var"),
        ("spread", r"std|var(?:iance)?$"),
        ("truncated", r"response_length/clip_ratio|clipped_ratio|truncat|no_eos_ratio"),
        (
            "response length",
            r"(?:response|completion|output)s?[_/](?:mean_)?len(?:gth)?s?(?:/mean|_mean)?$"
            r"|completions?/mean_length|mean_(?:generation|response|completion)_length"
            r"|mean_gen_tokens|avg_num_tokens|(?:seq|response)_len/avg|gen(?:eration)?_len(?:gth)?(?:/mean)?$",
        ),
        ("agreement", r"pearson"),
        (
            "disagreement",
            r"rollout_probs_diff_mean|rollout_corr/(?:k3_)?kl|mismatch_kl"
            r"|sampling_logp_difference/mean|logprobs?_(?:abs_)?diff|gen(?:eration)?_kl"
            r"|token_mult_prob_error|vllm_kl",
        ),
        ("entropy", r"entropy(?!.*coef)"),
        ("likelihood of the chosen", r"logps/chosen$|chosen_logps?$"),
        ("likelihood of the rejected", r"logps/rejected$|rejected_logps?$"),
        ("return", r"(?:^|/)(?:critic/)?returns?/(?:mean|max|min)$"),
        ("imbalance", r"max_vio|imbalance|load_balanc|lb_loss|moe.*aux|aux_loss"),
        ("value loss", r"(?:critic|vf|value)_loss|loss/value"),
        ("policy loss", r"(?:pg|policy|actor|ppo)_loss|actor/loss|kl_loss"),
        ("loss", r"(?:^|[/_])loss(?:/mean|/avg|_step)?$"),
        ("KL", r"(?:^|[/_])kl(?:/mean|_mean)?$|approx_kl|ppo_kl"),
        ("reward", r"(?<!kl_)(?:rewards?|score)(?:/mean|_mean|/avg)?$|raw_reward"),
        (
            "step time",
            r"total_step_time|step_time|per_iteration|^s/it$|iter_time",
        ),
        (
            "memory",
            r"mem(?:ory)?.*(?:alloc|reserved|used|peak)|(?:peak|max|cpu)[_.]*mem"
            r"|^mem(?:ory)?(?:\(|$)|rss",
        ),
        ("waiting requests", r"^waiting$"),
        ("running requests", r"^running$"),
        ("throughput", r"throughput|tokens_per_s|samples/sec|samplespersec"),
        ("preference accuracy", r"rewards/accuracies$"),
        ("accuracy", r"(?:^|[/_])acc(?:uracy)?(?:/mean)?$"),
    )
)  # fmt: skip


# What a training step itself yields.
TRAINING = {"loss", "policy loss", "value loss", "gradient norm", "entropy", "reward"}


@functools.lru_cache(maxsize=4096)
def role(name: str) -> str:
    """What the metric measures; ``other`` if that is unknown or not judged."""
    plain = re.sub(r"[\s.]+", "_", name.strip().lower())
    return next((role for role, known in _ROLES if known.search(plain)), "other")
