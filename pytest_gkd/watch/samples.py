"""What one look at a running job shows: its processes, its GPUs and its output.

Plain values, so that ``verdicts`` can judge them without a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gkd.diagnosis.stack_dump import Thread
from pytest_gkd.language import marked
from pytest_gkd.processes.kernel_calls import Call
from pytest_gkd.watch.flight_files import Recorder
from pytest_gkd.watch.process_facts import Connection
from pytest_gkd.watch.rank_servers import Answer

# No pid has more bits (Linux, include/linux/threads.h, PID_MAX_LIMIT).
PID_BITS = 22

# The kinds of process that a job is made of (see ``roles``).
KINDS = (
    "launcher",  # torchrun, accelerate launch, deepspeed
    "rank",  # one with RANK in its environment
    "ray-driver",
    "ray-actor",
    "ray-worker",  # idle, or running a task
    "ray-system",  # raylet, GCS, dashboard, agents
    "engine",  # vLLM's EngineCore
    "engine-worker",  # vLLM's tensor and pipeline parallel workers
    "teacher",  # vllm serve, sglang.launch_server
    "data-worker",  # of a DataLoader
    "compiler",
    "helper",  # multiprocessing's resource trackers, shells, tee
    "process",  # any other
)


@dataclass(frozen=True)
class Role:
    """What a process of a job does.

    ``kind`` is one of KINDS; ``name`` is for people, such as ``rank 3``,
    ``ray::Trainer.fit`` or ``vLLM EngineCore``. ``rank``, ``local_rank`` and
    ``world_size`` are None where nothing tells them.
    """

    kind: str = "process"
    name: str = ""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class ProcessSample:
    """One process of the job at one moment.

    ``state`` is the kernel's letter (proc(5)): R, S, D, T stopped by a signal, t by a
    debugger, Z. ``cpu_s`` is its own user and system time, ``io_bytes`` what it read
    and wrote through system calls and what disks were read for (None: not ours to
    see). ``tracer`` is the debugger's pid, 0 without one. ``reads_terminal`` says that
    it waits for what is typed, ``receives`` that its main thread is in a call that
    reads a socket, ``woken`` how often that thread has slept. ``wchan``, ``tracer``,
    these and ``threads`` are there only where stacks were taken; ``problem`` is why
    they were not.

    ``node`` names another node of the job, and is empty for this machine. There, the
    node's number stands above the bits of ``pid`` and ``ppid``, so that no two are
    alike and none is of this machine; ``calls`` are its threads' kernel calls, by
    thread, ``pipes`` those that it reads and in which a process of the job is
    writing, ``connections`` those of TCP, ``recorder`` is NCCL's, and ``at``
    is when the answer came (``clock.monotonic()``).
    """

    pid: int
    start: int
    ppid: int
    role: Role
    command: str
    state: str = "S"
    cpu_s: float = 0.0
    io_bytes: int | None = 0
    rss_bytes: int = 0
    wchan: str = ""
    tracer: int = 0
    reads_terminal: bool = False
    receives: bool = False
    woken: int = 0
    threads: tuple[Thread, ...] = ()
    problem: str = ""
    node: str = ""
    calls: tuple[tuple[int, Call], ...] = ()
    pipes: tuple[str, ...] = ()
    connections: tuple[Connection, ...] = ()
    recorder: Recorder | None = None
    at: float = 0.0

    @property
    def local_pid(self) -> int:
        """Its pid on its own machine."""
        return local_pid(self.pid)

    @property
    def place(self) -> str:
        """Its pid, and its node unless that is this machine: ``pid 712 on node-b``."""
        return f"pid {self.local_pid}" + (f" on {self.node}" if self.node else "")

    @property
    def label(self) -> str:
        """Its role and pid, for people: ``rank 3 (pid 712)``."""
        return f"{self.role.name or self.role.kind} ({self.place})"


def local_pid(pid: int) -> int:
    """The pid of a process on its own machine; see ``ProcessSample``."""
    return pid & ((1 << PID_BITS) - 1)


@dataclass(frozen=True)
class NodeSample:
    """Another node of the job's cluster.

    ``problem`` is why it is not seen now, empty where it is; ``is_lost`` that it has
    left the cluster, with processes of the job. ``number`` stands above the bits of its
    processes' pids, ``id`` is Ray's name for it; ``servers`` is what those inside the
    ranks there have answered (``rank_servers``), once a standstill is proven.
    """

    name: str
    problem: str = ""
    is_lost: bool = False
    number: int = 0
    id: str = ""
    servers: Mapping[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuSample:
    """One GPU: percent busy (None: not told), memory in bytes; ``node`` as of a
    process."""

    index: int
    percent: int | None
    used_bytes: int
    total_bytes: int
    node: str = ""


@dataclass(frozen=True)
class JobSample:
    """The whole job at one moment.

    ``at`` is ``clock.monotonic()`` and ``boot`` CLOCK_BOOTTIME, which also counts a
    machine's sleep. ``output_bytes`` is all output so far; ``output_at`` is when the
    last of it came. ``network_bytes`` went through the machine's interfaces without
    the loopback. ``blocked_s`` is for how long whoever reads the watcher's own output
    has not read. ``remote`` are the addresses of other machines that the job is
    connected to, as ``host:port``, and ``gpus_at_work`` why a GPU may be computing for
    the job; ``unanswered`` says who waits for a machine that cannot be reached, and
    ``unplaced`` for what its Ray cluster has no place; all of these only with stacks.
    ``nodes`` are the other nodes of its Ray cluster. ``unseen`` says what could not be
    looked at.
    """

    at: float
    boot: float
    output_bytes: int
    output_at: float
    processes: tuple[ProcessSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    network_bytes: int = 0
    blocked_s: float = 0.0
    remote: tuple[str, ...] = ()
    gpus_at_work: str = ""
    unanswered: tuple[str, ...] = ()
    unplaced: tuple[str, ...] = ()
    nodes: tuple[NodeSample, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def seen(self) -> frozenset[str]:
        """The machines that this look has seen: other nodes' names, and an empty one
        for this machine."""
        return frozenset(["", *(one.name for one in self.nodes if not one.problem)])

    @property
    def has_stacks(self) -> bool:
        """Whether the stacks of its processes were taken."""
        return any(one.threads or one.problem for one in self.processes)


@dataclass(frozen=True)
class Point:
    """One value of a series at a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Progress:
    """How far the job's output says that it has come.

    ``phase`` is one of ``log_phases.PHASES``, or empty before any sign; ``phase_at``,
    ``step_at`` and ``said_at``, of the last output, are ``clock.monotonic()``.
    ``step_s`` is the median time of the last steps, ``steps_s`` those times, the latest
    last. ``series`` is the loss or reward that is shown, ``metric`` its name.
    ``marked`` says that the program itself told its phase (see ``marks``).
    ``trained_at`` is when the first training step was done.
    """

    phase: str = ""
    phase_at: float = 0.0
    step: int | None = None
    total: int | None = None
    step_at: float = 0.0
    step_s: float | None = None
    steps_s: tuple[float, ...] = ()
    metric: str = ""
    series: tuple[Point, ...] = ()
    last_line: str = ""
    said_at: float = 0.0
    marked: bool = False
    trained_at: float = 0.0
    finished: bool = False
    failed: bool = False

    @property
    def trained(self) -> bool:
        """Whether a training step is done."""
        return self.trained_at > 0


@dataclass(frozen=True)
class Usual:
    """What earlier runs of this job took, in seconds; empty where there were none.

    ``phases`` is the longest time in each phase, ``silences`` the longest silence.
    """

    runs: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    silences: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None


VERDICTS = AT_WORK, SLOW, STUCK, DEAD, FINISHED, HELD = (
    marked("at work"),
    marked("slow"),
    marked("stuck"),
    marked("dead"),
    marked("finished"),
    marked("held"),
)


@dataclass(frozen=True)
class Verdict:
    """What is true of the job now.

    ``word`` is one of the six above: ``held`` is neither stuck nor at work, because a
    person or the machine holds it (a debugger, Ctrl-Z, a laptop's sleep, a reader of
    its output that does not read). ``since_s`` is for how long, ``why`` the evidence,
    a sentence each, ``confidence`` ``certain`` or ``likely``. ``odd`` are the pids
    that the others wait for, where that is known, and ``who`` names them.
    """

    word: str
    since_s: float = 0.0
    why: tuple[str, ...] = ()
    confidence: str = "certain"
    phase: str = ""
    odd: tuple[int, ...] = ()
    who: str = ""
