"""verl's SFT programs: their values, and what they refuse or pass over.

Read in verl 0.8.0, 0.9.0 and 0.9.1. Rules that name no other file are of
trainer/sft_trainer.py and trainer/sft_trainer_ray.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents, releases
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.fitting import Recipe
from pytest_gkd.job.frameworks import accelerate
from pytest_gkd.job.frameworks.reading import Pool, derived, names
from pytest_gkd.job.frameworks.verl import config, plan
from pytest_gkd.job.frameworks.verl.rules import (
    MISSING,
    Rule,
    Sizes,
    UnsureError,
    judged,
)
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import Text, Word
from pytest_gkd.options import near

# verl up to 0.7.0
OLD_PROGRAM = re.compile(
    r"(?:verl\.trainer\.|(?:.*/)?verl/trainer/)fsdp_sft_trainer\S*"
)
OLD = (
    "verl.trainer.fsdp_sft_trainer is in verl up to 0.7.0: from 0.7.1 on it is verl."
    "trainer.sft_trainer, with other keys (model.path for model.partial_pretrain, "
    "data.messages_key for data.multiturn.messages_key, engine.ulysses_sequence_"
    "parallel_size and model.use_remove_padding for the keys without a section)"
)
UNTOLD = Given("undetermined", needs=frozenset({"the number of processes"}))
SECTIONS = {"data", "engine", "optim"}
NODES, EACH = "trainer.nnodes", "trainer.n_gpus_per_node"
# What is accepted beside a number.
EACH_EPOCH = "after_each_epoch"
FREQUENCIES = ("trainer.save_freq", "trainer.test_freq")
# The keys that split a model's copy, by the engine's strategy.
ULYSSES = "engine.ulysses_sequence_parallel_size"
SPLITS = {
    "fsdp": (ULYSSES,),
    "fsdp2": (ULYSSES,),
    "megatron": tuple(
        f"engine.{part}_parallel_size"
        for part in ("tensor_model", "pipeline_model", "context")
    ),
    "veomni": ("engine.ulysses_parallel_size",),
    "automodel": ("engine.tp_size", "engine.pp_size", "engine.cp_size"),
}
# The factor of max_token_len_per_gpu: sp_size in workers/engine/*/transformer_impl.py.
SEQUENCE = {
    "fsdp": ULYSSES,
    "fsdp2": ULYSSES,
    "megatron": "engine.context_parallel_size",
    "veomni": "engine.ulysses_parallel_size",
}
# Keys of its configuration that nothing reads, and why.
UNREAD = {
    "data.balance_dp_token": "it is not implemented",
    "data.use_shm": "model.use_shm is another key",
    "trainer.seed": "the order of the rows depends on the epoch alone",
}
UNREAD_WITHOUT_RAY = {"trainer.balance_batch": "only sft_trainer_ray does"}
UNREAD_WITH_RAY = {"data.num_workers": "sft_trainer_ray always has 8"}
CHOICES = {
    "data.truncation": ("error", "left", "right"),
    "data.pad_mode": ("no_padding",),
}
SCHEDULERS = ("constant", "cosine")


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of these programs'."""
    return {key.partition(".")[0] for key in keys} >= SECTIONS


def is_sft(launch: Launch) -> bool:
    """Whether it starts one of these programs; a file may also build on their own."""
    if launch.document is None:
        return bool(config.SFT.fullmatch(launch.program))
    settings = documents.settings(launch.document, documents.OMEGACONF)
    on = str([one.value for one in settings if one.key == "defaults"])
    builds_on_it = config.SFT_CONFIG in on or "engine@engine" in on
    return is_own({one.key for one in settings}) or builds_on_it


def has_ray(launch: Launch) -> bool:
    """Whether Ray starts the workers, on the nodes that the configuration names."""
    found = config.SFT.fullmatch(launch.program)
    return bool(found and found["ray"])


def is_old(launch: Launch) -> bool:
    """Whether it starts the program of verl up to 0.7.0."""
    return bool(OLD_PROGRAM.fullmatch(launch.program))


def processes(launch: Launch, release: Release) -> list[Override]:
    """The launcher's nodes and processes, under the keys that Ray's program has."""
    if has_ray(launch):
        return []
    nodes, each = UNTOLD, UNTOLD
    if launch.document is None:
        place = Path(launch.command.file).parent
        own = releases.beside(release, "accelerate").release
        started = accelerate.started(launch.before, place, own)
        nodes, each = started.machines, started.each or UNTOLD
    word = Word(Text("the launcher"), launch.command.file, launch.command.line, "")
    return [
        Override("", key, one.value, one.needs, one.word or word)
        for key, one in ((NODES, nodes), (EACH, each))
    ]


