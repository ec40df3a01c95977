"""Small jobs that stand still for real, and what a look at their processes shows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.processes import procfs, stacks, tree
from pytest_gkd.watch.samples import ProcessSample, Role

RAYS_OWN = re.compile(
    r"ray::\w+Agent|/gcs_server|/raylet/|ray/(?:_private|dashboard|autoscaler)/"
)
RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(4)

def save_checkpoint():
    with open(os.environ["READY"] + str(rank), "w"):
        time.sleep(120)

def train(step):
    if step == 2 and rank == int(os.environ["ODD"]):
        save_checkpoint()
    if step == 2:
        open(os.environ["READY"] + str(rank), "w").close()
    dist.all_reduce(tensor)

for step in range(4):
    train(step)
"""


READY = """
import os, threading, time
def ready(number=0):
    open(os.environ["READY"] + str(number), "w").close()
"""
LOCKS = (
    READY
    + """
one, two = threading.Lock(), threading.RLock()
def push_weights():
    with one:
        time.sleep(0.5)
        ready(1)
        with two: pass
def generate():
    with two:
        time.sleep(0.5)
        ready(2)
        with one: pass
both = push_weights, generate
threads = [threading.Thread(target=f, name=f.__name__) for f in both]
[t.start() for t in threads]
[t.join() for t in threads]
"""
)
LOADER = (
    READY
    + """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number):
        if number == 3: self.reads_a_dead_disk()
        return number
    def reads_a_dead_disk(self):
        ready()
        time.sleep(120)
for batch in torch.utils.data.DataLoader(Rows(), num_workers=2): pass
"""
)
# Its teacher accepts and never answers.
TEACHER = (
    READY
    + """
import multiprocessing, socket, urllib.request
def teacher(listener):
    found = [listener.accept()]
    ready()
    time.sleep(120)
listener = socket.create_server(("127.0.0.1", 0))
multiprocessing.get_context("fork").Process(target=teacher, args=(listener,)).start()
port = listener.getsockname()[1]
listener.close()
def ask_teacher():
    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models").read()
ask_teacher()
"""
)
PIPE = (
    READY
    + """
import subprocess, sys
reader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                          stdin=subprocess.PIPE)
# Has the end to write to as well, as all that a shell's pipe is handed on to.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                 pass_fds=[reader.stdin.fileno()])
def log_metrics():
    ready()
    reader.stdin.write(b"x" * (1 << 20))
log_metrics()
"""
)
RAY = (
    READY
    + """
import ray
ray.init(num_cpus=2, log_to_driver=False)
@ray.remote(num_cpus=0)
class Rollout:
    def generate(self):
        ready()
        time.sleep(300)
@ray.remote(num_cpus=0)
class Trainer:
    def fit(self, rollout): return ray.get(rollout.generate.remote())
rollout, trainer = Rollout.remote(), Trainer.remote()
ray.get(trainer.fit.remote(rollout))
"""
)
# A waits for a method of B, which waits for one of A, whose turn never comes.
RAY_CIRCLE = (
    READY
    + """
import ray
ray.init(num_cpus=2, log_to_driver=False)
@ray.remote(num_cpus=0)
class Worker:
    def sync(self, me, other):
        ready()
        return ray.get(other.push.remote(other, me))
    def push(self, me, other):
        return ray.get(other.load.remote())
    def load(self): return 1
one, two = Worker.options(name="one").remote(), Worker.options(name="two").remote()
ray.get(one.sync.remote(one, two))
"""
)
# More than the cluster has: pending without a word.
RAY_PENDING = (
    READY
    + """
import ray
ray.init(num_cpus=1, log_to_driver=False)
@ray.remote(num_cpus=64)
class Rollout:
    def generate(self): return 1
ready()
ray.get(Rollout.remote().generate.remote())
"""
)


@contextlib.contextmanager
def running(command: Sequence[str], **environment: str) -> Iterator[int]:
    """The pid of a command that runs until the end of the block, with all below it."""
    with subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            yield child.pid
        finally:
            tree.stop(child.pid, itself=True)


