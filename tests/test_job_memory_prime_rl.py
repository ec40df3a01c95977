"""The memory plan of prime-rl: parts counted by hand, reasons, advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_estimate import HALF_B, QWEN_7B
from test_job_memory import shape
from test_job_prime_rl import BASE, RELEASE

from pytest_gkd.job import check, fitting, models
from pytest_gkd.job.check import Checked

UPDATE, STEP = "forward and backward", "optimizer step"
SFT = """\
max_steps = 10
[model]
name = "student"
[data]
name = "data"
seq_len = 2048
batch_size = 8
micro_batch_size = 2
[optim]
lr = 1e-5
[deployment]
type = "single_node"
num_train_gpus = 2
"""


class Planned:
    """What is planned of a file of prime-rl's, with changes and overrides."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = shape(place / "student", HALF_B)
        self.student = models.read(self.path)

    def __call__(self, *overrides: str, text: str = BASE, gib: int = 79) -> Checked:
        file = self.place / "job.toml"
        file.write_text(text.replace('"student"', f'"{self.path}"'))
        room = fitting.machine(f"memory={gib}GiB")
        words = [w for one in overrides for w in f"--{one}".split("=")]
        return check.check(file, words, RELEASE, machine=room)

    def parts(self, *overrides: str, **more: Any) -> dict[str, dict[str, int]]:
        """The trainer's parts by phase."""
        found = self(*overrides, **more)
        assert found.memory, found.no_memory_plan
        return {row.phase: row.bytes for row in found.memory if row.role == "trainer"}


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


def test_state_and_layers_inputs_are_in_host_memory(planned: Planned) -> None:
    elements = planned.student.elements
    found = planned.parts("deployment.num_train_gpus=4")
    for phase, parts in found.items():
        has_states = "optimizer states float32" in parts
        assert has_states == (phase in (STEP, "checkpoint")), phase
    assert found[STEP]["optimizer states float32"] == 8 * elements // 4
    assert found[STEP]["optimizer's temporaries float32"] == elements
    stay = planned.parts(
        "deployment.num_train_gpus=4", "trainer.model.optim_cpu_offload=false"
    )
    assert stay[UPDATE]["optimizer states float32"] == 2 * elements
    assert "optimizer's temporaries float32" not in stay[STEP]


def test_the_output_matrix_works_in_tiles(planned: Planned) -> None:
    # Small embeddings, so that the loss is the fullest moment.
    planned.path = shape(planned.place / "few", replace(HALF_B, vocab=9000))
    long = "seq_len=8192"
    tile = 8192 * 8192
    assert planned.parts(long)[UPDATE]["logits' gradient"] == tile * 22
    less = planned.parts(long, "trainer.model.fused_lm_head_token_chunk_size=1024")
    assert "logits and loss" not in less[UPDATE]
    assert less[UPDATE].get("logits' gradient", 0) < tile * 22


def test_layers_inputs_stay_without_offload(planned: Planned) -> None:
    planned.path = shape(planned.place / "few", replace(HALF_B, vocab=9000))
    # So many tokens that a layer's backward pass is the fullest moment.
    more = "seq_len=262144", "trainer.model.fused_lm_head_token_chunk_size=1"
    away = planned.parts(*more)[UPDATE]["activations bfloat16"]
    off = "trainer.model.ac_offloading=None"
    there = planned.parts(*more, off)[UPDATE]["activations bfloat16"]
    assert there - away == 23 * 262_144 * HALF_B.hidden * 2


def test_weights_are_sent_by_tensors_or_by_layers(planned: Planned) -> None:
    rest = planned.student.embedding + planned.student.head
    one = planned.parts()["weight sync"]["bucket of weights"]
    assert one == 2 * planned.student.largest
    sent = planned.parts("weight_broadcast.type=nccl")["weight sync"]
    # All that is in no layer, and a flat copy of it.
    assert sent["bucket of weights"] == 4 * rest


def test_the_server_is_planned_apart(planned: Planned) -> None:
    found = planned()
    served = {r.phase: r.bytes for r in found.memory if r.role == "rollout server"}
    assert served["serving"]["KV cache bfloat16"] > 50 << 30
    alone = planned(text='[vllm]\nmodel = "student"\n[server]\nport = 8001\n')
    assert {row.role for row in alone.memory} == {"inference server"}
    assert "trains nothing" in alone.no_memory_plan
    odd = planned("inference.vllm.quantization=fp8")
    assert {row.role for row in odd.memory} == {"trainer"}
    assert any("inference.vllm.quantization" in f.message for f in odd.findings)


def test_sft_has_the_same_head_or_whole_logits(planned: Planned) -> None:
    elements = planned.student.elements
    found = planned.parts(text=SFT)
    assert "weight sync" not in found
    assert found[UPDATE]["weights float32"] == 2 * elements
    whole = planned.parts("model.fused_lm_head_token_chunk_size=disabled", text=SFT)
    # Two rows of 2048 tokens: logits, their probabilities and gradients in float32.
    assert whole[UPDATE]["logits and loss"] == 4096 * HALF_B.vocab * 12


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("weight_broadcast.type=nixl", "NIXL's buffers"),
        ("trainer.model.lora.rank=8", "LoRA layers"),
        ("trainer.model.ac.mode=selective", "full recomputation"),
        ("trainer.model.reshard_after_forward=false", "has gathered"),
        ("trainer.optim.type=muon", "optimizer muon"),
        ("trainer.model.fused_lm_head_token_chunk_size=disabled", "whole logits"),
        ("trainer.model.quantization.type=fp8", "FP8"),
        ("trainer.model.dp_replicate=3", "dp_replicate * cp"),
    ],
)
def test_what_is_not_known_is_said(
    planned: Planned, override: str, reason: str
) -> None:
    found = planned(override)
    assert reason in found.no_memory_plan
    assert {row.role for row in found.memory} == {"rollout server"}


def test_too_large_a_student_gets_a_change(planned: Planned) -> None:
    planned.path = shape(planned.place / "large", QWEN_7B)
    (said,) = [
        f for f in planned().findings if f.cause == "cuda.oom" and "With" in f.message
    ][:1]
    # State that leaves and state that stays are two settings that exclude each other.
    assert "trainer.model.fsdp_cpu_offload=true" in said.message
    assert "trainer.model.optim_cpu_offload=false" in said.message
