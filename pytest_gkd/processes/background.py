"""Runs work in a background thread: once, for what may block, or periodically."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in the background; the future gets its result or exception.

    The thread is a daemon, so one that never returns does not block interpreter exit.
    Where no more threads can be started, the work is done before this returns.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return future


@contextlib.contextmanager
def every(seconds: float, name: str, work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` every ``seconds`` while the block runs; it joins the thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
