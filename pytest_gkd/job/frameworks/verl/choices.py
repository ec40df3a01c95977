"""Names that a release of verl accepts for a key: engines, estimators, losses.

sources/verl.py reads them from its registries and checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.overrides import Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.options import near

CAUSE = "config.unknown-option"
ACTOR = "actor_rollout_ref.actor"
STRATEGY = f"{ACTOR}.strategy"
CORRECTION = "algorithm.rollout_correction"
LOGGER = "trainer.logger"
# Values that the code compares a key with: _load_checkpoint of
# trainer/ppo/ray_trainer.py and v1/trainer_base.py; FSDPOptimizerConfig of
# workers/config/optimizer.py. A table, since they are in no registry or annotation but
# in the ifs of two methods and in an assert; they are the same in 0.8.0, 0.9.0 and
# 0.9.1.
COMPARED = {"trainer.resume_mode": ["disable", "auto", "resume_path"]}
COMPARED_BY_FSDP = {f"{ACTOR}.optim.lr_scheduler_type": ["constant", "cosine"]}
# Keys that are read only if another key is true.
CONDITIONS = {
    f"{ACTOR}.kl_loss_type": f"{ACTOR}.use_kl_loss",
    "algorithm.kl_penalty": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.type": "algorithm.use_kl_in_reward",
    "distillation.distillation_loss.loss_mode": "distillation.enabled",
    f"{CORRECTION}.loss_type": f"{CORRECTION}.bypass_mode",
    "trainer.v1.trainer_mode": "trainer.use_v1",
}


def judged(said: Iterable[Override], job: Job, release: Release) -> Iterator[Finding]:
    """Names that the release does not know, with similar ones.

    An error if verl refuses all others, a warning if user code may register more.
    """
    schema = release.schema
    is_fsdp = job.value(STRATEGY).value in ("fsdp", "fsdp2")
    compared = {**COMPARED, **(COMPARED_BY_FSDP if is_fsdp else {})}
    for override in said:
        key, word = override.key, override.word
        if override.needs or job.value(key).word is not word:
            continue  # not certain, or overridden later
        if key == STRATEGY:
            text, level = _strategy(override.value, job, schema, release)
            if text:
                yield Finding(CAUSE, level, text, word.file, word.line, key)
            continue
        is_open = key in schema["open"]
        known = schema["open" if is_open else "closed"].get(key) or compared.get(key)
        if known is None or not _counts(key, job):
            continue
        for name in _names(key, override.value):
            if name in known:
                continue
            text = f"{key}={name}: verl {release} knows {', '.join(known)}"
            hint = near(name, known).rstrip(".")
            more = "; another one has to be registered by code of your own"
            level = "warning" if is_open else "error"
            text += hint or (more if is_open else "")
            yield Finding(CAUSE, level, text, word.file, word.line, key)


def _counts(key: str, job: Job) -> bool:
    """Whether verl reads the key at all."""
    if key == "reward.reward_manager.name":
        return bool(job.value("reward.reward_manager.source").value == "register")
    if key.endswith(".checkpoint_engine.backend"):
        module = job.value(key.replace(".backend", ".custom_backend_module"))
        return bool(module.value is None and not module.needs)
    condition = CONDITIONS.get(key)
    return condition is None or job.value(condition).value is True


def _names(key: str, value: Any) -> list[str]:
    """The names in a value, without what verl strips from them."""
    if value is None or (isinstance(value, str) and ("${" in value or value == "???")):
        return []
    if key == LOGGER:
        names = value if isinstance(value, list) else [value]
        # utils/tracking.py: an old name of wandb.
        return [str(name) for name in names if name != "tracking"]
    if key == f"{CORRECTION}.rollout_rs":
        return [name.strip() for name in str(value).split(",") if name.strip()]
    if key in (f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty"):
        return [str(value).removesuffix("+")]
    return [str(value)]


def _strategy(
    value: Any, job: Job, schema: dict[str, Any], release: Release
) -> tuple[str, str]:
    """A strategy that the job's model engine does not accept, and how bad that is."""
    default = job.default(STRATEGY)
    own: list[str] = next((s for s in schema["strategies"] if default in s), [])
    others = [name for some in schema["strategies"] for name in some]
    if not own or value in own:
        return "", ""
    text = f"{STRATEGY}={value}: with this model engine verl {release} takes "
    text += ", ".join(own)
    if value in others:
        return f"{text}; {value} needs a model_engine=... of its own", "error"
    return f"{text}{near(str(value), own + others)}", "warning"
