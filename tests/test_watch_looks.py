"""What two looks at a job prove, and when the second one is due."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from watch_helpers import until

from pytest_gkd.diagnosis import suspects
from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.processes import procfs
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch import stack_phases, stuck_report, verdicts, waits, watcher
from pytest_gkd.watch.arguments import Asked
from pytest_gkd.watch.samples import (
    AT_WORK,
    STUCK,
    JobSample,
    ProcessSample,
    Progress,
    Role,
    Usual,
    Verdict,
)
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope
from pytest_gkd.watch.screen import OwnScreen
from pytest_gkd.watch.stuck_report import Report
from pytest_gkd.watch.waits import Known, Peer


def process(
    *functions: str, kind: str = "rank", number: int = 0, file: str = "train.py"
) -> ProcessSample:
    frames = tuple(Frame(file, 7, name) for name in functions)
    role = Role(kind, f"{kind} {number}", number, number, 4)
    thread = Thread(MAIN, 1, frames)
    return ProcessSample(10 + number, 1, 1, role, "python", threads=(thread,))


def sample(at: float, *processes: ProcessSample) -> JobSample:
    return JobSample(at, at, 100, 0.0, processes)


def judged(first: ProcessSample, second: ProcessSample) -> str:
    looks = sample(10.0, first), sample(20.0, second)
    return verdicts.compare(*looks, Progress(), Usual()).word


@pytest.mark.parametrize(
    ("woken", "receives", "word"),
    [(200, True, "at work"), (3, True, "stuck"), (200, False, "stuck")],
)
def test_who_stands_in_recv_and_is_woken_gets_data(
    woken: int, receives: bool, word: str
) -> None:
    first = replace(process("main", "readinto"), receives=receives)
    assert judged(first, replace(first, woken=woken)) == word


def told(processes: list[ProcessSample], *odd: int, known: str = "unknown") -> str:
    return stack_phases.of(processes, waits.picture(processes), odd, known)


def test_a_phase_is_told_by_a_method_and_by_a_data_worker() -> None:
    trainer = process("main", "GKDTrainer.training_step", "Model.generate")
    assert told([trainer]) == "generation"
    worker = process("main", "read", kind="data-worker")
    worker = replace(worker, pid=11)
    assert told([trainer, worker], 11) == "data"
    # One that is idle beside a trainer tells nothing.
    assert told([worker, trainer]) == "generation"


ASKS = "urlopen"


def asking(*functions: str, command: str = "python serve.py") -> list[ProcessSample]:
    """A program that waits for a server's answer, and the server."""
    client = process(*functions, kind="process")
    thread = client.threads[0]
    request = Frame("urllib/request.py", 9, ASKS)
    thread = replace(thread, frames=(*thread.frames, request))
    server = process(kind="process", number=1)
    server = replace(server, threads=(), state="T", command=command)
    return [replace(client, threads=(thread,)), server]


def phase_of_request(known: str, found: list[ProcessSample]) -> str:
    client, server = found
    links = Known(peers={client.pid: [Peer("127.0.0.1:8000", server.pid)]})
    seen = waits.picture(found, links)
    assert (seen.odd, seen.clients) == ((server.pid,), (client.pid,))
    return stack_phases.of(found, seen, seen.odd, known, links)


@pytest.mark.parametrize(
    ("known", "functions", "command", "phase"),
    [
        ("training-step", ["compute_log_prob"], "python serve.py", "teacher"),
        ("training-step", ["fit"], "vllm serve m", "teacher"),
        ("training-step", ["fit"], "trl vllm-serve --model m", "generation"),
        ("training-step", ["generate_sequences"], "vllm serve m", "generation"),
        ("training-step", ["update_weights"], "vllm serve m", "weight-sync"),
        ("training-step", ["next_batch"], "python hub.py", "data"),
        ("actor-init", ["fit"], "python hub.py", "actor-init"),
    ],
)
def test_a_request_tells_the_phase_by_who_asks_and_who_is_asked(
    known: str, functions: list[str], command: str, phase: str
) -> None:
    assert phase_of_request(known, asking(*functions, command=command)) == phase


