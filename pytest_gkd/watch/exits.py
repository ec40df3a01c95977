"""The exit statuses of ``gkd watch``."""

from __future__ import annotations

# A command that was started passes its own on, 128+N where signal N ended it. These are
# in nobody's use that was found: sysexits.h has 64 to 78, shells have 126 and up,
# pytest 0 to 5.
STUCK = 90  # the job stood still and was ended (--on-stuck=end)
DEAD = 91  # an attached job has failed
UNKNOWN = 92  # an attached job has ended, and nothing tells how
LATE = 93  # no training step was done in time, and it was ended (--within)
USAGE = 2
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as a shell says it
SIGNAL = 128
