"""What models' files say of the memory that a job takes, and what it really takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh_python
import psutil
import pytest
import recorded
from recorded import (
    EIGHT_H100,
    MIG_R570,
    ONE_H100,
    ONE_T4,
    PutsOn,
    Recorded,
    needs_compiler,
)

from pytest_gkd import options
from pytest_gkd.checkpoint import ITEM_BYTES
from pytest_gkd.diagnosis import catalogue
from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.environment import gpu
from pytest_gkd.workload.environment import memory as env_memory
from pytest_gkd.workload.layouts import estimate
from pytest_gkd.workload.layouts.estimate import GIB, HOST
from pytest_gkd.workload.layouts.job_config import job_config
from pytest_gkd.workload.models import model_files, tiny
from pytest_gkd.workload.models.inputs import Inputs

PROGRAMS = Path(__file__).parent / "programs"
STEPS = ("vllm", "weight_sync", "training_step")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen2 model, by what its memory depends on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 152_064


QWEN_7B = Shape(3584, 28, 28, 4, 18_944)
QWEN_14B = Shape(5120, 48, 40, 8, 13_824)
HALF_B = Shape(896, 24, 14, 2, 4_864)


def sparse(directory: Path, shape: Shape, dtype: str = "BF16", **config: Any) -> Path:
    """A model directory of that size that takes no space on the disk."""
    directory.mkdir()
    wide, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    sizes = {"model.embed_tokens.weight": [shape.vocab, wide]}
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        for name, out in (("q", wide), ("k", kv), ("v", kv), ("o", wide)):
            sizes[f"{layer}.self_attn.{name}_proj.weight"] = [out, wide]
        for name in ("gate", "up", "down"):
            sizes[f"{layer}.mlp.{name}_proj.weight"] = [shape.intermediate, wide]
    sizes["lm_head.weight"] = [shape.vocab, wide]
    header, end = {}, 0
    for name, size in sizes.items():
        start, end = end, end + math.prod(size) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    found = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": wide,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "max_position_embeddings": 32_768,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(found))
    (directory / "tokenizer.json").write_text("{}")
    return directory


class Stage:
    """Takes what a stage is told."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.facts: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.fact = self.facts.__setitem__
        self.note = self.notes.__setitem__


def judged(student: Path, chosen: Settings, tmp_path: Path) -> dict[str, Any]:
    """For each stage the fault, or the notes."""
    inputs = Inputs(str(student), str(student), ())
    made = estimate.Estimate(job_config(chosen, inputs, tmp_path), inputs)
    found: dict[str, Any] = {}
    for name in STEPS:
        stage: Any = Stage(name)
        try:
            made.check(stage)
            found[name] = stage.notes
        except StageFault as fault:
            found[name] = fault
        assert HOST in made.rooms
    return found


