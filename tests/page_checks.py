"""What a screen reader and a keyboard need of a page (WCAG 2.1, 1.3.1 and 2.1.1)."""

from __future__ import annotations

import itertools
import re


def assert_accessible(page: str) -> None:
    """No level of heading is left out, and what scrolls can be reached by Tab."""
    levels = [1, *map(int, re.findall(r"<h([1-6])", page))]
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), levels
    assert "<pre>" not in page
