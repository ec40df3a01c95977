"""What a stuck job's surroundings say: real servers, pipes, recorders and clusters."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import live_jobs
import pytest

from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes import oom, procfs, tree
from pytest_gkd.watch import evidence, flight_files, rank_servers, ray_places, waits
from pytest_gkd.watch.evidence import Evidence, Finding
from pytest_gkd.watch.flight_files import Recorder
from pytest_gkd.watch.rank_servers import Answer
from pytest_gkd.watch.samples import NodeSample, ProcessSample, Role


def _of(pid: int, kind: str = "process", rank: int | None = None) -> ProcessSample:
    return ProcessSample(pid, 1, 1, Role(kind, kind, rank, rank, 2), "python")


def _only(
    monkeypatch: pytest.MonkeyPatch, name: str, *processes: ProcessSample
) -> Finding | None:
    source = {name: evidence.SOURCES[name]}
    monkeypatch.setattr(evidence, "SOURCES", source)
    found = evidence.collect(processes, None, 60).findings
    return found[0] if found else None


# What torch does with its pipe (ProcessGroupNCCL.hpp, DumpPipe): it writes its record.
ANSWERS_ITS_PIPE = """
import os, pickle, sys, time
import torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
stem, prefix, rank = sys.argv[1:]
for _ in range(3 if rank == "0" else 2):
    dist.all_reduce(torch.ones(2))
os.mkfifo(stem + rank + ".pipe")
pipe = os.open(stem + rank + ".pipe", os.O_RDONLY | os.O_NONBLOCK)
open(stem + rank + ".ready", "w").close()
asked = b""
while not asked:
    time.sleep(0.1)
    try: asked = os.read(pipe, 128)
    except BlockingIOError: pass
with open(prefix + rank, "wb") as file:
    record = pickle.loads(c10d._dump_fr_trace())
    record["pg_config"] = {"": {"ranks": "[0, 1]"}}
    file.write(pickle.dumps(record))
time.sleep(60)
"""


@pytest.mark.needs("torch")
def test_ranks_that_are_armed_are_asked_for_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_files, "uses_nccl", lambda _: True)
    monkeypatch.setattr(flight_files, "PIPE_S", 60.0)
    stem, prefix = str(tmp_path / "fr-"), str(tmp_path / "dump-")
    program = tmp_path / "rank.py"
    program.write_text(ANSWERS_ITS_PIPE)
    armed = {flight_files.PIPE: stem, flight_files.DUMPS[1]: prefix}
    with contextlib.ExitStack() as ends:
        pids = [
            ends.enter_context(
                live_jobs.running(
                    [sys.executable, str(program), stem, prefix, rank], **armed
                )
            )
            for rank in "01"
        ]
        live_jobs.wait_for(tmp_path, "*.ready", 2)
        ranks = [_of(pid, "rank", rank) for rank, pid in enumerate(pids)]
        source = {"flight recorder": evidence.SOURCES["flight recorder"]}
        monkeypatch.setattr(evidence, "SOURCES", source)
        found = evidence.collect(ranks, tmp_path / "kept", 90)
    assert set(found.known.records) == {("rank", 0), ("rank", 1)}, found
    (line,) = found.said
    assert "collective 3" in line
    assert "entered by rank 0; rank 1 had entered 2" in line
    assert "gloo:all_reduce" in (tmp_path / "kept/flight-recorder.txt").read_text()


def test_the_ranks_of_each_kind_of_actor_are_compared_among_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainers and rollouts have a rank 0 each, and groups of the same name."""

    def actor(pid: int, name: str, rank: int, number: int) -> ProcessSample:
        entry = {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[2]],
            "input_dtypes": ["Float"],
            "time_created_ns": number,
        }
        recorder = Recorder(asked=True, record=json.dumps({"entries": [entry]}))
        one = _of((1 << 22) + pid, "ray-actor", rank)
        role = replace(one.role, name=f"ray::{name}.step")
        return replace(one, role=role, node="b", recorder=recorder)

    ranks = [
        actor(1, "Trainer", 0, 7),
        actor(2, "Trainer", 1, 6),
        actor(3, "Rollout", 0, 90),
        actor(4, "Rollout", 1, 90),
    ]
    found = _only(monkeypatch, "flight recorder", *ranks)
    assert found is not None
    trainers, rollouts = found.said
    assert trainers.endswith("entered by rank 0; rank 1 had entered 6")
    assert rollouts == "flight recorder: no collective that a rank has not entered"


