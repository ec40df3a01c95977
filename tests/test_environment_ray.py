"""A Ray that a job would join, and that is gone, is found."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import fresh_python
import psutil
import pytest

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment import ray_cluster
from pytest_gkd.workload.environment.probe import Probe
from pytest_gkd.workload.environment.ray_cluster import judge_clusters


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def left(folder: Path, port: int) -> Path:
    """The file that ``ray start`` leaves below its temporary directory."""
    (folder / "ray").mkdir()
    file = folder / "ray" / "ray_current_cluster"
    file.write_text(f"127.0.0.1:{port}")
    return file


def test_without_a_trace_of_ray_nothing_is_said(tmp_path: Path) -> None:
    assert judge_clusters({}, tmp_path, needed=True) == []


def test_a_cluster_that_answers_is_no_finding(tmp_path: Path, open_port: int) -> None:
    left(tmp_path, open_port)
    assert judge_clusters({}, tmp_path, needed=True) == []


def test_a_cluster_that_is_gone_is_named_with_its_file(
    tmp_path: Path, closed_port: int
) -> None:
    file = left(tmp_path, closed_port)
    (fault,) = judge_clusters({}, tmp_path, needed=True)
    assert isinstance(fault, StageFault)
    assert fault.cause == "ray.connection"
    assert f"127.0.0.1:{closed_port}" in fault.message
    assert fault.facts["file"] == str(file)


def test_a_job_without_ray_hears_of_it_and_passes(
    tmp_path: Path, closed_port: int
) -> None:
    left(tmp_path, closed_port)
    (note,) = judge_clusters({}, tmp_path, needed=False)
    assert isinstance(note, Note)
    assert f"127.0.0.1:{closed_port}" in note.text


def test_a_variable_goes_before_the_file(
    tmp_path: Path, open_port: int, closed_port: int
) -> None:
    left(tmp_path, closed_port)
    assert (
        judge_clusters({"RAY_ADDRESS": f"127.0.0.1:{open_port}"}, tmp_path, needed=True)
        == []
    )
    (fault,) = judge_clusters(
        {"RAY_ADDRESS": f"ray://127.0.0.1:{closed_port}"}, tmp_path, needed=False
    )
    assert isinstance(fault, StageFault)
    assert fault.message.startswith("RAY_ADDRESS names")
    assert "file" not in fault.facts


@pytest.mark.parametrize("address", ["auto", "local", ""])
def test_an_address_that_names_no_place_is_left_to_ray(
    tmp_path: Path, address: str
) -> None:
    assert judge_clusters({"RAY_ADDRESS": address}, tmp_path, needed=True) == []


def test_the_file_is_where_rays_own_variable_says(
    tmp_path: Path, closed_port: int
) -> None:
    (tmp_path / "own").mkdir()
    left(tmp_path / "own", closed_port)
    environ = {"RAY_TMPDIR": str(tmp_path / "own")}
    (fault,) = judge_clusters(environ, tmp_path, needed=True)
    assert isinstance(fault, StageFault)
    assert str(tmp_path / "own") in fault.message


def reachable(listening: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The processes and addresses that another machine could connect to."""

    def is_loopback(address: str) -> bool:
        given = ipaddress.ip_address(address)
        return (getattr(given, "ipv4_mapped", None) or given).is_loopback

    return {(name, ip) for name, ip in listening if not is_loopback(ip)}


def test_the_stages_own_ray_listens_on_loopback_only(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    run_dir = tmp_path_factory.mktemp("r")
    directory = ray_cluster.make_directory(run_dir)
    environ = {**os.environ, **ray_cluster.own_environ(os.environ)}
    probe = Probe("start_ray", [str(directory)], tmp_path, environ)
    seen = set()
    try:
        while probe.running():
            for process in probe.family():
                try:
                    found = process.net_connections("inet")
                    name = process.name()
                except psutil.Error:
                    continue
                seen |= {(name, c.laddr.ip) for c in found if c.status == "LISTEN"}
            time.sleep(0.1)
    finally:
        outcome = probe.finish()
    assert outcome.found("worker_pid"), outcome
    assert {"raylet", "gcs_server"} <= {name for name, _ in seen}
    assert reachable(seen) == set()


def test_the_ray_of_the_layout_listens_on_loopback_only() -> None:
    pytest.importorskip("ray")
    ended = fresh_python.run(str(Path(__file__).parent / "programs" / "layout_ray.py"))
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    assert "raylet" in {name for name, _ in found["listening"]}
    assert reachable(map(tuple, found["listening"])) == set()
    assert found["auth"] == "token"


def test_a_token_of_the_users_is_left_to_them() -> None:
    own = ray_cluster.own_environ({"RAY_AUTH_TOKEN_PATH": "/etc/ray/token"})
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & own.keys()
    assert len(ray_cluster.own_environ({})["RAY_AUTH_TOKEN"]) == 64
