"""Environments in which no job could run, or that mislead their user."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import platform
import py_compile
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_gkd.processes import tree
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.workload.environment import package_versions, ray_cluster
from pytest_gkd.workload.environment.variables import RAY_DIRECTORY_BYTES
from pytest_gkd.workload.inject.site import Site, checked

# linux/sched.h and linux/mount.h
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

CRASH = "import ctypes; ctypes.string_at(0)\n"
HANG = "from pathlib import Path; Path(__file__).with_name('libtorch.so').open('rb')\n"


# -- packages ------------------------------------------------------------------------


def package_missing(site: Site) -> None:
    packages = _environment_of_links(site)
    for name in package_versions.NEEDED["vllm"]:
        _take_out(packages, name)


def package_contradiction(site: Site) -> None:
    packages = _environment_of_links(site)
    metadata = _own_metadata(packages, "datasets") / "METADATA"
    head, blank, body = metadata.read_text().partition("\n\n")
    least = _lowest("transformers", "huggingface-hub")
    asks = f"Requires-Dist: huggingface-hub<{least}"
    metadata.write_text(f"{head}\n{asks}{blank}{body}")


def package_truncated(site: Site) -> None:
    """tokenizers' compiled half, truncated by a full disk."""
    packages = _environment_of_links(site)
    folder = _own_copy(packages, "tokenizers")
    for library in folder.glob("*.so"):
        os.truncate(library, library.stat().st_size // 2)
    # An earlier stage in this process imported the real one, which is proof enough.
    loaded = sys.modules.pop("tokenizers", None)
    if loaded is not None:
        site.callback(sys.modules.__setitem__, "tokenizers", loaded)


def module_shadowed(site: Site, name: str, source: str) -> None:
    """A user's file precedes the package of the same name on the search path."""
    job = site.folder / "job"
    job.mkdir()
    (job / f"{name}.py").write_text(source)
    site.replace(sys, "path", [str(job), *sys.path])
    importlib.invalidate_caches()


def import_crashes(site: Site) -> None:
    _own_package(_environment_of_links(site), "torch", CRASH)


def import_hangs(site: Site) -> None:
    """A pipe stands in for a library on a file server that does not answer."""
    folder = _own_package(_environment_of_links(site), "torch", HANG)
    os.mkfifo(folder / "libtorch.so")


def _environment_of_links(site: Site) -> Path:
    """A copy of this Python environment made of links, for this process tree.

    In its packages folder entries can be changed without touching the real one.
    """
    root = site.folder / "env"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = root / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (root / "bin").mkdir()
    python = root / "bin" / "python"
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    python.symlink_to(base)
    (root / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n"
        f"version = {platform.python_version()}\n"
    )
    real = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    for folder in real:
        for entry in Path(folder).iterdir():
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    path = [str(packages) if p == real[0] else p for p in sys.path]
    site.replace(sys, "path", [p for p in path if p not in real])
    site.replace(sys, "executable", str(python))
    importlib.invalidate_caches()
    return packages


def _take_out(packages: Path, distribution: str) -> None:
    try:
        files = importlib.metadata.distribution(distribution).files or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for name in {file.parts[0] for file in files} - {".."}:
        (packages / name).unlink(missing_ok=True)


def _own_metadata(packages: Path, distribution: str) -> Path:
    version = importlib.metadata.version(distribution)
    return _own_copy(packages, f"{distribution}-{version}.dist-info")


def _own_copy(packages: Path, name: str) -> Path:
    """A folder that is changed must not be a link to the real one."""
    real = (packages / name).resolve()
    (packages / name).unlink()
    shutil.copytree(real, packages / name)
    return packages / name


def _own_package(packages: Path, name: str, source: str) -> Path:
    (packages / name).unlink()
    (packages / name).mkdir()
    init = packages / name / "__init__.py"
    init.write_text(source)
    py_compile.compile(str(init))
    # A package with this content, not a damaged other one.
    record = _own_metadata(packages, name) / "RECORD"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(x for x in lines if not x.startswith(f"{name}/")))
    return packages / name


