"""A stage's own process that the kernel ends for lack of memory is told as that."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_plugin import Run
from test_tree import root_only

from pytest_gkd.processes import oom

LIMITS = {1: "memory/{}/memory.limit_in_bytes", 2: "{}/memory.max"}
PROBE = """
import os, signal
from pathlib import Path
import pytest

@pytest.mark.gkd_stage("grows", timeout=60)
def test_grows():
    Path("{procs}").write_text(str(os.getpid()))
    bytearray(1 << 30)

@pytest.mark.gkd_stage("killed", timeout=60)
def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may have 128 MiB; skips where none can be made."""
    for limit in LIMITS.values():
        file = Path("/sys/fs/cgroup", limit.format(f"gkd-test-{os.getpid()}"))
        try:
            file.parent.mkdir()
        except OSError:
            continue
        if file.exists():
            file.write_text(str(128 << 20))
            break
        file.parent.rmdir()
    else:
        pytest.skip("no control group with a memory limit can be made")
    yield file.parent
    while (file.parent / "cgroup.procs").read_text():
        time.sleep(0.05)
    file.parent.rmdir()


@root_only
def test_a_stage_ended_for_want_of_memory_is_told_from_one_that_was_killed(
    tmp_path: Path, group: Path
) -> None:
    if oom.kills() is None:
        pytest.skip("the kernel does not count (Linux before 4.13)")
    (tmp_path / "test_probe.py").write_text(PROBE.format(procs=group / "cgroup.procs"))
    run = Run(tmp_path, "--gkd-stages=grows,killed", "test_probe.py", "-n1")
    assert run.outcomes() == {"grows": "failed", "killed": "failed"}
    grows, killed = run.stage("grows"), run.stage("killed")
    assert grows["diagnosis"]["cause"] == "env.host-oom"
    assert grows["diagnosis"]["confidence"] == "certain"
    said = "signal SIGKILL; meanwhile the kernel ended 1 process(es)"
    assert said in grows["message"]
    assert killed["diagnosis"] is None
    assert "by the kernel's count it was not for lack of memory" in killed["message"]


@pytest.mark.parametrize("text", ["", "oom_kill x\n", "oom_kill_disable 0\n"])
def test_a_kernel_that_does_not_count_is_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.events").write_text(text)
    assert oom.kills(tmp_path / "memory.events") is None
    assert not oom.Count(None, None).is_known


def test_of_both_counts_that_of_the_group_is_told_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = oom.Count(3, 1)
    for now, told in (
        (oom.Count(3, 1), (0, "")),
        (oom.Count(5, 1), (2, "ended 2 process(es) on this machine")),
        (oom.Count(5, 2), (1, "ended 1 process(es) of pytest's control group")),
    ):
        monkeypatch.setattr(oom.Count, "now", lambda now=now: now)
        kills, said = before.since()
        assert kills == told[0]
        assert told[1] in said
