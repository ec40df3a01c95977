"""Which of several failures in one log is told first."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.catalogue import Rule, Signature
from pytest_gkd.diagnosis.log_report import LogReport

CATALOGUE = catalogue.load()
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def ended(error: str, *frames: str) -> str:
    lines = (f'  File "/job/{frame}", line 3, in {frame[:-3]}\n' for frame in frames)
    return f"Traceback (most recent call last):\n{''.join(lines)}{error}\n"


MISSING = ended(
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.parquet'",
    "load_rows.py",
)
NO_SPACE = ended("OSError: [Errno 28] No space left on device", "run.py")
KILLED = (
    "E1120 10:00:11 700 torch/distributed/elastic/multiprocessing/api.py:882] failed "
    "(exitcode: -9) local_rank: 1 (pid: 712) of binary: /opt/env/bin/python\n"
)
KERNEL = "[812221.3] Memory cgroup out of memory: Killed process 712 (python)\n"


def causes(*texts: str, rules: Any = CATALOGUE) -> list[str]:
    log = log_file.read(io.BytesIO("".join(texts).encode()), "x.log", 0, rules)
    return [one.cause for one in logs.judge([log], rules).causes]


def test_the_direct_cause_of_an_exception_explains_it() -> None:
    assert causes(MISSING, CAUSE, NO_SPACE) == ["data.file-missing"]


def test_an_exception_after_another_is_not_explained_by_it() -> None:
    assert {*causes(MISSING, "\n", NO_SPACE)} == {"data.file-missing", "env.disk-full"}


def test_what_was_handled_explains_what_came_of_it() -> None:
    assert causes(NO_SPACE, CONTEXT, MISSING) == ["env.disk-full"]


def test_a_broad_guess_that_was_handled_does_not_explain_a_known_cause() -> None:
    broad = ended("FileNotFoundError: [Errno 2] No such file: '/a'", "load_rows.py")
    assert causes(broad) == ["data.file-missing"]
    assert causes(broad, CONTEXT, NO_SPACE)[0] == "env.disk-full"


def test_a_line_that_shows_two_causes_is_no_proof_of_what_brought_it_about() -> None:
    def rule(name: str, tier: str, **more: Any) -> Rule:
        signature = Signature(text=("it broke",))
        return Rule(name, "t", tier, "w", signatures=(signature,), **more)

    broke = rule("own.broke", "cause", consequence_of=("own.root",))
    rules = {one.id: one for one in (rule("own.root", "symptom"), broke)}
    assert causes("RuntimeError: it broke\n", rules=rules)[0] == "own.broke"
    proof = Signature(text=("root gone",))
    root = replace(rules["own.root"], signatures=(*broke.signatures, proof))
    both = "RuntimeError: root gone\nRuntimeError: it broke\n"
    assert causes(both, rules={**rules, root.id: root})[0] == "own.root"


def test_sigkill_alone_is_not_told_as_a_lack_of_memory() -> None:
    assert causes(KILLED) == ["env.killed"]
    assert causes(KERNEL, KILLED) == ["env.host-oom"]


@pytest.mark.parametrize("first", [True, False])
def test_a_cause_in_another_process_explains_what_its_peer_sees(first: bool) -> None:
    lack = ended("ModuleNotFoundError: No module named 'vllm'", "judge.py")
    error = "requests.exceptions.ConnectionError: HTTPConnectionPool(port=81): gone"
    asked = ended(error, "llm_judge.py", "reward.py")
    texts = (lack, asked) if first else (asked, "\n", lack)
    assert causes(*texts) == ["env.package-missing"]
    assert causes(asked) == ["reward.unreachable"]


def test_echoed_overrides_are_no_evidence() -> None:
    echo = "Error executing job with overrides: ['actor.fsdp_config.offload=True']\n"
    died = ended("ray.exceptions.ActorDiedError: The actor died.", "main.py")
    assert causes(echo, died) == ["ray.actor-died"]


PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [x]:4"


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def judged(*texts: str) -> LogReport:
    log = log_file.read(io.BytesIO("".join(texts).encode()), "x.log", 0, CATALOGUE)
    return logs.judge([log], CATALOGUE)


@pytest.mark.parametrize("first", [True, False])
def test_what_peers_saw_is_no_cause_where_a_rank_raised_what_no_rule_knows(
    first: bool,
) -> None:
    own = of_rank(1, ended("StopIteration", "draw.py", "train_step.py"))
    seen = of_rank(0, ended(PEER, "backward.py"))
    report = judged(own, seen) if first else judged(seen, own)
    assert (report.verdict, report.phase) == ("unknown", "training-step")
    assert "[rank1]: StopIteration" in report.telling[0].text
    assert "/job/train_step.py:3" in report.telling[1].text
    assert "comm.peer-died" not in report.nearest


@pytest.mark.parametrize(
    "other",
    [
        "",
        of_rank(0, ended("ValueError: x", "draw.py")),  # the rank that saw it
        of_rank(1, ended("torch.distributed.DistBackendError: NCCL", "draw.py")),
        of_rank(1, ended("SignalException: Process 7 got signal: 15", "draw.py")),
    ],
)
def test_what_peers_saw_is_the_cause_where_no_other_rank_failed_by_itself(
    other: str,
) -> None:
    assert judged(of_rank(0, ended(PEER, "backward.py")), other).verdict == "failed"


def test_a_peers_error_that_the_run_outlived_is_not_its_cause() -> None:
    steps = "".join(f"step {n}/9 loss 2.0\n" for n in range(1, 6))
    own = of_rank(1, ended("KeyError: 'web'", "draw.py"))
    report = judged(own, steps, of_rank(0, ended(PEER, "backward.py")))
    assert [one.cause for one in report.causes] == ["comm.peer-died"]


def test_a_rule_that_only_guesses_is_named_among_what_an_unknown_failure_is_like() -> (
    None
):
    signature = Signature(text=("0x7f3c",), example="0x7f3c", confidence="guess")
    broad = Rule("own.rule", "", "cause", "", signatures=(signature,))
    text = ended("RuntimeError: no event loop for 0x7f3c", "update_weights.py")
    rules = {**CATALOGUE, broad.id: broad}
    log = log_file.read(io.BytesIO(text.encode()), "x.log", 0, rules)
    report = logs.judge([log], rules)
    assert report.verdict == "unknown"
    assert report.nearest[0] == "own.rule"
    assert len(report.nearest) > 1
