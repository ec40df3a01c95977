"""SkyRL's main_sft: its values, and what it refuses.

Read in 0.3.0 and the main branch at a9564572. Rules that name no other file are from
validate_sft_cfg or _normalize_dataset_cfg in skyrl/train/config/sft_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pytest_gkd.job import looking
from pytest_gkd.job.looking import Fault
from pytest_gkd.job.omegaconf import Config
from pytest_gkd.options import near

ROOT = "SFTConfig"
# Neither another framework nor SkyRL's RL has keys that begin like this.
OWN = re.compile(
    r"micro_train_batch_size_per_gpu|train_on_what|placement\.num_gpus_per_node"
    r"|(?:fsdp|megatron|optimizer)_config\.\w+.*"
)
STRATEGIES = ("megatron", "fsdp")
OLD_NAME = ("strategy", "fsdp2")
SAMPLERS = ("random", "sequential", "custom")
ON_WHAT = ("last_assistant_message", "all_assistant_messages")
GPUS = "placement.num_gpus_per_node"
# The first is main's; 0.3.0 has only the second of each.
TRAIN = ("train_datasets", "dataset_name")
EVALUATED = ("eval_datasets", "eval_dataset_name", "eval_pretokenized_dataset_paths")
PRETOKENIZED = "pretokenized_dataset_paths"


class Look(looking.Look):
    """The certain values of a configuration of main_sft; ``keys`` are the release's."""

    def __init__(self, config: Config, keys: Collection[str]) -> None:
        super().__init__(config)
        self.keys = keys

    def of_release(self, key: str) -> Any:
        """The value of a key that not all releases have."""
        return self(key) if key in self.keys else None

    def is_megatron(self) -> bool:
        """Whether Megatron trains."""
        return bool(self("strategy") == "megatron")

    def gpus(self) -> int:
        """All GPUs of the job."""
        return self.whole("placement.num_nodes") * self.whole(GPUS)

    def parallel(self, *kinds: str) -> int:
        """The product of these Megatron sizes."""
        found = 1
        for kind in kinds:
            found *= self.size(f"megatron_config.{kind}_parallel_size")
        return found

    def is_users(self, key: str) -> bool:
        """Whether the user gives it, even as null."""
        setting = self.config.settings.get(key)
        return setting is not None and bool(setting.word.file)


# -- values ------------------------------------------------------------------------


def train_files(look: Look) -> Any:
    """The training data; main has a list of datasets, and its own default."""
    stored = look.of_release(PRETOKENIZED)
    several, one = (look.of_release(key) for key in TRAIN)
    if stored is not None or several is not None:
        return several if stored is None else stored
    return [one or "yahma/alpaca-cleaned"]


DERIVED: looking.Derived[Look] = {
    "train_files": (train_files, "train_datasets"),
    "fsdp_version": (
        lambda look: None if look.is_megatron() else 2,
        "2 under strategy=fsdp",
    ),
    "trainer_gpus": (lambda look: look.gpus(), "placement.num_nodes * num_gpus"),
    "total_gpus": (lambda look: look.gpus(), "placement.num_nodes * num_gpus"),
}


# -- rules -------------------------------------------------------------------------


def _sizes(look: Look) -> Iterator[Fault]:
    keys = ["batch_size", "micro_train_batch_size_per_gpu"]
    keys += ["num_steps", "max_training_steps"]
    keys += ["dummy_run_max_steps"] if look.is_on("dummy_run_full_ctx") else []
    keys += [] if look("num_steps") is not None else ["num_epochs"]
    for key in keys:
        value = look(key)
        if type(value) is int and value < 1:
            yield key, f"{key} = {value} must be at least 1"
    for key in ("dataloader_num_workers", "eval_interval"):
        value = look(key)
        if type(value) is int and value < 0:
            yield key, f"{key} = {value} must be at least 0"


def _length(look: Look) -> Iterator[Fault]:
    """SFTConfig.from_cli_overrides, too."""
    keys = ("num_epochs", "num_steps")
    if all(look.is_users(key) for key in keys):
        yield keys[1], "num_epochs and num_steps are both given: only one may be"
    elif look(keys[0]) is None and look(keys[1]) is None:
        yield keys[0], "num_epochs and num_steps are both null: one must be set"


def _named(look: Look) -> Iterator[Fault]:
    """TrainOnWhat for the last; fsdp2 is accepted as fsdp."""
    kinds = {"strategy": STRATEGIES, "sampler": SAMPLERS, "train_on_what": ON_WHAT}
    for key, known in kinds.items():
        value = look(key)
        if look.is_users(key) and value not in known and (key, value) != OLD_NAME:
            text = f"{key}={value}: known values are {', '.join(known)}"
            yield key, text + near(str(value), known)
    if look("sampler") == "custom" and not look("sampler_class_path"):
        yield "sampler", "sampler=custom needs sampler_class_path"


def _student(look: Look) -> Iterator[Fault]:
    if not look("model.path"):
        line = "model.path is not given; its default is lost, as another key of model"
        yield "model.path", f"{line} is"


