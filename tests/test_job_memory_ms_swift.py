"""The memory plan of ms-swift's jobs: parts counted by hand, reasons, and advice."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import memory_page
import pytest
from checked_job import Checked
from test_estimate import HALF_B, QWEN_7B

from pytest_gkd.job import loss_memory, models
from pytest_gkd.job.releases import Release

GPUS = "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift"
GKD = (
    f"{GPUS} rlhf --rlhf_type gkd --model {{s}} --dataset d --tuner_type full "
    "--max_length 1000 --max_completion_length 500 --lmbda 1"
)
T = "--teacher_model {t}"
GRPO = (
    f"{GPUS} rlhf --rlhf_type grpo --model {{s}} --dataset d --max_length 1000 "
    "--max_completion_length 500 --beta 0 --reward_funcs r --num_generations 4"
)
SFT = f"{GPUS} sft --model {{s}} --dataset d --max_length 1000 --tuner_type full"
VLLM = "--use_vllm true --vllm_mode colocate"
SERVED = "--teacher_model_server http://localhost:8000 --gkd_logits_topk 20"

LOSS = "modelscope+ms-swift/swift/rlhf_trainers/gkd_loss.py"
DIGEST = "5d02ce7d1dfd162cb37dba054eff1e23e29d41dd1f2122352a8651f6e7ca0fec"


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "ms-swift==4.6.0")


def test_ddp_holds_all_of_both_models(checked: Checked) -> None:
    student, teacher = checked.elements()
    found = checked.parts(f"{GKD} {T} --per_device_train_batch_size 2")
    assert found["weights bfloat16"] == 2 * student
    assert found["optimizer states bfloat16"] == 4 * student
    assert found["DDP's buckets bfloat16"] == 2 * student
    assert found["teacher's weights bfloat16"] == 2 * teacher


@pytest.mark.parametrize(
    ("options", "tokens", "each", "in_chunk"),
    [
        # Of each row the logits of all 500 answers and one before; 2 rows.
        (T, 1002, 52, 8),
        (f"{T} --beta 0", 1002, 32, 12),
        (f"{T} --beta 1", 1002, 36, 8),
        (f"{T} --bf16 false", 1002, 26, 4),
        (f"{T} --deepspeed zero2", 1002, 26, 4),
        (f"{T} --deepspeed zero2 --beta 0", 1002, 16, 6),
        (f"{T} --deepspeed zero2 --beta 1", 1002, 18, 4),
        (f"{T} --gkd_logits_topk 20", 1002, 12, 0),
        (SERVED, 1002, 8, 0),
        (f"{SERVED} --deepspeed zero2", 1002, 8, 0),
        ("", 1002, 52, 8),  # the student is its own teacher
        # A row of the dataset may be an answer as a whole.
        (f"{T} --lmbda 0.5", 2002, 52, 8),
        (f"{T} --lmbda 0", 2000, 52, 8),
    ],
)
def test_its_own_loss_goes_through_chunks_of_512(
    checked: Checked, options: str, tokens: int, each: int, in_chunk: int
) -> None:
    found = checked.parts(f"{GKD} {options} --per_device_train_batch_size 2")
    expected = HALF_B.vocab * (tokens * each + 512 * in_chunk)
    assert found["logits and loss"] == expected


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "buffer"),
    [
        ("zero1", 1, 1, 200_000_000),
        ("zero2", 1, 4, 200_000_000),
        ("zero3", 4, 4, HALF_B.hidden**2),
    ],
)
def test_zero_divides_by_its_stage(
    checked: Checked, name: str, weights: int, gradients: int, buffer: int
) -> None:
    elements, teachers = checked.elements()
    steps = "--gradient_accumulation_steps 2"
    found = checked.parts(f"{GKD} {T} --deepspeed {name} {steps}")
    assert found["weights bfloat16"] == 2 * elements // weights
    assert found["gradients bfloat16"] == 2 * elements // gradients
    assert found["optimizer states float32"] == 2 * elements
    assert found["master copies float32"] == elements
    assert found["teacher's weights bfloat16"] == 2 * teachers // weights
    assert found["DeepSpeed's buckets"] == 2 * buffer


def test_offload_leaves_weights_and_states_in_host_memory(checked: Checked) -> None:
    elements, teachers = checked.elements()
    found = checked.parts(f"{GKD} {T} --deepspeed zero2_offload")
    assert found["weights bfloat16"] == 2 * elements
    assert found["teacher's weights bfloat16"] == 2 * teachers
    largest = HALF_B.vocab * HALF_B.hidden
    assert found["DeepSpeed's buckets"] == 2 * (200_000_000 + largest)
    assert not [
        n for n in found if "states" in n or "master" in n or "gradients b" in n
    ]
    found = checked.parts(f"{GKD} {T} --deepspeed zero3_offload")
    assert not [n for n in found if n.startswith(("weights", "optim", "teacher's w"))]
    assert found["gathered weights bfloat16"] == 2 * elements


@pytest.mark.parametrize("is_file", [False, True])
def test_deepspeeds_json_is_read(
    checked: Checked, tmp_path: Path, is_file: bool
) -> None:
    elements, _ = checked.elements()
    text = (
        '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 3e8, '
        '"overlap_comm": true, "offload_optimizer": {"device": "none"}}}'
    )
    (tmp_path / "ds.json").write_text(text)
    given = tmp_path / "ds.json" if is_file else f"'{text}'"
    command = f"{GKD} {T} --deepspeed {given}"
    found = checked.parts(command)
    assert found["DeepSpeed's buckets"] == 2 * 600_000_000
    assert found["optimizer states float32"] == 2 * elements
    assert checked(command)["values"]["offload_optimizer"]["value"] is False


def test_lora_trains_float32_matrices_beside_the_base(checked: Checked) -> None:
    elements, _ = checked.elements()
    trained = 16 * models.read(checked.student).matrices
    lora = "--tuner_type lora --lora_rank 16 --gradient_accumulation_steps 2"
    found = checked.parts(f"{GKD} {T} {lora}")
    assert found["weights bfloat16"] == 2 * elements
    assert found["adapters float32"] == 4 * trained
    assert found["gradients float32"] == 4 * trained
    assert found["DDP's buckets float32"] == 4 * trained
    assert found["optimizer states float32"] == 8 * trained
    found = checked.parts(f"{GKD} {T} {lora} --deepspeed zero2")
    assert found["master copies float32"] == trained
    assert "adapters float32" not in found
    # Its own base is the teacher without a copy.
    own = checked.parts(f"{GKD} --teacher_model {{s}} {lora}")
    assert not [name for name in own if name.startswith("teacher")]
    copied = checked.parts(f"{GKD} --teacher_model {{s}}")
    assert copied["teacher's weights bfloat16"] == 2 * elements


def test_fsdp_divides_float32_and_recomputes(checked: Checked) -> None:
    elements, _ = checked.elements()
    found = checked.parts(f"{SFT} --fsdp fsdp2", "optimizer step")
    assert found["weights float32"] == elements
    assert found["optimizer states float32"] == 2 * elements
    sizes = [
        checked.parts(f"{SFT} {more}")["activations bfloat16"]
        for more in ("--fsdp fsdp2 --gradient_checkpointing false", "--fsdp fsdp2")
    ]
    assert sizes[0] == sizes[1]
    kept = checked.parts(f"{SFT} --gradient_checkpointing false")
    assert kept["activations bfloat16"] > 3 * sizes[0]


def test_sft_takes_all_logits_of_packed_rows(checked: Checked) -> None:
    found = checked.parts(f"{SFT} --per_device_train_batch_size 2")
    assert found["logits and loss"] == 2 * 1000 * HALF_B.vocab * 12
    packs = "--packing true --packing_length 3000 --attn_impl flash_attn"
    found = checked.parts(f"{SFT} {packs}")
    assert found["logits and loss"] == 3000 * HALF_B.vocab * 12


def test_grpo_beside_vllm(checked: Checked) -> None:
    command = f"{GRPO} --tuner_type full {VLLM} --vllm_gpu_memory_utilization 0.4"
    command += " --per_device_train_batch_size 4"
    found = checked.parts(command)
    assert found["logits and loss"] == 4 * 501 * HALF_B.vocab * 16
    assert found["KV cache bfloat16"] > 10 << 30  # the engine is awake beside it
    slept = checked.parts(f"{command} --sleep_level 1")
    assert "KV cache bfloat16" not in slept
    assert slept["CUDA graphs"] > 0
    eager = checked.parts(f"{command} --sleep_level 1 --vllm_enforce_eager true")
    assert "CUDA graphs" not in eager
    apart = checked(f"{GRPO} --use_vllm true --vllm_mode server --vllm_server_host h")
    assert {row["role"] for row in apart["memory"]} == {"trainer"}


def test_vllm_runs_as_many_as_it_is_asked_for(checked: Checked) -> None:
    # The sampler's logits of all sequences are its most, in float32 three times.
    command = f"{GRPO} --tuner_type full {VLLM} --per_device_train_batch_size 64"
    for more, sequences in (
        ("--gradient_accumulation_steps 4", 256),
        ("--steps_per_generation 8", 512),
        ("--generation_batch_size 1024", 256),
        ("--vllm_max_num_seqs 300", 300),
        ("--steps_per_generation 4 --vllm_tensor_parallel_size 2", 512),
    ):
        found = checked.parts(f"{command} {more}", "rollout")
        assert found["engine's activations"] == sequences * HALF_B.vocab * 12


def test_offload_during_rollouts_lowers_these_alone(checked: Checked) -> None:
    elements, _ = checked.elements()
    away = "--offload_model true --offload_optimizer true"
    command = f"{GRPO} --tuner_type full {VLLM} --sleep_level 1"
    for more, left in (("", 6), (away, 0)):
        found = checked.parts(f"{command} {more}", "rollout")
        sizes = [
            n for name, n in found.items() if name.startswith(("weights", "optim"))
        ]
        assert sum(sizes) == left * elements
    assert checked.parts(f"{command} {away}")["weights bfloat16"] == 2 * elements


def test_rollouts_by_transformers_have_a_phase(checked: Checked) -> None:
    elements, _ = checked.elements()
    command = f"{GKD} {T} --deepspeed zero3 --steps_per_generation 2"
    found = checked.parts(command, "rollout")
    assert found["gathered weights bfloat16"] == 2 * elements
    one = models.read(checked.student).cache_bytes(1500, "bfloat16")
    assert found["KV cache bfloat16"] == 2 * one
    for other in (f"{command} --lmbda 0", SFT):
        told = checked(other)["memory"]
        assert told
        assert "rollout" not in {row["phase"] for row in told}


@pytest.mark.parametrize(
    ("dtype", "weights", "compute"),
    [
        ("--torch_dtype float32", "float32", "float16"),
        ("--torch_dtype float32 --fp16 false --bf16 true", "float32", "bfloat16"),
        ("--torch_dtype float32 --fp16 false", "float32", "float32"),
    ],
)
def test_mixed_precision_follows_the_dtype(
    checked: Checked, dtype: str, weights: str, compute: str
) -> None:
    found = checked.parts(f"{SFT} {dtype}")
    assert f"weights {weights}" in found
    assert f"activations {compute}" in found


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{GKD} {T} --use_liger_kernel true", "Liger"),
        (f"{GKD} {T} --quant_bits 4", "quantised"),
        (f"{GKD} {T} --optim adafactor", "adafactor"),
        (f"{GKD} {T} $MORE", "which options"),
        (f"{GKD} {T} --optimizer muon", "optimizer of ms-swift's own"),
        (f"{GKD} {T} --attn_impl eager", "eager"),
        (f"{GKD} {T} --freeze_parameters_ratio 0.5", "frozen"),
        (f"{GKD} {T} --tuner_type adalora", "adalora"),
        (f"{GKD} {T} --tuner_type lora --target_modules q_proj", "which layers"),
        (f"{GKD} {T} --tuner_type lora --gradient_checkpointing false", "without rec"),
        (f"{GKD} {T} --tuner_type lora --fsdp fsdp2", "LoRA's dtypes under FSDP"),
        (f"{GKD} {T} --fsdp fsdp2", "teacher under FSDP"),
        (f"{GKD} --fsdp fsdp2", "transformers under FSDP"),
        (f"{SFT} --fsdp own.json", "FSDP by a file"),
        (f"{GKD} {T} --offload_teacher_model true", "offloaded teacher"),
        (f"{GKD} {T} --sft_alpha 0.1", "two losses"),
        (f"{GKD} {T} --lmbda 0.5 --truncation_strategy left", "bounds rows"),
        (f"{GKD} {T} --deepspeed zero0", "stage 0"),
        (f"{GKD} {T} --deepspeed none.json", "ion is not found"),
        (f"{GKD} {T} --deepspeed $DS", "deepspeed cannot be determined"),
        (f"{GKD} {T} --deepspeed zero2 --fp16 false --bf16 false", "in float32"),
        (f"{GKD} {T} --deepspeed zero3 --offload_model true {VLLM}", "offload_model"),
        (
            f"{GKD} {T} --gradient_checkpointing $C",
            "checkpointing cannot be determined",
        ),
        (f"{GKD} --teacher_model_server http://h:8000", "gkd_logits_topk"),
        (f"{GKD.replace('--max_length 1000', '')} {T}", "bounds the rows"),
        (f"{GRPO} --tuner_type full --beta 0.1", "reference model"),
        (f"{GRPO} {T}", "GRPO's teacher"),
        (f"{GRPO} --tuner_type lora {VLLM} --vllm_engine_kwargs '{{}}'", "is given"),
        (f"{SFT} --sequence_parallel_size 2", "sequence parallelism"),
        (f"{SFT} --loss_scale react", "weighted losses"),
        (SFT.replace(" sft", " pt"), "ms-swift's pt"),
        (SFT.replace("NPROC_PER_NODE=4 ", ""), "spreads its model"),
        (f"{GPUS} rlhf --rlhf_type dpo --model {{s}} --dataset d", "dpo"),
    ],
)
def test_what_is_not_known_has_no_plan(
    checked: Checked, command: str, said: str
) -> None:
    found = checked(command)
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_an_older_release_is_not_planned_by_a_later_ones_rules(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    checked = Checked(tmp_path, capsys, "ms-swift==4.5.3")
    assert checked(f"{GKD} {T}")["memory"]
    asked = []
    monkeypatch.setattr(Release, "is_at_least", lambda _, one: asked.append(one))
    found = checked(f"{GKD} {T}")
    assert found["memory"] == []
    assert asked[-1] in found["no_memory_plan"]


@pytest.mark.parametrize(
    "options",
    [
        *("--max_length -5", "--max_completion_length 0", "--beta 7", "--lmbda 3"),
        *("--per_device_train_batch_size 0", "--steps_per_generation -1"),
        *("--max_length 99999999999999", "--tuner_type lora --lora_rank 0"),
        *("--torch_dtype int8", """--deepspeed '{"zero_optimization": 5}'"""),
        """--deepspeed '{"zero_optimization": {"stage": true}}'""",
        """--deepspeed '{"zero_optimization":{"stage":2,"reduce_bucket_size":-5}}'""",
        """--deepspeed '{"zero_optimization": {"stage": 1, "cpu_offload": true}}'""",
    ],
)
def test_sizes_that_are_none_have_no_plan(checked: Checked, options: str) -> None:
    found = checked(f"{GKD} {T} {options}")
    assert found["memory"] == []
    assert found["no_memory_plan"]


def test_a_section_that_is_none_has_no_stage(checked: Checked) -> None:
    found = checked(f"""{GKD} {T} --deepspeed '{{"zero_optimization": 5}}'""")
    assert found["values"]["zero_stage"]["source"] == "undetermined"
    packed = f"{SFT} --packing true --attn_impl flash_attn --packing_length -3"
    assert "packing_length" in checked(packed)["no_memory_plan"]


def test_a_server_in_the_script_has_rows_of_its_own(checked: Checked) -> None:
    deploy = (
        "CUDA_VISIBLE_DEVICES=4,5 swift deploy --model MODEL --infer_backend vllm "
        "--port 8000 --max_logprobs 64 --vllm_tensor_parallel_size 2 "
        "--vllm_gpu_memory_utilization 0.5 --vllm_max_model_len 4096 &"
    )
    told = checked(f"{deploy.replace('MODEL', '{t}')}\n{GKD} {SERVED}")
    assert told["values"]["teacher_gpus"]["value"] == 2
    rows = {(row["role"], row["phase"]): row["bytes"] for row in told["memory"]}
    _, teacher = checked.elements()
    serving = rows["teacher", "serving"]
    assert serving["engine's weights bfloat16"] == teacher  # 2 bytes on 2 GPUs
    cache = serving["engine's weights bfloat16"] + serving["KV cache bfloat16"]
    assert cache + serving["engine's activations"] == (79 << 30) // 2
    # What is asked of prompts is outside of its share.
    assert serving["prompts' logits"] == 4096 * QWEN_7B.vocab * 8
    one = models.read(checked.teacher).cache_bytes(4096, "bfloat16")
    start = rows["teacher", "engine start"]
    assert start["KV cache bfloat16 of one sequence"] == one // 2
    assert ("trainer", "forward and backward") in rows


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--infer_backend lmdeploy", "infer_backend is lmdeploy"),
        ("--infer_backend vllm --vllm_max_model_len $LENGTH", "is not certain"),
        ("--infer_backend vllm --vllm_max_num_seqs 0", "sequences is 0"),
    ],
)
def test_a_server_that_is_not_known_is_told(
    checked: Checked, more: str, said: str
) -> None:
    deploy = f"CUDA_VISIBLE_DEVICES=4 swift deploy --model {{t}} --port 8000 {more} &"
    told = checked(f"{deploy}\n{GKD} {SERVED}")
    assert {row["role"] for row in told["memory"]} == {"trainer"}
    notes = [f["message"] for f in told["findings"] if f["level"] == "note"]
    assert [one for one in notes if "the teacher has none" in one and said in one]


@pytest.mark.parametrize("memory", ["32GiB", "24GiB"])
def test_a_server_that_does_not_fit_gets_an_option(
    checked: Checked, memory: str
) -> None:
    deploy = (
        "CUDA_VISIBLE_DEVICES=4 swift deploy --model {t} --infer_backend vllm "
        "--port 8000 --max_logprobs 64 --vllm_max_model_len 32768 &"
    )
    command = f"{deploy}\n{GKD} {SERVED}"
    told = [
        one["message"]
        for one in checked(command, memory)["findings"]
        if one["message"].startswith("teacher does not fit")
    ]
    advice = told[0].split("With ")[1].removesuffix(" it fits")
    again = command
    for part in advice.split(" and "):
        option, value = part.split(" (now")[0].split(" ")
        assert option.startswith("--vllm_")
        again = re.sub(rf" {option} \S+", "", again)
        again = again.replace(" --port", f" {option} {value} --port")
    rows = [r for r in checked(again, memory)["memory"] if r["role"] == "teacher"]
    assert {row["verdict"] for row in rows} <= {"fits", "tight"}


def test_the_advice_makes_it_fit(checked: Checked) -> None:
    command = f"{GKD} {T} --gradient_accumulation_steps 1"
    bad = checked(f"{command} --per_device_train_batch_size 16")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = dict(re.findall(r"(\w+)=(\w+) \(now", told[0]))
    more = " ".join(f"--{key} {value}" for key, value in advice.items())
    good = checked(f"{command} {more}")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


def test_the_advice_names_deepspeeds_file(checked: Checked) -> None:
    command = f"{SFT.replace('{s}', '{t}')} --deepspeed"
    totals = [
        max(row["total"] for row in checked(f"{command} {name}")["memory"])
        for name in ("zero1", "zero2")
    ]
    found = checked(f"{command} zero1", f"{sum(totals) // 2}B")
    (told,) = {one["message"].split("With ")[1] for one in found["findings"]}
    assert told.startswith("deepspeed=zero2 (now 1)")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("loss", "beta", "top"),
    [
        ("swift-jsd-0", 0.0, 0),
        ("swift-jsd", 0.5, 0),
        ("swift-jsd-1", 1.0, 0),
        ("swift-topk", 0.5, 4),
        ("swift-served", 0.5, 4),
    ],
)
def test_the_loss_takes_what_its_tensors_take(
    monkeypatch: Any, dtype: str, loss: str, beta: float, top: int
) -> None:
    """Counted, of ms-swift's file at the commit of upstream/ms-swift.toml."""
    path = Path(os.environ.get("GKD_UPSTREAM", ""), LOSS)
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != DIGEST:
        pytest.skip(f"GKD_UPSTREAM has not the right {LOSS}")
    import torch

    spec = importlib.util.spec_from_file_location("gkd_loss", path)
    assert spec is not None
    assert spec.loader is not None
    swift: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gkd_loss", swift)
    spec.loader.exec_module(swift)
    kind, low = getattr(torch, dtype), "low-" if dtype == "bfloat16" else ""
    tokens, vocab = 1536, 2000

    def of(hidden: Any, head: Any) -> Any:
        student = (hidden @ head)[None]
        labels = torch.ones(1, tokens, dtype=torch.long)
        if loss == "swift-served":
            ids = torch.zeros(1, tokens, top, dtype=torch.long)
            values = torch.zeros(1, tokens, top)
            said = swift.TeacherOutput(None, values, ids, labels)
        else:
            with torch.no_grad():
                full = (hidden @ head)[None]  # compute_loss holds it to its end
            said = swift.TeacherOutput(full, labels=labels)
            said = said.to_topk(top) if top else said
        return swift.gkd_loss(student, said, labels, beta, 0.9)[0]

    hidden = torch.randn(tokens, 2, dtype=kind)
    head = torch.randn(2, vocab, dtype=kind, requires_grad=True)
    measured, _ = memory_page.peak_bytes(lambda: of(hidden, head).backward())
    width = torch.finfo(kind).bits // 8
    planned, _ = loss_memory.needed(f"{low}{loss}", tokens, vocab, width)
    assert planned == pytest.approx(measured, rel=0.03)
