"""verl's keys, from the trees that it generates, and the names valid for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import documents, hydra_compose
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

TREE = re.compile(r"verl/trainer/config/_generated_ppo_(?:(\w+?)_)?trainer\.yaml")
CONFIG = re.compile(r"verl/trainer/config/((?!.*_generated_|eval)[\w/]+)\.yaml")
MODEL = "actor_rollout_ref.model.path"
FSDP = "dp"  # model_engine's own name for it
# The names valid for a key: files, and a pattern whose matches contain all of them.
# Those that user code may extend, by a decorator or a module of its own, are open.
CORE, ROLLOUT = "verl/trainer/ppo/core_algos.py", "actor_rollout_ref.rollout"
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
OPEN_CHOICES = {
    "algorithm.adv_estimator": (CORE, r"^    [A-Z_]+ = \"\w+\"$"),
    f"{ACTOR}.policy_loss.loss_mode": (CORE, r"^@register_policy_loss\(\"\w+\"\)"),
    f"{ROLLOUT}.name": (
        "verl/workers/rollout/replica.py",
        r"^RolloutReplicaRegistry\.register\(\"\w+\"",
    ),
    f"{ROLLOUT}.checkpoint_engine.backend": (
        r"verl/checkpoint_engine/\w+\.py",
        r"^@CheckpointEngineRegistry\.register\(\"\w+\"\)",
    ),
    "distillation.distillation_loss.loss_mode": (
        "verl/trainer/distillation/losses.py",
        r"DistillationLossSettings\(names=\[[^\]]*\]",
    ),
    "trainer.v1.trainer_mode": (
        r"verl/trainer/ppo/v1/\w+\.py",
        r"^@register_trainer\(\"\w+\"\)",
    ),
    "reward.reward_manager.name": (
        r"verl/experimental/reward_loop/reward_manager/\w+\.py",
        r"^@register\(\"\w+\"\)",
    ),
}
CLOSED_CHOICES = {
    f"{ACTOR}.loss_agg_mode": (
        "verl/workers/config/actor.py",
        r"valid_loss_agg_modes = \[[^\]]*\]",
    ),
    f"{ACTOR}.router_replay.mode": (
        "verl/workers/config/actor.py",
        r"valid_modes = \[[^\]]*\]",
    ),
    f"{ACTOR}.kl_loss_type": (CORE, r"if kl_penalty (?:==|in) [(\"][^:]*(?<!full\"):$"),
    "algorithm.kl_penalty": (CORE, r"if kl_penalty (?:==|in) [(\"][^:]*(?<!full\"):$"),
    "algorithm.kl_ctrl.type": (CORE, r"if kl_ctrl\.type == \"\w+\""),
    f"{CORRECTION}.loss_type": (CORE, r"if loss_type == \"\w+\""),
    f"{CORRECTION}.rollout_is": (
        "verl/trainer/ppo/rollout_corr_helper.py",
        r"valid_is_levels = \{[^}]*\}",
    ),
    f"{CORRECTION}.rollout_rs": (
        "verl/trainer/ppo/rollout_corr_helper.py",
        r"SUPPORTED_ROLLOUT_RS_OPTIONS: set\[str\] = \{[^}]*\}",
    ),
    "trainer.logger": ("verl/utils/tracking.py", r"supported_backend = \[[^\]]*\]"),
}
# Each engine's configuration accepts its own strategies.
ENGINE = "verl/workers/config/engine.py"
STRATEGIES = r"assert self\.strategy (?:in|==) (.*?)(?:, f\"|$)"


def read(files: Files) -> Schema:
    """The keys under FSDP, and the differences for each other ``model_engine=``."""
    engines = {}
    for name, text in files.items():
        found = TREE.fullmatch(name)
        if found:
            settings = documents.settings_of(text, name)
            engines[found[1] or FSDP] = {one.key: one.value for one in settings}
    if FSDP not in engines:
        raise SourceError("it has no verl/trainer/config/_generated_ppo_trainer.yaml")
    common = engines[FSDP]
    if MODEL not in common:
        raise SourceError(f"its configuration has no key {MODEL}")
    changes: dict[str, Any] = {}
    for engine, own in sorted(engines.items()):
        changed = {k: v for k, v in own.items() if common.get(k, ...) != v}
        changes[engine] = {
            "changed": changed,
            "absent": sorted(common.keys() - own.keys()),
        }
    asserted = re.findall(STRATEGIES, files.get(ENGINE, ""), re.MULTILINE)
    return {
        "keys": common,
        "engines": changes,
        "open": _choices(files, OPEN_CHOICES),
        "closed": _choices(files, CLOSED_CHOICES),
        "configs": _configs(files),
        "strategies": [re.findall(r"[\"'](\w+)[\"']", one) for one in asserted],
    }


def _choices(
    files: Files, table: Mapping[str, tuple[str, str]]
) -> dict[str, list[str]]:
    """The quoted names in the matches of each pattern, in file order."""
    found = {}
    for key, (wanted, pattern) in table.items():
        texts = matching(files, wanted).values()
        parts = [m[0] for t in texts for m in re.finditer(pattern, t, re.MULTILINE)]
        names = [n for part in parts for n in re.findall(r"\"([\w-]+)\"", part)]
        if names:
            found[key] = list(dict.fromkeys(names))
    return found


def _configs(files: Files) -> dict[str, Any]:
    """The files that the trees are composed of, by path without the suffix."""
    found = {}
    for name, text in files.items():
        own = CONFIG.fullmatch(name)
        if own is None:
            continue
        settings = documents.settings_of(text, name, documents.OMEGACONF)
        one = hydra_compose.config_file(text, settings)
        keys = {setting.key: setting.value for setting in one.settings}
        found[own[1]] = {"package": one.package, "defaults": one.defaults, "keys": keys}
    return found


SOURCE = Source(
    {
        "verl": (
            "verl/trainer/config/**/*.yaml",
            "verl/trainer/ppo/*.py",
            "verl/trainer/ppo/v1/*.py",
            "verl/trainer/distillation/losses.py",
            "verl/workers/config/*.py",
            "verl/workers/rollout/replica.py",
            "verl/checkpoint_engine/*.py",
            "verl/experimental/reward_loop/reward_manager/*.py",
            "verl/utils/tracking.py",
        )
    },
    read,
)