def test_a_programs_own_function_tells_the_phase_by_its_name() -> None:
    stands = process("main", "next_batch", "stand_still")
    assert told([stands], stands.pid, known="training-step") == "data"


def test_an_actors_role_tells_the_phase_where_its_stack_does_not() -> None:
    one = process("main", "answer")
    one = replace(one, role=Role("ray-actor", "ray::TeacherWorker.answer"))
    assert told([one], one.pid, known="generation") == "teacher"


def test_who_waits_for_the_odd_one_tells_the_phase_before_others() -> None:
    trains = process("main", "training_step", number=2)
    writes = process("main", "update_weights", number=1)
    reads = replace(process(kind="helper", number=3), threads=())
    links = Known(
        calls={(11, 11): Call("write", 4, "pipe:[1]", True)},
        readers={("", "pipe:[1]"): [13, 14]},
    )
    agent = replace(process(kind="ray-system", number=4), threads=())
    found = [trains, writes, reads, agent]
    seen = waits.picture(found, links)
    assert (seen.odd, seen.waiters) == ((13,), (11,))  # never Ray's own agent
    assert stack_phases.of(found, seen, seen.odd, "generation") == "weight-sync"


@pytest.mark.parametrize(
    ("state", "call", "phase"),
    [
        ("D", Call("mkdir", -1, "/mnt/out/step_8", True), "checkpoint"),
        ("D", Call("write", 3, "/mnt/out/train.log", True), "training-step"),
        ("D", Call("read", 3, "/mnt/out/rows.bin"), "training-step"),
        ("S", Call("write", 3, "/mnt/out/model.pt", True), "training-step"),
    ],
)
def test_a_file_that_cannot_be_written_is_a_checkpoints(
    state: str, call: Call, phase: str
) -> None:
    one = replace(process(), threads=(), state=state)
    links = Known(calls={(one.pid, one.pid): call})
    seen = waits.picture([one], links)
    known = "training-step"
    assert stack_phases.of([one], seen, [one.pid], known, links) == phase


def test_an_engine_that_has_ended_is_who_its_client_waits_for() -> None:
    core = "vllm/v1/engine/core_client.py"
    client = process("SyncMPClient.get_output", kind="ray-actor", file=core)
    ended = process(kind="engine", number=1)
    seen = waits.picture([client], Known(ended=[ended]))
    assert seen.absent == "engine 1 (pid 11), which has ended"
    assert seen.odd == ()
    assert "which has ended" in seen.lines[0]


def test_ranks_that_are_not_there_are_named() -> None:
    c10d = "torch/distributed/distributed_c10d.py"
    ranks = [process("init_process_group", number=n, file=c10d) for n in range(3)]
    seen = waits.picture(ranks)
    assert (seen.odd, seen.absent) == ((), "rank 3 of 4 (not on this machine)")


def test_who_ended_first_is_named_where_one_did() -> None:
    engine, worker = process(kind="engine"), process(kind="data-worker", number=1)
    rank, other = process(number=2), process(number=3)
    seen = sample(1.0, engine, worker, rank, other)
    assert verdicts.gone(seen, sample(2.0, rank, other)) == [engine]
    ends = [(2.0, engine), (5.0, rank), (5.0, other)]
    assert verdicts.first_to_end(ends, 6.0) == "engine 0 (pid 10)"
    assert verdicts.first_to_end(ends[1:], 6.0) == ""
    assert verdicts.first_to_end(ends, 63.0) == ""
    assert verdicts.first_to_end([], 6.0) == ""


class Clock:
    now = 1000.0


def test_looks_that_became_rare_at_work_come_soon_where_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "monotonic", lambda: Clock.now)
    asked = Asked(("train",), look_after_s=5.0, stuck_after_s=10.0, status=False)
    sampler = Sampler(Scope(lambda _: ()), lambda: (0, 0.0))
    screen = OwnScreen(status=False)
    watch = watcher.Watch(asked, tmp_path, screen, sampler, Usual())
    at, looks = Clock.now, []

    def take() -> JobSample:
        one = process("main", "compile")
        return sample(Clock.now, replace(one, cpu_s=min(Clock.now - at, 300.0)))

    def look(_: Path) -> JobSample:
        looks.append(Clock.now - at)
        return take()

    monkeypatch.setattr(sampler, "take", take)
    monkeypatch.setattr(sampler, "look", look)
    told: list[str] = []
    monkeypatch.setattr(watch, "begin_report", lambda verdict, _: told.append(verdict))
    while not told and Clock.now < at + 900:
        Clock.now += 1.0
        watch.tick(b"")
        if watch.look is not None:
            watch.look.result()
    before = [one for one in looks if one < 300]
    assert len(before) < 8, looks
    assert Clock.now - at < 330, looks


