"""Sizes of prompts, as far as they can be told without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

    Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


@dataclass(frozen=True)
class Sizes:
    """How large prompts are: three numbers for each.

    ``ascii_bytes`` and ``other_bytes`` are the UTF-8 bytes of the texts that are ASCII
    and of those that are not; ``messages`` counts the messages, 1 for a text.
    """

    ascii_bytes: Numbers
    other_bytes: Numbers
    messages: Numbers
