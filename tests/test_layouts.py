"""Weights are pushed into a real engine, and broadcast between two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh_python
import pytest

pytestmark = pytest.mark.needs("ray", "torch", "transformers", "vllm")

PROGRAMS = Path(__file__).parent / "programs"
TENSORS = 26  # of the tiny student


@pytest.fixture(scope="module")
def pushes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of pushes, right and wrong, into one in-process engine."""
    base = tmp_path_factory.mktemp("p")
    result = base / "result.json"
    with (base / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, str(PROGRAMS / "colocated_faults.py"), base, result],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=600,
            env=os.environ | {"TMPDIR": str(base)},  # vLLM leaves files behind
        )
    assert result.exists(), (base / "log").read_text("utf-8", "replace")[-4000:]
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def test_a_push_changes_every_tensor_in_the_engine(pushes: dict[str, Any]) -> None:
    assert pushes["changed"] == [TENSORS, TENSORS]


def test_a_trainer_loaded_before_it_does_not_make_the_engine_compile(
    pushes: dict[str, Any],
) -> None:
    assert pushes["compiles"] is False


def test_a_push_back_restores_the_engine_bit_for_bit(pushes: dict[str, Any]) -> None:
    assert pushes["restored"] is True


@pytest.mark.parametrize(
    ("push", "cause", "says"),
    [
        ("lost all", "sync.not-applied", f"{TENSORS} of {TENSORS} tensors"),
        ("lost half", "sync.not-applied", f"{TENSORS // 2} of {TENSORS} tensors"),
        ("renamed", "sync.name-or-shape", "module.model.embed_tokens.weight"),
        ("missing", "sync.name-or-shape", "model.norm.weight"),
        ("misshapen", "sync.name-or-shape", "[256, 129]"),
        ("nan", "train.nan", "model.embed_tokens.weight"),
    ],
)
def test_a_push_that_is_wrong_or_gets_lost_is_told_by_its_tensors(
    pushes: dict[str, Any], push: str, cause: str, says: str
) -> None:
    assert pushes[push]["cause"] == cause
    assert says in pushes[push]["message"]


def test_a_refused_push_leaves_the_engine_as_it_was(pushes: dict[str, Any]) -> None:
    assert pushes["untouched"] is True


def test_a_new_engine_starts_where_a_broken_one_was(pushes: dict[str, Any]) -> None:
    assert pushes["fresh"] is True
    assert pushes["answers"] == 4


class Side:
    """One process of a broadcast."""

    def __init__(self, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "broadcast_side.py"), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
        self._watch = threading.Timer(90.0, self.process.kill)
        self._watch.start()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self._watch.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Side]:
    side = Side("receive")
    yield side
    side.end()


@pytest.fixture(scope="module")
def sender() -> Iterator[Side]:
    side = Side("send")
    yield side
    side.end()


def broadcast(sender: Side, receiver: Side, case: str) -> dict[str, Any]:
    sender.say(case)
    receiver.say(sender.hear())
    assert receiver.hear() == "joined"
    sender.say("go")
    found: dict[str, Any] = json.loads(receiver.hear())
    return found


def test_a_broadcast_arrives_as_it_was_sent(sender: Side, receiver: Side) -> None:
    assert broadcast(sender, receiver, "whole") == {"equal": True}


def test_a_sender_of_fewer_tensors_is_noticed(sender: Side, receiver: Side) -> None:
    error = broadcast(sender, receiver, "fewer tensors")["error"]
    assert "announces 2048 bytes, the receiver expects 2080" in error


def test_a_message_shorter_than_announced_is_noticed(
    sender: Side, receiver: Side
) -> None:
    error = broadcast(sender, receiver, "short message")["error"]
    assert "2080 bytes arrived whose hash is not the sender's" in error


def test_a_sender_that_stops_is_given_up_at_the_deadline(receiver: Side) -> None:
    sender = Side("send")
    try:
        error = broadcast(sender, receiver, "stops")["error"]
    finally:
        sender.end()
    assert "Timed out waiting 3000ms" in error


def test_a_sender_that_dies_is_told_from_one_that_stops(receiver: Side) -> None:
    sender = Side("send")
    try:
        error = broadcast(sender, receiver, "dies")["error"]
    finally:
        sender.end()
    assert "Connection closed by peer" in error or "Connection reset" in error


def test_what_ray_cannot_place_is_named_by_resource() -> None:
    ended = fresh_python.run(str(PROGRAMS / "infeasible_placement.py"))
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    assert found["cause"] == "ray.no-resources"
    assert "GPU: 1 wanted, 0 there" in found["message"]


def test_the_meeting_of_a_push_is_on_loopback_only() -> None:
    program = """
import psutil
from pytest_gkd.workload.sync import broadcast
rendezvous, store = broadcast.open_rendezvous("gloo", 2, 10)
found = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
print([(c.laddr.ip, c.laddr.port == rendezvous.port) for c in found])
"""
    assert (
        fresh_python.output(program).strip().splitlines()[-1] == "[('127.0.0.1', True)]"
    )


def test_a_class_that_vllm_would_share_with_the_trainer_is_told(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "shared_class.py"), tmp_path, result],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert result.exists(), done.stderr[-4000:]
    found = json.loads(result.read_text("utf-8"))
    note = found["notes"]["vllm.shared-class"]
    assert found["kept"] == ""
    # What the note says of other jobs is what happens to them.
    assert found["before"] == "'Olmo2Model' object has no attribute 'do_not_compile'"
    assert found["before"] in note
    assert found["after"].startswith("Current vLLM config is not set")
