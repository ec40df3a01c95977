"""Times as people write them in options: ``90``, ``90s``, ``5m``, ``1h``."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(.+?)\s*(s|m|min|h)?", re.DOTALL)


def seconds(text: str) -> float | None:
    """The seconds, a plain number being those; None unless it is a time above 0."""
    found = _SPAN.fullmatch(text.strip())
    try:
        value = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
