"""Collects the environment variable names that the installed packages contain."""

from __future__ import annotations

import importlib.util
import mmap
import re
from pathlib import Path

from pytest_gkd.workload.environment.package_versions import NEEDED, read_installed

# Where read_real_names looks for names with each prefix.
PLACES = {
    "NCCL_": "the installed NCCL library",
    "RAY_": "the installed Ray's raylet and sources",
    "TORCH_NCCL_": "the installed torch's headers",
}


def read_vllm_source() -> tuple[str | None, str]:
    """The text of the installed vllm/envs.py and vLLM's version, without importing
    either."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None, ""
    path = Path(spec.origin).parent / "envs.py"
    installed = [*read_installed(NEEDED["vllm"]).values()]
    version = installed[0].version if installed else ""
    return (path.read_text() if path.exists() else None), version


def read_real_names(prefix: str) -> frozenset[str]:
    """Names with ``prefix`` in the files of the package that reads them.

    NCCL's library, Ray's raylet and Python sources, torch's installed headers. Takes
    some tenths of a second, so it is called only if an unknown name is set.
    """
    pattern = re.compile(prefix.encode() + rb"[A-Za-z0-9_]+")
    names: set[str] = set()
    for path in _files_of(prefix):
        with path.open("rb") as file:
            if path.stat().st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    names.update(found.decode() for found in pattern.findall(text))
    return frozenset(names)


def _files_of(prefix: str) -> list[Path]:
    if prefix == "NCCL_":
        # libnccl is where the nvidia wheels put it; torch's headers add old names.
        return _below("nvidia", "nccl/lib/libnccl.so.*")
    if prefix == "RAY_":
        return _below(
            "ray",
            "core/src/ray/*/raylet",
            "core/src/ray/gcs/gcs_server",
            "*.py",
            "*/*.py",
            "_private/**/*.py",
            "_common/**/*.py",
        )
    headers = "include/torch/csrc/distributed/c10d/*.hpp"
    return _below("torch", headers, headers.replace("*", "**/*"))


def _below(package: str, *patterns: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    found = {
        path
        for place in places or ()
        for pattern in patterns
        for path in Path(place).glob(pattern)
    }
    return [path for path in found if path.is_file()]


def read_interfaces() -> tuple[str, ...]:
    """This machine's network interfaces (those of this network namespace)."""
    return tuple(sorted(p.name for p in Path("/sys/class/net").iterdir()))