@contextlib.contextmanager
def standing(
    text: str, tmp_path: Path, files: int = 1
) -> Iterator[list[ProcessSample]]:
    """The processes of a program that has written so many files and then settled."""
    program = tmp_path / "prog.py"
    program.write_text(text)
    with running([sys.executable, str(program)], READY=str(tmp_path / "ready")) as pid:
        wait_for(tmp_path, "ready*", files)
        yield settled(pid)


@contextlib.contextmanager
def ranks(tmp_path: Path, size: int = 4, odd: int = 2) -> Iterator[list[ProcessSample]]:
    """Ranks of gloo of which one saves a checkpoint while the others all-reduce."""
    program = tmp_path / "train.py"
    program.write_text(RANKS)
    ready = tmp_path / "ready"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={size}", str(program)]
    with running(run, READY=str(ready), ODD=str(odd), OMP_NUM_THREADS="1") as pid:
        wait_for(tmp_path, "ready*", size)
        yield settled(pid)


def wait_for(place: Path, pattern: str, number: int = 1, limit_s: float = 90) -> None:
    """Until that many files are there."""
    until = time.monotonic() + limit_s
    while len(list(place.glob(pattern))) < number:
        assert time.monotonic() < until, f"no {pattern} in {place}"
        time.sleep(0.05)


def settled(pid: int, limit_s: float = 60) -> list[ProcessSample]:
    """A process and all below it, once none of them has computed for half a second."""
    until = time.monotonic() + limit_s
    used = -1.0
    while time.monotonic() < until:
        whole = [psutil.Process(pid), *tree.descendants(pid)]
        with contextlib.suppress(psutil.Error):
            now = sum(sum(p.cpu_times()[:2]) for p in whole)
            if now - used < 0.02:
                break
            used = now
        time.sleep(0.5)
    return sample([one.pid for one in whole])


def sample(pids: Sequence[int], *, native: bool = True) -> list[ProcessSample]:
    """Processes with their stacks; a rank is told by its environment."""
    asked = [psutil.Process(pid) for pid in pids]
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"stacks-{os.getpid()}"
    found = stacks.collect_of(asked, out / "armed", out, limit_s=90, native=native)
    return [_sample(one) for one in found]


def _sample(stack: stacks.Stack) -> ProcessSample:
    here = procfs.stat(stack.pid)
    threads = stack_dump.threads(stack.text, stack.pid)
    return ProcessSample(
        stack.pid,
        here.start if here else 0,
        here.ppid if here else 0,
        _role(stack.pid),
        procfs.full_command(stack.pid),
        threads=threads,
        problem="" if threads else stack.text,
    )


def _role(pid: int) -> Role:
    with contextlib.suppress(psutil.Error):
        environ = psutil.Process(pid).environ()
        if "RANK" in environ:
            rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            return Role("rank", f"rank {rank}", rank, rank, size)
    title = procfs.full_command(pid)
    if re.search(
        r"ray::\w+Agent|/gcs_server|/raylet/|ray/(?:_private|dashboard|auto)", title
    ):
        return Role("ray-system", "Ray's own")
    if title.startswith("ray::"):
        kind = "ray-actor" if "." in title else "ray-worker"
        return Role(kind, title.split()[0].removesuffix("()"))
    return Role()


# What NCCL's RAS threads write (NCCL 2.24 to 2.30, src/ras/client_support.cc), in two
# parts: the second comes when all ranks have answered, or ten seconds later.
RAS_ANSWER = """\
NCCL version 2.30.7 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators...| (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         2         4         4   RUNNING  MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 77 on node 10.0.0.3 managing GPU 1

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 1050
  Rank 2 has launched up to operation 1049 -- GPU 0 managed by process 99 on node b

  Communicator ranks have different Broadcast operation counts
  3 ranks have launched up to operation 7
  Rank 2 has not launched any operations -- GPU 0 managed by process 99 on node b

"""
RAS_TELLS = (
    "ncclras: #0-0 MISMATCH: Communicator ranks have different AllReduce operation "
    "counts; 3 ranks have launched up to operation 1050; Rank 2 has launched up to "
    "operation 1049 -- GPU 0 managed by process 99 on node b"
)
