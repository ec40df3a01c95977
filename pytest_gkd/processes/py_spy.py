"""py-spy's dumps of the stacks of several processes at once, or why there are none.

Nothing but psutil is imported: this also runs on a job's other nodes (see
``watch.node_agent``).
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import host_capabilities

END_S = 0.2
NATIVE_AT_ONCE = 8  # each loads the symbols of torch's libraries: 0.1 GB


def dump(
    asked: Sequence[psutil.Process], deadline: float, *, native: bool = False
) -> dict[int, str]:
    """py-spy's text for each process, or what it said instead, by pid.

    Until ``deadline`` (``clock.monotonic()``). With ``native``, C and C++ frames are
    included where py-spy can tell them: half of the time goes to asking for those, a
    few processes at once, the rest to plain Python stacks.
    """
    texts: dict[int, str] = {}
    if native:
        half = (monotonic() + deadline) / 2
        for first in range(0, len(asked), NATIVE_AT_ONCE):
            if monotonic() < half:
                some = asked[first : first + NATIVE_AT_ONCE]
                texts |= _ask(some, half, native=True)
    plain = [one for one in asked if not has_stacks(texts.get(one.pid, ""))]
    return texts | _ask(plain, deadline)


def has_stacks(text: str) -> bool:
    """Whether a dump has any."""
    return "Thread" in text


def note(process: psutil.Process, why: str) -> str:
    """Instead of stacks: why there are none, the state, and what it waits in."""
    # py-spy may add its own backtrace, and repeats its command before an error.
    told = [line for line in why.strip().splitlines() if line.startswith("Error: ")]
    lines = [*told, *why.strip().splitlines()[-1:], "no stacks"][:1]
    try:
        Path(f"/proc/{process.pid}/exe").readlink()
    except PermissionError:  # of which py-spy says that the process is gone
        lines = ["ptrace is not allowed on it: another user's, or too well protected"]
    except OSError:
        pass  # it has ended
    with contextlib.suppress(psutil.Error, OSError):
        lines.append(f"state: {process.status()}")
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip()
        if waits != "0":  # it runs
            lines.append(f"waits in kernel function: {waits or 'unknown'}")
    return "\n".join(lines)


def problem(text: str) -> str:
    """Why a text holds no stacks, on one line (see ``note``)."""
    return " ".join(text.strip().partition("\n")[0].split())[:200]


def _ask(
    some: Sequence[psutil.Process], deadline: float, *, native: bool = False
) -> dict[int, str]:
    """py-spy's output for each, all run at once."""
    spies = {p.pid: _begin(p, native=native) for p in some}
    return {pid: _answer(spy, deadline) for pid, spy in spies.items()}


def _begin(
    process: psutil.Process, *, native: bool = False
) -> subprocess.Popen[str] | str:
    """A running py-spy, or why there is none."""
    program = host_capabilities.py_spy()
    if program is None:
        return "py-spy is not installed (pip install py-spy)"
    arguments = [program, "dump", "--pid", str(process.pid)]
    arguments += ["--native"] * native
    with contextlib.suppress(psutil.Error):  # py-spy will say so itself
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP):
            if native:
                return "a stopped process cannot be asked for native frames"
            # ptrace cannot attach to it, or waits as long as the kernel holds it.
            arguments.append("--nonblocking")
    try:
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:  # such as too many processes
        return f"py-spy could not be started: {error.strerror}"


def _answer(spy: subprocess.Popen[str] | str, deadline: float) -> str:
    if isinstance(spy, str):
        return spy
    try:
        return spy.communicate(timeout=max(0.05, deadline - monotonic()))[0]
    except subprocess.TimeoutExpired:
        spy.kill()
        # It may be stuck in the kernel on the process that it has attached to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            spy.communicate(timeout=END_S)
        return "py-spy did not answer in time"
