"""The phase at a log's end: frameworks' markers, and what usually comes next."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, log_phases, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.diagnosis.usual_next import usual_next
from pytest_gkd.report import render

TABLES = sorted(Path(log_phases.__file__).parent.glob("phase_markers/*.toml"))
CATALOGUE = catalogue.load()


def judged(text: str, tmp_path: Path) -> LogReport:
    log = tmp_path / "train.log"
    log.write_text(text)
    return logs.examine([log], CATALOGUE)


def source(repository: str, path: str) -> str:
    """A file of a checkout that GKD_UPSTREAM names, else of the installed package."""
    checkout = Path(os.environ.get("GKD_UPSTREAM", ""), repository.replace("/", "+"))
    if "GKD_UPSTREAM" in os.environ and checkout.is_dir():
        return (checkout / path).read_text("utf-8")
    inside = path.removeprefix("src/")
    spec = importlib.util.find_spec(inside.partition("/")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"neither GKD_UPSTREAM nor this environment has {repository}")
    return (Path(spec.origin).parents[1] / inside).read_text("utf-8")


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_markers_stand_in_the_sources_that_are_named(file: Path) -> None:
    table: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    spelled = [
        re.escape(one).replace(r"\{\}", r"(\w+)") for one in table.get("spelled", ())
    ]
    lost = []
    for phase, files in table.items():
        if not isinstance(files, dict):
            continue
        assert phase in {*log_phases.PHASES, "first-step"}
        for path, marks in files.items():
            text = source(table["repository"], path)
            for mark in marks:
                names = [found[1] for one in spelled if (found := re.match(one, mark))]
                if mark not in text and not any(name in text for name in names):
                    lost.append(f"{path}: {mark}")
    assert lost == []


# Lines of one step of each framework, in the order of its source, each with the phase
# that the run is in while it is the last one.
STEPS = {
    "slime": """
        generation | INFO timer.py:24 - Timer train_wait start
        training-step | INFO timer.py:32 - Timer train_wait end (elapsed: 40.1s)
        training-step | INFO timer.py:24 - Timer actor_train start
        checkpoint | INFO timer.py:24 - Timer save_model start
        weight-sync | INFO timer.py:24 - Timer update_weights start
        generation | INFO timer.py:32 - Timer update_weights end (elapsed: 3.0s)
    """,
    "nemo-rl": """
        actor-init | ▶ Setting up student policy...
        teacher-init | ▶ Setting up teacher policy...
        generation | ▶ Generating responses for batch of size 64...
        teacher | ▶ Computing teacher logprobs...
        training-step | ▶ Training policy...
        checkpoint | Saving checkpoint for step 10...
    """,
    "skyrl": """
        weight-sync | INFO trainer.py:288 - Started: 'sync_weights'
        generation | INFO trainer.py:361 - Started: 'generate'
        training-step | INFO trainer.py:361 - Finished: 'generate', time cost: 9.11s
        training-step | INFO trainer.py:450 - Started: 'train_critic_and_policy'
        checkpoint | INFO trainer.py:475 - Started: 'save_checkpoints'
        weight-sync | INFO trainer.py:493 - Started: 'sync_weights'
        generation | INFO trainer.py:493 - Finished: 'sync_weights', time cost: 2.00s
    """,
    "openrlhf": """
        generation | Generate samples:   0%|          | 0/128 [00:00<?, ?it/s]
        training-step | INFO 🚀 Starting experience making with 512 samples
        weight-sync | update weight: model.norm.weight, dtype: bf16, shape: [896]
    """,
    "verl's asynchronous trainer": """
        weight-sync | [ASYNC MAIN] Param sync before fit..
        generation | [FullyAsyncTrainer] Requesting 128 samples from queue
        training-step | [FullyAsyncTrainer] Loop collection completed: 128/128 samples
    """,
}


@pytest.mark.parametrize("name", STEPS)
def test_each_line_of_a_step_tells_its_phase(name: str, tmp_path: Path) -> None:
    text, told, expected = "", [], []
    for line in STEPS[name].strip().splitlines():
        phase, _, line = line.strip().partition(" | ")
        text += f"{line}\n"
        expected.append(phase)
        told.append(judged(text, tmp_path).phase)
    assert told == expected


def test_after_a_step_the_framework_that_printed_last_says_what_follows(
    tmp_path: Path,
) -> None:
    step = "step:{} - actor/loss:0.5 - perf/time_per_step:9.0\n"
    steps = "".join(step.format(n) for n in range(1, 4))
    assert judged(f"dataset len: 64\n{steps}", tmp_path).phase == "generation"
    assert judged(f"worker started...\n{steps}", tmp_path).phase == "weight-sync"


HOSTILE = "\x1b[2J"  # clears a screen that obeys it
DISTILLS = "".join(
    f"[teacher] 12:00:{n:02} INFO {HOSTILE}request {n}: 4 sequences\n"
    f'{{"step": {n}, "loss": 1.5}}\n'
    for n in range(1, 9)
)


def test_the_line_that_usually_follows_is_what_the_run_waits_for(
    tmp_path: Path,
) -> None:
    found = usual_next(DISTILLS.encode())
    assert found is not None
    assert (found.times, found.of) == (7, 7)
    log = tmp_path / "train.log"
    log.write_text(DISTILLS)
    report = logs.examine([log], CATALOGUE, now="13:00")
    assert (report.verdict, report.phase) == ("hung", "teacher")
    line = f"[teacher] 12:00:08 INFO {HOSTILE}request 8: 4 sequences"
    shown = report.to_json()["expected"]
    assert shown == {"text": line.replace(HOSTILE, ""), "times": 7, "of": 7}
    text = render.log_text(report)
    assert "  next  usually (7 of 7 times): [teacher] 12:00:08 INFO request 8" in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one line\n",
        "a\nb\na\nb\na\n",  # twice only
        "".join(f"step {n}\n{'abcdef'[n % 6]}\n" for n in range(9)) + "step 9\n",
        "loss 1\n" * 50,
    ],
)
def test_nothing_usual_follows(text: str) -> None:
    assert usual_next(text.encode()) is None


def test_words_of_a_warning_do_not_end_the_start(tmp_path: Path) -> None:
    start = "ray init kwargs: {}\nWARNING: no rollout was sampled before\n"
    assert judged(start, tmp_path).phase == "ray-init"
    assert judged(f"{start}loading rollout from m\n", tmp_path).phase == "rollout-init"


def test_a_checkpoint_that_is_whole_ends_its_phase(tmp_path: Path) -> None:
    steps = "dataset len: 64\nstep:1 - actor/loss:0.5\nsaving checkpoint of step 1\n"
    assert judged(steps, tmp_path).phase == "checkpoint"
    assert judged(f"{steps}checkpoint saved to out\n", tmp_path).phase == "generation"


def test_what_is_pushed_ends_the_start(tmp_path: Path) -> None:
    start = "ray init kwargs: {}\npushing weights to 2 rollout workers\n"
    assert judged(start, tmp_path).phase == "weight-sync"


def test_of_several_ranks_the_one_that_is_behind_tells_the_phase(
    tmp_path: Path,
) -> None:
    steps = "".join(f"[rank {r}/3] step 1: loss 0.5\n" for r in range(3))
    begins = "".join(f"[rank {r}/3] step 2: generating\n" for r in range(3))
    update = "[rank 0/3] step 2: forward/backward\n[rank 2/3] step 2: backward\n"
    assert judged(f"{steps}{begins}{update}", tmp_path).phase == "generation"
    last = "[rank 1/3] step 2: forward/backward\n"
    assert judged(f"{steps}{begins}{update}{last}", tmp_path).phase == "training-step"


STACK = """Timeout (0:10:00)!
Thread 0x00007f2b211d7b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/app/loop.py", line 77 in ask_teacher
  File "/app/loop.py", line 151 in <module>
