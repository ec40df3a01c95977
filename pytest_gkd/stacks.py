"""Where every process of a tree stands: py-spy, or the faulthandler signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd import abilities
from pytest_gkd import process as processes

DUMP_SIGNAL = signal.SIGUSR1
SIGNAL_GRACE_S = 0.2
LIMIT = 32
XDIST_TITLE = "[pytest-xdist"
PYTEST_FRAME = re.compile(r"[(/](_pytest|pluggy|xdist|execnet)/|\(<string>")


@dataclass(frozen=True)
class Stack:
    """The stacks of one process: the file they are in, and their text."""

    pid: int
    command: str
    path: Path
    text: str

    def where(self) -> str:
        """The process and its main thread's innermost frames, in one line."""
        name = self.command[:60].rstrip()
        if XDIST_TITLE in self.command:
            name = f"{self.pid} (the stage's own process)"
        return f"{name}: {innermost(self.text, self.pid)}"


def innermost(text: str, pid: int) -> str:
    """The innermost two frames of the main thread, from either kind of dump.

    py-spy writes ``name (file:line)``, innermost first, under ``Thread ID (state):
    "NAME"``; faulthandler ``File "file", line N in name``, main thread last. Without
    frames the text's last lines are given, which say why there are none.
    """
    blocks = re.findall(
        r"^Thread (.*)\n((?:    .+(?:\n|$))+)", text, re.MULTILINE
    )  # py-spy's
    for title, body in blocks:
        if "MainThread" in title or title.startswith(f"{pid} "):
            return _shown([line.strip() for line in body.splitlines()])
    threads = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', threads[-1])
    if frames:
        return _shown([f"{name} ({file}:{line})" for file, line, name in frames])
    return "; ".join(text.strip().splitlines()[-3:])


def _shown(frames: list[str]) -> str:
    """The innermost frame, and the next that is not Python's own library's."""
    own = [frame for frame in frames if not PYTEST_FRAME.search(frame)] or frames
    others = [frame for frame in own[1:] if not _in_library(frame)] or own[1:]
    return " < ".join([*own[:1], *others[:1]])


def _in_library(frame: str) -> bool:
    # py-spy gives a file's last part only: threading.py, or asyncio/runners.py.
    found = re.search(r"\((?:.*/lib/python[\d.]+/)?([\w/]+)\.py:\d+\)$", frame)
    return found is not None and found[1].split("/")[0] in sys.stdlib_module_names


def arm(directory: Path) -> None:
    """Let a signal make this process write its stacks, even with the GIL held in C.

    The way out where ptrace is refused (containers without CAP_SYS_PTRACE). A crash
    (SIGSEGV, SIGABRT and their like) writes its stacks to ``PID.crash``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"{os.getpid()}.txt").open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable((directory / f"{os.getpid()}.crash").open("w"))


def of_crash(pid: int, armed: Path, out: Path) -> list[Stack]:
    """The stacks that a crashed process wrote as it died; none for SIGKILL."""
    try:
        text = (armed / f"{pid}.crash").read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    if not text.strip():
        return []
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{pid}.txt"
    path.write_text(text, "utf-8")
    current = re.search(r"^Current thread .*\n((?:  .+\n?)+)", text, re.MULTILINE)
    return [Stack(pid, XDIST_TITLE, path, current[0] if current else text)]


def collect(
    pid: int, armed: Path, out: Path, *, limit_s: float = 1.2, itself: bool = True
) -> list[Stack]:
    """Dump the stacks of ``pid`` and everything below it, in parallel.

    At most 32 of them; the others are listed in ``more.txt``. Files go to ``out``;
    ``armed`` is the directory given to ``arm``. After ``limit_s`` seconds whatever has
    not answered is left with a note. A process that is not Python gets its state and
    the kernel function it waits in.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    tree = [*([root] if itself else []), *processes.descendants(pid)]
    tree = [p for p in tree if processes.alive(p) and not processes.is_tracker(p)]
    # The stage's own process comes first; nobody reads the stacks of a thousand.
    dropped, tree = tree[LIMIT:], tree[:LIMIT]
    spies = {p.pid: _spy(p) for p in tree}
    deadline = time.monotonic() + limit_s
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for process in tree:
        text = _answer(spies[process.pid], deadline)
        if "Thread" not in text:
            text = _by_signal(process, armed, deadline) or _note(process, text)
        command = processes.describe(process)
        path = out / f"{process.pid}.txt"
        path.write_text(f"{command}\n{text.rstrip()}\n", "utf-8")
        found.append(Stack(process.pid, command, path, text))
    if dropped:
        lines = [processes.describe(process) for process in dropped]
        text = "\n".join([f"{len(dropped)} more processes, without stacks:", *lines])
        (out / "more.txt").write_text(text + "\n", "utf-8")
    return found


def _spy(process: psutil.Process) -> subprocess.Popen[str] | None:
    program = abilities.py_spy()
    if program is None:
        return None
    arguments = [program, "dump", "--pid", str(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):  # py-spy will say so itself
        if process.status() == psutil.STATUS_STOPPED:
            arguments.append("--nonblocking")  # ptrace cannot attach to it
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _answer(spy: subprocess.Popen[str] | None, deadline: float) -> str:
    if spy is None:
        return "py-spy is not installed"
    try:
        return spy.communicate(timeout=max(0.05, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        spy.kill()
        spy.communicate()
        return "py-spy did not answer in time"


def _by_signal(process: psutil.Process, armed: Path, deadline: float) -> str:
    path = armed / f"{process.pid}.txt"
    if not path.exists() or not _catches(process.pid, DUMP_SIGNAL):
        return ""  # the signal's default action would kill it
    before = path.stat().st_size
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(DUMP_SIGNAL)
    # A signal is answered at once; it gets that moment even if py-spy took all others.
    deadline = max(deadline, time.monotonic() + SIGNAL_GRACE_S)
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        longer = path.read_text("utf-8", "replace")[before:]
        if "File " in longer and longer == text:
            return text  # nothing was added meanwhile: it is whole
        text = longer
    return text if "File " in text else ""


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _note(process: psutil.Process, why: str) -> str:
    lines = [why.strip().splitlines()[-1] if why.strip() else "no stacks"]
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        lines.append(f"state: {process.status()}")
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip()
        lines.append(f"waits in kernel function: {waits or 'unknown'}")
    return "\n".join(lines)