def test_who_is_not_armed_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_files, "uses_nccl", lambda _: True)
    found = _only(monkeypatch, "flight recorder", _of(os.getpid(), "rank", 0))
    assert found is not None
    assert "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=" in found.said[0]


def test_who_uses_torchcomms_without_a_server_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _only(monkeypatch, rank_servers.DEBUG, _of(os.getpid(), "rank", 0)) is None
    monkeypatch.setattr(flight_files, "uses_torchcomms", lambda _: True)
    found = _only(monkeypatch, rank_servers.DEBUG, _of(os.getpid(), "rank", 0))
    assert found is not None
    (line,) = found.said
    assert "start_debug_server()" in line


def test_a_pipe_without_a_reader_and_a_file_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("mine")
    assert not flight_files.write_to(tmp_path / "pipe")
    assert not flight_files.write_to(tmp_path / "file")
    assert not flight_files.write_to(tmp_path / "nothing")
    assert (tmp_path / "file").read_text() == "mine"


DEBUGGED = (
    live_jobs.READY
    + """
import torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
from torch.distributed.debug import start_debug_server
def main():
    dist.init_process_group("gloo")
    start_debug_server(int(os.environ["DEBUG_PORT"]), start_method="spawn")
    dist.all_reduce(torch.ones(3))
    record = os.environ.get("RECORD" + os.environ["RANK"])
    if record:  # TorchComms is not installed
        c10d._register_handler(
            "torchcomms_fr_trace_json",
            lambda _, answer: answer.set_content(record, "application/json"),
        )
    ready(dist.get_rank())
    if dist.get_rank() or "WAITS" not in os.environ:
        time.sleep(120)
    dist.all_reduce(torch.ones(3))
if __name__ == "__main__":
    main()
"""
)


def _debugged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **told: str
) -> tuple[Evidence, Finding]:
    """What the debug server of two ranks says."""
    for module in ("jinja2", "requests", "tabulate"):
        pytest.importorskip(module)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(rank_servers, "DEBUG_PORT", port)
    program = tmp_path / "train.py"
    program.write_text(DEBUGGED)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node=2", str(program)]
    told["READY"] = str(tmp_path / "ready")
    told |= {"OMP_NUM_THREADS": "1", "DEBUG_PORT": str(port)}
    with live_jobs.running(run, **told) as pid:
        live_jobs.wait_for(tmp_path, "ready*", 2)
        until = time.monotonic() + 60
        found = None
        while time.monotonic() < until and (
            found is None or ("WAITS" in told and len(found.said) < 2)
        ):
            below = {p.pid: procfs.environ(p.pid) for p in tree.descendants(pid)}
            ranks = {one: told["RANK"] for one, told in below.items() if "RANK" in told}
            processes = [_of(one, "rank", int(rank)) for one, rank in ranks.items()]
            source = {"torch debug server": evidence.SOURCES["torch debug server"]}
            monkeypatch.setattr(evidence, "SOURCES", source)
            asked = evidence.collect(processes, None, 60)
            found = next(iter(asked.findings), None)
            time.sleep(0.5)
    assert found is not None, "its server never listened"
    assert not found.problem
    return asked, found


