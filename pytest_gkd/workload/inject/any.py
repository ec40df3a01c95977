"""What can go wrong in any stage's process: hangs, crashes, children, floods."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

from pytest_gkd.workload.inject.site import Site

CHILDREN = 1000
GIGABYTE = 10**9
WAITS = "import signal; signal.pause()"
IGNORES = """
import signal
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(one, signal.SIG_IGN)
print(flush=True)
while True:
    signal.pause()
"""


def native_hang(site: Site) -> None:
    """Lock a mutex twice, through a library handle that keeps the GIL."""
    _lock_twice(site, ctypes.PyDLL(None))


def native_hang_without_gil(site: Site) -> None:
    """Lock a mutex twice, through a library handle that releases the GIL."""
    _lock_twice(site, ctypes.CDLL(None))


def _lock_twice(site: Site, libc: ctypes.CDLL) -> None:
    mutex = ctypes.create_string_buffer(64)
    site.gkd.step("waiting for a lock in C code")
    site.triggered()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def endless_loop(site: Site) -> None:
    site.gkd.step("running in a circle")
    site.triggered()
    while True:
        pass


def fork_bomb(site: Site) -> None:
    site.gkd.step(f"starting {CHILDREN} children")
    site.triggered()
    for _ in range(CHILDREN):
        if os.fork() == 0:
            signal.pause()
            os._exit(0)
    site.gkd.step(f"waiting for {CHILDREN} children")
    os.wait()


def child_of_its_own_session(site: Site) -> None:
    """Start a child that no signal to this process's group reaches."""
    subprocess.Popen([sys.executable, "-c", WAITS], start_new_session=True)


def daemon(site: Site) -> None:
    """Leave behind a process that nothing links to this one any more."""
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", WAITS], {})  # noqa: S606
        os._exit(0)
    os.waitpid(pid, 0)


def child_that_ignores_sigterm(site: Site) -> None:
    """Start a child that only SIGKILL ends, and hang."""
    child = subprocess.Popen([sys.executable, "-c", IGNORES], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    site.gkd.step("waiting for a child")
    site.triggered()
    child.wait()


def output_of_1_gb(site: Site) -> None:
    site.gkd.step("printing 1 GB")
    line = b"nothing to be seen here, in a line of sixty-four characters ...\n"
    block = line * (1 << 14)
    for _ in range(GIGABYTE // len(block)):
        os.write(1, block)


def output_then_hang(site: Site) -> None:
    output_of_1_gb(site)
    native_hang(site)


def worker_killed(site: Site) -> None:
    """Kill this process as the kernel's OOM killer does."""
    site.triggered()
    os.kill(os.getpid(), signal.SIGKILL)


def worker_crashes(site: Site) -> None:
    site.triggered()
    ctypes.string_at(0)


def signal_controller(site: Site, *, name: str) -> None:
    """Send pytest a signal from within the stage, and wait for the end."""
    site.gkd.step(f"waiting for the end after {name}")
    site.triggered()
    os.kill(os.getppid(), signal.Signals[name])
    signal.pause()


# -- imports -------------------------------------------------------------------------

SLOW = """
import sys, time

class SlowDisk:
    def __init__(self, package, seconds, hangs):
        self.package, self.left_s, self.hangs = package, seconds, hangs

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            while self.hangs:
                time.sleep(600)
            if self.left_s > 0:
                self.left_s -= 0.25
                time.sleep(0.25)
        return None

sys.meta_path.insert(0, SlowDisk({package!r}, {seconds!r}, {hangs!r}))
"""


def imports_slow(
    site: Site, *, package: str, seconds: float, hangs: bool = False
) -> None:
    """A package on a disk that answers every request late, or never.

    Applies to this process and each one it starts; ``seconds`` is the total delay in
    each process that imports it.
    """
    code = SLOW.format(package=package, seconds=seconds, hangs=hangs)
    place = site.folder / "start"
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    before = os.environ.get("PYTHONPATH")
    # After the plugin's own, which gives way to it.
    site.environ("PYTHONPATH", os.pathsep.join([*filter(None, [before]), str(place)]))
    site.replace(sys, "meta_path", list(sys.meta_path))
    exec(code, {})  # noqa: S102 - the lines above