def of(found: config.Composed, given: list[Override], launched: list[Override]) -> Job:
    """The job; Megatron's configuration has no strategy, but its class has one."""
    defaults = found.defaults
    if str(defaults.get("engine._target_")).endswith(".McoreEngineConfig"):
        defaults = {"engine.strategy": "megatron", **defaults}
    return Job(defaults, [*given, *launched])


def other_group(key: str, release: Release) -> str:
    """The choice that has a key, of an engine or an optimizer that is not the job's."""
    group, _, rest = key.partition(".")
    for path, one in release.schema["configs"].items():
        folder, _, name = path.partition("/")
        if folder == group and rest in one["keys"]:
            return f": it is one of {group}={name}, and this job's is another"
    return ""


# -- values ------------------------------------------------------------------------


def values(job: Job) -> dict[str, Given]:
    """All values of the job on one path through the script."""
    strategy = job.find("engine.strategy")
    table = names("verl-sft") | names(f"verl-sft-{_engine(strategy.value)}")
    found = {name: job.find(key) for name, key in table.items()}
    if strategy.value in plan.FSDP:  # nothing reads engine.dtype
        found["train_dtype"] = Given("default", "bfloat16")
        mixed = "engine.mixed_precision.param_dtype"
        if job.given(mixed):
            found["train_dtype"] = derived(
                mixed, lambda name: plan.DTYPES.get(name, name), job.find(mixed)
            )
    found["tokenizer"] = derived(
        "model.tokenizer_path, or else model.path",
        lambda own, path: own or path,
        *(found["tokenizer"], found["student"]),
    )
    found["truncation"] = derived(
        "data.truncation",
        # MultiTurnSFTDataset.__getitem__ without padding
        lambda way: "error" if way == "error" else "right",
        job.find("data.truncation"),
    )
    gpus = derived(
        f"{NODES} * {EACH}", lambda a, b: a * b, found["nodes"], found["gpus_per_node"]
    )
    return found | {"trainer_gpus": gpus, "total_gpus": gpus}


def _engine(strategy: Any) -> str:
    return "fsdp" if strategy in plan.FSDP else str(strategy)


def pools(job: Job, launch: Launch) -> tuple[Pool, ...]:
    """The trainer's GPUs on each node."""
    sizes = job.find(NODES), job.find(EACH)
    is_ray = has_ray(launch)
    return (
        Pool("the trainer", *sizes, EACH if is_ray else "", is_launched=not is_ray),
    )


def recipe(job: Job) -> Recipe | None:
    """How its memory plan is made; None if the engine's is not known."""
    if job.find("engine.strategy").value not in plan.FSDP:
        return None
    table = names("verl-sft") | names("verl-sft-fsdp")
    keys = {name: (key,) for name, key in table.items()}
    return Recipe(plan.sft_job, keys, plan.doubt(job, {}, {}))


def old_values(said: Iterable[Override], launched: list[Override]) -> dict[str, Given]:
    """What the program of verl up to 0.7.0 is given; its defaults are not recorded."""
    job = Job({}, [*said, *launched])
    found = {name: job.find(key) for name, key in names("verl-sft-old").items()}
    gpus = derived(
        f"{NODES} * {EACH}", lambda a, b: a * b, found["nodes"], found["gpus_per_node"]
    )
    return found | {"trainer_gpus": gpus, "total_gpus": gpus}


# -- rules -------------------------------------------------------------------------


RULES: list[Rule] = []


def broken(job: Job, said: Iterable[Override], launch: Launch) -> Iterator[Finding]:
    """The rules that a job breaks, and the keys that nothing reads."""
    is_ray = has_ray(launch)
    yield from judged((*RULES, _shares_by_ray if is_ray else _shares), job)
    yield from _unread(job, list(said), is_ray=is_ray)


def _rule(body: Rule) -> Rule:
    RULES.append(body)
    return body


