"""Two machines on one: each with its own network, processes and folder for Ray."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_gkd.processes import procfs

# Another release of Ray is tried by its own Python, of the same minor version as this.
PYTHON = os.environ.get("GKD_RAY_PYTHON", sys.executable)
RAY = str(Path(PYTHON).with_name("ray"))
LIMIT_S = 120.0
# Only who has the token may speak to the cluster: Ray's default where one was made.
TOKEN = ("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'a1' * 32}")


@functools.cache
def may_isolate() -> bool:
    """Whether namespaces can be made here, and connected."""
    command = ("unshare", "--pid", "--net", "--mount", "--fork", "ip", "link")
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


class Machine:
    """Namespaces of its own; ``address`` is its IP address, ``pid`` its first process
    as it is seen from outside."""

    def __init__(self, address: str) -> None:
        self.address = address
        # What is below /tmp/ray and /dev/shm is no other machine's.
        begin = (
            "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
            " && mount -t tmpfs tmpfs /dev/shm && ip link set lo up"
            " && echo ready && exec sleep infinity"
        )
        self._outer = subprocess.Popen(
            (
                *("unshare", "--pid", "--net", "--mount", "--mount-proc", "--fork"),
                *("--kill-child", "sh", "-c", begin),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == b"ready\n"
        table = procfs.table()
        (self.pid,) = procfs.below([self._outer.pid], table) - {self._outer.pid}

    def command(self, *words: str) -> tuple[str, ...]:
        """A command as it is run inside."""
        return (
            *("nsenter", "--target", str(self.pid), "--pid", "--net", "--mount"),
            f"--wdns={Path.cwd()}",
            *words,
        )

    def run(self, *words: str) -> str:
        """Run a command inside; its output. Raises CalledProcessError."""
        done = subprocess.run(
            self.command(*words),
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def pids(self, *words: str) -> list[int]:
        """Who is inside with all of these in its command line, as seen from outside."""
        inside = procfs.link(self.pid, "ns/pid")
        return sorted(
            pid
            for pid in procfs.pids()
            if procfs.link(pid, "ns/pid") == inside
            and all(word in procfs.full_command(pid) for word in words)
        )

    def end(self) -> None:
        """End all that is inside: the end of its first process does it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()


@contextlib.contextmanager
def connected() -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a cable between them."""
    one, other = Machine("10.87.0.1"), Machine("10.87.0.2")
    try:
        add = ("ip", "link", "add", "cable", "netns", str(one.pid), "type", "veth")
        peer = ("peer", "name", "cable", "netns", str(other.pid))
        subprocess.run((*add, *peer), check=True)
        for machine, peer_of in ((one, other), (other, one)):
            # On lo, as the cable goes with the other machine.
            machine.run("ip", "addr", "add", f"{machine.address}/32", "dev", "lo")
            machine.run("ip", "link", "set", "cable", "up")
            route = ("route", "add", peer_of.address, "dev", "cable")
            machine.run("ip", *route, "src", machine.address)
        yield one, other
    finally:
        one.end()
        other.end()


@contextlib.contextmanager
def ray_cluster(far: Mapping[str, str]) -> Iterator[tuple[Machine, Machine]]:
    """A Ray cluster over two machines; the second has the resource ``far``, and the
    variables."""
    with connected() as (head, other):
        common = ("--object-store-memory=80000000", "--disable-usage-stats")
        # A client's server is forked beside open channels: with grpcio 1.80 to 1.85 it
        # may die before exec (grpc/grpc issue 43055).
        sound = "GRPC_ENABLE_FORK_SUPPORT=0"
        start = ("env", *TOKEN, sound, RAY, "start", *common, "--num-cpus=2")
        head.run(
            *(*start, "--head", f"--node-ip-address={head.address}", "--port=6379"),
            "--include-dashboard=false",
        )
        variables = (f"{name}={value}" for name, value in far.items())
        other.run(
            *("env", *variables, *start, f"--address={head.address}:6379"),
            *(f"--node-ip-address={other.address}", '--resources={"far": 8}'),
        )
        yield head, other


def wait_for(holds: object, what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until a function is true; AssertionError where it never is."""
    assert callable(holds)
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