def _evaluation(look: Look) -> Iterator[Fault]:
    if any(look.of_release(key) for key in EVALUATED):
        return
    needed = next(key for key in EVALUATED if key in look.keys)
    if (look("eval_interval") or 0) > 0:
        yield "eval_interval", f"eval_interval > 0 needs {needed}"
    if look.is_on("eval_before_train"):
        yield "eval_before_train", f"eval_before_train=true needs {needed}"


def _datasets(look: Look) -> Iterator[Fault]:
    """In main only; 0.3.0 has one dataset."""
    for kind, stored in (("", PRETOKENIZED), ("eval_", EVALUATED[2])):
        many = "eval_datasets" if kind else TRAIN[0]
        splits = "eval_dataset_splits" if kind else "train_dataset_splits"
        old = (f"{kind}dataset_name", f"{kind}dataset_split")
        if many not in look.keys:
            return
        used = [key for key in (many, splits, *old) if look(key) is not None]
        if look(stored) is not None and used:
            yield stored, f"{stored} and {used[0]} are both given: only one may be"
            continue
        several = look(many)
        older = [key for key in old if look(key) is not None]
        if several is not None and older:
            yield many, f"{many} and {older[0]} are both given: only one may be"
        elif several is not None:
            parts = look(splits)
            count = len(parts) if isinstance(parts, list) else None
            if isinstance(several, list) and count != len(several):
                said = "not given" if parts is None else f"{count}"
                line = f"{many} has {len(several)} entries, {splits} {said}"
                yield splits, f"{line}: each needs its own split"


def _weights(look: Look) -> Iterator[Fault]:
    """_normalize_mixing_weights."""
    key = "train_dataset_weights"
    weights, files = look.of_release(key), train_files(look)
    if weights is None:
        return
    if look("sampler") != "random":
        yield key, f"{key} needs sampler=random, and it is {look('sampler')}"
    elif isinstance(weights, list) and isinstance(files, list):
        if len(weights) != len(files):
            line = f"{key} has {len(weights)} entries, and there are {len(files)}"
            yield key, f"{line} datasets"
        elif any(type(one) in (int, float) and one <= 0 for one in weights):
            yield key, f"{key} = {weights}: all must be above 0"


def _megatron(look: Look) -> Iterator[Fault]:
    if not look.is_megatron():
        return
    split = look.parallel("tensor_model", "pipeline_model", "context")
    key = "megatron_config.tensor_model_parallel_size"
    if look.gpus() % split:
        text = f"the {look.gpus()} GPUs cannot be divided by TP * PP * CP = {split}"
        yield key, text
    padded = "remove_microbatch_padding"
    if look.parallel("context") > 1 and not look.is_on(padded):
        key = "megatron_config.context_parallel_size"
        yield key, f"{key} > 1 needs {padded}=true"
    key = "sequence_parallel_size"
    if look(key) != 1:
        yield key, f"{key} = {look(key)} must be 1 under strategy=megatron"


def _packed(look: Look) -> Iterator[Fault]:
    """resolved_bin_capacity, too."""
    key, most = "use_sequence_packing", "max_tokens_per_microbatch"
    if not look.is_on(key):
        return
    if not look.is_megatron():
        yield key, f"{key}=true needs strategy=megatron"
    length, capacity = look("max_length"), look(most)
    if length is None:
        yield key, f"{key}=true needs max_length"
    elif type(capacity) is int and type(length) is int and capacity < length:
        line = f"{most} = {capacity} must be at least max_length = {length}"
        yield most, line


def _batch(look: Look) -> Iterator[Fault]:
    """sft_trainer.py, _validate_batch_parallelism: its replicas ignore CP."""
    whole, micro = look.size("batch_size"), look.size("micro_train_batch_size_per_gpu")
    is_packed = look.is_on("use_sequence_packing")
    kinds = ["tensor_model", "pipeline_model", *(["context"] * is_packed)]
    replicas = look.gpus() // (look.parallel(*kinds) if look.is_megatron() else 1)
    if replicas < 1:
        return
    if is_packed:
        if whole < replicas:
            line = f"batch_size = {whole} is below the {replicas} replicas"
            yield "batch_size", f"{line}, each of which needs a bin"
    elif whole % replicas:
        line = f"batch_size = {whole} cannot be divided by the {replicas} replicas"
        yield "batch_size", line
    elif whole // replicas % micro:
        key = "micro_train_batch_size_per_gpu"
        line = f"the {whole // replicas} samples of each replica cannot be divided by"
        yield key, f"{line} {key} = {micro}"


def _lost_split(look: Look) -> Iterator[Fault]:
    """config/config.py, build_nested_dataclass builds sections from what is given."""
    if not look.is_megatron() or not look.config.is_section("megatron_config"):
        return
    for kind in ("tensor", "pipeline"):
        key = f"megatron_config.{kind}_model_parallel_size"
        if not look.is_users(key) and look(key) == 1:
            line = f"{key} is 1, and not its default of 2: another key of"
            yield key, f"{line} megatron_config is given"


Rule = Callable[[Look], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    *(_sizes, _length, _named, _student, _evaluation, _datasets, _weights),
    *(_megatron, _packed, _batch),
)
DOUBTFUL: tuple[Rule, ...] = (_lost_split,)
