"""A job on two nodes of Ray: what stands still on the other one is seen and named.

Both nodes are namespaces of this machine, with processes and a network of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live_jobs
import pytest
import recorded
import two_machines
from recorded import Recorded
from two_machines import TOKEN, Machine, wait_for

from pytest_gkd.watch import ray_helper_process

pytestmark = [
    pytest.mark.needs("ray"),
    pytest.mark.skipif(
        not two_machines.may_isolate(), reason="needs namespaces (root) and ip(8)"
    ),
]
JOB = """
import fcntl, mmap, os, subprocess, sys, threading, time
import ray
by_client = "client" in sys.argv
address = "ray://10.87.0.1:10001" if by_client else "10.87.0.1:6379"
ray.init(address=address, log_to_driver=False)
mode, more = sys.argv[1], sys.argv[-1]

@ray.remote(num_cpus=0, resources={"far": 1}, max_restarts=-1, max_task_retries=-1)
class Rollout:
    def pid(self):
        return os.getpid()
    def generate(self, step):
        time.sleep(0.2)
        if step == 4 and mode == "locks":
            self.wait_for_lock()
        if step == 4 and mode == "pipes":
            self.feed_reader()
        end = time.time() + (float(more) if step == 4 and mode == "works" else 0)
        while time.time() < end:
            time.sleep(0.001 if sum(range(20000)) else 0)
        return step
    def feed_reader(self):
        reader = subprocess.Popen([sys.executable, more], stdin=subprocess.PIPE)
        while True:
            os.write(reader.stdin.fileno(), bytes(4096))
    def wait_for_lock(self):
        for _ in range(2):
            kept = open(more, "w")
            fcntl.flock(kept, fcntl.LOCK_EX)
            self.kept = [*getattr(self, "kept", []), kept]

@ray.remote(num_cpus=0)
class Trainer:
    def update(self, step):
        return 1.0 / step

@ray.remote(num_cpus=0)
class Rank:
    # Of a real group; NCCL's library and a GPU are files that have their names.
    def __init__(self, folder):
        self.folder, self.maps = folder, []
        for name in ("libnccl.so.2", "dev/nvidia0"):
            with open(os.path.join(folder, name), "rb") as file:
                self.maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        import torch.distributed as dist
        rank, where = int(os.environ["RANK"]), "tcp://10.87.0.1:29511"
        dist.init_process_group("gloo", where, rank=rank, world_size=2)
        threading.Thread(target=self.answer_pipe, daemon=True).start()
        if rank == 1:
            threading.Thread(target=self.answer_as_nccl, daemon=True).start()
            threading.Thread(target=self.answer_as_debug_server, daemon=True).start()
    def answer_as_nccl(self):
        import socket
        head, rest = open(os.path.join(self.folder, "ras")).read().split("|")
        listener = socket.create_server(("127.0.0.1", 28028))
        while True:
            talk, _ = listener.accept()
            if talk.recv(99) == b"verbose status\\n":
                talk.sendall(head.encode())
                time.sleep(6)  # it waits itself for ranks that do not answer
                talk.sendall(rest.encode())
            talk.close()
    def answer_as_debug_server(self):
        from http.server import BaseHTTPRequestHandler, HTTPServer
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<h2>Rank 1: x</h2><pre>in evaluate</pre>")
        HTTPServer(("127.0.0.1", 25999), Handler).serve_forever()
    def answer_pipe(self):
        # As ProcessGroupNCCL's DumpPipe does.
        import torch._C._distributed_c10d as c10d
        rank = os.environ["RANK"]
        name = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
        os.mkfifo(name)
        pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        while True:
            time.sleep(0.2)
            try:
                asked = os.read(pipe, 128)
            except BlockingIOError:
                continue
            if asked:
                with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
                    file.write(c10d._dump_fr_trace())
    def step(self, step, lock):
        import torch
        if step == 3 and os.environ["RANK"] == "1":
            self.evaluate(lock)
        torch.distributed.all_reduce(torch.ones(2))
        return step
    def evaluate(self, lock):
        for _ in range(2):
            kept = open(lock, "w")
            fcntl.flock(kept, fcntl.LOCK_EX)
            self.kept = [*getattr(self, "kept", []), kept]

