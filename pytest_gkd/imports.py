"""How long has this process been importing, and does it still get on with it?"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from pytest_gkd.clock import monotonic

TELL_EVERY_S = 0.5


class ImportClock:
    """Measures what the thread that made it spends on imports, from ``start`` on.

    ``tell`` is called with the seconds so far, at most twice a second and only when an
    import has begun or returned: it stays silent while one hangs.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._thread = threading.get_ident()
        self._depth = 0
        self._begun = self._told = monotonic()
        self._spent_s = 0.0
        self._find: Callable[..., Any] | None = None

    def start(self) -> None:
        # What every import of a module that is not there yet goes through, whether by a
        # statement or by importlib; those that are there already cost nothing.
        self._find = _bootstrap._find_and_load
        _bootstrap._find_and_load = self._watched

    def stop(self) -> None:
        if self._find is not None:
            _bootstrap._find_and_load = self._find

    def _watched(self, name: str, import_: Any) -> Any:
        __tracebackhide__ = True
        assert self._find is not None
        if threading.get_ident() != self._thread:
            return self._find(name, import_)
        now = monotonic()
        if self._depth == 0:
            self._begun = now
        self._depth += 1
        broken_off = False
        try:
            self._said(now)
            return self._find(name, import_)
        except Exception:
            raise  # some packages try what may not be there
        except BaseException:
            broken_off = True  # it hung, and what was no progress does not count
            raise
        finally:
            self._depth -= 1
            now = max(self._told, self._begun) if broken_off else monotonic()
            if self._depth == 0:
                self._spent_s += now - self._begun
            self._said(now)

    def _said(self, now: float) -> None:
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            self._tell(self.seconds(now))

    def seconds(self, now: float | None = None) -> float:
        """Spent so far, with the import that goes on."""
        going_on = self._depth and (monotonic() if now is None else now) - self._begun
        return self._spent_s + going_on


_bootstrap: Any = importlib._bootstrap