@pytest.mark.needs("torch")
def test_torchs_real_debug_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = _debugged(tmp_path, monkeypatch)
    assert "all_reduce" in found.text
    assert "main" in found.text
    # Each rank has come to the first collective, as gloo's recorder tells.
    assert set(asked.known.records) == {("rank", 0), ("rank", 1)}
    for record in asked.known.records.values():
        assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert not [line for line in found.said if "flight recorder" in line]


def _of_torchcomms(collectives: int, cut: int = 0) -> dict[str, Any]:
    """What TorchComms answers after so many, the first of which it may have lost."""
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", "gloo"],
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[3]],
            "input_dtypes": ["Float"],
            "time_created_ns": 1_795_936_269_791_350_516 + number,
            "is_p2p": False,
            "retired": True,
        }
        for number in range(cut, collectives)
    ]
    groups = {"0": {"desc": "gloo", "name": "0", "ranks": "[0,1]"}}
    return {"version": "2.10", "entries": entries, "pg_config": groups}


def _bytes(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.needs("torch")
def test_it_is_asked_for_the_records_of_torchcomms_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TorchComms itself where it is installed, else by what it answers."""
    told = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "WAITS": ""}
    if importlib.util.find_spec("torchcomms") is None:
        told = {"RECORD0": json.dumps(_of_torchcomms(2))}
        told["RECORD1"] = json.dumps(_of_torchcomms(1))
    asked, found = _debugged(tmp_path, monkeypatch, **told)
    (line,) = (line for line in found.said if "flight recorder" in line)
    assert line == (
        "flight recorder: collective 2, gloo:all_reduce of Float[3]: entered by rank "
        "0; rank 1 had entered 1"
    )
    assert set(asked.known.records) == {("rank", 0), ("rank", 1)}


TORCHS_OWN = (
    "flight recorder: collective 9, gloo:broadcast of Float[3]: entered by rank 0; "
    "rank 1 had entered 8"
)


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (
            (_of_torchcomms(2), None),
            [
                "flight recorder: collective 2, gloo:all_reduce of Float[3]: entered "
                "by rank 0; no record of rank 1"
            ],
        ),
        ((_of_torchcomms(0), _of_torchcomms(0)), [TORCHS_OWN]),
        (
            (_of_torchcomms(2), _of_torchcomms(3, cut=1)),
            [
                "flight recorder of TorchComms: it no longer holds the first "
                "operations, from which they are counted; for the next attempt: export "
                "TORCHCOMM_FR_BUFFER_SIZE=100000",
                TORCHS_OWN,
            ],
        ),
    ],
    ids=["one rank does not answer", "it is not used", "one has lost the first"],
)
def test_what_torchcomms_cannot_tell_is_not_said_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, texts: tuple[object, ...], lines: list[str]
) -> None:
    own = {"profiling_name": "gloo:broadcast", "process_group": ["0", "default_pg"]}
    (entry,) = _of_torchcomms(1)["entries"]
    pages = [
        f"<h2>Rank {rank}: http://a:1/handler/fr_trace_json?</h2>\n<pre>"
        + json.dumps({"entries": [{**entry, **own, "collective_seq_id": 9 - rank}]})
        + "</pre>"
        for rank in range(2)
    ]
    pages += [
        f"<h2>Rank {rank}: http://a:1/handler/{rank_servers.TORCHCOMMS}</h2>\n<pre>"
        + json.dumps(flight_records.counted(flight_records.read(_bytes(one))))
        + "</pre>"
        for rank, one in enumerate(texts)
        if one is not None
    ]
    node = NodeSample(
        "b", number=1, servers={rank_servers.DEBUG: Answer("b:1", "\n".join(pages))}
    )
    ranks = [replace(_of((1 << 22) + n, "rank", n), node="b") for n in range(2)]
    source = {rank_servers.DEBUG: evidence.SOURCES[rank_servers.DEBUG]}
    monkeypatch.setattr(evidence, "SOURCES", source)
    asked = evidence.collect(ranks, None, 60, [node])
    _, *said = asked.said
    assert said == lines
    assert set(asked.known.records) == {("rank", n) for n in range(2) if texts[n]}


def test_a_page_that_does_not_come_loses_no_other() -> None:
    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/stacks" else 404)
            self.end_headers()
            if self.path == "/stacks":
                self.wfile.write(b"all stacks")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_servers, "DEBUG_PORT", port)
            ports = {port: rank_servers.Listener(1, "127.0.0.1")}
            found = rank_servers.answer(rank_servers.DEBUG, [], ports)
            patch.setattr(rank_servers, "PAGES", ("fr_trace_json",))
            nothing = rank_servers.answer(rank_servers.DEBUG, [], ports)
        server.shutdown()
    assert found is not None
    assert found.text == "stacks\nall stacks"
    assert nothing is not None
    assert "404" in nothing.problem


RAS = """
import socket, sys, time
host, port, answer = sys.argv[1:]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
listener = socket.create_server((host, int(port)), family=family)
while True:
    talk, _ = listener.accept()
    asked = talk.recv(99)
    assert asked == b"verbose status\\n", asked
    for part in answer.split("|"):
        talk.sendall(part.encode())
        time.sleep(6 if part == answer.split("|")[0] else 0)
    talk.close()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nccls_ras_is_asked_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """It listens on what "localhost" means first, and waits itself for its ranks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip(f"no {host} here")
    monkeypatch.setattr(rank_servers, "RAS_PORT", port)
    program = tmp_path / "ras.py"
    program.write_text(RAS)
    run = [sys.executable, str(program), host, str(port), live_jobs.RAS_ANSWER]
    with live_jobs.running(run) as pid:
        found = None
        for _ in range(400):
            processes = [_of(pid), _of(os.getpid(), "rank", 0)]
            found = found or _only(monkeypatch, "ncclras", *processes)
            time.sleep(0.05)
            if found:
                break
    assert found is not None
    assert not found.problem
    incomplete, first, second = found.said
    assert incomplete == (
        "ncclras: INCOMPLETE: Missing communicator data from 1 job process; Process 77 "
        "on node 10.0.0.3 managing GPU 1"
    )
    assert first == live_jobs.RAS_TELLS
    assert second.startswith(
        "ncclras: #0-0 MISMATCH: Communicator ranks have different"
    )
    assert "Rank 2 has not launched any operations" in second
    assert "NCCL version 2.30.7" in found.text


def test_ras_that_complains_of_nothing_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do the words of its table, which has a column for errors."""
    sound = re.sub(
        r"(?s)INCOMPLETE\n.*\n\n(Warnings\n=+\n\n).*", r"\1", live_jobs.RAS_ANSWER
    )
    sound = "<none> &amp;\n" + sound.replace("|", "").replace("MISMATCH", "OK")
    answer = Answer("127.0.0.1:28028", sound)
    far = NodeSample("node-b", number=1, servers={"ncclras": answer})
    source = {"ncclras": evidence.SOURCES["ncclras"]}
    monkeypatch.setattr(evidence, "SOURCES", source)
    (found,) = evidence.collect([_of(os.getpid())], None, 60, [far]).findings
    assert (found.said, found.problem) == ((), "")
    assert sound in found.text  # it is no page


def test_a_real_rays_pending_actor_is_told_by_its_own_executable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_places, "ASK_S", 50.0)
    with live_jobs.standing(live_jobs.RAY_PENDING, tmp_path) as found:
        for _ in range(6):  # demands are told of every few seconds
            told = _only(monkeypatch, "ray", *found)
            if told is None or told.said:
                break
            time.sleep(5)
    assert told is not None
    assert not told.problem
    assert any("CPU: 64" in line or "'CPU': 64" in line for line in told.said), told
    assert "Total Usage" in told.text


