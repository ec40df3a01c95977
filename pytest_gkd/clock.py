"""The machine's monotonic clock, which no test in this process can freeze or shift.

freezegun and monkeypatch replace the functions of the ``time`` module wherever a
module refers to them; this bypasses them to read the same clock (clock_gettime(2)).
"""

from __future__ import annotations

import time
from functools import partial

monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
