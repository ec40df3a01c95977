"""The memory plan of TRL's jobs: parts counted by hand, reasons, and advice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B

from pytest_gkd.job import loss_memory

GKD = "examples/scripts/gkd.py --dataset_name d --max_length 1000 --max_new_tokens 500"
GRPO = "trl/scripts/grpo.py --dataset_name d --reward_funcs r"
DDP = "accelerate launch --num_processes 4 --multi_gpu"
ZERO = "accelerate launch --num_processes 4 --use_deepspeed"
FSDP = (
    "accelerate launch --num_processes 4 --use_fsdp "
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
)
BOTH = "--model_name_or_path {s} --teacher_model_name_or_path {t}"
ONE = "--model_name_or_path {s}"
SFT = f"trl/scripts/sft.py --dataset_name d {ONE}"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "trl==1.16.0")


def test_ddp_holds_all_of_both_models_in_float32(checked: Checked) -> None:
    student, teacher = checked.elements()
    found = checked.parts(f"{DDP} {GKD} {BOTH} --per_device_train_batch_size 2")
    assert found["weights float32"] == 4 * student
    assert found["optimizer states float32"] == 8 * student
    assert found["DDP's buckets float32"] == 4 * student
    assert found["teacher's weights float32"] == 4 * teacher
    # Prompt and rollout: 1000 and 500 tokens of 2 rows; TRL's divergence at beta 0.5.
    assert found["logits and loss"] == 2 * 1500 * HALF_B.vocab * 68


@pytest.mark.parametrize(
    ("options", "each"), [("", 68), ("--bf16 false", 34), ("--beta 0", 36)]
)
def test_mixed_precision_gives_float32_logits_of_16_bit_weights(
    checked: Checked, options: str, each: int
) -> None:
    student, teacher = checked.elements()
    dtype = "--dtype bfloat16"
    found = checked.parts(f"{DDP} {GKD} {BOTH} {dtype} {options}")
    assert found["weights bfloat16"] == 2 * student
    assert found["teacher's weights bfloat16"] == 2 * teacher
    assert found["logits and loss"] == 8 * 1500 * HALF_B.vocab * each


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "teacher"),
    [(1, 1, 1, 1), (2, 1, 4, 1), (3, 4, 4, 4)],
)
def test_zero_divides_by_its_stage(
    checked: Checked, stage: int, weights: int, gradients: int, teacher: int
) -> None:
    elements, teachers = checked.elements()
    found = checked.parts(
        f"{ZERO} --zero_stage {stage} {GKD} {BOTH} --gradient_accumulation_steps 2"
    )
    assert found["weights bfloat16"] == 2 * elements // weights
    assert found["gradients bfloat16"] == 2 * elements // gradients
    assert found["optimizer states float32"] == 2 * elements
    assert found["master copies float32"] == elements
    assert found["teacher's weights bfloat16"] == 2 * teachers // teacher
    assert found["DeepSpeed's buckets"] == 2 * 500_000_000
    # DeepSpeed's logits stay in 16 bits: half of what mixed precision's take.
    assert found["logits and loss"] == 8 * 1500 * HALF_B.vocab * 34


def test_the_launchers_precision_counts_where_trl_has_none(checked: Checked) -> None:
    for launched, own in (("bf16", "true"), ("fp8", "true"), ("bf16", "false")):
        command = f"{DDP} --mixed_precision {launched} {GKD} {BOTH} --bf16 {own}"
        assert "activations bfloat16" in checked.parts(command)
    alone = checked.parts(f"{DDP} --mixed_precision no {GKD} {BOTH} --bf16 false")
    assert "activations float32" in alone


def test_deepspeeds_own_file_is_read(checked: Checked, tmp_path: Path) -> None:
    elements, _ = checked.elements()
    settings: dict[str, Any] = {"stage": 2, "reduce_bucket_size": "auto"}
    settings["offload_optimizer"] = {"device": "cpu"}
    file = tmp_path / "ds.json"
    for overlap in (False, True):
        settings["overlap_comm"] = overlap
        file.write_text(json.dumps({"zero_optimization": settings}))
        more = "--gradient_accumulation_steps 2"
        found = checked.parts(f"{ZERO} {GKD} {BOTH} --deepspeed {file} {more}")
        assert found["weights bfloat16"] == 2 * elements
        largest = HALF_B.vocab * HALF_B.hidden
        size = HALF_B.hidden**2 * (1 + overlap) + largest
        assert found["DeepSpeed's buckets"] == 2 * size
        assert not [name for name in found if "states" in name or "master" in name]
        assert not [name for name in found if name.startswith("gradients")]


def test_fsdp_divides_float32(checked: Checked) -> None:
    elements, _ = checked.elements()
    rolls = "--use_vllm --vllm_max_model_length 2048 --max_completion_length 1024"
    found = checked.parts(
        f"{FSDP} {GRPO} {ONE} {rolls} --gradient_accumulation_steps 4", "optimizer step"
    )
    assert found["weights float32"] == elements
    assert found["optimizer states float32"] == 2 * elements
    # The engine is awake beside it: 0.3 of the GPU.
    assert found["KV cache bfloat16"] > 10 << 30
    slept = checked.parts(
        f"{FSDP} {GRPO} {ONE} {rolls} --vllm_enable_sleep_mode", "optimizer step"
    )
    assert "KV cache bfloat16" not in slept


def test_rollouts_by_transformers_have_a_phase(checked: Checked) -> None:
    elements, _ = checked.elements()
    zero3 = f"{ZERO} --zero_stage 3 {GKD} {BOTH}"
    found = checked.parts(zero3, "rollout")
    assert found["gathered weights bfloat16"] == 2 * elements
    assert "KV cache bfloat16" not in found  # off with gradient checkpointing
    found = checked.parts(f"{zero3} --gradient_checkpointing false", "rollout")
    assert found["KV cache bfloat16"] > 0
    told = checked(f"{zero3} --lmbda 0")["memory"]
    assert "rollout" not in {row["phase"] for row in told}


@pytest.mark.parametrize("packing", ["", "--packing"])
def test_sft_has_tiles_of_logits_and_no_rollout(checked: Checked, packing: str) -> None:
    student, _ = checked.elements()
    found = checked(f"{DDP} {SFT} --max_length 4096 {packing}")
    assert found["memory"], found["no_memory_plan"]
    rows = {row["phase"]: row["bytes"] for row in found["memory"]}
    assert "rollout" not in rows
    update = rows["forward and backward"]
    assert update["weights float32"] == 4 * student
    # 8 rows of 4096 tokens: what recomputed layers keep, and one of them.
    kept = HALF_B.layers * 8 * 4096 * HALF_B.hidden * 4
    assert kept < update["activations bfloat16"] < 3 * kept
    assert update.get("logits and loss", 0) <= 8 * 4096 * 32_768


def test_the_tiles_of_trls_losses(checked: Checked) -> None:
    rows = 4096 * 32_768
    one = f"{FSDP} {SFT} --max_length 2048 --gradient_checkpointing false"
    update = checked.parts(one)
    assert update["logits' gradient"] == 2 * rows
    # The output matrix' and the hidden states', and the former in 16 bits.
    assert update["gradients added up float32"] == 4 * HALF_B.hidden * (
        HALF_B.vocab + 8 * 2048
    )
    assert update["a matrix's gradient bfloat16"] == 2 * HALF_B.hidden * HALF_B.vocab
    # Of a teacher's logits beside the student's, both in float32.
    assert loss_memory.needed("chunked", 8 * 1024, HALF_B.vocab, 2)[0] == 8 * rows


def test_sft_of_earlier_releases_has_no_plan(tmp_path: Path, capsys: Any) -> None:
    found = Checked(tmp_path, capsys, "trl==1.9.0")(f"{DDP} {SFT}")
    assert "1.16 and later" in found["no_memory_plan"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"CUDA_VISIBLE_DEVICES=0,1 python {GKD} {BOTH}", "nn.DataParallel"),
        (f"{FSDP} {GKD} {BOTH}", "leaves TRL's teacher in host memory"),
        (f"{DDP} {GKD} {BOTH} --use_liger_kernel", "Liger"),
        (f"{DDP} {GKD} {BOTH} --load_in_4bit", "bitsandbytes"),
        (f"{DDP} --mixed_precision fp8 {GKD} {BOTH} --bf16 false", "training in fp8"),
        (f"{DDP} {GKD} {BOTH} --optim adafactor", "adafactor"),
        (f"{DDP} {GKD} {BOTH} --attn_implementation eager", "eager"),
        (f"{DDP} {GRPO} {ONE}", "bounds the prompts"),
        (f"{DDP} {GRPO} {ONE} --beta 0.1", "reference model"),
        (f"{DDP} train.py --model_name_or_path {{s}}", "one's own"),
        (f"{DDP} examples/scripts/sft_vlm.py --dataset_name d {ONE}", "not known yet"),
        (f"{DDP} {SFT} --max_length None", "bounds the rows"),
        (f"{DDP} {SFT} --label_smoothing_factor 0.1", "label smoothing"),
        (f"{DDP} {SFT} --activation_offloading", "offloaded activations"),
        (f"{ZERO} --deepspeed_config_file $F {GKD} {BOTH}", "config_file cannot be"),
        (f"{ZERO} --deepspeed_config_file a.json {GKD} {BOTH}", "ion is not found"),
        (f"{ZERO} --zero_stage $STAGE {GKD} {BOTH}", "zero_stage cannot be determined"),
        (f"{DDP} --config_file a.yaml {GKD} {BOTH}", "configuration is not found"),
        (f"{DDP} {GKD} {BOTH} --gradient_checkpointing $C", "checkpointing cannot"),
        (f"{FSDP} --fsdp_sharding_strategy SHARD_GRAD_OP {GRPO} {ONE}", "does not div"),
    ],
)
def test_what_is_not_known_has_no_plan(
    checked: Checked, command: str, said: str
) -> None:
    judged = "" if "train.py" not in command else " --dataset_name d"
    found = checked(command + judged)
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


SERVE = "CUDA_VISIBLE_DEVICES=4,5 trl vllm-serve --model {s} --tensor_parallel_size 2"


def test_the_rollouts_server_has_rows_of_its_own(checked: Checked) -> None:
    student, _ = checked.elements()
    server = f"{SERVE} --max_model_len 4096 --gpu_memory_utilization 0.5 &\n"
    rolls = "--use_vllm --vllm_mode server --max_completion_length 1024"
    trains = f"CUDA_VISIBLE_DEVICES=0,1,2,3 {DDP} {GRPO} {ONE} {rolls}"
    found = checked(f"{server}{trains}")
    rows = {row["phase"]: row["bytes"] for row in found["memory"]}
    assert {row["role"] for row in found["memory"]} == {"rollout server"}
    assert "bounds the prompts" in found["no_memory_plan"]  # of the trainer's
    serving = rows["serving"]
    assert serving["engine's weights bfloat16"] == student
    assert "prompts' logits" not in serving
    cut = checked(f"{server}{trains} --vllm_max_model_length 4096")
    assert {row["role"] for row in cut["memory"]} == {"rollout server", "trainer"}
    quantized = server.replace(" &", " --quantization fp8 &")
    told = checked(f"{quantized}{trains}")
    assert told["memory"] == []
    notes = [f["message"] for f in told["findings"] if f["level"] == "note"]
    assert [one for one in notes if "quantization is not known" in one]


def test_one_gpu_needs_no_launcher(checked: Checked) -> None:
    found = checked.parts(f"CUDA_VISIBLE_DEVICES=0 python {GKD} {BOTH}")
    assert not [name for name in found if name.startswith("DDP")]


def test_an_older_release_is_not_planned_by_a_later_ones_rules(
    tmp_path: Path, capsys: Any
) -> None:
    found = Checked(tmp_path, capsys, "trl==0.29.1")(f"{DDP} {GKD} {BOTH}")
    assert found["memory"] == []
    assert "TRL 1.9" in found["no_memory_plan"]


@pytest.mark.parametrize(
    "options",
    [
        *("--max_length 1e9", "--max_length -5", "--max_new_tokens 0", "--beta 7"),
        *("--beta x", "--dtype int8", "--per_device_train_batch_size 0"),
    ],
)
def test_sizes_that_are_none_have_no_plan(checked: Checked, options: str) -> None:
    found = checked(f"{DDP} {GKD} {BOTH} {options}")
    assert found["memory"] == []
    assert options.split()[-1] in found["no_memory_plan"]


@pytest.mark.parametrize(
    "settings",
    [
        '{"stage": "auto"}',
        '{"stage": true}',
        '{"stage": 2, "reduce_bucket_size": -5}',
        '{"stage": 2, "reduce_bucket_size": "big"}',
        '{"stage": 3, "stage3_max_live_parameters": [1]}',
        "5",
    ],
)
def test_deepspeeds_file_is_not_trusted(
    checked: Checked, tmp_path: Path, settings: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{"zero_optimization": {settings}}}')
    found = checked(f"{ZERO} {GKD} {BOTH} --deepspeed {file}")
    assert found["memory"] == []
    assert found["no_memory_plan"].startswith("DeepSpeed's")


@pytest.mark.parametrize(
    ("launcher", "memory"), [(DDP, "79GiB"), (f"{ZERO} --zero_stage 2", "79GiB")]
)
def test_the_advice_makes_it_fit(checked: Checked, launcher: str, memory: str) -> None:
    command = f"{launcher} {GKD} {BOTH} --gradient_accumulation_steps 1"
    bad = checked(f"{command} --per_device_train_batch_size 16", memory)
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = dict(re.findall(r"(\w+)=(\w+) \(now", told[0]))
    assert (
        int(advice["per_device_train_batch_size"])
        * int(advice["gradient_accumulation_steps"])
        == 16
    )
    more = " ".join(f"--{key} {value}" for key, value in advice.items())
    good = checked(f"{launcher} {GKD} {BOTH} {more}", memory)
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


def test_the_advice_has_the_key_of_where_it_is_set(
    checked: Checked, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    command = f"{GKD} --model_name_or_path {{t}} --teacher_model_name_or_path {{s}}"
    rows = "--per_device_train_batch_size 1"
    for launcher, key in (
        (f"{ZERO} --zero_stage 1", "zero_stage=2"),
        (f"{ZERO} --deepspeed_config_file {file}", "zero_optimization.stage=2"),
    ):
        totals = [
            max(row["total"] for row in checked(f"{one} {command} {rows}")["memory"])
            for one in (f"{ZERO} --zero_stage 1", f"{ZERO} --zero_stage 2")
        ]
        found = checked(f"{launcher} {command} {rows}", f"{sum(totals) // 2}B")
        (told,) = {f["message"].split("With ")[1] for f in found["findings"]}
        assert told.startswith(key)