def _unread(job: Job, said: list[Override], *, is_ray: bool) -> Iterator[Finding]:
    unread = UNREAD | (UNREAD_WITH_RAY if is_ray else UNREAD_WITHOUT_RAY)
    if job.find("engine.strategy").value in plan.FSDP:
        unread["engine.dtype"] = "FSDP computes in engine.mixed_precision's"
    for one in said:
        why = unread.get(one.key)
        started = job.find(one.key).value
        if not is_ray and one.key in (NODES, EACH) and started not in (None, one.value):
            why = f"the launcher starts {started}"
        if why and not one.needs:
            text = f"nothing reads {one.key}={one.value}: {why}"
            word = one.word
            yield Finding(
                "config.unknown-option", "warning", text, word.file, word.line, one.key
            )


def _split(sizes: Sizes) -> tuple[int, int]:
    """All GPUs, and how many of them share one row."""
    nodes, each = sizes.whole(NODES, EACH)
    strategy = sizes("engine.strategy")
    if strategy not in SPLITS:
        raise UnsureError
    split = 1
    for size in sizes.whole(*SPLITS[strategy]):
        split *= size
    if split < 1 or nodes * each < 1:
        raise UnsureError
    return nodes * each, split


def _parts(sizes: Sizes) -> int:
    """The data-parallel ranks."""
    gpus, split = _split(sizes)
    if gpus % split:  # told by _world
        raise UnsureError
    return gpus // split


@_rule
def _positive(sizes: Sizes) -> Iterator[Finding]:
    # The world size is divided by them.
    for key in SPLITS.get(sizes("engine.strategy"), ()):
        if sizes.whole(key)[0] < 1:
            yield sizes.fault(f"{key}={sizes(key)} must be at least 1")


@_rule
def _world(sizes: Sizes) -> Iterator[Finding]:
    # workers/engine/fsdp, _init_device_mesh; Megatron's initialize_model_parallel.
    gpus, split = _split(sizes)
    if gpus % split:
        yield sizes.fault(
            f"the job has {gpus} GPUs, and each model copy takes {split}: {gpus} is "
            f"not a multiple of {split}"
        )