if mode == "ranks":
    names = {"GLOO_SOCKET_IFNAME": "cable", "WORLD_SIZE": "2"}
    names["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = os.path.join(more, "fr-")
    names["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(more, "dump-")
    ranks = [
        Rank.options(
            resources={"node:10.87.0." + node: 0.01},
            runtime_env={"env_vars": {**names, "RANK": rank}},
        ).remote(more)
        for rank, node in (("0", "1"), ("1", "2"))
    ]
    for step in range(1, 9):
        ray.get([one.step.remote(step, os.path.join(more, "lock")) for one in ranks])
        print({"loss": 1.0 / step, "step": step}, flush=True)

if mode == "asks":
    # One thread would serve both: who asks the second is not even accepted.
    @ray.remote(num_cpus=0, resources={"far": 1})
    class Scorer:
        def __init__(self):
            from http.server import BaseHTTPRequestHandler, HTTPServer
            class Handler(BaseHTTPRequestHandler):
                do_GET = lambda self: score_batch(self, more)
            self.servers = [HTTPServer(("", 0), Handler) for _ in range(2)]
        def serve(self):
            for one in self.servers:
                one.serve_forever()
        def ports(self):
            return [one.server_port for one in self.servers]
    def score_batch(handler, lock):
        for _ in range(2):
            kept = open(lock, "w")
            fcntl.flock(kept, fcntl.LOCK_EX)
            handler.kept = [*getattr(handler, "kept", []), kept]

    import urllib.request
    scorer = Scorer.remote()
    urls = [f"http://10.87.0.2:{port}" for port in ray.get(scorer.ports.remote())]
    scorer.serve.remote()
    print({"loss": 1.0, "step": 1}, flush=True)
    def ask_for_scores():
        urllib.request.urlopen(urls[0]).read()
    program = f"import urllib.request; urllib.request.urlopen('{urls[1]}').read()"
    second = subprocess.Popen([sys.executable, "-c", program])
    ask_for_scores()

rollout, trainer = Rollout.remote(), Trainer.remote()
print("rollout is", ray.get(rollout.pid.remote()), flush=True)
for step in range(1, 8 if mode == "works" else 1000):
    ray.get(rollout.generate.remote(step))
    print({"loss": ray.get(trainer.update.remote(step)), "step": step}, flush=True)
print("CPUs", ray.available_resources()["CPU"], "of", ray.cluster_resources()["CPU"])
print("training finished")
"""


FAR_GPU = Recorded("580.95.05", (recorded.gpu(0, "H100", recorded.H100, free=12159),))


class Watched:
    """``gkd watch`` and its job, on a machine."""

    def __init__(self, machine: Machine, place: Path, *words: str) -> None:
        self.machine, self.place = machine, place
        place.mkdir()
        (place / "job.py").write_text(JOB)
        options = ("--look-after=3", "--stuck-after=3", "--dir", str(place / "watch"))
        gkd = (sys.executable, "-m", "pytest_gkd", "watch", *options)
        # The token is the job's alone, and no variable of who watches.
        job = ("env", *TOKEN, two_machines.PYTHON, str(place / "job.py"), *words)
        with (place / "shown").open("wb") as shown:
            self.process = subprocess.Popen(
                machine.command(*gkd, "--", *job),
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
            )

    @property
    def text(self) -> str:
        return (self.place / "shown").read_text()

    @property
    def verdict(self) -> dict[str, Any]:
        """The newest, as ``verdict.json`` has it."""
        for file in self.place.glob("watch/*/verdict.json"):
            told: dict[str, Any] = json.loads(file.read_text())
            return told
        return {"verdict": "", "why": []}

    def wait_for(self, pattern: str) -> re.Match[str]:
        wait_for(lambda: re.search(pattern, self.text), f"no {pattern}")
        found = re.search(pattern, self.text)
        assert found, self.text
        return found

    def wait_for_verdict(self, word: str, part: str = "") -> dict[str, Any]:
        told = self.verdict

        def holds() -> bool:
            nonlocal told
            told = self.verdict
            return told["verdict"] == word and part in json.dumps(told)

        wait_for(holds, f"not {word} {part}")
        return told

    def report(self, name: str) -> str:
        (found,) = self.place.glob(f"watch/*/stuck-*/{name}")
        return found.read_text()

    def end(self) -> None:
        for pid in self.machine.pids(str(self.place)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Machine, Machine]]:
    """The second believes that it has a GPU, where a stand-in for NVML can be built."""
    far = {}
    if shutil.which("cc"):
        far = recorded.environment(FAR_GPU, tmp_path_factory.mktemp("gpu"))
    with two_machines.ray_cluster(far) as machines:
        yield machines


@pytest.fixture(scope="class")
def watched(
    cluster: tuple[Machine, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Watched]]:
    """Several jobs at once, on one cluster: none may be taken for another."""
    base = tmp_path_factory.mktemp("jobs")
    lock, reader = str(base / "lock"), base / "reader.py"
    reader.write_text("import time\n\n\ndef never_reads():\n    time.sleep(1e6)\n\n\n")
    with reader.open("a") as file:
        file.write("never_reads()\n")
    words = {
        "works": ("works", "12"),
        "locks": ("locks", lock),
        "stops": ("stops",),
        "pipes": ("pipes", str(reader)),
        "asks": ("asks", str(base / "scores")),
    }
    jobs = {k: Watched(cluster[0], base / k, *some) for k, some in words.items()}
    yield jobs
    for job in jobs.values():
        job.end()


class TestAtOnce:
    def test_work_on_another_node_is_work(self, watched: dict[str, Watched]) -> None:
        job = watched["works"]
        job.wait_for("also looked at, through Ray: 10.87.0.2\n")
        wait_for(lambda: job.process.poll() is not None, "it does not end")
        assert "training finished" in job.text
        assert job.verdict["verdict"] == "finished", job.text
        assert "stuck" not in job.text
        # Who watches takes none.
        assert "CPUs 4.0 of 4.0" in job.text

    def test_an_actor_that_waits_for_a_lock_on_another_node(
        self,
        watched: dict[str, Watched],
    ) -> None:
        job = watched["locks"]
        pid = job.wait_for(r"rollout is (\d+)")[1]
        told = job.wait_for_verdict("stuck", "wait_for_lock")
        assert told["confidence"] == "certain"
        assert told["phase"] == "generation"
        assert told["who"] == f"ray::Rollout.generate (pid {pid} on 10.87.0.2)"
        assert told["standstill"]["odd_pids"] == [int(pid)]
        (line,) = [one for one in told["standstill"]["waits"] if "ray.get" in one]
        assert line.startswith("Ray driver (pid ")
        assert f"for {told['who']}, which is in Rollout.wait_for_lock (job.py:" in line
        assert "flock() on /" in line
        assert "processes on this machine and 10.87.0.2 used" in told["why"][0]
        assert f"ray::Rollout, MainThread: {told['who']}" in job.report("tree.txt")
        assert "no process any more" not in job.report("report.txt")
        dump = job.report(f"stacks/10.87.0.2-{pid}.txt")
        assert "wait_for_lock" in dump

    def test_a_pipe_that_nobody_reads_on_another_node(
        self, watched: dict[str, Watched]
    ) -> None:
        job = watched["pipes"]
        pid = job.wait_for(r"rollout is (\d+)")[1]
        told = job.wait_for_verdict("stuck", "full pipe")
        (line,) = [one for one in told["standstill"]["waits"] if "full pipe" in one]
        assert re.fullmatch(
            rf"ray::Rollout.generate \(pid {pid} on 10.87.0.2\) waits in write\(\) to "
            r"a full pipe for reader.py \(pid \d+ on 10.87.0.2\), which is in "
            r"never_reads \(reader.py:5\), \w+\(\)",
            line,
        )
        assert told["who"].startswith("reader.py (pid ")

    def test_a_server_on_another_node_that_does_not_answer(
        self, watched: dict[str, Watched]
    ) -> None:
        """Also where its node alone is known: nobody has accepted the connection."""
        job = watched["asks"]
        told = job.wait_for_verdict("stuck", "HTTP answer")
        who = told["who"]
        assert re.fullmatch(r"ray::Scorer.serve \(pid \d+ on 10.87.0.2\)", who)
        waits = [one for one in told["standstill"]["waits"] if "HTTP answer" in one]
        doing = f": {who}, which is in score_batch (job.py:"
        assert not [one for one in waits if doing not in one]
        ask, behind = sorted(waits, key=lambda one: "ask_for_scores" not in one)
        assert ask.startswith("Ray driver (pid ")
        assert "waits for an HTTP answer (ask_for_scores, job.py:" in ask
        assert "waits for an HTTP answer" in behind
        assert "not of the job" not in json.dumps(told)

    def test_an_actor_that_is_stopped_on_another_node(
        self, watched: dict[str, Watched], cluster: tuple[Machine, Machine]
    ) -> None:
        job = watched["stops"]
        pid = job.wait_for(r"rollout is (\d+)")[1]
        job.wait_for("'step': 3")
        cluster[1].run("kill", "-STOP", pid)
        who = f"ray::Rollout.generate (pid {pid} on 10.87.0.2)"
        told = job.wait_for_verdict("stuck", f'"who": "{who}"')
        assert f"{who} is stopped by a signal (SIGSTOP)" in told["why"][0]
        assert f"kill -CONT {pid} lets it go on, on 10.87.0.2" in told["why"][0]
        cluster[1].run("kill", "-CONT", pid)
        job.wait_for_verdict("at work")


def test_flight_records_of_ranks_on_both_nodes(
    cluster: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Both are asked, by their pipes, for what gloo's recorder holds."""
    pytest.importorskip("torch")
    for number, machine in enumerate(cluster, 1):
        address = f"10.88.0.{number}/24"
        machine.run("ip", "addr", "replace", address, "dev", "cable")
    place = tmp_path / "files"
    (place / "dev").mkdir(parents=True)
    for name in ("libnccl.so.2", "dev/nvidia0"):
        (place / name).write_bytes(bytes(4096))
    (place / "ras").write_text(live_jobs.RAS_ANSWER)
    job = Watched(cluster[0], tmp_path / "job", "ranks", str(place))
    try:
        job.wait_for("'step': 2")
        told = job.wait_for_verdict("stuck", "rank 1")
        line = told["standstill"]["waits"][0]
        assert re.match(
            r"ray::Rank.step rank 0 \(pid \d+\) waits in all_reduce.* #3 for "
            r"ray::Rank.step rank 1 \(pid \d+ on 10.87.0.2\), which is in "
            r"Rank.evaluate \(job.py:\d+\), flock\(\) on /",
            line,
        ), line
        found = "\n".join(told["standstill"]["evidence"])
        assert "entered by rank 0; rank 1 had entered 2" in found
        record = job.report("evidence/flight-recorder.txt")
        assert re.search(rf"rank 1: 10.87.0.2:{place}/dump-1\n", record)
        # What listens on its own node alone has been asked there.
        assert live_jobs.RAS_TELLS in told["standstill"]["evidence"]
        ras = job.report("evidence/ncclras.txt")
        assert ras.startswith("127.0.0.1:28028 on 10.87.0.2\nNCCL version 2.")
        server = job.report("evidence/torch-debug-server.txt")
        assert server.startswith("127.0.0.1:25999 on 10.87.0.2\nstacks\n")
        assert "in evaluate" in server
        if shutil.which("cc"):
            assert "GPUs: 10.87.0.2: 0 at 0 %, the fullest 68/80 GiB" in found
        # By an interface that is not Ray's, to a node that is seen.
        assert told["confidence"] == "certain"
    finally:
        job.end()


def test_a_client_of_ray_is_the_driver_of_its_job(
    cluster: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Whatever its actors do is seen, though the client itself is in no session."""
    pytest.importorskip("grpc")
    works = Watched(cluster[0], tmp_path / "works", "works", "client", "12")
    try:
        wait_for(lambda: works.process.poll() is not None, "it does not end")
        assert "training finished" in works.text, works.text + cluster[0].run(
            *("sh", "-c", "tail -n 50 /tmp/ray/session_latest/logs/ray_client_*; true")
        )
        assert "stuck" not in works.text
    finally:
        works.end()
    lock = str(tmp_path / "lock")
    locks = Watched(cluster[0], tmp_path / "locks", "locks", "client", lock)
    try:
        pid = locks.wait_for(r"rollout is (\d+)")[1]
        told = locks.wait_for_verdict("stuck", "wait_for_lock")
        assert told["who"] == f"ray::Rollout.generate (pid {pid} on 10.87.0.2)"
        (line,) = told["standstill"]["waits"]
        assert line.startswith("Ray driver (pid ")
        assert "waits in ray.get (" in line
    finally:
        locks.end()


def test_a_node_that_does_not_answer_never_counts_as_still(
    cluster: tuple[Machine, Machine], tmp_path: Path
) -> None:
    head, other = cluster
    wait_for(lambda: not other.pids("ray::gkd_watch"), "agents of ended watches")
    job = Watched(head, tmp_path / "job", "works", "1000")
    try:
        job.wait_for("also looked at")
        job.wait_for("'step': 3")
        (agent,) = other.pids("ray::gkd_watch")
        subprocess.run(["kill", "-STOP", str(agent)], check=True)
        told = job.wait_for_verdict("slow", "10.87.0.2 is not seen")
        assert "nothing moves on the machines that are seen" in told["why"][0]
        assert told["confidence"] == "likely"
        subprocess.run(["kill", "-CONT", str(agent)], check=True)
        # At work, or slow where no step is made for long: in either case busy there.
        wait_for(lambda: "on 10.87.0.2) uses" in str(job.verdict["why"]), "not busy")
        assert "stuck" not in job.text
        # Nothing of ours outlives who watches, however that ends.
        (gkd,) = head.pids("pytest_gkd watch")
        subprocess.run(["kill", "-KILL", str(gkd)], check=True)
        wait_for(lambda: not other.pids("ray::gkd_watch"), "the agent is left")
        wait_for(lambda: not head.pids("ray_helper.py"), "the helper is left")
    finally:
        job.end()


def test_a_node_that_is_lost(cluster: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Its actor waits to be restarted where nothing has room for it."""
    head, other = cluster
    job = Watched(head, tmp_path / "job", "stops")
    try:
        job.wait_for("also looked at")
        pid = job.wait_for(r"rollout is (\d+)")[1]
        job.wait_for("'step': 3")
        other.end()
        told = job.wait_for_verdict("stuck", '"who": "10.87.0.2, which Ray has lost"')
        assert told["confidence"] == "likely"
        why = " ".join(told["why"])
        assert re.search(rf"where .*ray::Rollout\S* \(pid {pid} on 10.87.0.2\)", why)
    finally:
        job.end()


def test_what_is_sent_is_all_that_the_agent_imports(tmp_path: Path) -> None:
    """In an interpreter that has nothing but psutil, as a node may have it."""
    import psutil

    (tmp_path / "psutil").symlink_to(Path(psutil.__file__).parent)
    helper = Path(ray_helper_process.__file__).with_name("ray_helper.py")
    text = helper.read_text().replace("import ray  #", "ray = None  #")
    text = re.sub(r"(?m)^(?:from|import) ray\..*$", "", text).partition(
        "\nif __name__"
    )[0]
    ask = {"jobs": ["00"], "look": "stacks", "limit_s": 5}
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
__file__ = "/nowhere/x.py"
exec(compile({text!r}, "helper", "exec"))
import json
made = gkd_watch({ray_helper_process.packed()!r}, {ray_helper_process.AGENT!r})
number, answer = made.answer({json.dumps(ask)!r})
print(number, "re2" in sys.modules, "pytest" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "0 False False\n", done.stderr