def test_a_report_that_makes_the_job_run_is_no_sign_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flight records and native stacks are asked of the ranks themselves.

    torch's debug server writes a line for each request besides.
    """
    monkeypatch.setattr(watcher, "monotonic", lambda: Clock.now)
    asked = Asked(("train",), look_after_s=5.0, stuck_after_s=5.0, status=False)
    sampler = Sampler(Scope(lambda _: ()), lambda: (0, 0.0))
    watch = watcher.Watch(asked, tmp_path, OwnScreen(status=False), sampler, Usual())
    ran_s, said, said_at, makes = 0.0, 100, Clock.now, threading.Event()

    def take(_: object = None) -> JobSample:
        found = sample(Clock.now, replace(process("main", "save"), cpu_s=ran_s))
        return replace(found, output_bytes=said, output_at=said_at)

    def make(directory: Path, verdict: Verdict, *_: object, **__: object) -> Report:
        assert makes.wait(60)
        return Report(directory, verdict, "", suspects.suspects("checkpoint", b"", []))

    def is_reported() -> bool:
        watch.tick(b"")
        return watch.reported is not None

    monkeypatch.setattr(sampler, "take", take)
    monkeypatch.setattr(sampler, "look", take)
    monkeypatch.setattr(stuck_report, "make", make)
    told: list[str] = []
    monkeypatch.setattr(watch.screen, "say", told.append)
    for second in range(120):
        Clock.now += 1.0
        if watch.verdict.word == STUCK and ran_s < 30:
            ran_s, said, said_at = ran_s + 1.0, said + 500, Clock.now
        watch.tick(b"")
        if second == 60:
            said, said_at = said + 500, Clock.now
            makes.set()
            until(is_reported, "no report")
        if watch.look is not None:
            watch.look.result()
    assert watch.verdict.word == STUCK
    assert watch.verdict.since_s > 60, "for as long as it stands, not as it is silent"
    assert not [line for line in told if "moves again" in line], told
    assert not [line for line in told if "goes on" in line], told
    assert len([line for line in told if line.startswith("stuck for")]) == 1, told


METRICS = "{'loss': 0.1, 'step': %d}\n"


@pytest.mark.parametrize(
    ("before", "line", "cpu", "word"),
    [
        (METRICS, METRICS, 0.0, AT_WORK),
        ("starting\n", "loading\n", 0.9, AT_WORK),
        ("starting\n", "trying again\n", 0.0, STUCK),
    ],
    ids=["steps", "works", "says"],
)
def test_a_job_that_goes_on_and_says_little_is_stuck_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    line: str,
    cpu: float,
    word: str,
) -> None:
    """A line of metrics each five seconds are five bytes a second."""
    monkeypatch.setattr(watcher, "monotonic", lambda: Clock.now)
    asked = Asked(("train",), look_after_s=20.0, stuck_after_s=10.0, status=False)
    at, said = Clock.now, [0.0, Clock.now]
    sampler = Sampler(Scope(lambda _: ()), lambda: (0, 0.0))
    watch = watcher.Watch(asked, tmp_path, OwnScreen(status=False), sampler, Usual())

    def take(_: object = None) -> JobSample:
        used = max(0.0, Clock.now - at - 100) * cpu
        one = replace(process("main", "compile"), cpu_s=used)
        seen = sample(Clock.now, one)
        return replace(seen, output_bytes=int(said[0]), output_at=said[1])

    monkeypatch.setattr(sampler, "take", take)
    monkeypatch.setattr(sampler, "look", take)
    monkeypatch.setattr(watch, "begin_report", lambda *_: None)

    def go_on(seconds: int, line: str = "") -> None:
        for second in range(seconds):
            Clock.now += 1.0
            data = b""
            if line and second % 5 == 0:
                number = int(Clock.now - at)
                data = (line % number if "%" in line else line).encode()
                said[:] = said[0] + len(data), Clock.now
            watch.tick(data)
            if watch.look is not None:
                watch.look.result()

    go_on(20, before)
    go_on(80)
    assert (watch.verdict.word, watch.verdict.confidence) == (STUCK, "certain")
    go_on(100, line)
    assert watch.verdict.word == word
    if word == STUCK:
        assert "it says: trying again" in watch.verdict.why
        assert watch.verdict.confidence == "likely"


REFUSED = """Traceback (most recent call last):
  File "/home/me/loop.py", line 77, in do
    found = function(*given)
  File "/home/me/steps.py", line 112, in compute_log_prob
    logits = ask_server(url, ids) if url else teacher(ids)
  File "/home/me/steps.py", line 106, in ask_server
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
urllib.error.URLError: <urlopen error [Errno 111] Connection refused>
"""


def test_a_job_that_tries_again_is_slow_for_the_cause_that_its_log_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "monotonic", lambda: Clock.now)
    log, said = tmp_path / "output.log", list[str]()
    notified: list[str] = []
    asked = Asked(("train",), status=False)
    sampler = Sampler(Scope(lambda _: ()), lambda: (0, Clock.now))
    watch = watcher.Watch(asked, tmp_path, OwnScreen(status=False), sampler, Usual())

    def look(*_: Path) -> JobSample:
        seen = sample(Clock.now, process("main", "sleep"))
        return replace(seen, output_at=Clock.now, output_bytes=log.stat().st_size)

    monkeypatch.setattr(sampler, "take", look)
    monkeypatch.setattr(sampler, "look", look)
    monkeypatch.setattr(watch.screen, "say", said.append)
    monkeypatch.setattr(watch, "notify", lambda v, *_: notified.append(v.phase))
    watch.log = log

    def printed(text: str) -> None:
        with log.open("a") as file:
            file.write(text)
        Clock.now += 1.0
        watch.tick(text.encode())
        if watch.look is not None:
            watch.look.result()

    printed("Loading teacher\n")
    for step in range(1, 7):
        printed(f"INFO - train - step {step}/20 loss=0.0{step} reward=0.5\n")
    printed(f"WARNING - train - score failed (attempt 1 of 1001)\n{REFUSED}")
    for attempt in range(2, 200):
        line = f"WARNING - train - score failed (attempt {attempt} of 1001)\n"
        printed(2 * line)

    def heard() -> bool:
        watch.tick(b"")
        return bool(notified)

    until(heard, "nobody is told")
    (text,) = said
    assert text.startswith("slow (likely): no step for ")
    assert "\n  cause asking the teacher failed" in text
    assert "[teacher.unreachable]" in text
    assert f"\n  more  gkd diagnose {log}" in text
    assert notified == ["teacher"]
    assert watch.progress.phase == "teacher"


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
@pytest.mark.parametrize(("program", "held"), [("py-spy", False), ("gdb", True)])
def test_a_debugger_holds_a_job_and_py_spy_does_not(
    tmp_path: Path, program: str, held: bool
) -> None:
    (tmp_path / program).symlink_to(shutil.which("gdb") or "")
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    stop = [str(tmp_path / program), "-p", str(job.pid), "-batch", "-nx"]
    stop += ["-iex", "set auto-solib-add off", "-ex", "shell sleep 60"]
    with subprocess.Popen(stop, stdout=-3, stderr=-3, start_new_session=True) as other:
        try:
            until(lambda: procfs.own_words(job.pid)[0] == b"t", "not stopped")  # type: ignore[index]
            sampler = Sampler(Scope(lambda _: [job.pid]), lambda: (0, 0.0))
            seen = sampler.look(tmp_path / "look")
            assert (verdicts.held(seen) is not None) is held
        finally:
            os.killpg(other.pid, signal.SIGKILL)
            job.kill()
            job.wait()
