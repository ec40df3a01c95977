"""Which of several failures in one log is told first."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.catalogue import Rule, Signature

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
