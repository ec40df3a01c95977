"""The machine's monotonic clock, which no test in this process can freeze or move.

freezegun and monkeypatch replace the functions of the ``time`` module, wherever a
module refers to them; this reads the same clock (clock_gettime(2)) past them.
"""

from __future__ import annotations

import time
from functools import partial

monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
