"""Where every process of a tree stands: py-spy, or the faulthandler signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.files import make_way, write_private
from pytest_gkd.processes import host_capabilities, procfs
from pytest_gkd.processes import tree as processes

Prepare = Callable[[Path], None]
DUMP_SIGNAL = signal.SIGUSR1
SIGNAL_GRACE_S = 0.2
SPY_END_S = 0.2
LIMIT = 32
_PYTEST_FRAME = Pattern(
    rb"[(/](?:(?:_pytest|pluggy|xdist|execnet)/|pytest_gkd/run/)|\(<string>"
)
# py-spy's: a title, then frames; faulthandler's: titles, and frames of another form.
_SPY_THREAD = Pattern(rb"(?m)^Thread (.*)\n((?:    .+(?:\n|$))+)")
_THREAD = Pattern(rb"(?m)^(?:Current t|T)hread .*$")
_CURRENT = Pattern(rb"(?m)^Current thread .*\n(?:  .+\n?)+")
_FRAME = Pattern(rb'File "(.*)", line (\d+) in (.*)')
# py-spy gives a file's last part only: threading.py, or asyncio/runners.py.
_MODULE = Pattern(rb"\((?:.*/lib/python[\d.]+/)?([\w/]+)\.py:\d+\)$")


@dataclass(frozen=True)
class Stack:
    """The stacks of one process: the file they are in, and their text.

    ``problem`` is why there is no such file; ``is_root`` says that the process is the
    stage's own.
    """

    pid: int
    command: str
    path: Path
    text: str
    problem: str = ""
    is_root: bool = False

    def where(self) -> str:
        """The process and its main thread's innermost frames, in one line."""
        name = self.command[:60].rstrip()
        if self.is_root:
            name = f"{self.pid} (the stage's own process)"
        return f"{name}: {innermost(self.text, self.pid)}"


def innermost(text: str, pid: int) -> str:
    """The innermost two frames of the main thread, from either kind of dump.

    py-spy writes ``name (file:line)``, innermost first, under ``Thread ID (state):
    "NAME"``; faulthandler ``File "file", line N in name``, main thread last. Without
    frames the text's last lines are given, which say why there are none.
    """
    dump = text.encode("utf-8", "replace")
    for block in _SPY_THREAD.finditer(dump):
        title, body = block[1], block[2]
        if b"MainThread" in title or title.startswith(b"%d " % pid):
            return _shown([line.strip() for line in body.splitlines()])
    last = max((thread.end() for thread in _THREAD.finditer(dump)), default=0)
    frames = [frame.groups() for frame in _FRAME.finditer(dump, last)]
    if frames:
        return _shown([b"%s (%s:%s)" % (name, file, at) for file, at, name in frames])
    return "; ".join(text.strip().splitlines()[-3:])


def _shown(frames: list[bytes]) -> str:
    """The innermost frame, and the next that is not Python's own library's."""
    own = [frame for frame in frames if not _PYTEST_FRAME.search(frame)] or frames
    others = [frame for frame in own[1:] if not _in_library(frame)] or own[1:]
    return b" < ".join([*own[:1], *others[:1]]).decode("utf-8", "replace")


def _in_library(frame: bytes) -> bool:
    found = _MODULE.search(frame)
    name = found[1].split(b"/")[0].decode() if found else ""
    return name in sys.stdlib_module_names


