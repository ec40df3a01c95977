"""A ROLL job: its trainer, rollout and teachers, and the values derived from them.

Read at 8eb27cc2 (0.3.0 and the main branch of August 2026); paths are below roll/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gkd.job import looking
from pytest_gkd.job.frameworks.roll import devices
from pytest_gkd.job.looking import NotCertainError
from pytest_gkd.job.omegaconf import Config

PPO = ("RLVRConfig", "AgenticConfig")
TRAINERS = {"DistillConfig": "student", "SFTConfig": "sft_train"}
WORKERS = (
    *("actor_train", "actor_infer", "critic", "reference", "reward", "reward_model"),
    *("student_train", "student_infer", "student", "teacher", "sft_train"),
    "validation",
)
ENGINES = ("vllm", "sglang")
TRAIN = ("megatron_train", "fsdp2_train")
MEGATRON = ("tensor_model", "pipeline_model", "context")


class Look(looking.Look):
    """The certain values; ``said`` are those that the user gave.

    ``root`` is the root class, ``program`` the name of the start script, empty for the
    user's own or a file alone, ``schema`` the release's. ``is_pure`` is whether the
    teacher's KL is the only reward.
    """

    def __init__(
        self,
        config: Config,
        said: Config | None = None,
        root: str = "",
        program: str = "",
        schema: Mapping[str, Any] | None = None,
        *,
        is_pure: bool = False,
    ) -> None:
        super().__init__(config)
        self.said = said or config
        self.root, self.program, self.schema = root, program, schema or {}
        self.is_pure = is_pure

    def quietly(self, key: str, default: Any = None) -> Any:
        """A key that decides which others matter; it is not recorded in ``given``."""
        count = len(self.given)
        try:
            return self(key, default)
        finally:
            del self.given[count:]

    @property
    def is_ppo(self) -> bool:
        """Whether it is an RLVR or agentic job, which generates."""
        return self.root in PPO

    @property
    def trainer(self) -> str:
        """The section that is trained."""
        own = "student_train" if self.is_pure else "actor_train"
        return TRAINERS.get(self.root, own)

    @property
    def rollout(self) -> str:
        """The section that generates, empty if there is none."""
        own = "student_infer" if self.is_pure else "actor_infer"
        return own if self.is_ppo else ""

    @property
    def is_rollout(self) -> bool:
        """Whether it only generates: agentic_rollout_pipeline.py and rlvr's."""
        trains = self(f"{self.trainer}.device_mapping") is not None
        is_alone = not self.program and not trains  # a file alone
        return self.is_ppo and (self.program.endswith("rollout_pipeline") or is_alone)

    def workers(self) -> list[str]:
        """The sections of workers that the user gave."""
        found = [name for name in WORKERS if self.said.is_section(name)]
        if "teacher" in found and self.teachers_below():
            found.remove("teacher")
            found += self.teachers_below()
        some = self.said.below("rewards") if self.said.is_section("rewards") else []
        names = [f"rewards.{name}" for name in some]
        return [*found, *(name for name in names if self.said.is_section(name))]

    def teachers_below(self) -> list[str]:
        """The sections of several teachers; empty for a single one.

        dacite reads a mapping as teachers by name only if it has nothing but sections.
        """
        names = [f"teacher.{name}" for name in self.said.below("teacher")]
        several = names and all(self.said.is_section(name) for name in names)
        return names if several and self.is_ppo else []

    def teachers(self) -> list[str]:
        """The sections of the job's teachers."""
        if not self.said.is_section("teacher"):
            return []
        if self.root == "DistillConfig" or self.is_pure or self.quietly("use_opd"):
            return self.teachers_below() or ["teacher"]
        return []

    def has_reference(self) -> bool:
        """configs/base_config.py, PPOConfig; is_lora_training in both pipelines."""
        if self.root == "DPOConfig":
            return True
        kl = self.number("init_kl_coef") > 0 or self.is_on("use_kl_loss")
        return (kl or self.is_on("enable_reference")) and not self.has_lora()

    def has_lora(self) -> bool:
        """Whether a LoRA is trained."""
        return self.quietly(f"{self.trainer}.model_args.lora_target") is not None

    def gpus(self, worker: str) -> list[int]:
        """The GPUs of a worker, empty without a device_mapping.

        Raises NotCertainError for what is not supported, or reported by rules.
        """
        key = f"{worker}.device_mapping"
        text = self(key)
        if text is None:
            return []
        try:
            if isinstance(text, str):
                return devices.numbers(text)
        except (devices.NotReadError, SyntaxError):
            pass
        raise NotCertainError(frozenset({key}))

    def strategy(self, worker: str) -> str:
        """The name of a worker's strategy, empty if there is none."""
        return str(self.quietly(f"{worker}.strategy_args.strategy_name", ""))

    def part(self, worker: str, name: str, default: Any = None) -> Any:
        """A value of a worker's strategy_config."""
        found = self(f"{worker}.strategy_args.strategy_config.{name}", default)
        return default if found is None else found

    def whole_part(self, worker: str, name: str, default: int = 1) -> int:
        """The same, for a number of parts."""
        found = self.part(worker, name, default)
        if type(found) is not int or found < 1:
            raise NotCertainError(frozenset({name}))
        return found

    def split(self, worker: str) -> int:
        """How many GPUs one replica of a trained model, or of a teacher, takes."""
        if self.strategy(worker).startswith("megatron"):
            sizes = (f"{kind}_parallel_size" for kind in MEGATRON)
            return math.prod(self.whole_part(worker, size) for size in sizes)
        if self.strategy(worker).startswith("fsdp2"):
            return self.size(f"{worker}.model_args.ulysses_size")
        return 1

    def replicas(self, worker: str) -> int:
        """Its data-parallel ranks. Raises NotCertainError if there are none."""
        count, split = len(self.gpus(worker)), self.split(worker)
        if not count or count % split:
            raise NotCertainError(frozenset({f"{worker}.device_mapping"}))
        return count // split

    def per_worker(self, worker: str) -> int:
        """configs/worker_config.py, WorkerConfig.__post_init__."""
        if self.strategy(worker) == "vllm":
            sizes = ("tensor_parallel_size", "pipeline_parallel_size")
            return math.prod(self.whole_part(worker, size) for size in sizes)
        if self.strategy(worker) in ("", "hf_infer", "sglang"):
            return self.size(f"{worker}.num_gpus_per_worker")
        return 1

    def longest(self) -> int:
        """The length of a sequence in tokens (configs/base_config.py, BaseConfig)."""
        if self("sequence_length") is not None:
            return self.whole("sequence_length")
        return self.whole("response_length") + self.whole("prompt_length")

    def path(self, worker: str) -> Any:
        """The model of a worker, from the key that determines it.

        configs/base_config.py, PPOConfig: if three sections have no model, all three
        get another one, including a teacher's.
        """
        return self(self.path_key(worker))

    def path_key(self, worker: str) -> str:
        """The key alone."""
        if self.root == "SFTConfig":
            return "pretrain"
        own = f"{worker}.model_args.model_name_or_path"
        same: dict[str, str] = {}
        if self.root == "DistillConfig":
            same = {name: f"{name}_pretrain" for name in ("student", "teacher")}
        elif self.is_ppo or self.root == "DPOConfig":
            first = [name for name in self.teachers()[:1] if self.is_ppo]
            names = [self.trainer, self.rollout, *(first or ["reference"])]
            same = dict.fromkeys(filter(None, names), "pretrain")
        keys = [f"{name}.model_args.model_name_or_path" for name in same]
        if worker in same and any(self.quietly(key) is None for key in keys):
            return same[worker]
        return own


def backward(look: Look) -> int:
    """Samples per update on one rank (pipeline/base_worker.py, train_step)."""
    start = f"{look.trainer}.training_args"
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return math.prod(look.size(f"{start}.{name}") for name in names)


def samples(look: Look) -> int | None:
    """Samples of one prompt, or of one environment."""
    keys = {
        "RLVRConfig": "num_return_sequences_in_group",
        "AgenticConfig": "train_env_manager.group_size",
    }
    return look.whole(keys[look.root]) if look.root in keys else None


def all_gpus(look: Look) -> int:
    """The GPUs up to the highest index; ROLL takes whole nodes from the first on."""
    return max((n for w in look.workers() for n in look.gpus(w)), default=-1) + 1


def nodes(look: Look) -> int | None:
    """configs/base_config.py, BaseConfig: whatever ``num_nodes`` is."""
    count = all_gpus(look)
    return -(-count // look.size("num_gpus_per_node")) if count else None