@contextlib.contextmanager
def _server(code: int) -> Iterator[str]:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_that_answers_is_told_with_its_codes() -> None:
    with _server(503) as address:
        told = evidence.probe(address)
    assert told.startswith("accepts a connection after ")
    assert "/health answers 503 after" in told
    assert "/v1/models answers 404 after" in told


def test_a_server_that_accepts_and_is_silent_is_told_apart_from_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        told = evidence.probe(f"127.0.0.1:{port}")
    assert "/health does not answer within 3 s" in told
    gone = evidence.probe(f"127.0.0.1:{port}")
    assert gone == "does not accept a connection (Connection refused)"


def test_what_speaks_no_http_harms_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            for _ in range(3):
                with contextlib.suppress(OSError):
                    peer, _ = listener.accept()
                    peer.sendall(b"\x00\x01 garbage\n")
                    peer.close()

        threading.Thread(target=talk, daemon=True).start()
        told = evidence.probe(f"127.0.0.1:{listener.getsockname()[1]}")
    assert "/health" in told


def test_the_endpoint_that_a_process_waits_for_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_jobs.standing(live_jobs.TEACHER, tmp_path) as found:
        told = _only(monkeypatch, "endpoints", *found)
    # Its one connection is taken, and the port is closed again.
    assert told is not None
    assert told.said[0].startswith("server 127.0.0.1:")


