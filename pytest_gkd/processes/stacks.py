"""The stacks of every process in a tree, by py-spy or the faulthandler signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import stack_dump
from pytest_gkd.diagnosis.patterns import Pattern
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.files import make_way, write_private
from pytest_gkd.processes import procfs, py_spy
from pytest_gkd.processes import tree as processes

Prepare = Callable[[Path], None]
DUMP_SIGNAL = signal.SIGUSR1
SIGNAL_GRACE_S = 0.2
LIMIT = 32
_PYTEST_FRAME = Pattern(
    rb"[(/](?:(?:_pytest|pluggy|xdist|execnet)/|pytest_gkd/run/)|\(<string>"
)
_CURRENT = Pattern(rb"(?m)^Current thread .*\n(?:  .+\n?)+")
# py-spy prints only the end of a path: threading.py, or asyncio/runners.py.
_LIBRARY = Pattern(rb"^(?:.*/lib/python[\d.]+/)?(\w+)(?:/[\w/]+)?\.py$")


@dataclass(frozen=True)
class Stack:
    """The stacks of one process: the file they are in, and their text.

    ``problem`` is why there is no such file; ``is_root`` marks the stage's own process.
    """

    pid: int
    command: str
    path: Path
    text: str
    problem: str = ""
    is_root: bool = False

    def where(self) -> str:
        """The process and its main thread's innermost frames, in one line."""
        name = procfs.shown(self.command, 60)
        if self.is_root:
            name = f"{self.pid} (the stage's own process)"
        return f"{name}: {innermost(self.text, self.pid)}"


def innermost(text: str, pid: int) -> str:
    """The innermost two frames of the main thread, from either kind of dump.

    Without frames, the text's last lines, which say why there are none.
    """
    for thread in stack_dump.threads(text, pid):
        if thread.is_main:
            return _shown(thread.frames[::-1])
    return "; ".join(text.strip().splitlines()[-3:])


def _shown(frames: Sequence[Frame]) -> str:
    """The innermost frame, and the next one outside the standard library."""
    own = [one for one in frames if not _PYTEST_FRAME.search(_line(one))] or [*frames]
    others = [frame for frame in own[1:] if not in_library(frame)] or own[1:]
    shown = map(_line, [*own[:1], *others[:1]])
    return b" < ".join(shown).decode("utf-8", "replace")


def _line(frame: Frame) -> bytes:
    return str(frame).encode("utf-8", "replace")


def in_library(frame: Frame) -> bool:
    """Whether a frame is in the standard library, judging by its file."""
    found = _LIBRARY.search(frame.file.encode("utf-8", "replace"))
    return found is not None and found[1].decode() in sys.stdlib_module_names


def arm(directory: Path) -> None:
    """Make this process dump its stacks on a signal, even if C code holds the GIL.

    The fallback where ptrace is denied (containers without CAP_SYS_PTRACE). On a crash
    (SIGSEGV, SIGABRT and the like) the stacks are written to ``PID.crash``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"{os.getpid()}.txt").open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable((directory / f"{os.getpid()}.crash").open("w"))


def is_armed(directory: Path) -> bool:
    """Whether the file that this process dumps to still exists."""
    return (directory / f"{os.getpid()}.txt").exists()


def of_crash(
    pid: int, armed: Path, out: Path, prepare: Prepare = make_way
) -> list[Stack]:
    """The stacks that a crashed process dumped as it died; none after SIGKILL."""
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
    """Write a file, creating its directory; the reason if that failed, else empty."""
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
    """Dump the stacks of ``pid`` and its descendants, in parallel.

    See ``collect_of``; ``pid`` itself comes first.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    tree = [root, *processes.descendants(pid)]
    return collect_of(tree, armed, out, root=pid, prepare=prepare, limit_s=limit_s)


def collect_of(
    asked: Sequence[psutil.Process],
    armed: Path,
    out: Path,
    *,
    root: int = 0,
    prepare: Prepare = make_way,
    limit_s: float = 1.2,
    native: bool = False,
    most: int = LIMIT,
) -> list[Stack]:
    """Dump the stacks of these processes, in parallel, in the given order.

    At most ``most`` of them; the others are listed in ``more.txt``. Files go to
    ``out``; ``armed`` is the directory given to ``arm``. ``prepare`` creates the
    directory of a file, or raises OSError. A process that has not answered after
    ``limit_s`` seconds gets a note instead; one that is not Python gets its state and
    what it waits in. ``native`` is ``py_spy.dump``'s. ``root`` is the stage's own
    process.
    """
    tree = [p for p in asked if processes.alive(p) and not procfs.is_tracker(p.pid)]
    # Nobody reads the stacks of a thousand processes.
    dropped, tree = tree[most:], tree[:most]
    deadline = monotonic() + limit_s
    texts = py_spy.dump(tree, deadline, native=native)
    found = []
    for process in tree:
        text = texts[process.pid]
        if not py_spy.has_stacks(text):
            told = _by_signal(process, armed, deadline)
            text = told or py_spy.note(process, text)
        text = sanitize.text(text)
        command = processes.describe(process)
        path = out / f"{process.pid}.txt"
        problem = _keep(path, f"{command}\n{text.rstrip()}\n", prepare)
        is_root = process.pid == root
        found.append(Stack(process.pid, command, path, text, problem, is_root))
    if dropped:
        lines = [processes.describe(process) for process in dropped]
        text = "\n".join([f"{len(dropped)} more processes, without stacks:", *lines])
        _keep(out / "more.txt", text + "\n", prepare)
    return found


def _by_signal(process: psutil.Process, armed: Path, deadline: float) -> str:
    path = armed / f"{process.pid}.txt"
    if not path.exists() or not procfs.catches(process.pid, DUMP_SIGNAL):
        return ""  # the signal's default action would kill it
    before = path.stat().st_size
    with contextlib.suppress(psutil.Error):
        process.send_signal(DUMP_SIGNAL)
    # A signal is answered at once; allow for that even if py-spy used up the time.
    deadline = max(deadline, monotonic() + SIGNAL_GRACE_S)
    text = ""
    while monotonic() < deadline:
        time.sleep(0.02)
        longer = path.read_text("utf-8", "replace")[before:]
        if "File " in longer and longer == text:
            return text  # nothing more was added: it is complete
        text = longer
    return text if "File " in text else ""
