"""How a stage says that it knows what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StageFault(Exception):  # noqa: N818 - a finding, not a bug of ours
    """A stage found the cause itself and names it.

    ``cause`` is an id of the catalogue (``data.file-missing``). ``message`` is one
    sentence that names the value, where it came from, and what was expected; it does
    not repeat the advice, which the catalogue holds. ``facts`` are the values that
    the advice may use, such as ``{"column": "prompt", "columns": ["text"]}``; they
    must be JSON. ``evidence`` are the lines that prove it, each ``(source, line
    number or None, text)``.
    """

    def __init__(
        self,
        cause: str,
        message: str,
        *,
        facts: Mapping[str, Any] | None = None,
        evidence: tuple[tuple[str, int | None, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.facts = dict(facts or {})
        self.evidence = evidence