def test_the_kernels_lines_since_the_job_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    monkeypatch.setattr(oom, "KERNEL_LOG", log)
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    log.write_text(f"4,1,5000000,-;{xid}\n")
    late = replace(_of(1), start=4 * os.sysconf("SC_CLK_TCK"))
    found = _only(monkeypatch, "kernel", late)
    assert found is not None
    assert found.said == (f"kernel: {xid}",)
    early = replace(late, start=6 * os.sysconf("SC_CLK_TCK"))
    assert evidence.kernel_lines(evidence.Job([early])) is None


def test_a_source_that_hangs_or_fails_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: object) -> None:
        raise ValueError("\x1b[31mbroken\n::error::x")

    sources = {
        "hangs": lambda _: time.sleep(30),
        "fails": fails,
        "speaks": lambda _: Finding(
            "speaks", ("a\x1b[2J\nb",), "HF_TOKEN=hf_" + "a" * 30
        ),
    }
    monkeypatch.setattr(evidence, "SOURCES", sources)
    found = evidence.collect([], tmp_path, 1)
    assert found.problems[0] == "hangs: no answer within 1 s"
    assert found.problems[1] == "fails: ValueError: broken : :error::x"
    assert found.said == ("a b",)
    assert "hf_***" in (tmp_path / "speaks.txt").read_text()


def test_a_report_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = evidence.keep(Finding("x", (), "text"), tmp_path / "file")
    assert one.problem.endswith("File exists")


# Written by hand, with the fields of Ray 2.60's `ray list tasks --detail` in JSON.
TASKS = [
    {"task_id": "t1", "parent_task_id": "d", "name": "Trainer.sync", "actor_id": "a1",
     "state": "RUNNING", "worker_pid": 11, "type": "ACTOR_TASK"},
    {"task_id": "t2", "parent_task_id": "t1", "name": "Trainer.load", "actor_id": "a1",
     "state": "SUBMITTED_TO_WORKER", "worker_pid": None, "type": "ACTOR_TASK"},
    {"task_id": "t3", "parent_task_id": "d", "name": "Trainer.__init__",
     "state": "FINISHED", "worker_pid": 11, "type": "ACTOR_CREATION_TASK"},
]  # fmt: skip


def test_rays_tasks_are_read_behind_whatever_it_prints_before() -> None:
    text = f"2026-11-25 WARNING [x] of Ray\n{json.dumps(TASKS, indent=1)}\n"
    tasks = ray_places.tasks(text)
    assert [(t.id, t.pid, t.actor) for t in tasks] == [
        ("t1", 11, "a1"),
        ("t2", 0, "a1"),
    ]
    assert ray_places.tasks("Error: no answer [") == []
    assert waits.picture([], Evidence().known) == waits.Picture()
