"""Work in a thread of its own: what may block forever, and what comes again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> Future[T]:
    """Run ``work`` beside what goes on here; its result or exception is the future's.

    The thread is a daemon: one that never returns does not hold the interpreter at its
    exit. Where no thread can be started any more, the work is done before this returns.
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
    """Do ``work`` again and again beside the block, which waits for it at its end."""
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
