"""Checks that a package's files are the ones that were installed, and compiled.

A full disk, an interrupted installation or two packages that write the same file leave
a library that crashes whatever imports it, in ways that look like other causes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_gkd.clock import monotonic
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment import package_records
from pytest_gkd.workload.environment.package_versions import (
    NEEDED,
    read_installed,
)


def judge_damage(modules: Iterable[str], limit_s: float) -> list[StageFault]:
    """One finding for each distribution of ``modules``, or required by one of them,
    with files that are gone or differ in size from what its installer recorded.

    What has not been checked after ``limit_s`` seconds is skipped: on a slow disk this
    takes long (87 packages with 37 000 files: 0.6 s idle, 6 s on a busy machine).
    """
    deadline = monotonic() + limit_s
    names = dict.fromkeys(
        name for module in modules for name in _with_requirements(module)
    )
    findings = []
    for name in names:
        distribution, _ = package_records.read(name)
        wrong = list(package_records.differences(distribution, deadline))
        if wrong:
            more = f" ({len(wrong)} files like this)" if len(wrong) > 1 else ""
            findings.append(
                StageFault(
                    "env.package-damaged",
                    f"the installed {name} is damaged: {wrong[0]}{more}.",
                    {"package": name, "files": wrong[:20]},
                    tuple((f"{name} RECORD", None, line) for line in wrong[1:4]),
                )
            )
    return findings


def _with_requirements(module: str) -> Iterator[str]:
    """The installed distributions of a module, and what they require directly."""
    for package in read_installed(NEEDED.get(module, (module,))).values():
        needed = (demand.on for demand in package.demands())
        yield from read_installed((canonicalize_name(package.name), *needed))


def uncompiled(packages: Iterable[str]) -> list[str]:
    """The packages whose first module has no bytecode where Python looks for it."""
    missing = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        if not Path(importlib.util.cache_from_source(spec.origin)).exists():
            missing.append(package)
    return missing


def judge_bytecode(
    packages: Iterable[str], environ: Mapping[str, str]
) -> list[StageFault | Note]:
    """Compiling dominates an import's time: without bytecode, torch, transformers,
    datasets and vLLM took 10.3 s of CPU time, and 2.8 s with it (2 cores, Python 3.11,
    torch 2.13), again in every engine, worker and Ray process."""
    missing = uncompiled(packages)
    if not missing:
        return []
    text = f"no compiled bytecode was found for {', '.join(missing)}"
    if environ.get("PYTHONDONTWRITEBYTECODE"):
        text += " and PYTHONDONTWRITEBYTECODE is set: every process that starts "
        text += "compiles them again."
    else:
        text += ": the first process that imports them compiles them."
    return [Note("package.bytecode", text)]
