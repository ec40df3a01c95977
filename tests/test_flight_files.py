"""Which files of NCCL's flight recorder count, and whom asking for them disturbs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_machines import may_isolate
from watch_helpers import until

from pytest_gkd.watch import flight_files, node_agent
from pytest_gkd.watch.flight_files import Recorder


def _record(number: int) -> bytes:
    entry = {
        "pg_id": 0,
        "collective_seq_id": number,
        "input_sizes": [],
        "input_dtypes": [],
        "time_created_ns": number,
    }
    return json.dumps({"entries": [entry]}).encode()


def _number(found: Recorder) -> int | None:
    if not found.record:
        return None
    return int(json.loads(found.record)["entries"][-1]["collective_seq_id"])


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The pid of a rank that looks as if it used NCCL, with its home in tmp_path."""
    monkeypatch.setattr(flight_files, "uses_nccl", lambda _: True)
    default = str(tmp_path / "nccl_trace_rank_")
    monkeypatch.setattr(flight_files, "DEFAULTS", (flight_files.DEFAULTS[0], default))
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    sleep = [sys.executable, "-c", "print(flush=True); import time; time.sleep(100)"]
    with subprocess.Popen(sleep, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_record_of_an_earlier_run_is_not_this_ones(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(_record(7))
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert flight_files.ask({rank: 3}) == {rank: Recorder()}
    path.touch()
    assert _number(flight_files.ask({rank: 3})[rank]) == 7


def test_the_newest_of_several_records_counts(tmp_path: Path, rank: int) -> None:
    """By either default: what another release of torch has left is older."""
    first = tmp_path / f".cache/{flight_files.DEFAULTS[0]}3"
    first.parent.mkdir(parents=True)
    for path, number, ahead_s in (
        (first, 1, 10),
        (tmp_path / "nccl_trace_rank_3", 2, 20),
    ):
        path.write_bytes(_record(number))
        os.utime(path, (time.time() + ahead_s, time.time() + ahead_s))
    assert _number(flight_files.ask({rank: 3})[rank]) == 2
    os.utime(first, (time.time() + 30, time.time() + 30))
    assert _number(flight_files.ask({rank: 3})[rank]) == 1


def test_the_cache_directory_may_be_elsewhere() -> None:
    own, old = flight_files.DEFAULTS
    home = f"/home/me/.cache/{own}"
    assert flight_files.default_stems({"HOME": "/home/me"}) == [home, old]
    elsewhere = {"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch"}
    assert flight_files.default_stems(elsewhere) == [f"/scratch/{own}", home, old]
    assert flight_files.default_stems({}) == [f"/tmp/.cache/{own}", old]


def test_a_file_of_torchcomms_is_not_taken_for_torchs(
    tmp_path: Path, rank: int
) -> None:
    """Both write to one place, and number differently."""
    path = tmp_path / f".cache/{flight_files.DEFAULTS[0]}3"
    path.parent.mkdir(parents=True)
    record = json.loads(_record(40))
    path.write_text(json.dumps(record))
    assert _number(flight_files.ask({rank: 3})[rank]) == 40
    (entry,) = record["entries"]
    entry |= {"process_group": ["0", "nccl"], "profiling_name": "nccl:all_reduce"}
    path.write_text(json.dumps(record))
    assert flight_files.ask({rank: 3})[rank] == Recorder()


@pytest.mark.parametrize("kind", ["pipe", "folder", "text", "nothing"])
def test_what_is_no_record_holds_nobody(tmp_path: Path, rank: int, kind: str) -> None:
    path = tmp_path / "nccl_trace_rank_3"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("no record")
    assert flight_files.ask({rank: 3}) == {rank: Recorder()}


@pytest.mark.skipif(not may_isolate(), reason="needs namespaces (root)")
def test_a_path_is_that_of_the_processs_own_mounts(tmp_path: Path) -> None:
    """In a container, say, where another file has the name."""
    (tmp_path / "dump").write_text("the machine's")
    inside = (
        f"mount -t tmpfs none {tmp_path} && echo own > {tmp_path}/dump && sleep 100"
    )
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", inside]) as other:
        try:
            seen = f"/proc/{other.pid}/root{tmp_path}/dump"
            until(lambda: Path(seen).read_text() == "own\n", "it has mounted nothing")
            found = flight_files.path_of(other.pid, str(tmp_path / "dump"))
            assert found.read_text() == "own\n"
        finally:
            other.kill()
    mine = flight_files.path_of(os.getpid(), str(tmp_path / "dump"))
    assert mine == tmp_path / "dump"


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_records_that_cannot_be_had_cost_a_node_nothing_else(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A file system that does not answer is what some jobs stand still for."""

    def ask(_: object) -> dict[int, Recorder]:
        if how == "hangs":
            time.sleep(60)
        raise OSError("gone")

    monkeypatch.setattr(flight_files, "ask", ask)
    request = {"jobs": ["00"], "look": "native", "limit_s": 1}
    told = node_agent.Agent().answer(request)
    assert told["host"]
    (why,) = (one for one in told["unseen"] if one.startswith("flight records: "))
    assert why.endswith("no answer in time" if how == "hangs" else "gone")