def _shares(sizes: Sizes) -> Iterator[Finding]:
    """_build_dataloader, and prepare_micro_batches (workers/engine/utils.py)."""
    parts = _parts(sizes)
    (batch,) = sizes.whole("data.train_batch_size")
    if batch < parts:
        yield sizes.fault(
            f"train_batch_size {batch} leaves none of the {parts} data-parallel ranks "
            "a row: torch's DataLoader refuses a batch size of 0"
        )
        return
    if batch % parts:
        yield sizes.fault(
            f"train_batch_size {batch} cannot be divided evenly among {parts} "
            f"data-parallel ranks: a step has {batch // parts * parts} rows",
            "warning",
        )
    yield from _micro_batches(sizes, batch // parts)


def _shares_by_ray(sizes: Sizes) -> Iterator[Finding]:
    """single_controller's dispatch, and get_seqlen_balanced_partitions."""
    parts = _parts(sizes)
    (batch,) = sizes.whole("data.train_batch_size")
    if batch % parts:
        yield sizes.fault(
            f"train_batch_size {batch} cannot be divided evenly among {parts} "
            "data-parallel ranks; verl finds that out at the first step"
        )
    else:
        yield from _micro_batches(sizes, batch // parts)


def _micro_batches(sizes: Sizes, rows: int) -> Iterator[Finding]:
    if sizes("data.use_dynamic_bsz"):
        return
    (micro,) = sizes.whole("data.micro_batch_size_per_gpu")
    if micro > 0 and rows % micro:
        yield sizes.fault(
            f"the {rows} rows of each data-parallel rank are not a multiple of micro_"
            f"batch_size_per_gpu {micro}; verl finds that out at the first step"
        )


@_rule
def _tokens(sizes: Sizes) -> Iterator[Finding]:
    # utils/seqlen_balancing.py, rearrange_micro_batches: asserted on each batch.
    if not sizes("data.use_dynamic_bsz"):
        return
    strategy = sizes("engine.strategy")
    if strategy not in SEQUENCE:
        return
    longest, most, split = sizes.whole(
        "data.max_length", "data.max_token_len_per_gpu", SEQUENCE[strategy]
    )
    if 0 < most * split < longest:
        text = f"max_token_len_per_gpu {most}"
        text += f" times {split}" if split > 1 else ""
        yield sizes.fault(
            f"{text} is less than max_length {longest}: verl ends at the first longer "
            "row"
        )


@_rule
def _choices(sizes: Sizes) -> Iterator[Finding]:
    # utils/dataset/multiturn_sft_dataset.py; every engine refuses the padding that the
    # dataset has (prepare_model_inputs).
    for key, known in CHOICES.items():
        value = sizes(key)
        if value not in known:
            text = f"{key}={value}: verl takes {', '.join(known)}"
            yield sizes.fault(text + near(str(value), known).rstrip("."))
    key = "optim.lr_scheduler_type"  # FSDPOptimizerConfig.__post_init__
    if sizes("engine.strategy") in plan.FSDP and sizes(key) not in SCHEDULERS:
        text = f"{key}={sizes(key)}: verl takes {', '.join(SCHEDULERS)}"
        yield sizes.fault(text + near(str(sizes(key)), SCHEDULERS).rstrip("."))


@_rule
def _truncation(sizes: Sizes) -> Iterator[Finding]:
    # utils/dataset/multiturn_sft_dataset.py, __getitem__ without padding
    if sizes("data.truncation") == "left":
        yield sizes.fault(
            "data.truncation=left: a row longer than max_length loses its end (right), "
            "with the last answer; the side is read only with a padding that the "
            "engines refuse",
            "warning",
        )


@_rule
def _sequence_parallel(sizes: Sizes) -> Iterator[Finding]:
    # workers/engine/fsdp/transformer_impl.py, __init__
    key = "model.use_remove_padding"
    (split,) = sizes.whole(ULYSSES)  # which no other engine has
    if split > 1 and not sizes(key):
        yield sizes.fault(f"ulysses_sequence_parallel_size {split} needs {key}=True")


@_rule
def _validation(sizes: Sizes) -> Iterator[Finding]:
    # fit
    save, test = (sizes(key) for key in FREQUENCIES)
    for key, value in zip(FREQUENCIES, (save, test), strict=True):
        if value == 0:
            text = f"{key}={value} is divided by at the first step; -1 is never"
            yield sizes.fault(text)
        elif isinstance(value, str) and value != EACH_EPOCH:
            text = f"{key}={value}: verl takes a number of steps or {EACH_EPOCH}"
            yield sizes.fault(f"{text}, and fails at the first step")
    is_on = test == EACH_EPOCH or (type(test) is int and test > 0)
    if is_on and not sizes("data.val_files"):
        yield sizes.fault(
            f"trainer.test_freq={test} needs data.val_files: verl fails at the first "
            "validation",
            cause=MISSING,
        )


@_rule
def _optimizer(sizes: Sizes) -> Iterator[Finding]:
    # The engines read their own optimizer's keys: workers/config/optimizer.py.
    kinds = [
        re.sub(r"(?:Engine|Optimizer)Config$", "", str(sizes(f"{group}._target_")))
        for group in ("engine", "optim")
    ]
    known = [one for one in kinds if one.startswith("verl.workers.config.")]
    if len(known) == 2 and known[0] != known[1]:
        own, other = (one.rpartition(".")[2] for one in known)
        yield sizes.fault(
            f"the engine is {own}'s and the optimizer {other}'s: give engine=... and "
            "optim=... of the same name"
        )


@_rule
def _betas(sizes: Sizes) -> Iterator[Finding]:
    # utils/megatron/optimizer.py, init_megatron_optim_config
    key = "optim.betas"
    is_muon = "muon" in str(sizes("optim.optimizer")).lower()
    if sizes("engine.strategy") == "megatron" and sizes.is_given(key) and not is_muon:
        yield sizes.fault(
            f"nothing passes {key}={sizes(key)} to Megatron, whose Adam keeps its own "
            "0.9 and 0.999: give +optim.override_optimizer_config.adam_beta1 and "
            "adam_beta2",
            "warning",
        )


@_rule
def _resume(sizes: Sizes) -> Iterator[Finding]:
    # utils/checkpoint/checkpoint_handler.py, _determine_resume_path
    mode, place = sizes("trainer.resume_mode"), sizes("trainer.resume_from_path")
    if mode == "disable" and place is not None:
        yield sizes.fault(
            f"nothing reads trainer.resume_from_path={place} with trainer.resume_mode="
            "disable",
            "warning",
        )
    elif mode == "resume_path" and place is None:
        yield sizes.fault(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path",
            cause=MISSING,
        )
    elif place is not None and "global_step_" not in str(place):
        yield sizes.fault(
            f"trainer.resume_from_path={place} does not contain global_step_: verl "
            "refuses it after all workers have loaded their models"
        )
