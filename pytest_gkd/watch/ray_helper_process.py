"""The process that runs ``ray_helper`` by the job's own Python, and asks it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs
from pytest_gkd.watch.node_answers import LONGEST

AGENT = "pytest_gkd.watch.node_agent"
# What the agent imports; packages go as empty modules.
SENT = (
    "pytest_gkd.clock",
    "pytest_gkd.files",
    "pytest_gkd.diagnosis.flight_records",
    "pytest_gkd.processes.background",
    "pytest_gkd.processes.cgroup",
    "pytest_gkd.processes.gpus",
    "pytest_gkd.processes.host_capabilities",
    "pytest_gkd.processes.kernel_calls",
    "pytest_gkd.processes.kill",
    "pytest_gkd.processes.procfs",
    "pytest_gkd.processes.py_spy",
    "pytest_gkd.processes.resource_use",
    "pytest_gkd.processes.tree",
    "pytest_gkd.sanitize",
    "pytest_gkd.rank_words",
    AGENT,
    "pytest_gkd.watch.flight_files",
    "pytest_gkd.watch.process_facts",
    "pytest_gkd.watch.rank_servers",
    "pytest_gkd.watch.scope",
)
PACKAGES = (
    "pytest_gkd",
    "pytest_gkd.diagnosis",
    "pytest_gkd.processes",
    "pytest_gkd.watch",
)
START_S = 30.0  # to import Ray, to join, and to start a worker on each node
LATE_S = 3.0  # what an answer may take on its way
GIVE_UP_S = 60.0  # for one answer
# Of the raylet's environment, what would change the job that a driver begins.
_DROPPED = ("RAY_ADDRESS", "RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR")


@dataclass(frozen=True)
class Raylet:
    """This machine's part of a cluster, by its raylet's command line."""

    pid: int
    gcs: str
    node_ip: str
    python: str

    @classmethod
    def of(cls, pid: int) -> Raylet | None:
        """None where it is gone, or says less than is needed."""
        try:
            text = (procfs.PROC / str(pid) / "cmdline").read_text("utf-8", "replace")
        except OSError:
            return None
        told = dict(word.partition("=")[::2] for word in text.split("\0"))
        try:
            python = shlex.split(told["--python_worker_command"])[0]
            return cls(pid, told["--gcs-address"], told["--node_ip_address"], python)
        except (KeyError, ValueError, IndexError):
            return None


class NoAnswerError(Exception):
    """The helper has not answered; the text says why."""


class Helper:
    """The running helper; ``why_ended`` is None while it can be asked."""

    def __init__(self, raylet: Raylet) -> None:
        """Start it. Raises NoAnswerError where that cannot be."""
        self.why_ended: str | None = None
        self._asked = self._answered = 0
        self._asked_at = monotonic()
        self._rest = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with it
        environ = procfs.environ(raylet.pid) or dict(os.environ)
        environ = {k: v for k, v in environ.items() if k not in _DROPPED}
        # Under "uv run" Ray would upload the working directory.
        environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        try:
            self._process = subprocess.Popen(
                [raylet.python, str(Path(__file__).with_name("ray_helper.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environ,
                cwd="/",
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        except OSError as error:
            self.why_ended = f"{raylet.python}: {error.strerror}"
            raise NoAnswerError(self.why_ended) from None
        begin = {
            "address": raylet.gcs,
            "node_ip": raylet.node_ip,
            "sources": packed(),
            "module": AGENT,
        }
        self._send(begin)

    def ask(self, request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """A row for each node (see ``ray_helper``). Raises NoAnswerError."""
        until = monotonic() + limit_s + (LATE_S if self._answered else START_S)
        while self._answered < self._asked:
            self._hear(until)  # of an earlier question
        self._asked += 1
        self._asked_at = monotonic()
        self._send({**request, "id": self._asked})
        return self._hear(until)

    def _hear(self, until: float) -> list[dict[str, Any]]:
        line = self._line(until)
        try:
            told = json.loads(line)
            self._answered = int(told["id"])
            return list(told["nodes"])
        except (ValueError, KeyError, TypeError):
            self._end("what looks there has answered what cannot be read")

    def _send(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._end(self._last_words())

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left_s = until - monotonic()
            if left_s <= 0 or not select.select([source], [], [], left_s)[0]:
                if monotonic() > self._asked_at + GIVE_UP_S:
                    self._end("Ray does not answer")
                raise NoAnswerError("Ray does not answer")
            data = os.read(source, 1 << 16)
            if not data or len(self._rest) > LONGEST:
                self._end(self._last_words())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """What it says of its end, which is as a rule Ray's error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        text = self._errors.read().decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        told = sanitize.line(lines[-1])[:200] if lines else "it said nothing"
        return f"what looks there has ended: {told}"

    def _end(self, why: str) -> NoReturn:
        self.why_ended = why
        self.close(at_once=True)
        raise NoAnswerError(why)

    def close(self, *, at_once: bool = False) -> None:
        """End it: it ends with its input, in a few seconds at most."""
        self.why_ended = self.why_ended or "it was ended"
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if at_once:
            self._process.kill()
        until = time.monotonic() + 1.0
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        self._errors.close()


def packed() -> str:
    """The source texts that are sent to each node."""
    root = Path(__file__).parents[2]
    sources = dict.fromkeys(PACKAGES, "")
    for name in SENT:
        sources[name] = (root / (name.replace(".", "/") + ".py")).read_text()
    text = json.dumps(sources).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode()
