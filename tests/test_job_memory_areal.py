"""The memory plan of AReaL under FSDP: parts counted by hand, reasons, advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_estimate import HALF_B, QWEN_7B
from test_job_areal import FILE
from test_job_memory import shape

from pytest_gkd.__main__ import main
from pytest_gkd.job import models

Rows = dict[tuple[str, str], dict[str, int]]
UPDATE = "forward and backward"
REF = """\
ref:
  backend: "fsdp:d2"
  path: ${actor.path}
  experiment_name: e
  trial_name: t
"""
TEACHER = FILE[FILE.index("teacher:") : FILE.index("train_dataset:")]


class Planned:
    """What ``gkd check`` plans of a file of AReaL's, with changes and overrides."""

    def __init__(self, place: Path, capsys: Any) -> None:
        self.student = models.read(shape(place / "s", HALF_B))
        self.teacher = models.read(shape(place / "t", QWEN_7B))
        self._place, self.capsys = place, capsys

    def __call__(self, *overrides: str, memory: str = "79GiB", **text: str) -> Any:
        file = FILE.replace(TEACHER, text.get("more", ""))
        file = file.replace("Qwen/Qwen3-0.6B", self.student.path)
        path = self._place / "job.yaml"
        path.write_text(file.replace("TEACHER", self.teacher.path))
        asked = ("--framework=areal==1.0.4", f"--machine=memory={memory}")
        main(["check", str(path), *overrides, *asked, "--format=json"])
        return json.loads(self.capsys.readouterr().out)

    def rows(self, *overrides: str, **text: str) -> Rows:
        """The parts by role and phase."""
        found = self(*overrides, **text)
        assert found["memory"], found["no_memory_plan"]
        return {(row["role"], row["phase"]): row["bytes"] for row in found["memory"]}


@pytest.fixture
def planned(tmp_path: Path, capsys: Any) -> Planned:
    return Planned(tmp_path, capsys)


def test_fsdp_trains_16_bits(planned: Planned) -> None:
    elements = planned.student.elements
    found = planned.rows()
    update = found["trainer", UPDATE]
    assert update["weights bfloat16"] == 2 * elements // 2
    assert update["optimizer states bfloat16"] == 4 * elements // 2
    # 10240 tokens at once: logits, their gradient and that of a chunk's, of 16 bits.
    whole = HALF_B.vocab * 2 * (3 * 10240 + 1024)
    assert update["logits and loss"] == whole
    assert "optimizer's temporaries bfloat16" not in found["trainer", "optimizer step"]
    asked = found["trainer", "log-probabilities"]
    assert asked["student's logits"] == 10240 * HALF_B.vocab * 2
    engine = found["rollout", "rollout"]
    assert engine["KV cache bfloat16"] > 60 << 30


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        # 64 prompts of 4 samples on 2 ranks in 4 minibatches, all of one at once.
        (("actor.mb_spec.max_tokens_per_mb=null",), 32 * 1536),
        (
            ("actor.mb_spec.max_tokens_per_mb=null", "+actor.mb_spec.n_mbs=4"),
            8 * 1536,
        ),
        (("actor.mb_spec.max_tokens_per_mb=100",), 1536),
    ],
)
def test_without_a_bound_a_minibatch_is_one(
    planned: Planned, overrides: tuple[str, ...], tokens: int
) -> None:
    update = planned.rows(*overrides)["trainer", UPDATE]
    expected = HALF_B.vocab * 2 * (3 * tokens + 1024)
    assert update["logits and loss"] == expected


def test_sglangs_share_is_of_weights_and_cache_alone(planned: Planned) -> None:
    room = 79 << 30
    served = {}
    for engine, key in (
        ("vllm", "vllm.gpu_memory_utilization"),
        ("sglang", "sglang.mem_fraction_static"),
    ):
        backend = f'rollout.backend="{engine}:d2t1"'
        parts = planned.rows(backend, f"+{key}=0.5")["rollout", "rollout"]
        served[engine] = parts
    weights = "engine's weights bfloat16"
    cache, work = "KV cache bfloat16", "engine's activations"
    assert sum(served["vllm"][name] for name in (weights, cache, work)) == room // 2
    assert sum(served["sglang"][name] for name in (weights, cache)) == room // 2
    # Without chunks a whole prefill of 32768 tokens is there at once.
    layer = 2 * HALF_B.hidden + 3 * HALF_B.intermediate
    assert served["sglang"][work] == 32768 * layer * 2


def test_reference_and_teacher_are_engines_of_their_own(planned: Planned) -> None:
    teacher = TEACHER.replace("Qwen/Qwen3-8B", "TEACHER").replace("d1t4", "d4")
    found = planned.rows("actor.kl_ctl=0.1", more=REF + teacher)
    elements = planned.student.elements
    reference = found["reference", "forward"]
    assert reference["reference's weights bfloat16"] == elements
    # All rows of a rank at once: nothing bounds its tokens.
    assert reference["reference's logits"] == 128 * 1536 * HALF_B.vocab * 2
    large = found["teacher", "forward"]
    assert large["teacher's weights bfloat16"] == 2 * planned.teacher.elements // 4
    assert "weights bfloat16" not in large
    bounded = planned.rows(
        "actor.kl_ctl=0.1", "+ref.mb_spec.max_tokens_per_mb=4096", more=REF
    )
    logits = bounded["reference", "forward"]["reference's logits"]
    assert logits == 4096 * HALF_B.vocab * 2