@pytest.fixture
def on(on: PutsOn, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts this process on a recorded machine; the settings that a user has there."""

    def put(machine: Recorded, **asked: Any) -> Settings:
        memory = env_memory.Memory(512 * GIB, 500 * GIB, None)
        monkeypatch.setattr(env_memory, "read_memory", lambda: memory)
        usable = on(machine)
        ranks = asked.get("tensor_parallel_size", 1)
        layout, _ = options.choose_layout(
            "auto", usable.ranks, has_ray=True, tensor_parallel_size=ranks
        )
        layout = asked.pop("layout", layout)
        share = asked.pop("gpu_memory_utilization", None)
        return Settings(
            gpus=len(usable.cards),
            layout=layout,
            bfloat16=usable.bfloat16,
            gpu_memory_utilization=options.choose_memory(
                share, layout, usable.ranks, ranks
            ),
            **asked,
        )

    return put


@needs_compiler
def test_a_7b_fits_one_h100_up_to_its_training(tmp_path: Path, on: Any) -> None:
    found = judged(sparse(tmp_path / "m", QWEN_7B), on(ONE_H100), tmp_path)
    assert found["vllm"] == found["weight_sync"] == {}
    fault = found["training_step"]
    assert fault.cause == "cuda.oom"
    assert fault.message.startswith(
        "training_step cannot fit, by the models' files: GPU 0 (NVIDIA H100 80GB HBM3)"
        " has 79.0 GiB free of 79.6 GiB, and at least 8"
    )
    for part in (
        "the engine's weights 14.2 GiB",
        "its KV cache up to 0.3 of the card 9.7 GiB",
        "the student's weights in training (bfloat16) 14.2 GiB",
        "gradients 14.2 GiB",
        "float32 copies 56.7 GiB",
        "AdamW's moments 56.7 GiB",
        "the teacher's weights 14.2 GiB",
    ):
        assert part in fault.message


@needs_compiler
def test_a_7b_fits_eight_h100_without_float32_copies(tmp_path: Path, on: Any) -> None:
    chosen = on(EIGHT_H100)
    assert chosen.layout == "ray"
    found = judged(sparse(tmp_path / "m", QWEN_7B), chosen, tmp_path)
    assert found["vllm"] == found["weight_sync"] == {}
    assert set(found["training_step"]) == {"memory.tight"}
    assert "142.3 GiB, without" in found["training_step"]["memory.tight"]


@needs_compiler
def test_a_14b_trains_on_no_h100(tmp_path: Path, on: Any) -> None:
    found = judged(sparse(tmp_path / "m", QWEN_14B), on(EIGHT_H100), tmp_path)
    assert found["vllm"] == found["weight_sync"] == {}
    assert found["training_step"].cause == "cuda.oom"
    assert "share" not in found["training_step"].facts  # the engine is elsewhere


@needs_compiler
def test_an_engine_that_does_not_fit_its_share_is_told_the_one_it_needs(
    tmp_path: Path, on: Any
) -> None:
    model = sparse(tmp_path / "m", QWEN_14B)
    fault = judged(model, on(EIGHT_H100, gpu_memory_utilization=0.3), tmp_path)["vllm"]
    assert fault.cause == "vllm.kv-cache"
    assert "0.3 of 79.6 GiB, is 23.9 GiB; its weights take 27.5 GiB" in fault.message
    assert fault.facts["share"] == "0.40"
    assert fault.facts["tensor_parallel"] == 2
    chosen = on(EIGHT_H100, gpu_memory_utilization=0.4)
    assert judged(model, chosen, tmp_path)["vllm"] == {}
    chosen = on(EIGHT_H100, gpu_memory_utilization=0.3, tensor_parallel_size=2)
    assert judged(model, chosen, tmp_path)["vllm"] == {}


@needs_compiler
def test_a_long_sequence_counts(tmp_path: Path, on: Any) -> None:
    model = sparse(tmp_path / "m", QWEN_7B)
    chosen = on(ONE_T4, gpu_memory_utilization=0.99, max_prompt_length=30_000)
    fault = judged(model, chosen, tmp_path)["vllm"]
    assert fault.cause == "vllm.kv-cache"
    assert "one sequence of 30016 tokens 1.6 GiB" in fault.message
    # vLLM itself refuses what is longer than the model's positions.
    small = sparse(tmp_path / "s", HALF_B, tie_word_embeddings=True)
    chosen = on(ONE_T4, max_prompt_length=3_000_000)
    assert judged(small, chosen, tmp_path)["vllm"] == {}


@needs_compiler
def test_a_share_that_leaves_no_room_beside_it_is_told_a_smaller_one(
    tmp_path: Path, on: Any
) -> None:
    model = sparse(tmp_path / "m", Shape(2560, 40, 20, 2, 10_240))
    chosen = on(ONE_H100, gpu_memory_utilization=0.98)
    fault = judged(model, chosen, tmp_path)["training_step"]
    assert fault.cause == "cuda.oom"
    chosen = on(ONE_H100, gpu_memory_utilization=float(fault.facts["share"]))
    assert set(judged(model, chosen, tmp_path)["training_step"]) == {"memory.tight"}


@needs_compiler
@pytest.mark.parametrize("total", [15_360, 81_559, 143_771])
def test_a_gpu_that_others_hold_is_told_as_vllm_tells_it(
    tmp_path: Path, on: Any, total: int
) -> None:
    small = sparse(tmp_path / "m", Shape(64, 2, 4, 2, 128))
    taken = recorded.gpu(0, "H", recorded.H100, total=total, free=total // 10)
    free = recorded.gpu(1, "H", recorded.H100, total=total, free=total)
    chosen = on(Recorded("580.95.05", (taken, free)), layout="split")
    fault = judged(small, chosen, tmp_path)["vllm"]
    assert fault.cause == "vllm.gpu-memory-utilization"
    assert "its share of GPU 0 (H), 0.85 of " in fault.message
    assert 0.05 <= float(fault.facts["share"]) <= 0.10
    advised = {fix.facts for fix in catalogue.load()[fault.cause].fixes if fix.facts}
    assert advised == {("place", "share")}
    assert set(advised.pop()) <= set(fault.facts)


@needs_compiler
def test_no_share_is_told_where_none_holds_the_engine(tmp_path: Path, on: Any) -> None:
    small = sparse(tmp_path / "m", Shape(64, 2, 4, 2, 128))
    taken = recorded.gpu(0, "H", recorded.H100, total=15_360, free=800)
    free = recorded.gpu(1, "H", recorded.H100, total=15_360, free=15_360)
    chosen = on(Recorded("580.95.05", (taken, free)), layout="split")
    assert "share" not in judged(small, chosen, tmp_path)["vllm"].facts


@needs_compiler
def test_memory_that_the_driver_does_not_tell_refuses_nothing(
    tmp_path: Path, on: Any
) -> None:
    small = sparse(tmp_path / "m", Shape(64, 2, 4, 2, 128))
    spark = recorded.gpu(0, "NVIDIA GB10", "12 1", total=0, free=0)
    chosen = on(Recorded("580.95.05", (spark,)))
    assert judged(small, chosen, tmp_path)["vllm"] == {}


@needs_compiler
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_a_half_b_trains_on_a_t4(tmp_path: Path, on: Any, layout: str) -> None:
    model = sparse(tmp_path / "m", HALF_B, tie_word_embeddings=True)
    found = judged(model, on(ONE_T4, layout=layout), tmp_path)
    assert found["vllm"] == found["weight_sync"] == {}
    assert not isinstance(found["training_step"], StageFault)


@needs_compiler
def test_mig_instances_are_left_out(tmp_path: Path, on: Any) -> None:
    model = sparse(tmp_path / "m", QWEN_14B)
    assert judged(model, on(MIG_R570), tmp_path)["training_step"] == {}


def host(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Leave so much host memory, with nothing that could become free."""
    room = estimate.Room(HOST, free, 2 * free)
    monkeypatch.setattr(estimate, "rooms", lambda _: {HOST: room})


def test_host_memory_is_refused_below_what_is_certain_and_not_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse(tmp_path / "m", HALF_B)
    files = model_files.inspect(str(model), "--gkd-student")
    assert files is not None
    size = estimate.count(files, "float32")
    assert size is not None
    cache = 4 * 24 * 2 * 2 * 64 * 4 * (1024 + 16 + 128)
    certain = {
        "vllm": 2 * size.nbytes + cache,
        "weight_sync": 3 * size.nbytes + cache,
        "training_step": 6 * size.nbytes + cache,  # the teacher is converted too
    }
    for stage, needed in certain.items():
        host(monkeypatch, needed)
        assert not isinstance(judged(model, Settings(), tmp_path)[stage], StageFault)
        host(monkeypatch, needed - 1)
        fault = judged(model, Settings(), tmp_path)[stage]
        assert fault.cause == "env.host-oom"
        assert "host memory has" in fault.message


def test_what_a_file_holds_in_the_same_type_may_stay_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse(tmp_path / "m", HALF_B, "F32")
    host(monkeypatch, model.joinpath("model.safetensors").stat().st_size + GIB)
    found = judged(model, Settings(), tmp_path)
    assert set(found["vllm"]) == {"memory.tight"}
    assert found["weight_sync"].cause == "env.host-oom"


def test_what_a_loader_may_leave_out_is_not_certain(tmp_path: Path) -> None:
    plain = sparse(tmp_path / "m", HALF_B)
    fewer = sparse(tmp_path / "n", HALF_B, num_hidden_layers=12)
    counts = []
    for model in (plain, fewer):
        files = model_files.inspect(str(model), "--gkd-student")
        assert files is not None
        counts.append(estimate.count(files, "float32"))
    assert counts[0]
    assert counts[1]
    assert counts[0].least == counts[0].nbytes == counts[1].nbytes
    layers = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) * 4
    assert counts[0].least - counts[1].least == layers // 2


