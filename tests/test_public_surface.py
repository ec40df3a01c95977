"""What others rely on by name. A change here is a change for them, on purpose."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd.diagnosis.catalogue import load
from pytest_gkd.report.record import SCHEMA, RunRecord, StageRecord
from pytest_gkd.stage_specs import STAGES

FLAGS = [
    *("--gkd-stages", "--gkd-timeout", "--gkd-report", "--gkd-lang"),
    *("--gkd-config", "--gkd-framework", "--gkd-set", "--gkd-student", "--gkd-teacher"),
    *("--gkd-shrink", "--gkd-shrink-weights", "--gkd-train-files"),
    *("--gkd-prompt-column", "--gkd-max-prompt-length", "--gkd-batch-size"),
    *("--gkd-max-new-tokens", "--gkd-loss", "--gkd-top-k", "--gkd-beta"),
    *("--gkd-temperature", "--gkd-learning-rate", "--gkd-layout", "--gkd-world-size"),
    *("--gkd-min-bus-bandwidth", "--gkd-gpu-memory-utilization"),
    *("--gkd-tensor-parallel-size", "--gkd-trust-remote-code", "--gkd-launch"),
    *("--gkd-full-budget", "--gkd-inject"),
]
INI_ONLY = ["gkd_keyword", "gkd_stage_files", "gkd_rules"]

STAGE_NAMES = [
    "config",
    "environment",
    "data",
    "tokenizer",
    "vllm",
    "nccl",
    "weight_sync",
    "training_step",
    "launch",
]

# An id keeps its meaning forever; new ones may be added.
OF_AREA = {
    "env": "package-missing package-conflict import-stuck package-damaged "
    "module-shadowed cuda-arch-mismatch driver-too-old no-gpu gpu-busy "
    "gpu-hardware compiler install-build shm-too-small disk-full "
    "storage-stalled "
    "too-many-files file-size-limit loopback-down host-oom killed hub-unreachable "
    "hub-auth permission variable-invalid variable-not-propagated",
    "data": "file-missing corrupt schema empty too-long cache loader-stall worker-died",
    "internal": "error",
    "tokenizer": "load chat-template vocab-mismatch pad-token eos-token",
    "model": "trust-remote-code unsupported-arch",
    "checkpoint": "missing corrupt mismatch save-failed",
    "vllm": "kv-cache gpu-memory-utilization max-model-len attention-backend "
    "tp-divisibility engine-died engine-start-timeout compile-capture quantization "
    "sleep-wake invalid-argument wrong-output",
    "cuda": "oom illegal-access device-assert library-init",
    "comm": "collective-timeout rendezvous port-in-use interface ib p2p duplicate-gpu "
    "peer-died mismatch world-size wrong-result env-missing nccl-version nccl-other",
    "ray": "no-resources worker-start actor-died object-store memory-monitor "
    "connection get-timeout",
    "sync": "name-or-shape not-applied stuck",
    "reward": "unreachable",
    "train": "nan batch-size no-grad diverged slow memory-leak moe fsdp-deepspeed",
    "config": "unknown-option missing-value invalid-combination framework-version "
    "unread-variable debug-setting secret-in-file",
    "teacher": "unreachable protocol wrong-output",
}
CAUSES = [f"{area}.{name}" for area, told in OF_AREA.items() for name in told.split()]

# The first row of the run's and two of a stage's are the contract; the others may
# move, but not unseen.
RUN_KEYS = [
    *("schema", "started", "versions", "settings", "stages"),
    *("ended", "interrupted", "notes", "cleaned", "injected", "machine", "commit"),
    "memory",
]
STAGE_KEYS = [
    *("name", "outcome", "started_s", "duration_s", "budget_s"),
    *("facts", "diagnosis", "stacks", "blocked_by"),
    *("nodeid", "lane", "step", "message", "also", "telling", "stuck", "output"),
    *("cleaned", "progress", "injected", "verdict_after_s", "ran"),
]


def told(flag: str, place: Path) -> str:
    """What pytest says of itself and its plugins, in an empty directory."""
    done = fresh_python.run(
        "-m", "pytest", "-p", "no:cacheprovider", flag, cwd=place, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def help_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return told("--help", tmp_path_factory.mktemp("help"))


def test_the_flags(help_text: str) -> None:
    assert re.findall(r"^  (--gkd-[\w-]+)", help_text, re.MULTILINE) == FLAGS


def test_every_flag_has_an_ini_twin(help_text: str) -> None:
    twins = [flag.removeprefix("--").replace("-", "_") for flag in FLAGS]
    keys = re.findall(r"^  (gkd_\w+) \(", help_text, re.MULTILINE)
    assert sorted(keys) == sorted(twins + INI_ONLY)


def test_the_marker(tmp_path: Path) -> None:
    (marker,) = re.findall(r"@pytest.mark.(gkd.*)", told("--markers", tmp_path))
    assert marker.startswith("gkd_stage(name, *, lane=None, needs=None, timeout=None):")


def test_the_stages_and_their_order() -> None:
    assert [stage.name for stage in STAGES] == STAGE_NAMES


def test_the_causes() -> None:
    known = set(load())
    assert known >= set(CAUSES), "an id is gone that others have stored"
    assert known <= set(CAUSES), "a new id: add it to the list above"


def test_the_keys_of_the_report() -> None:
    stage = StageRecord("data", "stages/test_data.py::test_data", "host", 20.0)
    report = RunRecord("now", {}, {}, [stage]).to_json()
    assert report["schema"] == SCHEMA == 1
    assert sorted(report) == sorted(RUN_KEYS)
    assert sorted(report["stages"][0]) == sorted(STAGE_KEYS)


def test_the_names_under_which_pytest_and_the_shell_find_us() -> None:
    (entry,) = metadata.entry_points(group="pytest11", name="gkd")
    assert entry.value == "pytest_gkd.plugin"
    (command,) = metadata.entry_points(group="console_scripts", name="gkd")
    assert command.value == "pytest_gkd.__main__:main"