def test_offload_by_torch_memory_saver_and_by_fsdp(planned: Planned) -> None:
    shared = (
        "+actor.scheduling_strategy.type=colocation",
        "+actor.scheduling_strategy.target=rollout",
        "+enable_offload=true",
    )
    found = planned.rows(*shared)
    rollout = found["trainer+rollout", "rollout"]
    assert "weights bfloat16" not in rollout
    assert "KV cache bfloat16" not in found["trainer+rollout", UPDATE]
    assert "weights bfloat16" in found["trainer+rollout", UPDATE]
    away = planned.rows("+actor.fsdp.offload_params=true")["trainer", UPDATE]
    assert not [name for name in away if name.startswith(("weights", "optimizer"))]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('actor.backend="megatron:d2"', "under megatron"),
        ('actor.backend="archon:d2"', "under archon"),
        ('actor.backend="fsdp:d1t2"', "tensor parallelism"),
        ("+actor.enable_tree_training=true", "tree training"),
        ("+actor.use_lora=true", "LoRA"),
        ("+actor.fsdp.per_layer_optim_step=true", "by layers"),
        ("+actor.optimizer.type=sgd", "sgd"),
        ("+actor.attn_impl=eager", "eager"),
        ("+actor.dtype=int8", "actor.dtype is int8"),
        ("train_dataset.max_length=null", "max_prompt_length is not certain"),
    ],
)
def test_what_is_not_known_has_no_plan(
    planned: Planned, override: str, said: str
) -> None:
    found = planned(override)
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_makes_it_fit(planned: Planned) -> None:
    tokens = "actor.mb_spec.max_tokens_per_mb=65536"
    bad = planned(tokens, memory="40GiB")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    changed = [part.split(" (now")[0] for part in advice.split(" and ")]
    # A key that the file does not have wants the sign.
    assert all(one.startswith("++") for one in changed)
    good = planned(tokens, *changed, memory="40GiB")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


SFT = """\
experiment_name: e
trial_name: t
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 4, fileroot: /tmp/a}
actor:
  backend: "fsdp:d4"
  experiment_name: e
  trial_name: t
  path: STUDENT
  gradient_checkpointing: true
  mb_spec: {SPEC}
  optimizer: {type: adam, lr: 2e-5}
train_dataset: {path: openai/gsm8k, type: TYPE, batch_size: BATCH, max_length: LENGTH}
"""


def sft(
    planned: Planned,
    spec: str = "max_tokens_per_mb: 4096",
    batch: int = 64,
    length: str = "null",
    kind: str = "sft",
    memory: str = "79GiB",
) -> Any:
    """What ``gkd check`` says of SFT on four GPUs."""
    text = SFT.replace("SPEC", spec).replace("BATCH", str(batch))
    text = text.replace("LENGTH", length).replace("TYPE", kind)
    path = Path(planned.student.path).parent / "sft.yaml"
    path.write_text(text.replace("STUDENT", planned.student.path))
    asked = ("--framework=areal==1.0.4", f"--machine=memory={memory}")
    main(["check", str(path), *asked, "--format=json"])
    return json.loads(planned.capsys.readouterr().out)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 4096),
        ({"length": "8192"}, 4096),  # a longer row would end the job
        ({"length": "1536", "batch": 8}, 2 * 1536),  # two rows on each rank
        ({"spec": "n_mbs: 2", "length": "512"}, 8 * 512),
    ],
)
def test_sft_takes_micro_batches_of_tokens(
    planned: Planned, given: dict[str, Any], tokens: int
) -> None:
    found = sft(planned, **given)
    assert found["memory"], found["no_memory_plan"]
    rows = {row["phase"]: row for row in found["memory"]}
    assert {row["role"] for row in rows.values()} == {"trainer"}
    parts = rows[UPDATE]["bytes"]
    elements, vocab = planned.student.elements, planned.student.vocab
    assert parts["weights bfloat16"] == 2 * elements // 4
    assert parts["optimizer states bfloat16"] == 4 * elements // 4
    # Logits, their two copies and a chunk of 1024 more in 16 bits, as of AReaL's RL.
    whole = (3 * tokens + min(tokens, 1024)) * vocab * 2
    assert parts["logits and loss"] == whole
    assert ("gradients bfloat16" in parts) == (given.get("batch", 64) > 8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spec": "n_mbs: 2"}, "nothing bounds the rows (train_dataset.max_length, "),
        ({"kind": "rw"}, "the memory of AReaL without a rollout is known for SFT"),
    ],
)
def test_training_without_a_rollout_says_why_it_has_no_plan(
    planned: Planned, given: dict[str, Any], says: str
) -> None:
    assert sft(planned, **given)["no_memory_plan"].startswith(says)


def test_a_micro_batch_is_halved_only_where_rows_are_bounded(planned: Planned) -> None:
    for length, named in (("512", True), ("null", False)):
        found = sft(planned, length=length, memory="5GiB")
        told = [one["message"] for one in found["findings"]]
        assert any("does not fit" in text for text in told), found["memory"]
        assert any("max_tokens_per_mb" in text for text in told) == named, told
