"""Reuses the engine's lane's vLLM import as the environment stage's evidence.

A second import beside the engine's takes a tenth of a run's total CPU time. Only
success is reused: what fails, hangs or is not reported to the end is imported again by
a child of the environment stage, as when no engine starts beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd import files
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import background, prctl
from pytest_gkd.processes.import_clock import ImportClock
from pytest_gkd.workload import collector
from pytest_gkd.workload.engine import engine_fork
from pytest_gkd.workload.environment import children
from pytest_gkd.workload.environment.children import Reporter
from pytest_gkd.workload.environment.probe import Outcome

# vLLM, and what it imports itself, from the bottom up.
MODULES = ("torch", "safetensors", "tokenizers", "transformers", "vllm")


def _path(run_dir: Path) -> Path:
    return run_dir / "engine-imports.jsonl"


@contextlib.contextmanager
def told(run_dir: Path) -> Iterator[None]:
    """Import what vLLM needs, let the block import vLLM, and report to ``run_dir``.

    What an import alone does not show, such as whether vLLM's kernels load, is checked
    in a fork of this process, which has done nothing but import. Not with GPUs: that
    would initialize CUDA there while the engine measures the GPUs' memory.
    """
    if "vllm" in sys.modules:
        yield
        return
    with _path(run_dir).open("wb", buffering=0) as file:
        reporter = Reporter(file.fileno())
        reporter.say(pid=os.getpid())
        clock = ImportClock(lambda seconds: reporter.say(importing=seconds))
        clock.start()
        try:
            for module in MODULES[:-1]:
                with collector.paused(), _importing(reporter, module):
                    importlib.import_module(module)
            with _importing(reporter, "vllm"):
                yield
        except BaseException:
            reporter.say(given_up=True)
            raise
        finally:
            clock.stop()
        build = sys.modules["torch"].version
        if build.cuda or build.hip or engine_fork.native_threads():
            reporter.say(given_up=True)
        else:
            _look_in_fork(reporter)


@contextlib.contextmanager
def _importing(reporter: Reporter, module: str) -> Iterator[None]:
    reporter.say(begin=f"import {module}")
    started = monotonic()
    yield
    seconds = round(monotonic() - started, 2)
    file = sys.modules[module].__file__
    reporter.say(done=f"import {module}", seconds=seconds, file=file)


def _look_in_fork(reporter: Reporter) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            prctl.die_with_parent()
            children.look_inside(reporter)
        finally:
            os._exit(0)
    background.begin("gkd-fork", lambda: os.waitpid(pid, 0))


class EngineImports:
    """What the engine's lane has reported so far about its imports in this run.

    It may be silent for ``patience_s`` seconds, as it is while a 500 MB library is read
    from a slow disk.
    """

    def __init__(self, run_dir: Path, patience_s: float) -> None:
        self._patience_s = patience_s
        self._path = _path(run_dir)
        self._began = self._advanced = monotonic()
        self._events: tuple[dict[str, Any], ...] = ()
        self._before_s = self.outcome().importing_s

    def _look(self) -> None:
        events = files.read_json_lines(self._path)
        if len(events) > len(self._events):
            self._advanced = monotonic()
        self._events = events

    def _told(self, what: str) -> bool:
        return any(what in event for event in self._events)

    def outcome(self) -> Outcome:
        """The reports so far, in the form of an importing child's outcome."""
        self._look()
        code = 0 if self._told("end") else None
        return Outcome(self._events, code, monotonic() - self._began)

    def importing_s(self) -> float:
        """Seconds spent on imports since this object was created."""
        return self.outcome().importing_s - self._before_s

    def proven(self) -> bool:
        """Whether everything was imported and inspected, and nothing failed."""
        self._look()
        return self._told("end") and not self._told("failed")

    def advances(self) -> bool:
        """Whether it is under way and has reported something recently."""
        self._look()
        return (
            bool(self._events)
            and not self._told("end")
            and not self._told("given_up")
            and psutil.pid_exists(self._events[0]["pid"])
            and monotonic() - self._advanced < self._patience_s
        )
