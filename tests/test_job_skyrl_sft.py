"""``gkd check`` on SkyRL's main_sft: values, keys, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job.check import Checked, check

START = """\
uv run --isolated --extra megatron -m PROGRAM \\
  model.path=Qwen/Qwen3-0.6B \\
  placement.num_gpus_per_node=4 \\
  optimizer_config.lr=1e-6 "$@"
"""
MAIN = "skyrl.train.main_sft"
TENSOR = "megatron_config.tensor_model_parallel_size"
PIPELINE = "megatron_config.pipeline_model_parallel_size"
CONTEXT = "megatron_config.context_parallel_size"
FSDP = "strategy=fsdp"
PACKED = "use_sequence_packing=true"


def checked(
    path: Path, more: str = "", program: str = MAIN, release: str = ""
) -> Checked:
    path.write_text(START.replace("PROGRAM", program))
    return check(path, more.split(), release)


def faults(found: Checked) -> list[tuple[str, str]]:
    return [(f.level, f.key) for f in found.findings if f.level != "note"]


@pytest.mark.parametrize("program", [MAIN, "my.main_sft", "skyrl/train/main_sft.py"])
def test_its_values(tmp_path: Path, program: str) -> None:
    found = checked(tmp_path / "run.sh", f"{TENSOR}=4 {PIPELINE}=1", program)
    values = {name: value.value for name, value in found.values.items()}
    assert found.framework == "skyrl"
    assert values["student"] == "Qwen/Qwen3-0.6B"
    assert values["train_files"] == ["yahma/alpaca-cleaned"]
    assert values["train_tensor_parallel_size"] == 4
    assert values["trainer_gpus"] == values["total_gpus"] == 4
    assert not faults(found)
    assert "train_batch_size" in values
    assert "rollout_gpus" not in values


def test_an_older_release_has_its_own_keys(tmp_path: Path) -> None:
    more = "train_datasets=[a] dataset_name=b"
    found = checked(tmp_path / "run.sh", more, release="skyrl==0.3.0")
    assert faults(found) == [("error", "train_datasets")]
    assert found.values["train_files"].value == ["b"]


def test_rl_and_sft_are_told_apart(tmp_path: Path) -> None:
    found = checked(tmp_path / "run.sh", "trainer.strategy=fsdp")
    assert faults(found) == [("error", "trainer")]
    base = checked(tmp_path / "run.sh", program="skyrl.train.entrypoints.main_base")
    assert ("error", "model") in faults(base)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("batch_sise=8", "batch_sise"),
        ("batch_size=many", "batch_size"),
        ("batch_size=0", "batch_size"),
        ("num_steps=0", "num_steps"),
        ("num_epochs=0", "num_epochs"),
        ("dummy_run_full_ctx=true dummy_run_max_steps=0", "dummy_run_max_steps"),
        ("dataloader_num_workers=-1", "dataloader_num_workers"),
        ("num_epochs=1 num_steps=5", "num_steps"),
        ("num_epochs=null", "num_epochs"),
        ("strategy=fdsp batch_size=8", "strategy"),
        ("sampler=shuffled", "sampler"),
        ("sampler=custom", "sampler"),
        ("train_on_what=ALL_ASSISTANT_MESSAGES", "train_on_what"),
        ("model.path=null", "model.path"),
        ("eval_interval=5", "eval_interval"),
        ("eval_before_train=true", "eval_before_train"),
        ("train_datasets=[a,b] train_dataset_splits=[train]", "train_dataset_splits"),
        ("train_datasets=[a]", "train_dataset_splits"),
        (
            "train_datasets=[a] train_dataset_splits=[train] dataset_name=b",
            "train_datasets",
        ),
        (
            "pretokenized_dataset_paths=[a] train_datasets=[b]",
            "pretokenized_dataset_paths",
        ),
        ("eval_datasets=[a]", "eval_dataset_splits"),
        ("train_dataset_weights=[0.5,0.5]", "train_dataset_weights"),
        ("train_dataset_weights=[0]", "train_dataset_weights"),
        ("train_dataset_weights=[1] sampler=sequential", "train_dataset_weights"),
        (f"{TENSOR}=3 {PIPELINE}=1", TENSOR),
        ("sequence_parallel_size=2", "sequence_parallel_size"),
        (
            f"{TENSOR}=1 {PIPELINE}=2 {CONTEXT}=2 remove_microbatch_padding=false",
            CONTEXT,
        ),
        (f"{PACKED}", "use_sequence_packing"),
        (f"{PACKED} max_length=64 {FSDP}", "use_sequence_packing"),
        (
            f"{PACKED} max_length=64 max_tokens_per_microbatch=32",
            "max_tokens_per_microbatch",
        ),
        (f"{PACKED} max_length=64 batch_size=1 {TENSOR}=1 {PIPELINE}=1", "batch_size"),
        (f"{FSDP} batch_size=6", "batch_size"),
        (f"{FSDP} batch_size=4", "micro_train_batch_size_per_gpu"),
    ],
)
def test_what_it_refuses(tmp_path: Path, more: str, key: str) -> None:
    found = faults(checked(tmp_path / "run.sh", more))
    assert [fault for fault in found if fault[0] == "error"] == [("error", key)]


@pytest.mark.parametrize(
    "more",
    [
        f"{FSDP} batch_size=8 eval_interval=5 eval_dataset_name=a",
        "strategy=fsdp2 batch_size=8",
        "train_datasets=[a,b] train_dataset_splits=[c,d] train_dataset_weights=[1,2]",
        "pretokenized_dataset_paths=[a] num_steps=5 max_training_steps=2",
        "use_sample_packing=false train_on_what=all_assistant_messages",
        f"{PACKED} max_length=64 max_tokens_per_microbatch=128 batch_size=1",
        f"{CONTEXT}=2 {TENSOR}=2 {PIPELINE}=1",
    ],
)
def test_what_it_takes(tmp_path: Path, more: str) -> None:
    assert not faults(checked(tmp_path / "run.sh", more))


def test_sizes_that_lose_their_defaults(tmp_path: Path) -> None:
    found = checked(tmp_path / "run.sh", f"{TENSOR}=1 batch_size=8")
    assert faults(found) == [("warning", PIPELINE)]
    assert found.values["train_pipeline_parallel_size"].value == 1
    whole = checked(tmp_path / "run.sh")
    assert whole.values["train_pipeline_parallel_size"].value == 2
