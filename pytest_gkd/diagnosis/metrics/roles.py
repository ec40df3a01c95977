"""What a metric measures, by its name in each framework, else by the words of it.

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
            r"|(?:^|[/_])(?:min|max|last|lowest|previous)[/_]loss$"
            r"|(?:^|[/_])(?:min|max)[/_](?:rewards?|score|kl|entropy)$",
        ),
        ("step time", r"(?:timing_s|timing|time|perf)/step(?:_total|_time)?(?:_m?s)?$"),
        ("part of the step", r"^(?:timing_s|timing|time|timeperf)/"),
        ("learning rate", r"(?:^|[/_])(?:lr|learning_rate|lr-pg_\d+)$"),
        ("loss scale", r"loss_scale"),
        ("skipped steps", r"^skipped$|^number_of_skipped_iterations$"),
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
        ("entropy", r"(?<!cross)(?<!cross_)entropy(?!.*coef)"),
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


# Short forms and other words for one and the same, those of a Chinese log included.
_SAME = {
    word: known
    for known, words in {
        "loss": "nll xent ce bce mse rmse mae logloss mlogloss 损失 损失值",
        "grad norm": "gnorm gn 梯度范数",
        "grad": "gradient gradients 梯度",
        "lr": "学习率",
        "reward": "rewards rew 奖励",
        "entropy": "ent 熵",
        "accuracy": "acc top1 准确率",
        "memory": "mem vram rss 显存 内存",
        "length": "len lengths lens 长度",
        "response": "responses resp completion completions generated output outputs "
        "answer answers rollout gen generation 回复",
        "eval": "evaluation val valid validation test dev heldout 验证",
        "mean": "avg average episodic",
        "second": "s sec secs seconds",
        "time": "dt ms duration latency took timing 耗时",
        "step": "steps iter iteration it batch 步数",
        "throughput": "tps wps ups sps tflops tflop flops mfu toks speed fps 吞吐",
        "token": "tokens tok sample samples seqs images img batches examples",
        "data": "dataloader loader load loading",
        "expert": "experts",
        "dead": "unused inactive",
        "clip fraction": "clipfrac",
        "balance": "balancing imbalance lb aux",
        "accept": "acceptance accepted",
        "request": "req reqs requests",
        "queue": "queued waiting pending",
    }.items()
    for word in words.split()
}
_WORD = re.compile(r"[A-Z]?[a-z]+\d?|[A-Z]+(?![a-z])|\d+|[\u4e00-\u9fff]+")


def _set(words: str) -> set[str]:
    return set(words.split())


_PER_STEP = re.compile(
    r"(?:^|[/( _])(?:m?s|secs?|seconds)(?:/|_per_)(?:it|iter|iteration|step|batch)\b"
)
_PER_SECOND = re.compile(
    r"(?:steps?|it|iters?|batch(?:es)?)(?:/|_per_)s(?:ec(?:ond)?)?\b"
)
# With one of these it is a setting, an extreme or a count.
_NOT_ITSELF = _set(
    "coef coeff coefficient beta target limit threshold best min max last lowest std "
    "var previous initial weight mask ratio count num id rank idx fn type agg penalty "
    "warmup decay scheduler zero format py cc cpp cu"
)
# With one of these it is a sentence.
_SAID = _set("is are was be not no non at the a an set with from after since")
_PARTS = _set(
    "data response update sync weights forward backward fwd bwd optim optimizer reward "
    "teacher ref logprob logprobs comm reduce train"
)
_OF_A_STEP = {"time", "second", "step", "per", "train", "training", "in", "end", "to"}


def _by_words(name: str) -> str:
    """What a metric measures whose name is none of those above.

    A word of a name may be short for another: ``rew_avg``, ``gpu_mem_mb``, ``gnorm``.
    """
    told = [word.lower() for word in _WORD.findall(name)]
    if _SAID.intersection(told):
        return "other"
    words = set(" ".join(_SAME.get(word, word) for word in told).split())
    if "memory" in words and not words & _NO_MEMORY:
        return "free memory" if "free" in words else "memory"
    if words in ({"gb", "free"}, {"gpu", "gb", "free"}):
        return "free memory"
    if {"clip", "clipped"} & words and {"frac", "fraction", "ratio"} & words:
        return "other" if "response" in words else "clipped share"
    if "skipped" in words and not words & {"time", "loss"}:
        return "skipped steps"
    if "staleness" in words or {"policy", "level"} <= words:
        return "staleness"
    if "request" in words and not words & {"time", "total"}:
        return next((f"{a} requests" for a in _HELD if _HELD[a] in words), "other")
    if words & ({"coef", "weight", "py"} if "loss" in words else _NOT_ITSELF):
        return "other"
    if "eval" in words:
        return next((role for word, role in _OF_EVAL if word in words), "other")
    for role, needed, barred in _BY_WORDS:
        if needed <= words and not words & barred:
            return role
    return _of_time(words)


def _of_time(words: set[str]) -> str:
    if "throughput" in words or {"token", "second"} <= words:
        return "throughput"
    if words == {"data"}:
        return "part of the step"
    if not {"time", "second"} & words or words & {"eta", "total", "mean"}:
        return "other"
    if words <= _OF_A_STEP:
        return "step time"
    return "part of the step" if words & _PARTS else "other"


_NO_MEMORY = _set(
    "total util utilization fraction bandwidth percent efficient limit min"
)
_HELD = {"waiting": "queue", "running": "running"}
_OF_EVAL = (
    ("loss", "validation loss"),
    ("accuracy", "validation score"),
    ("reward", "validation score"),
    ("score", "validation score"),
)
_BY_WORDS = tuple(
    (role, _set(needed), _set(barred))
    for role, needed, barred in (
        ("loss scale", "loss scale", ""),
        ("value loss", "loss critic", ""),
        ("value loss", "loss value", "lm train eval"),
        ("imbalance", "loss balance", ""),
        ("policy loss", "loss policy", ""),
        ("policy loss", "loss kl", ""),
        (
            *("loss", "loss"),
            "mask token fn type agg ratio count num time z max min std var best last "
            "lowest previous scale pg per spike",
        ),
        ("dead experts", "dead expert", ""),
        ("gradient norm", "grad norm", "clip clipped max"),
        ("gradient norm", "norm", "param params weight weights layer clip"),
        ("learning rate", "lr", "actor critic mult"),
        ("draft acceptance", "accept rate", ""),
        ("disagreement", "kl vllm", ""),
        ("disagreement", "kl mismatch", ""),
        ("KL", "kl", "loss reward penalty"),
        (
            *("reward", "reward"),
            "kl time advantage batch model frac fraction second chosen rejected margin "
            "margins accuracies",
        ),
        ("reward", "return mean", "std min max advantage"),
        ("accuracy", "accuracy", "step steps"),
        ("response length", "response length", "prompt total"),
        ("response length", "response token mean", "prompt total second time"),
        ("entropy", "entropy", "loss"),
    )
)
# Names of a word or two that mean nothing within longer ones.
_ALONE = {"grad": "gradient norm", "length": "response length"}


# What a training step itself yields.
TRAINING = {"loss", "policy loss", "value loss", "gradient norm", "entropy", "reward"}


@functools.lru_cache(maxsize=4096)
def role(name: str) -> str:
    """What the metric measures; ``other`` if that is unknown or not judged."""
    plain = _plain(name)
    if known := _listed(plain):
        return known
    if plain.startswith("train_speed"):  # ms-swift's, an average over all steps so far
        return "other"
    if _PER_STEP.search(plain):
        return "step time"
    if _PER_SECOND.search(plain):
        return "throughput"
    alone = _SAME.get(plain, plain)
    return _ALONE.get(alone) or _by_words(name)


@functools.lru_cache(maxsize=4096)
def is_listed(name: str) -> bool:
    """Whether its role is told by a framework's own name, not by the words of it."""
    return _listed(_plain(name)) != ""


def _plain(name: str) -> str:
    return re.sub(r"[\s.]+", "_", name.strip().lower())


def _listed(plain: str) -> str:
    known = next((role for role, known in _ROLES if known.search(plain)), "")
    return known if known != "other" else ""
