"""What is certain about a start of OpenRLHF, or of LightRFT, which has its options.

Keys are OpenRLHF's option names up to 0.10.1; those of later releases, which have dots,
are mapped to these (sources/openrlhf_names.toml). Messages use the release's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_gkd.job import arguments, releases
from pytest_gkd.job.arguments import MISSING, Arguments
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import recorded_options
from pytest_gkd.job.frameworks.reading import UNKNOWN
from pytest_gkd.job.frameworks.recorded_options import Rule, UnsureError
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Override

PATHS = (
    *("pretrain", "critic_pretrain", "reward_pretrain", "teacher_model"),
    *("remote_rm_url", "agent_func_path"),
)


class Known(recorded_options.Known):
    """The settings of a start, as far as they are certain."""

    # Numbers of processes, samples and parts.
    SIZES = frozenset(
        {
            *("actor_num_nodes", "actor_num_gpus_per_node"),
            *("ref_num_nodes", "ref_num_gpus_per_node"),
            *("critic_num_nodes", "critic_num_gpus_per_node"),
            *("reward_num_nodes", "reward_num_gpus_per_node"),
            *("vllm_tensor_parallel_size", "engine_tp_size", "sp_size"),
            *("ds_tensor_parallel_size", "ring_attn_size"),
            *("rollout_batch_size", "micro_rollout_batch_size"),
            *("train_batch_size", "micro_train_batch_size", "n_samples_per_prompt"),
        }
    )

    def is_set(self, key: str) -> bool:
        """Whether a text is given and not empty. Raises UnsureError.

        One that the user gives but that cannot be determined is assumed not to be
        empty.
        """
        if not self.has(key):
            return False
        given = self.find(key)
        if given.needs and not self.is_given(key):
            raise UnsureError(key)
        return bool(given.needs or given.value)

    def is_at_least(self, release: str) -> bool:
        """Whether this is OpenRLHF in this release or a later one."""
        return self.name == "openrlhf" and self.release.is_at_least(release)


COMMON: tuple[Rule[Known], ...] = (
    # Actor loads it (openrlhf/models/actor.py, lightrft/models/actor_language.py).
    Rule(
        "pretrain",
        lambda v: not v.is_set("pretrain"),
        "there is no model to train: {--pretrain} is empty or not given",
        MISSING,
    ),
    # All train_*.py and train_colocate.py drop a template without {}.
    Rule(
        "input_template",
        lambda v: v.is_set("input_template") and "{}" not in v["input_template"],
        "{--input_template} has no {{}} for the prompt: it is ignored",
        level="warning",
    ),
)
# The estimators' baseline is that of the prompt's other samples (main of
# openrlhf/cli/train_ppo_ray.py and of LightRFT's train_colocate.py).
ROLLOUT: tuple[Rule[Known], ...] = (
    *COMMON,
    # blending_datasets splits the name (openrlhf/datasets/utils.py,
    # lightrft/utils/utils.py).
    Rule(
        "prompt_data",
        lambda v: not v.is_set("prompt_data"),
        "there are no prompts: {--prompt_data} is empty or not given",
        MISSING,
    ),
    Rule(
        "n_samples_per_prompt advantage_estimator",
        lambda v: (
            v["advantage_estimator"] in ("rloo", "reinforce_baseline", "group_norm")
            and v["n_samples_per_prompt"] < 2
        ),
        "{--advantage_estimator} {advantage_estimator} requires "
        "{--n_samples_per_prompt} above 1",
    ),
    Rule(
        "critic_pretrain",
        lambda v: v["advantage_estimator"] != "gae" and v.is_set("critic_pretrain"),
        "there is no critic with {--advantage_estimator} {advantage_estimator}: "
        "{--critic_pretrain} has no effect",
        level="warning",
    ),
    Rule(
        "use_kl_loss kl_estimator",
        lambda v: (
            v["use_kl_loss"]
            and v["kl_estimator"] not in ("k2", "k3")
            and not (v.has("unbiased_kl_gradient") and v["unbiased_kl_gradient"])
        ),
        "{--kl_estimator} {kl_estimator} as a loss ({--use_kl_loss}): the release "
        "itself recommends k2 or k3",
        level="warning",
    ),
)


def parsed(known: recorded_options.Parser, whose: str, launch: Launch) -> Arguments:
    """The start's words as its parser reads them; parse_args refuses all others."""
    found = arguments.parsed(launch.arguments, known.options, whose)
    for word in found.rest:
        text = (
            f"{word.text.shape[:60]} does not belong to any option: {whose} refuses it"
        )
        found.findings.append(Finding(UNKNOWN, "error", text, word.file, word.line, ""))
    return found


def absent(v: Known) -> Iterator[Finding]:
    """Paths that are not on this machine."""
    gone = []
    for key in PATHS:
        path = str(v.find(key).value or "") if v.has(key) else ""
        if path.startswith("/") and not Path(path).exists():
            gone.append((f"{v.option(key)} {path}", key))
    if gone:
        text = f"not on this machine: {', '.join(option for option, _ in gone)}"
        yield v.fault(MISSING, "warning", text, *(key for _, key in gone))


def named(v: Known, findings: Iterable[Finding]) -> list[Finding]:
    """The finding with the release's own names for keys and for renamed options."""
    told = []
    for one in findings:
        if one.key.startswith("--"):
            new = _renamed(v, one.key)
            said, _, _ = one.message.partition(";")
            text = f"{said.rstrip('.')}; it is called {new}" if new else one.message
            told.append(one._replace(message=text))
        else:
            key = v.option(one.key).lstrip("-") if one.key else ""
            told.append(one._replace(key=key))
    return told


def said(v: Known, given: Iterable[Override]) -> list[Override]:
    """What the user gave, under the release's own names."""
    return [o._replace(key=v.option(o.key).lstrip("-") if o.key else "") for o in given]


def _renamed(v: Known, option: str) -> str:
    """The release's name for another release's option; "" if no release has it."""
    for number in releases.recorded(v.name):
        release = releases.release(v.name, number)
        for table in release.schema:
            there = recorded_options.parser(release, table).options.get(option)
            if there is not None and there.key in v.parser.names:
                return v.parser.names[there.key]
    return ""
