"""The memory plan of ROLL's FSDP2 trainers, and what has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import memory_ranks
import pytest
import yaml
from test_estimate import HALF_B, QWEN_7B
from test_job_memory import shape
from test_job_roll import PLAIN, RLVR, script_of

from pytest_gkd.job import loss_memory, models
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.frameworks.roll import plan

UPDATE = "forward and backward"


def planned(folder: Path, **changes: Any) -> Checked:
    """An RLVR job under FSDP2, with keys changed."""
    student = shape(folder / "student", HALF_B)
    config = yaml.safe_load(PLAIN)
    config |= {"pretrain": str(student), "init_kl_coef": 0.1}
    fsdp = {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 8}}
    if "actor_train" in config:
        config["actor_train"]["strategy_args"] = fsdp
        config["actor_train"]["infer_batch_size"] = 4
        config["reference"]["infer_batch_size"] = 4
        config["reference"]["strategy_args"] = {"strategy_name": "fsdp2_infer"}
    for key, value in changes.items():
        place = config
        *parents, last = key.split("__")
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return check(script_of(folder, RLVR, yaml.safe_dump(config)))


def rows(found: Checked) -> dict[tuple[str, str], dict[str, int]]:
    assert not found.no_memory_plan
    return {(row.role, row.phase): row.bytes for row in found.memory}


def test_an_update_under_fsdp2(tmp_path: Path) -> None:
    found = rows(planned(tmp_path))
    elements = models.read(tmp_path / "student").elements
    update = found["trainer+rollout", UPDATE]
    assert update["weights float32"] == -(-elements * 4 // 8)
    # Rows of 4096 tokens, two at once: logits in 16 bits, three times in float32.
    assert update["logits and loss"] == 2 * 4096 * HALF_B.vocab * 14
    # Weights leave, AdamW's states do not.
    rollout = found["trainer+rollout", "rollout"]
    assert "weights float32" not in rollout
    assert rollout["optimizer states float32"] == -(-elements * 8 // 8)
    reference = found["reference", "forward"]
    assert reference["reference's weights bfloat16"] == -(-elements * 2 // 8)
    assert reference["reference's logits"] == 4 * 4096 * HALF_B.vocab * 10


@pytest.mark.parametrize(
    ("changes", "part", "there"),
    [
        ({}, "optimizer states float32", True),
        ({"offload_policy": True}, "optimizer states float32", False),
        ({"param_dtype": "bf16"}, "weights bfloat16", True),
        ({"fsdp_size": 2}, "weights float32", True),
    ],
)
def test_what_strategy_config_says(
    changes: dict[str, Any], part: str, there: bool, tmp_path: Path
) -> None:
    start = "actor_train__strategy_args__strategy_config__"
    found = planned(tmp_path, **{start + key: value for key, value in changes.items()})
    update = rows(found)["trainer+rollout", UPDATE]
    assert (part in update) == there
    if "fsdp_size" in changes:
        elements = models.read(tmp_path / "student").elements
        assert update[part] == -(-elements * 4 // 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"actor_train__strategy_args__strategy_name": "megatron_train"}, "megatron"),
        ({"actor_train__strategy_args__strategy_config__ep_size": 2}, "ep_size"),
        ({"entropy_loss_coef": 0.1}, "entropy"),
        ({"actor_train__model_args": {"lora_target": "q_proj"}}, "LoRA"),
        ({"adv_estimator": "gae"}, "critic"),
        ({"reference__strategy_args__strategy_name": "megatron_infer"}, "reference"),
    ],
)
def test_what_has_no_plan_is_said(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    found = planned(tmp_path, **changes)
    assert not found.memory
    assert reason in found.no_memory_plan


def test_a_teacher_that_scores_is_another_model(tmp_path: Path) -> None:
    teacher = {
        "model_args": {"model_name_or_path": str(shape(tmp_path / "teacher", QWEN_7B))},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": "list(range(0,8))",
        "infer_batch_size": 1,
    }
    own = {"model_name_or_path": "${pretrain}"}
    workers: dict[str, Any] = {
        f"actor_{one}__model_args": own for one in ("train", "infer")
    }
    found = planned(
        tmp_path, use_opd=True, teacher=teacher, init_kl_coef=0.0, **workers
    )
    parts = rows(found)["teacher", "forward"]
    elements = models.read(tmp_path / "teacher").elements
    assert parts["teacher's weights bfloat16"] == 2 * elements


@pytest.mark.needs("torch")
@pytest.mark.parametrize("trains", [True, False])
def test_the_loss_holds_what_is_planned(trains: bool) -> None:
    import torch

    path = Path(os.environ.get("GKD_UPSTREAM", ""), memory_ranks.ROLL)
    if "GKD_UPSTREAM" not in os.environ or not path.is_file():
        pytest.skip("GKD_UPSTREAM has no ROLL")
    of = memory_ranks.upstream(memory_ranks.ROLL, "log_probs_from_logits")
    tokens, vocab = 128, 2000
    hidden, head = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=trains)
        for size in ((1, tokens, 8), (8, vocab))
    )
    counted = memory_ranks.Counted([])
    with counted.mode(), torch.set_grad_enabled(trains):
        logits = hidden @ head  # ROLL's variable holds them, too
        found = of["log_probs_from_logits"](logits, torch.zeros(1, tokens).long())
        if trains:
            found.mean().backward()
    needed, _ = loss_memory.needed("roll", tokens, vocab, 2)
    planned = needed if trains else plan.ASKED * tokens * vocab
    assert planned == pytest.approx(counted.most, rel=0.02)
