"""Starts the job of a case, watched or alone, and does to it what the case says."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import make_runs
import psutil

HERE = Path(__file__).parent
# What `make watched` puts there: TRL, which the lock has no use for.
PACKAGES = HERE.parent / ".watched"
COMMANDS = Path(sysconfig.get_path("scripts"))
FREEZER = Path("/sys/fs/cgroup/freezer")
# Short, for cases of seconds: a look after 5 s of silence, a verdict 10 s later.
OPTIONS = ("--look-after=5", "--stuck-after=10")
START_S = 300.0  # until what a case waits for appears, on a loaded machine
END_S = 300.0
VERDICT_S = 120.0  # from the standstill
LOOK_S = 10.0  # for a process that is there

Case = dict[str, Any]
_TABLE = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Told:
    """A verdict: when (seconds since 1970), its word, and what was said with it."""

    at: float
    word: str
    phase: str
    who: str
    text: str


def cases() -> list[Case]:
    """All cases, each with what its job gives it."""
    return [{**_TABLE["job"][case["job"]], **case} for case in _TABLE["case"]]


def unbroken(case: Case) -> Case:
    """The same job with nothing done to it."""
    kept = {key: case[key] for key in ("name", "job", "command")}
    return {**_TABLE["job"][case["job"]], **kept}


def words(case: Case) -> list[str]:
    """The verdicts that are right."""
    found = case["verdict"]
    return found if isinstance(found, list) else [found]


def breaks(case: Case) -> bool:
    """Whether its file ``held`` tells when it is made to stand still."""
    return "break" in case or "beside_break" in case


def lacks(case: Case) -> str:
    """What this machine has not that the case needs, or ''."""
    needs = case.get("needs", ())
    if "root" in needs and not _is_root():
        return "no right to make a network namespace or to mount, or no ip(8)"
    if "gdb" in needs and shutil.which("gdb") is None:
        return "no gdb"
    if "freezer" in needs and not os.access(FREEZER, os.W_OK):
        return f"no {FREEZER} to write to"
    if case["job"] == "trl" and not (PACKAGES / "trl").is_dir():
        return "no TRL in .watched (make watched puts it there)"
    return ""


def _is_root() -> bool:
    if not all(map(shutil.which, ("ip", "unshare", "fsfreeze", "mkfs.ext4"))):
        return False
    # A mount in a namespace of its own: seen by nobody.
    trial = ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, check=False, capture_output=True).returncode == 0


class Job:
    """One start of a case's job; at the end of the ``with`` all of it is ended."""

    def __init__(self, case: Case, watched: bool) -> None:
        self.case, self.watched = case, watched
        # Short: UNIX sockets of Ray and vLLM lie below it.
        self.base = Path(tempfile.mkdtemp(prefix="gw"))
        self.mark = f"{case['name']}.{self.base.name}"
        made = make_runs.prepare(
            {"name": case["name"]}, self.base, COMMANDS, self.mark, HERE / "programs"
        )
        self.folder, env = made
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.env = {
            **env,
            "PORT": str(port),
            "NET": self.base.name,
            "PYTHONPATH": f"{self.folder}:{PACKAGES}",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_TMPDIR": str(self.base),
            "TMPDIR": str(self.base),
            "XDG_CACHE_HOME": str(self.base / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.base / "inductor"),
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        self.out, self.err = self.base / "out", self.base / "err"
        self.directory, self._told = self.base / "watch", self.base / "told"
        self.acted_at: float | None = None
        self._frozen: Path | None = None
        self._terminal: int | None = None
        self.shell(case.get("before", ""))
        self._beside = self._start_beside()
        self.process = self._start()

    def _start_beside(self) -> subprocess.Popen[bytes] | None:
        if "beside" not in self.case:
            return None
        with (self.base / "beside").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", f"exec {self.case['beside']}"],
                cwd=self.folder,
                env={**self.env, "JOB_BREAK": self.case.get("beside_break", "")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start(self) -> subprocess.Popen[bytes]:
        command = ["env", f"JOB_BREAK={self.case.get('break', '')}"]
        command += ["bash", "-c", self.case["command"]]
        if self.watched:
            said = '"$GKD_VERDICT" "$GKD_PHASE" "$GKD_WHO" "$GKD_TEXT"'
            form = r"%s\0%s\0%s\0%s\0%s\0\0\n"
            tell = f"printf '{form}' $(date +%s.%N) {said} >> {self._told}"
            command = [
                *(sys.executable, "-m", "pytest_gkd", "watch", *OPTIONS),
                *(f"--notify=command:{tell}", f"--dir={self.directory}", "--"),
                *command,
            ]
        out: IO[bytes]
        err: IO[bytes]
        if self.case.get("terminal"):
            self._terminal, inner = pty.openpty()
            command = ["setsid", "--ctty", *command]
            out = err = os.fdopen(inner, "rb+", 0)
            self.out.touch()
            self.err.touch()
        else:
            out, err = self.out.open("wb"), self.err.open("wb")
        with out, err:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, "TERM": "xterm"},
                stdin=out if self._terminal is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=self._terminal is None,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *what: object) -> None:
        self._thaw()
        make_runs.end(self.mark)
        # What was taken from it is given back: a frozen disk lets nobody end.
        self.shell(self.case.get("after", ""), check=False)
        make_runs.end(self.mark)
        for one in filter(None, (self.process, self._beside)):
            one.wait(30)
        if self._terminal is not None:
            os.close(self._terminal)
        shutil.rmtree(self.base, ignore_errors=True)

    def shell(self, line: str, check: bool = True) -> None:
        """Run a line of the case in the job's folder."""
        subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            check=check,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if check else subprocess.DEVNULL,
        )

    # ---- what can be seen of it

    def text(self) -> str:
        """What was printed so far, on both streams."""
        self._read_terminal()
        both = self.out.read_bytes() + self.err.read_bytes()
        return both.decode("utf-8", "replace")

    def _read_terminal(self) -> None:
        if self._terminal is None:
            return
        os.set_blocking(self._terminal, False)
        with contextlib.suppress(OSError), self.out.open("ab") as out:
            while part := os.read(self._terminal, 65536):
                out.write(part)

    def told(self) -> list[Told]:
        """The verdicts so far, in their order."""
        text = self._told.read_text("utf-8") if self._told.exists() else ""
        rows = [row.split("\0") for row in text.split("\0\0\n")[:-1]]
        return [self._with_report(Told(float(at), *more)) for at, *more in rows]

    def _with_report(self, told: Told) -> Told:
        """With the phase and the odd ones of the report that a verdict comes with."""
        for path in self.directory.glob("*/*/report.json"):
            if str(path.parent) not in told.text:
                continue
            report = json.loads(path.read_text("utf-8"))
            table = (path.parent / "processes.txt").read_text("utf-8")
            odd = [
                found[1].strip()
                for pid in report["odd_pids"]
                if (found := re.search(rf"(?m)^ *{pid} .* MiB \S+ +(.{{40}})", table))
            ]
            who = told.who or ", ".join(odd)
            return replace(told, phase=told.phase or report["phase"], who=who)
        return told

    def processes(self) -> list[psutil.Process]:
        """The job's own: neither the watcher nor what runs beside."""
        others = {self.process.pid} if self.watched else set()
        if self._beside is not None:
            others.add(self._beside.pid)
        found = [one for one, _ in make_runs.processes(self.mark)]
        return [one for one in found if one.pid not in others]

    def listed(self) -> str:
        """Its processes as a person reads them, and what runs beside."""
        lines = []
        for one, rank in make_runs.processes(self.mark):
            with contextlib.suppress(psutil.Error):
                command = " ".join(one.cmdline())[:100]
                lines.append(f"{one.pid} {one.status()} {rank} {command}")
        return "\n".join(["", *lines])

    def chosen(self, who: str) -> list[psutil.Process]:
        """Whom a case means by ``rank2``, ``rank2/workers``, or a pattern."""
        found = make_runs.processes(self.mark)
        rank, _, workers = who.partition("/")
        if re.fullmatch(r"rank\d", rank):
            members = {one.pid: one for one, its in found if its == rank}
            return [
                one
                for one in members.values()
                if (one.ppid() in members) == bool(workers)
            ]
        if who == "everything":
            return [one for one, _ in found]
        # The watcher and the shells have the job's command in their own.
        return [
            one
            for one, _ in found
            if make_runs.suits(one, who)
            and not make_runs.suits(one, "pytest_gkd")
            and one.name() != "bash"
        ]

    def stacks(self) -> Iterator[tuple[psutil.Process, str]]:
        """What py-spy shows of each of its Python processes, and beside it."""
        for one in self.chosen("python|ray::|VLLM::|pt_"):
            with contextlib.suppress(psutil.Error):
                done = subprocess.run(
                    [COMMANDS / "py-spy", "dump", "--nonblocking", "-p", str(one.pid)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                yield one, done.stdout or done.stderr

    def stands(self, shown: Mapping[psutil.Process, str]) -> bool:
        """Whether it stands where the label says, if that says it."""
        if "stands" not in self.case:
            return True
        who, function = self.case["stands"]
        meant = [shown.get(one, "") for one in self.chosen(who)]
        return any(re.search(rf"[ .]{function} \(", text) for text in meant)

    def stood_since(self, before: float) -> float:
        """When it was made to stand still (seconds since 1970).

        By a break, by an act, or of itself, which is when it last printed.
        """
        if breaks(self.case):
            return (self.folder / "held").stat().st_mtime
        if self.acted_at is not None:
            return self.acted_at
        return min(before, *(path.stat().st_mtime for path in (self.out, self.err)))

    # ---- what is done to it

    def act(self, acts: list[dict[str, Any]]) -> None:
        """Do what a case says, each as soon as its text was printed."""
        for act in acts:
            after = act.get("after", "")
            self.wait(partial(self._has_come, after), START_S, after)
            time.sleep(act.get("wait", 0))
            self.acted_at = time.time()
            if "signal" in act:
                choose = partial(self.chosen, act["who"])
                self.wait(choose, LOOK_S, f"process that is {act['who']}")
                for one in choose():
                    one.send_signal(getattr(signal, f"SIG{act['signal']}"))
            elif "run" in act:
                pid = str(self.chosen(act["who"])[0].pid) if "who" in act else ""
                self.shell(act["run"].replace("{pid}", pid))
            elif "type" in act:
                assert self._terminal is not None
                os.write(self._terminal, act["type"].encode())
            else:
                self._freeze(act["freeze"])

    def _has_come(self, after: str) -> bool:
        return bool(re.search(after, self.text()))

    def _freeze(self, seconds: float) -> None:
        self._frozen = group = FREEZER / self.base.name
        group.mkdir()
        for one in self.chosen("everything"):
            (group / "cgroup.procs").write_text(str(one.pid))
        (group / "freezer.state").write_text("FROZEN")
        time.sleep(seconds)
        self._thaw()

    def _thaw(self) -> None:
        group, self._frozen = self._frozen, None
        if group is None:
            return
        (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (FREEZER / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()

    def wait(self, holds: Callable[[], object], limit_s: float, what: str) -> None:
        """Return once it holds; TimeoutError if it does not, or the job ends before."""
        deadline = time.monotonic() + limit_s
        while not holds():
            status = self.process.poll()
            if status is not None and not holds():
                raise TimeoutError(f"it ended with {status} before {what!r}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what!r} after {limit_s:.0f} s")
            time.sleep(0.1)

    def finish(self) -> int:
        """Its exit status."""
        deadline = time.monotonic() + END_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not end within {END_S:.0f} s")
            self._read_terminal()
            time.sleep(0.1)
        self._read_terminal()
        return self.process.wait()

    def fall_silent(self, seconds: float) -> None:
        """Return once nothing was printed for so long."""
        last, since = "", time.monotonic()
        while time.monotonic() - since < seconds and self.process.poll() is None:
            if (now := self.text()) != last:
                last, since = now, time.monotonic()
            time.sleep(0.2)
