"""A job's pools of GPUs against the nodes of ``--machine``."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job import check, fitting

VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.actor.use_dynamic_bsz=True"
)
TEACHER = (
    "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=t "
    "distillation.nnodes=1 distillation.n_gpus_per_node"
)
OWN = "actor_rollout_ref.rollout.nnodes=2 actor_rollout_ref.rollout.n_gpus_per_node=3"
SWIFT = "swift rlhf --rlhf_type grpo --model m --dataset d"
ENGINE = "--rollout-num-gpus-per-engine"
NEMO = "uv run examples/run_grpo.py cluster.num_nodes=1"
SGLANG = (
    "policy.generation.backend=sglang "
    "+policy.generation.sglang_cfg.sglang_server_config.num_gpus=8 "
    "+policy.generation.sglang_cfg.sglang_server_config.num_gpus_per_engine=8"
)
SLIME = "python3 train.py --hf-checkpoint /root/m --rollout-batch-size 8"


@pytest.mark.parametrize(
    ("script", "machine", "expected"),
    [
        # verl: a node's part of a pool is on one node
        (f"{VERL} trainer.n_gpus_per_node=12", "nodes=2,gpus=8", "12 GPUs on one node"),
        (f"{VERL} trainer.n_gpus_per_node=8 trainer.nnodes=2", "nodes=2,gpus=8", ""),
        (f"{VERL} trainer.nnodes=3", "nodes=2,gpus=8", "24 GPUs"),
        (f"{VERL} trainer.n_gpus_per_node=4 trainer.nnodes=4", "nodes=2,gpus=8", ""),
        (f"{VERL} {TEACHER}=4 trainer.n_gpus_per_node=4", "nodes=1,gpus=8", ""),
        (
            f"{VERL} {TEACHER}=4 trainer.n_gpus_per_node=6 trainer.nnodes=2",
            "nodes=2,gpus=8",
            "have no place for all",
        ),
        (
            f"{VERL} {TEACHER}=2 trainer.n_gpus_per_node=6 trainer.nnodes=2",
            "nodes=2,gpus=8",
            "",
        ),
        # 4 + 2 + 2 on one node, 3 + 3 + 2 on the other
        (
            f"{VERL} {TEACHER}=2 distillation.nnodes=3 trainer.n_gpus_per_node=4 {OWN}",
            "nodes=2,gpus=8",
            "",
        ),
        (f"{VERL} {TEACHER}=12", "nodes=4,gpus=8", "the teacher needs 12 GPUs"),
        (f"{VERL} trainer.n_gpus_per_node=$N", "nodes=1,gpus=4", ""),
        # launchers: a process for each GPU of each machine
        (f"NPROC_PER_NODE=8 {SWIFT}", "nodes=2,gpus=4", "8 GPUs on one node"),
        (f"NPROC_PER_NODE=4 {SWIFT}", "nodes=1,gpus=4", ""),
        (f"NNODES=4 NPROC_PER_NODE=2 {SWIFT}", "nodes=2,gpus=8", "needs 4 nodes"),
        (
            "trl grpo --num_processes 8 --model_name_or_path m --dataset_name d",
            "nodes=2,gpus=4",
            "8 GPUs on one node",
        ),
        # slime: one placement group for all, spread as it comes
        (
            f"{SLIME} --actor-num-gpus-per-node 12 --colocate",
            "nodes=2,gpus=8",
            "",
        ),
        (
            f"{SLIME} --actor-num-nodes 3 --actor-num-gpus-per-node 8 --colocate",
            "nodes=2,gpus=8",
            "24 GPUs",
        ),
        # but an engine of SGLang's takes the GPUs behind its first one
        (f"{SLIME} {ENGINE} 8 --colocate", "nodes=2,gpus=4", "8 GPUs on one node"),
        (f"{SLIME} {ENGINE} 8 --colocate --num-gpus-per-node 4", "nodes=2,gpus=4", ""),
        (
            f"{SLIME} {ENGINE} 6 --actor-num-gpus-per-node 4 --rollout-num-gpus 12",
            "nodes=2,gpus=8",
            "behind the 4 GPUs before it, one would begin at GPU 4 of a node",
        ),
        (
            f"{SLIME} {ENGINE} 4 --actor-num-gpus-per-node 4 --rollout-num-gpus 12",
            "nodes=2,gpus=8",
            "",
        ),
        # Ray decides which 12 of 16 GPUs it gives.
        (
            f"{SLIME} {ENGINE} 8 --actor-num-gpus-per-node 4 --rollout-num-gpus 8",
            "nodes=2,gpus=8",
            "",
        ),
        (
            f"{SLIME} {ENGINE} 5 --num-gpus-per-node 5 --actor-num-gpus-per-node 15 "
            "--colocate",
            "nodes=2,gpus=8",
            "have no place for all",
        ),
        (
            f"{SLIME} {ENGINE} 8 --colocate --sglang-config engines.yaml",
            "nodes=2,gpus=4",
            "",
        ),
        # NeMo-RL: one GPU is placed after the other, too, but for those of SGLang
        (f"{NEMO} cluster.gpus_per_node=12", "nodes=2,gpus=8", ""),
        (f"{NEMO} cluster.gpus_per_node=8 {SGLANG}", "nodes=2,gpus=4", "8 GPUs on one"),
        (f"{NEMO} cluster.gpus_per_node=4 {SGLANG}", "nodes=2,gpus=4", ""),
    ],
)
def test_pools_are_held_against_the_nodes(
    tmp_path: Path, script: str, machine: str, expected: str
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    found = check.check(path, machine=fitting.machine(machine)).findings
    told = [one.message for one in found if one.cause == "ray.no-resources"]
    assert len(told) == bool(expected), told
    assert expected in "".join(told)
