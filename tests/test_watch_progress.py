"""What a job's output tells as it comes, what runs teach, and who is who."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_gkd.watch import relay, roles, status_line, usual_times
from pytest_gkd.watch.progress import TAIL, Follower
from pytest_gkd.watch.relay import RING, Shared
from pytest_gkd.watch.roles import Facts


def test_steps_their_time_and_the_loss_are_followed() -> None:
    follower = Follower()
    for step in range(1, 11):
        line = f"{{'loss': {1 / step:.3f}, 'step': {step}}}\n"
        progress = follower.feed(line.encode(), 100.0 + 2 * step)
    assert (progress.step, progress.step_s, progress.step_at) == (10, 2.0, 120.0)
    assert progress.metric == "loss"
    assert [one.value for one in progress.series][-1] == 0.1
    assert follower.longest_s == 2.0


def test_output_may_be_cut_anywhere() -> None:
    text = b"".join(
        b"\r 10%%|#   | %d/100 [00:0%d<09:00,  2.00s/it, loss=0.%d]" % (n, n, 9 - n)
        for n in range(1, 9)
    )
    whole, pieces = Follower(), Follower()
    expected = whole.feed(text + b"\n", 1.0)
    for at in range(0, len(text), 7):
        pieces.feed(text[at : at + 7], 1.0)
    found = pieces.feed(b"\n", 1.0)
    assert (found.step, found.total) == (expected.step, expected.total) == (8, 100)
    assert found.series == expected.series


def test_the_phase_follows_the_markers_and_stays_where_there_is_none() -> None:
    follower = Follower()
    assert follower.feed(b"Loading checkpoint shards: 10%\n", 1.0).phase == "actor-init"
    assert follower.feed(b"some words\n", 5.0).phase == "actor-init"
    progress = follower.feed(b"Saving checkpoint to /out\n", 9.0)
    assert (progress.phase, progress.phase_at) == ("checkpoint", 9.0)
    assert follower.phases == {"actor-init": 8.0}


@pytest.mark.parametrize(
    ("line", "trained"),
    [
        (b"{'loss': 0.7, 'grad_norm': 1.2, 'epoch': 0.1}", True),
        (b"step:1 - actor/pg_loss:0.1 - timing_s/step:12.3", True),
        (b"step 0: {'train/loss': 0.4, 'train/grad_norm': 1.0}", True),
        (b" iteration        1/     100 | lm loss: 4.0E-01 | grad norm: 1.2 |", True),
        (b"Step 1/100\n  \xe2\x80\xa2 Loss: 0.4", True),
        (
            b'GKD-PHASE {"phase": "training-step", "event": "end", "t": 1, "pid": 2}',
            True,
        ),
        (
            b'GKD-PHASE {"phase": "training-step", "event": "end", "t": 1, "pid": 2, '
            b'"error": "ValueError"}',
            False,
        ),
        (b'GKD-PHASE {"phase": "generation", "event": "end", "t": 1, "pid": 2}', False),
        (b"step:0 - val-core/gsm8k/reward/mean@1:0.3 - val-aux/num_turns:2", False),
        (b"kl_loss_coef: 0.001", False),
        (b"global_step: 0, use_kl_loss: 1, kl_loss_coef: 0.001", False),
        (b"step 0: {'eval_loss': 0.4}", False),
        (b"  0%|          | 0/100 [00:00<?, ?it/s]", False),
        (b"Loading checkpoint shards: 100%|####| 2/2 [00:01<00:00,  1.2it/s]", False),
        (b"learning_rate: 1e-06, gradient_accumulation_steps: 8, loss: topk", False),
    ],
)
def test_a_first_step_is_its_metrics_or_a_mark_and_no_setting(
    line: bytes, trained: bool
) -> None:
    follower = Follower()
    follower.feed(b"some words\n", 1.0)
    assert follower.feed(line + b"\n", 5.0).trained_at == (5.0 if trained else 0.0)
    assert follower.feed(b"more\n", 9.0).trained is trained


def test_a_log_without_numbers_of_steps_has_its_steps_counted() -> None:
    follower = Follower()
    for second in range(4):
        follower.feed(b"{'loss': 1.0, 'grad_norm': 0.5}\n", float(second))
    assert follower.steps_made >= 2


def test_what_is_kept_of_an_endless_output_is_bounded() -> None:
    follower = Follower()
    for number in range(200):
        follower.feed(b"x" * 100_000, float(number))  # no line end at all
    assert len(follower.head) <= TAIL
    assert len(follower.tail) <= TAIL
    assert follower.feed(b"\n{'loss': 0.5, 'step': 3}\n", 201.0).step == 3


def test_the_ring_gives_what_is_new_and_never_what_was_overwritten() -> None:
    shared = Shared.begin()
    seen = 0
    got = b""
    for number in range(50):
        part = bytes([number]) * 30_011
        shared.put(part)
        data, seen = shared.since(seen)
        got += data
    assert got == b"".join(bytes([number]) * 30_011 for number in range(50))
    shared.put(b"a" * (2 * RING))
    shared.put(b"end")
    data, seen = shared.since(seen)
    assert data.endswith(b"aaaend")
    assert len(data) <= RING
    assert shared.since(seen) == (b"", seen)
    os.close(shared.descriptor)


@pytest.mark.parametrize(
    ("tail", "whole"),
    [
        (b"plain", True),
        (b"\x1b[31mred\x1b[0m", True),
        (b"text\x1b", False),
        (b"text\x1b[3", False),
        (b"\x1b]0;title", False),
        (b"\x1b]0;title\x07", True),
        ("é".encode(), True),
        ("é".encode()[:1], False),
        ("█".encode()[:2], False),
        (b"", True),
    ],
)
def test_a_status_is_drawn_only_between_whole_sequences(
    tail: bytes, whole: bool
) -> None:
    assert relay.is_whole(tail) is whole


def test_earlier_runs_teach_what_is_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = usual_times.key(["python", "train.py", "--port", "29517"], "/job")
    assert name == usual_times.key(["python", "train.py", "--port", "30001"], "/job")
    assert name != usual_times.key(["python", "train.py", "--lr", "1"], "/job")
    assert name != usual_times.key(["python", "train.py", "--port", "29517"], "/other")
    assert usual_times.load(name).runs == 0
    for seconds in (10.0, 20.0, 60.0):
        usual_times.learn(name, {"generation": seconds}, {"generation": 5.0}, 2.0)
    usual = usual_times.load(name)
    assert (usual.runs, usual.phases, usual.step_s) == (3, {"generation": 20.0}, 2.0)
    path = tmp_path / "pytest-gkd" / "watch" / f"{name}.json"
    assert oct(path.stat().st_mode)[-3:] == "600"
    path.write_text("{ damaged")
    assert usual_times.load(name).runs == 0


def named(*told: tuple[int, int, str, dict[str, str]]) -> dict[int, tuple[str, str]]:
    facts = [Facts(*one) for one in told]
    return {pid: (r.kind, r.name) for pid, r in roles.roles(facts, told[0][0]).items()}


def test_torchruns_ranks_and_their_data_workers_are_known() -> None:
    train = "python train.py"
    found = named(
        (1, 0, "/venv/bin/python /venv/bin/torchrun --nproc-per-node 2 train.py", {}),
        (2, 1, train, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}),
        (3, 1, train, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
        (4, 3, train, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
        (5, 2, "/usr/bin/g++ -O2 kernel.cpp", {}),
    )
    assert found[1] == ("launcher", "torchrun")
    assert found[2] == ("rank", "rank 0")
    assert found[3] == ("rank", "rank 1")
    assert found[4][0] == "data-worker"
    assert "rank 1" in found[4][1]
    assert found[5] == ("compiler", "compiler g++")


def test_rays_and_vllms_processes_are_known_by_their_titles() -> None:
    found = named(
        (1, 0, "python main.py", {}),
        (2, 1, "/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", {}),
        (3, 1, "/ray/core/src/ray/raylet/raylet --session_dir=/tmp", {}),
        (4, 3, "ray::Trainer.fit", {}),
        (5, 3, "ray::Rollout", {}),
        (6, 3, "ray::IDLE", {}),
        (7, 5, "VLLM::EngineCore", {}),
        (8, 0, "python -m vllm.entrypoints.openai.api_server --model x", {}),
    )
    assert found[1] == ("ray-driver", "Ray driver")
    assert found[2][0] == found[3][0] == "ray-system"
    assert found[4] == ("ray-actor", "ray::Trainer.fit")
    assert found[5] == ("ray-actor", "ray::Rollout")
    assert found[6][0] == "ray-worker"
    assert found[7] == ("engine", "vLLM EngineCore")
    assert found[8][0] == "teacher"


def test_a_sparkline_and_a_trend_are_drawn() -> None:
    assert status_line.sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert status_line.sparkline([1.0, float("nan")]) == ""
    assert status_line.trend((1.0,) * 8) == " →"
    assert status_line.trend((1.0, 1.0, 1.0, 2.0, 2.0, 2.0)) == " ↗"
    assert status_line.clock(3723) == "1:02:03"
