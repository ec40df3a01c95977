"""A program's own words tell its phase: verbs, objects, tense, order, roles."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, log_phases, logs, phase_words
from pytest_gkd.diagnosis.phase_words import Told

LOGS = [
    log
    for file in sorted(Path(__file__).with_name("phase_words").glob("*.toml"))
    for log in tomllib.loads(file.read_text("utf-8"))["log"]
]
# What these say tells no more than it does, or is not read.
MISSED = {
    "few-words-before-anything",
    "few-words-stops-in-second-epoch",
    "ipc-attaches",
    "own-sampler-gets-a-wrong-shape",
    "own-stops-after-rollouts",
    "swift-final-merge",
    "tiny-loop-trains",
    "trainer-waits-for-sidecar",
}
CATALOGUE = catalogue.load()


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log["name"])
def test_the_phase_of_a_users_own_program(log: dict[str, Any], tmp_path: Path) -> None:
    assert {log["phase"], *log.get("also", ())} <= {*log_phases.PHASES}
    file = tmp_path / "train.log"
    file.write_text(log["text"].lstrip())
    phase = logs.examine([file], CATALOGUE).phase
    right = phase in {log["phase"], *log.get("also", ())}
    assert right is (log["name"] not in MISSED), phase


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("(Judge pid=4) loading the teacher from /models/t", "teacher-init"),
        ("joining the process group", "actor-init"),
        ("Connecting to coordinator", "actor-init"),
        ("broadcasting initial weights from rank 0", "actor-init"),
        ("Fetching 12 files:  33%|###  | 4/12 [00:53<01:33]", "actor-init"),
        ("waiting for 5 rollout workers", "rollout-init"),
        ("chunk 7: 24 rows, 781 characters", "data"),
        ("pushing weights to 2 engines", "weight-sync"),
        ("saving model to out/student", "checkpoint"),
        ("asking the teacher for 64 sequences", "teacher"),
        ("sampling 8 answers", "generation"),
        ("grading 64 completions", "generation"),
        ("updating the policy", "training-step"),
        ("(RolloutWorker pid=7) loading weights from /models/s", "rollout-init"),
        ("(TeacherWorker pid=7) loading weights from /models/t", "teacher-init"),
        ("(Mentor pid=7) loading weights from /models/t", "teacher-init"),
        ("calling up the ray cluster", "ray-init"),
        ("summoning the oracle", "teacher-init"),
        ("hiring 4 storytellers", "rollout-init"),
        ("[2025-06-11 02:17:20] ---- step 38/40 ----", "after-step"),
        ("large model: reading /m/14b", "teacher-init"),
        ("handing the apprentice's weights to the solvers", "weight-sync"),
        ("small model writes answers", "generation"),
        ("the model goes on record", "checkpoint"),
        ("加载学生模型", "actor-init"),
        ("等待教师模型启动", "teacher-init"),
        ("同步权重到推理引擎", "weight-sync"),
        ("学生采样中", "generation"),
        ("更新学生参数", "training-step"),
        ("保存检查点", "checkpoint"),
        ("教師モデルを読み込み", "teacher-init"),
        ("重みを同期", "weight-sync"),
        ("loading weights from /models/s", "actor-init"),
        ("WARNING: deprecated option", ""),
        ("teacher is off, not loading the teacher", ""),
        ("the checkpoint will be saved every 10 steps", ""),
        ("    loss = engine.load_weights(named)", ""),
        ("rollout", ""),
        ("    for choice in await gather(*(ask(row) for row in part)):", ""),
        (' - leaked function "create_location_snapshot"', ""),
    ],
)
def test_a_line_of_a_start_is_read_by_its_words(line: str, phase: str) -> None:
    told = phase_words.of_line(line.encode(), begun=False)
    assert (told.phase if told else "") == phase


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("waiting for 5 rollout workers", Told("generation")),
        ("loading new weights into the engine", Told("weight-sync")),
        ("weights pushed in 1.9 s", Told("weight-sync", over=True)),
        ("sampled 64 completions in 9.1s", Told("generation", over=True)),
        ("64 of 128 samples done", Told("generation")),
        ("scoring generated answers", Told("generation")),
        ("evaluation done, saving checkpoint", Told("checkpoint")),
        ("asking the teacher failed (503), retrying", Told("teacher")),
        (
            "[teacher] 12:00:01 INFO request 7: 4 sequences in 0.1 s",
            Told("teacher", over=True),
        ),
        ("Scoring:  45%|####      | 45/100 [00:08<00:09]", Told("generation")),
    ],
)
def test_a_line_of_a_step_says_also_what_is_over(line: str, told: Told) -> None:
    assert phase_words.of_line(line.encode(), begun=True) == told


def test_what_belongs_to_the_start_never_returns() -> None:
    lines = [b"loading the student", b"generating", b"loading the student"]
    assert phase_words.of_lines(lines, begun=False) == Told("generation")
    assert phase_words.of_lines(lines[:1], begun=False) == Told("actor-init")


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("grade_answers", "generation"),
        ("publishPolicy", "weight-sync"),
        ("dump_snapshot", "checkpoint"),
        ("__getitem__", "data"),
        ("read_settings", "config"),
        ("ask_teacher", "teacher"),
        ("create_reward_model", "actor-init"),
        ("split_data_proto", ""),
        ("get_data_refs", ""),
        ("main", ""),
        ("train", ""),
    ],
)
def test_a_functions_name_is_read_by_the_same_words(name: str, phase: str) -> None:
    assert phase_words.of_name(name) == phase


def test_hostile_lines_take_no_time_and_end_in_nothing() -> None:
    for text in (
        b"a" * 100_000,
        b"load " * 50_000,
        b"=" * 50_000,
        b"\x1b[2J\xff" * 9_999,
    ):
        phase_words.of_lines([text] * 100, begun=True)
