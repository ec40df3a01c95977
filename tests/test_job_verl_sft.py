"""``gkd check`` on verl's SFT programs: values, keys, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked as Planned
from test_estimate import HALF_B

from pytest_gkd.job.check import Checked, check

RELEASE = "verl==0.9.1"
START = """\
torchrun --nnodes=NODES --nproc_per_node=8 -m verl.trainer.sft_trainer \\
  model.path=Qwen/Qwen3-0.6B data.train_files=/a.parquet data.train_batch_size=64 \\
  optim.lr=1e-5 "$@"
"""
RAY = """\
python3 -m verl.trainer.sft_trainer_ray model.path=Qwen/Qwen3-0.6B \\
  data.train_files=/a.parquet data.train_batch_size=64 trainer.nnodes=2 \\
  trainer.n_gpus_per_node=8 "$@"
"""
MEGATRON = "engine=megatron optim=megatron"
TENSOR = "engine.tensor_model_parallel_size"
ULYSSES = "engine.ulysses_sequence_parallel_size"
STATIC = "data.use_dynamic_bsz=False"
MICRO = "data.micro_batch_size_per_gpu"


def checked(
    path: Path, more: str = "", start: str = START, release: str = RELEASE
) -> Checked:
    """A start with ``more``, in place of what it has of these keys."""
    keys = {word.partition("=")[0] for word in more.split()}
    words = [w for w in start.split() if w.partition("=")[0] not in keys or w == "\\"]
    path.write_text(" ".join(w for w in words if w != "\\").replace("NODES", "2"))
    return check(path, more.split(), release)


def faults(found: Checked) -> list[tuple[str, str]]:
    return [(f.level, f.key) for f in found.findings if f.level != "note"]


def values(found: Checked) -> dict[str, Any]:
    return {name: value.value for name, value in found.values.items()}


@pytest.mark.parametrize("release", ["0.8.0", "0.9.0", "0.9.1"])
@pytest.mark.parametrize("start", [START, RAY])
def test_its_values(tmp_path: Path, release: str, start: str) -> None:
    found = checked(tmp_path / "run.sh", "", start, f"verl=={release}")
    told = values(found)
    assert told["student"] == told["tokenizer"] == "Qwen/Qwen3-0.6B"
    assert told["prompt_column"] == "messages"
    assert (told["nodes"], told["gpus_per_node"]) == (2, 8)
    assert told["trainer_gpus"] == told["total_gpus"] == 16
    assert told["max_length"] == 1024
    assert told["truncation"] == "error"
    assert told["train_dtype"] == "bfloat16"
    assert "rollout_gpus" not in told
    assert not faults(found)


def test_values_of_megatron(tmp_path: Path) -> None:
    more = f"{MEGATRON} {TENSOR}=4 engine.dtype=float16"
    found = checked(tmp_path / "run.sh", more)
    assert faults(found) == []
    told = values(found)
    assert told["trainer_strategy"] == "megatron"
    assert told["train_tensor_parallel_size"] == 4
    assert told["train_dtype"] == "float16"


def test_the_dtype_of_fsdp_is_that_of_its_mixed_precision(tmp_path: Path) -> None:
    more = "+engine.mixed_precision.param_dtype=fp16 engine.dtype=float32"
    found = checked(tmp_path / "run.sh", more)
    assert values(found)["train_dtype"] == "float16"
    assert faults(found) == [("warning", "engine.dtype")]


def test_a_python_without_torchrun_leaves_the_number_of_gpus_open(
    tmp_path: Path,
) -> None:
    start = START.replace("torchrun --nnodes=NODES --nproc_per_node=8", "python")
    found = checked(tmp_path / "run.sh", "", start)
    assert found.values["trainer_gpus"].source == "undetermined"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("data.train_batch_sise=8", ("error", "data.train_batch_sise")),
        ("data.train_batch_size=many", ("error", "data.train_batch_size")),
        (f"{TENSOR}=2", ("error", TENSOR)),
        ("engine=megatrom", ("warning", "engine/megatrom")),
        ("data.train_batch_size=8", ("error", "data.train_batch_size")),
        ("data.train_batch_size=40", ("warning", "data.train_batch_size")),
        (f"{STATIC} {MICRO}=3", ("error", MICRO)),
        (f"{ULYSSES}=3", ("error", ULYSSES)),
        (f"{ULYSSES}=0", ("error", ULYSSES)),
        (f"{ULYSSES}=2 model.use_remove_padding=False", ("error", "model.use_remove")),
        (f"{MEGATRON} {TENSOR}=3", ("error", TENSOR)),
        ("data.max_length=9000", ("error", "data.max_length")),
        ("data.pad_mode=right", ("error", "data.pad_mode")),
        ("data.truncation=middle", ("error", "data.truncation")),
        ("data.truncation=left", ("warning", "data.truncation")),
        ("optim.lr_scheduler_type=linear", ("error", "optim.lr_scheduler_type")),
        ("optim.warmup_style=cosine optim.lr=x", ("error", "optim.lr")),
        ("trainer.test_freq=0", ("error", "trainer.test_freq")),
        ("trainer.save_freq=0", ("error", "trainer.save_freq")),
        ("trainer.save_freq=False", ("error", "trainer.save_freq")),
        ("trainer.test_freq=1", ("error", "trainer.test_freq")),
        ("trainer.test_freq=5", ("error", "trainer.test_freq")),
        ("trainer.save_freq=sometimes", ("error", "trainer.save_freq")),
        ("trainer.test_freq=sometimes", ("error", "trainer.test_freq")),
        ("trainer.test_freq=after_each_epoch", ("error", "trainer.test_freq")),
        ("engine=megatron", ("error", "")),
        (f"{MEGATRON} optim.betas=[0.9,0.95]", ("warning", "optim.betas")),
        ("trainer.resume_mode=resume_path", ("error", "trainer.resume_mode")),
        ("trainer.resume_mode=sometimes", ("error", "trainer.resume_mode")),
        (
            "trainer.resume_from_path=/x/step_4",
            ("error", "trainer.resume_from_path"),
        ),
        (
            "trainer.resume_mode=disable trainer.resume_from_path=/x/global_step_4",
            ("warning", "trainer.resume_from_path"),
        ),
        ("trainer.seed=3", ("warning", "trainer.seed")),
        ("trainer.n_gpus_per_node=4", ("warning", "trainer.n_gpus_per_node")),
        ("trainer.balance_batch=False", ("warning", "trainer.balance_batch")),
        ("trainer.logger=[consol]", ("error", "trainer.logger")),
    ],
)
def test_what_it_refuses_or_passes_over(
    tmp_path: Path, more: str, fault: tuple[str, str]
) -> None:
    found = faults(checked(tmp_path / "run.sh", more))
    level, key = fault
    assert [(one, name[: len(key)]) for one, name in found] == [(level, key)]


@pytest.mark.parametrize(
    "more",
    [
        "data.train_batch_size=16",
        f"{STATIC} {MICRO}=4",
        f"{ULYSSES}=2 data.max_length=16384",
        f"{STATIC} {MICRO}=4 data.max_length=9000",
        f"{MEGATRON} {TENSOR}=4 engine.pipeline_model_parallel_size=4",
        f"{MEGATRON} optim.betas=[0.9,0.95] optim.optimizer=muon",
        f"{MEGATRON} optim.lr_decay_style=cosine",
        "optim.betas=[0.9,0.95]",
        "engine=veomni optim=veomni optim.lr_scheduler_type=linear",
        "engine._target_=mine.Engine",
        "model.use_remove_padding=False",
        "trainer.resume_mode=disable",
        "optim.warmup_style=cosine optim.lr_scheduler_type=cosine",
        "trainer.test_freq=after_each_epoch data.val_files=/b.parquet",
        "trainer.n_gpus_per_node=8 trainer.nnodes=2",
        "trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_4",
        "engine=automodel optim=automodel engine.tp_size=2",
        "engine=veomni optim=veomni engine.ulysses_parallel_size=2",
        "engine=torchtitan optim=torchtitan",
        "data.messages_key=prompt model.lora_rank=32",
    ],
)
def test_what_is_sound(tmp_path: Path, more: str) -> None:
    assert faults(checked(tmp_path / "run.sh", more)) == []


@pytest.mark.parametrize(
    "more", ["trainer.test_freq=5", "trainer.resume_mode=resume_path"]
)
def test_what_is_not_given_is_told_as_missing(tmp_path: Path, more: str) -> None:
    found = checked(tmp_path / "run.sh", more).findings
    causes = [one.cause for one in found if one.level == "error"]
    assert causes == ["config.missing-value"]


def test_a_module_that_starts_the_program_with_an_engine_of_its_own(
    tmp_path: Path,
) -> None:
    start = START.replace("verl.trainer", "verl_mlite.launch verl.trainer")
    more = "hydra.searchpath=[pkg://verl_mlite.config] engine=mlite engine.tp=2"
    found = checked(tmp_path / "run.sh", f"{more} data.batch_size=8", start)
    assert faults(found) == [
        ("warning", "engine/mlite"),
        ("error", "data.batch_size"),
    ]
    told = values(found)
    assert (told["trainer_gpus"], told["train_batch_size"]) == (16, 64)


def test_ray_divides_each_batch_itself(tmp_path: Path) -> None:
    found = checked(tmp_path / "run.sh", "data.train_batch_size=40", RAY)
    assert faults(found) == [("error", "data.train_batch_size")]
    more = f"trainer.balance_batch=False data.num_workers=2 {STATIC} {MICRO}=3"
    found = checked(tmp_path / "run.sh", more, RAY)
    assert faults(found) == [("error", MICRO), ("warning", "data.num_workers")]


def test_a_key_of_another_engine_is_told_as_one(tmp_path: Path) -> None:
    found = checked(tmp_path / "run.sh", f"{TENSOR}=2").findings
    (fault,) = (one for one in found if one.level == "error")
    assert "it is one of engine=megatron, and this job's is another" in fault.message


def test_the_older_program_is_told_with_what_it_was_given(tmp_path: Path) -> None:
    start = START.replace("sft_trainer", "fsdp_sft_trainer")
    found = checked(tmp_path / "run.sh", "model.partial_pretrain=a/b", start)
    assert faults(found) == [("error", "")]
    assert "from 0.7.1 on it is verl.trainer.sft_trainer" in found.findings[0].message
    told = values(found)
    assert (told["student"], told["trainer_gpus"]) == ("a/b", 16)


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
        "defaults: [sft_trainer_engine, {override engine: megatron}, "
        "{override optim: megatron}, _self_]\n"
        f"data: {{train_batch_size: 32}}\nengine: {{{TENSOR[7:]}: 2}}\n"
    )
    found = check(path, (), RELEASE)
    assert faults(found) == []
    told = values(found)
    assert (told["train_batch_size"], told["train_tensor_parallel_size"]) == (32, 2)
    assert found.values["trainer_gpus"].source == "undetermined"
    path.write_text(path.read_text() + "optim: {betas: [0.9, 0.95]}\n")
    assert faults(check(path)) == [("warning", "optim.betas")]


def test_its_memory_plan(tmp_path: Path, capsys: Any) -> None:
    plan = Planned(tmp_path, capsys, RELEASE)
    command = (
        "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path={s} "
        "data.train_files=/a.parquet data.train_batch_size=64 data.max_length=1000 "
        "data.max_token_len_per_gpu=2000 engine.strategy=fsdp2"
    )
    found = plan.parts(command)
    elements, _ = plan.elements()
    assert found["weights float32"] == elements
    assert found["logits' gradient"] == 2000 * HALF_B.vocab * 2
    whole = plan.parts(f"{command} engine.use_no_sync_for_gradient_accumulation=True")
    assert sum(whole.values()) > sum(found.values()) + 2 * elements
    megatron = command.replace("engine.strategy=fsdp2", MEGATRON)
    reason = "the memory of verl's sft_trainer is not known yet"
    assert plan(megatron)["no_memory_plan"] == reason


@pytest.mark.parametrize(
    ("release", "keeps"), [("0.8.0", 0), ("0.9.0", 1), ("0.9.1", 0)]
)
def test_gradients_stay_whole_where_verl_defers_their_reduction(
    tmp_path: Path, capsys: Any, release: str, keeps: int
) -> None:
    plan = Planned(tmp_path, capsys, f"verl=={release}")
    found = plan.parts(
        "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path={s} "
        "data.train_files=/a.parquet data.train_batch_size=64 engine.strategy=fsdp2"
    )
    elements, _ = plan.elements()
    gradients = sum(n for name, n in found.items() if "gradients" in name)
    assert (gradients > 2 * elements) == bool(keeps), found


def test_a_copy_of_its_own_configuration_is_one_of_these_programs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [model@model: hf_model, engine@engine: fsdp, optim@optim: fsdp]\n"
        "data: {max_length: 512}\ntrainer: {n_gpus_per_node: 2}\n"
    )
    found = check(path)
    assert found.framework == "verl"
    assert "rollout_gpus" not in found.values
