"""A lock that the job's own load would wait for is found, and so is who has it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import cache_locks

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); "
    "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    lock = tmp_path / "data.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield lock, process
    process.kill()
    process.communicate()


def test_a_lock_that_nobody_holds_is_free_and_stays_so(tmp_path: Path) -> None:
    lock = tmp_path / "data.lock"
    assert not cache_locks.is_held(lock)
    assert not lock.exists()
    lock.touch()
    assert not cache_locks.is_held(lock)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_held_lock_is_told_with_its_holder(
    holder: tuple[Path, subprocess.Popen[str]],
) -> None:
    lock, process = holder
    assert cache_locks.is_held(lock)
    found = cache_locks.holder(lock)
    assert found is not None
    assert found[0] == process.pid


def test_the_locks_are_those_that_datasets_takes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n' * 3)
    parts = {
        name: datasets.load_dataset(
            "json",
            data_files=[str(file)],
            split="train",
            cache_dir=str(tmp_path / name),
        )
        for name in ("mine", "theirs")
    }
    arrow = Path(parts["mine"].cache_files[0]["filename"])
    locks = list(
        cache_locks.lock_files(arrow.parent, tmp_path / "mine", tmp_path / "theirs")
    )
    assert locks
    assert all(lock.is_file() for lock in locks)


def test_the_fault_names_the_process_the_lock_and_its_state(
    holder: tuple[Path, subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, process = holder
    holds = psutil.Process(process.pid)
    until(lambda: holds.status() == psutil.STATUS_SLEEPING)
    monkeypatch.setattr(cache_locks, "WAIT_S", 0.0)
    monkeypatch.setattr(cache_locks, "lock_files", lambda *_: iter([lock]))
    with pytest.raises(StageFault) as caught:
        cache_locks.check([tmp_path / "x"], tmp_path, tmp_path)
    assert caught.value.cause == "data.cache"
    assert caught.value.facts == {"path": str(lock), "pid": process.pid}
    program = Path(sys.executable).name
    assert f"process {process.pid} (sleeping: {program} -c" in caught.value.message
    assert str(lock) in caught.value.message


def test_the_cache_is_where_the_variables_say() -> None:
    home = Path(os.path.expanduser("~"))  # noqa: PTH111
    place = cache_locks.cache_root
    assert place({}) == home / ".cache/huggingface/datasets"
    assert place({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/datasets")
    assert place({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/datasets")
    assert place({"HF_DATASETS_CACHE": "/d", "HF_HOME": "/h"}) == Path("/d")
    # A user without a home, as in many containers, is no reason to stop.
    assert place({"HF_HOME": "~no-such-user"}) == Path("~no-such-user/datasets")