"""


def test_a_stack_that_is_shown_last_tells_the_phase(tmp_path: Path) -> None:
    steps = "step 1 loss 0.5\nstep 2 loss 0.5\nstep 3: sampling\n"
    assert judged(f"{steps}{STACK}", tmp_path).phase == "teacher"
    assert judged(f"{steps}{STACK}step 3 loss 0.5\n", tmp_path).phase != "teacher"


def test_the_order_in_which_a_step_tells_its_parts_says_what_comes_first(
    tmp_path: Path,
) -> None:
    step = "step:{} - actor/loss:0.5 - timing_s/{}:0.1 - timing_s/{}:0.2\n"
    for first, then, phase in (
        ("gen", "update_weights", "generation"),
        ("update_weights", "gen", "weight-sync"),
    ):
        text = "".join(step.format(n, first, then) for n in range(1, 4))
        assert judged(f"dataset len: 9\n{text}", tmp_path).phase == phase


def test_lines_that_usually_go_on_are_followed_by_their_like() -> None:
    steps = [f'{{"step": {n}, "loss": 1.5}}\n' for n in range(1, 19)]
    saved = "".join(
        line + ("saving checkpoint\n" if n % 5 == 0 else "")
        for n, line in enumerate(steps, 1)
    )
    assert usual_next(saved.encode()) is None
    found = usual_next(f"{saved}{steps[0]}{steps[1]}".encode())
    assert found is not None
    assert found.text == b"saving checkpoint"


@pytest.mark.parametrize(
    ("cause", "last", "phase"),
    [
        ("vllm.kv-cache", "config", "rollout-init"),
        ("vllm.kv-cache", "generation", "generation"),
        ("comm.rendezvous", "unknown", "actor-init"),
        ("comm.rendezvous", "rollout-init", "rollout-init"),
        ("sync.stuck", "training-step", "weight-sync"),
        ("env.host-oom", "data", "data"),
    ],
)
def test_a_cause_tells_the_phase_where_no_function_does(
    cause: str, last: str, phase: str
) -> None:
    assert log_phases.caused_in(cause, last) == phase


def test_the_causes_of_phases_are_those_of_the_catalogue() -> None:
    known = {*CATALOGUE, *(cause.partition(".")[0] for cause in CATALOGUE)}
    assert {*log_phases.CAUSED_IN} <= known


def test_a_group_of_exceptions_that_nothing_catches_fails_a_run(tmp_path: Path) -> None:
    steps = "".join(
        f"2026-11-29 10:00:0{n} INFO step {n}/90 loss=1\n" for n in range(9)
    )
    group = """  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 88, in <module>
  |     anyio.run(main)
  | BaseExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/job/roll.py", line 21, in sample
    |     return pool.pick(k)
    | KeyError: 9
    +------------------------------------
"""
    assert judged(steps + group, tmp_path).verdict == "unknown"