def test_memory_is_read_with_the_cgroups_limit_and_what_the_run_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = env_memory.Memory(64 * GIB, 3 * GIB, 4 * GIB)
    monkeypatch.setattr(env_memory, "read_memory", lambda: memory)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(gpu, "run_pids", lambda: {child.pid, os.getpid()})
    swap = SimpleNamespace(free=5)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    held = psutil.Process(child.pid).memory_info().rss
    room = estimate.rooms(Settings())[HOST]
    child.communicate(b"\n")
    assert (room.free, room.total) == (3 * GIB, 4 * GIB)
    assert room.most >= 3 * GIB + 5 + min(held, 1)


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny", "llama", "gpt2", "qwen3_moe"])
def test_a_real_step_takes_what_is_estimated(
    tmp_path: Path, name: str, dtype: str
) -> None:
    """Every tensor of weights, gradients, copies and moments is counted."""
    model = tiny.make(tmp_path).student if name == "tiny" else tmp_path / "model"
    done = fresh_python.run(
        *(PROGRAMS / "step_bytes.py", name, model, dtype),
        environ={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    real = json.loads(done.stdout.splitlines()[-1])
    files = model_files.inspect(str(model), "--gkd-student")
    assert files is not None
    size = estimate.count(files, dtype)
    assert size is not None
    parts = {part.what: part for part in estimate.training(size, dtype, "cpu")}
    assert size.nbytes == real.pop("weights") >= size.least
    assert {what: part.usual for what, part in parts.items()} == real
    assert all(part.least <= real[what] for what, part in parts.items())


@pytest.mark.needs("torch", "vllm")
def test_a_model_that_cannot_fit_is_refused_before_vllm_is_imported(
    tmp_path: Path,
) -> None:
    model = sparse(tmp_path / "m", dataclasses.replace(QWEN_14B, layers=9_000))
    prompts = tiny.make(tmp_path / "made").train_file
    asked = [f"--gkd-student={model}", f"--gkd-train-files={prompts}"]
    done = fresh_python.run(
        *("-m", "pytest", "--gkd-stages=vllm", *asked),
        cwd=tmp_path,
        environ={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1, done.stdout[-4000:]
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    (stage,) = report["stages"]
    assert stage["diagnosis"]["cause"] == "env.host-oom"
    assert "importing vLLM" not in done.stdout
    assert stage["facts"]["memory_estimate_gib"][HOST]["the engine's weights"] > 1000
