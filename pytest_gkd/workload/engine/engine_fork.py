"""Forks the engine's processes from this one on a CPU, where that is safe.

There vLLM spawns them, and each imports torch and vLLM again: 15 to 17 s on two cores,
where a fork takes 1.2 s. (On a GPU, fork is vLLM's own default.) Forking is safe only
while this process has done nothing but import: once OpenMP threads have run, a forked
child waits for them forever.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gkd.processes import prctl

if TYPE_CHECKING:
    from pytest_gkd.workload.engine.engine_config import EngineConfig

FORKED = "forked"
SPAWNED = "spawned"
VLLMS_CHOICE = "as vLLM chooses"

# pyarrow's allocator runs one, which holds no lock across a fork.
HARMLESS_THREADS = ("jemalloc_bg_thd",)


def choose(config: EngineConfig) -> str:
    """How the engine's processes are started; only the CPU's choice is ours."""
    if config.settings.device != "cpu":
        return VLLMS_CHOICE
    return FORKED if native_threads() == 0 else SPAWNED


def native_threads() -> int:
    """Threads of this process that Python does not know, such as OpenMP's."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    counted = [name for name in names if not name.startswith(HARMLESS_THREADS)]
    # Not threading's list: pytest-xdist's channel runs in threads it does not know.
    return max(0, len(counted) - len(sys._current_frames()))


@contextlib.contextmanager
def chosen(how: str) -> Iterator[None]:
    """While open, vLLM starts processes as ``how`` says.

    Its CPU platform resets the environment variable to spawn, so the function that
    reads it is replaced in every module that imported it. Forked processes, on a GPU
    too, end with their parent: they hold copies of its pipes, and a crash of pytest's
    worker would go unnoticed for as long as they live.
    """
    if how in (FORKED, VLLMS_CHOICE):
        _end_forks_with_parent()
    if how != FORKED:
        yield
        return
    from vllm.utils import system_utils
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    del coordinator, utils, multiproc_executor
    original = system_utils.get_mp_context
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.")
        and getattr(module, "get_mp_context", None) is original
    ]
    fork = functools.partial(multiprocessing.get_context, "fork")
    for module in holders:
        vars(module).update(get_mp_context=fork)
    try:
        yield
    finally:
        for module in holders:
            vars(module).update(get_mp_context=original)


@functools.cache
def _end_forks_with_parent() -> None:
    # This cannot be undone and need not be: nobody forks a daemon from a stage.
    os.register_at_fork(after_in_child=prctl.die_with_parent)