def arm(directory: Path) -> None:
    """Let a signal make this process write its stacks, even with the GIL held in C.

    The way out where ptrace is refused (containers without CAP_SYS_PTRACE). A crash
    (SIGSEGV, SIGABRT and their like) writes its stacks to ``PID.crash``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"{os.getpid()}.txt").open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable((directory / f"{os.getpid()}.crash").open("w"))


def is_armed(directory: Path) -> bool:
    """Whether what this process writes there can still be read there."""
    return (directory / f"{os.getpid()}.txt").exists()


def of_crash(
    pid: int, armed: Path, out: Path, prepare: Prepare = make_way
) -> list[Stack]:
    """The stacks that a crashed process wrote as it died; none for SIGKILL."""
    try:
        said = (armed / f"{pid}.crash").read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    text = sanitize.text(said)
    if not text.strip():
        return []
    path = out / f"{pid}.txt"
    problem = _keep(path, text, prepare)
    current = _CURRENT.search(text.encode("utf-8", "replace"))
    shown = current[0].decode("utf-8", "replace") if current else text
    return [Stack(pid, str(pid), path, shown, problem, is_root=True)]


def _keep(path: Path, text: str, prepare: Prepare) -> str:
    """Write it, in a directory that need not be there yet; why it could not be."""
    try:
        prepare(path)
        write_private(path, text)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def collect(
    pid: int,
    armed: Path,
    out: Path,
    *,
    prepare: Prepare = make_way,
    limit_s: float = 1.2,
) -> list[Stack]:
    """Dump the stacks of ``pid`` and everything below it, in parallel.

    At most 32 of them; the others are listed in ``more.txt``. Files go to ``out``;
    ``armed`` is the directory given to ``arm``. ``prepare`` makes the way to a file, or
    raises OSError. After ``limit_s`` seconds whatever has not answered is left with a
    note. A process that is not Python gets its state and what it waits in.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    tree = [root, *processes.descendants(pid)]
    tree = [p for p in tree if processes.alive(p) and not procfs.is_tracker(p.pid)]
    # The stage's own process comes first; nobody reads the stacks of a thousand.
    dropped, tree = tree[LIMIT:], tree[:LIMIT]
    spies = {p.pid: _spy(p) for p in tree}
    deadline = monotonic() + limit_s
    found = []
    for process in tree:
        text = _answer(spies[process.pid], deadline)
        if "Thread" not in text:
            text = _by_signal(process, armed, deadline) or _note(process, text)
        text = sanitize.text(text)
        command = processes.describe(process)
        path = out / f"{process.pid}.txt"
        problem = _keep(path, f"{command}\n{text.rstrip()}\n", prepare)
        is_root = process.pid == pid
        found.append(Stack(process.pid, command, path, text, problem, is_root))
    if dropped:
        lines = [processes.describe(process) for process in dropped]
        text = "\n".join([f"{len(dropped)} more processes, without stacks:", *lines])
        _keep(out / "more.txt", text + "\n", prepare)
    return found


def _spy(process: psutil.Process) -> subprocess.Popen[str] | str:
    """py-spy at work, or why it is not."""
    program = host_capabilities.py_spy()
    if program is None:
        return "py-spy is not installed"
    arguments = [program, "dump", "--pid", str(process.pid)]
    with contextlib.suppress(psutil.Error):  # py-spy will say so itself
        if process.status() == psutil.STATUS_STOPPED:
            arguments.append("--nonblocking")  # ptrace cannot attach to it
    try:
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:  # there are too many processes, say
        return f"py-spy could not be started: {error.strerror}"


def _answer(spy: subprocess.Popen[str] | str, deadline: float) -> str:
    if isinstance(spy, str):
        return spy
    try:
        return spy.communicate(timeout=max(0.05, deadline - monotonic()))[0]
    except subprocess.TimeoutExpired:
        spy.kill()
        # It may be held in the kernel by the process that it has attached to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            spy.communicate(timeout=SPY_END_S)
        return "py-spy did not answer in time"


def _by_signal(process: psutil.Process, armed: Path, deadline: float) -> str:
    path = armed / f"{process.pid}.txt"
    if not path.exists() or not procfs.catches(process.pid, DUMP_SIGNAL):
        return ""  # the signal's default action would kill it
    before = path.stat().st_size
    with contextlib.suppress(psutil.Error):
        process.send_signal(DUMP_SIGNAL)
    # A signal is answered at once; it gets that moment even if py-spy took all others.
    deadline = max(deadline, monotonic() + SIGNAL_GRACE_S)
    text = ""
    while monotonic() < deadline:
        time.sleep(0.02)
        longer = path.read_text("utf-8", "replace")[before:]
        if "File " in longer and longer == text:
            return text  # nothing was added meanwhile: it is whole
        text = longer
    return text if "File " in text else ""


def _note(process: psutil.Process, why: str) -> str:
    lines = [why.strip().splitlines()[-1] if why.strip() else "no stacks"]
    with contextlib.suppress(psutil.Error, OSError):
        lines.append(f"state: {process.status()}")
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip()
        lines.append(f"waits in kernel function: {waits or 'unknown'}")
    return "\n".join(lines)