def _lowest(distribution: str, wanted: str) -> str:
    """The lowest version of one package that another one accepts."""
    package = package_versions.read_installed([distribution])[distribution]
    asked = next(d.requirement for d in package.demands() if d.on == wanted)
    return next(s.version for s in asked.specifier if s.operator == ">=")


# -- room ----------------------------------------------------------------------------


def disk_full(site: Site) -> None:
    folder = site.folder / "full"
    folder.mkdir()
    _mount_memory(site, folder, "4m")
    with (folder / "old").open("wb") as file, contextlib.suppress(OSError):
        for _ in range(1024):
            file.write(bytes(2**16))
            file.flush()
    site.environ("TMPDIR", str(folder))
    site.replace(tempfile, "tempdir", None)


def small_shm(site: Site, *, size: str) -> None:
    """Like a container without --shm-size, or smaller."""
    _mount_memory(site, Path("/dev/shm"), size)  # noqa: S108 - the place itself


def few_files(site: Site, *, limit: int) -> None:
    """``ulimit -n``; the hard limit stays, so that this can be undone."""
    _limit(site, resource.RLIMIT_NOFILE, limit)


def small_files(site: Site, *, limit: int) -> None:
    """``ulimit -f`` in bytes, for all files; the hard limit stays, as above."""
    _limit(site, resource.RLIMIT_FSIZE, limit)


def _limit(site: Site, kind: int, limit: int) -> None:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    site.callback(resource.setrlimit, kind, before)


def _mount_memory(site: Site, place: Path, size: str) -> None:
    """A small disk there, for this thread and the processes that it starts.

    Nobody else sees it: it is in a mount namespace of its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    directory = Path.cwd()
    site.callback(os.close, before)
    checked(libc.unshare(CLONE_NEWNS))
    # Joining a namespace replaces the working directory with its root.
    site.callback(os.chdir, directory)
    site.callback(libc.setns, before, CLONE_NEWNS)
    checked(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    options = f"size={size},mode=1777".encode()
    checked(libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, options))


# -- variables -----------------------------------------------------------------------


def variable(site: Site, *, name: str, value: str) -> None:
    """As exported in the shell that starts the job."""
    site.environ(name, value)


# -- Ray -----------------------------------------------------------------------------


def ray_left_running(site: Site) -> None:
    """``ray start --head`` by someone who never stopped it."""
    _start_ray(site)


def ray_left_dead(site: Site) -> None:
    """``kill -9`` ended a Ray, and its file still says where to find it."""
    _end(_start_ray(site))


def _end(session: Stat) -> None:
    if left := tree.stop_session(session):
        raise TimeoutError(f"a Ray of our own did not end: {', '.join(left)}")


def _start_ray(site: Site) -> Stat:
    """The session directory of our own Ray, removed with the stage."""
    # Beside the run's own directory: inside, it would count as part of the run.
    folder = site.gkd.run_dir.with_name(site.gkd.run_dir.name + "-r")
    if len(os.fsencode(folder / "ray")) > RAY_DIRECTORY_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="gkd-r-", dir="/tmp"))
    else:
        folder.mkdir()
    site.callback(shutil.rmtree, folder)
    site.environ("RAY_TMPDIR", str(folder))
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--port=0", "--num-cpus=1", "--num-gpus=0"),
        *("--object-store-memory=80000000", "--include-dashboard=false"),
    ]
    with (site.gkd.output_dir / "left-ray.txt").open("wb") as output:
        started = subprocess.Popen(
            command,
            env={**os.environ, **ray_cluster.own_environ(os.environ)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        leader = tree.leader(started.pid)
        site.callback(_end, leader)
        code = started.wait(timeout=60)
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}")
    return leader
