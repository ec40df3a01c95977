"""Says that kernels are being compiled while a stage waits for something to start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import psutil

from pytest_gkd.processes import background

# NVIDIA's and Triton's compilers, and what FlashInfer and torch build extensions with.
COMPILERS = frozenset(
    ("nvcc", "cicc", "ptxas", "fatbinary", "ninja", "cc1plus", "cc1", "clang")
)
EVERY_S = 1.0


@contextlib.contextmanager
def told(say: Callable[[str], None], doing: str, *, on_gpu: bool) -> Iterator[None]:
    """Say what is being done, and that kernels compile while a compiler runs below us.

    A new machine compiles for minutes what later starts take from a cache. Without
    ``on_gpu`` nothing is compiled, and no thread exists when the engine forks.
    """
    say(doing)
    said = doing

    def watch() -> None:
        nonlocal said
        found = compilers()
        text = f"{doing}: compiling kernels ({', '.join(found)})" if found else doing
        if text != said:
            said = text
            say(text)

    watched = background.every(EVERY_S, "gkd-compiling", watch)
    with watched if on_gpu else contextlib.nullcontext():
        yield


def compilers() -> list[str]:
    """The names of the compilers that run below this process now."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found.add(process.name())
    return sorted(found & COMPILERS)
