"""Work that may block for ever, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
