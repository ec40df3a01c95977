"""How ``gkd COMMAND --help`` is laid out: like a page of a manual."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


class Formatter(argparse.HelpFormatter):
    """argparse's own, but exit statuses and examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            _filled(line, width, indent) if line else "" for line in text.splitlines()
        )


def _filled(line: str, width: int, indent: str) -> str:
    if line.startswith(("  gkd ", "  pytest ")):
        return indent + line  # an example, to be copied
    status = re.match(r"  \S+ +", line) if line.startswith("  ") else None
    hanging = " " * status.end() if status else ""
    return textwrap.fill(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )


def command(
    commands: Any,
    name: str,
    summary: str,
    details: str = "",
    *,
    exits: Mapping[Any, str],
    examples: Sequence[str],
    see: str,
    **more: Any,
) -> Any:
    """Add a command to argparse's ``commands``; returns its parser.

    ``summary`` begins in lower case and has no full stop; ``exits`` has a text for each
    exit status; ``see`` names what else to read. ``more`` is for argparse.
    """
    statuses = [f"  {status!s:3}  {text}" for status, text in exits.items()]
    ending = ["exit status:", *statuses, "", "examples:"]
    ending += [*(f"  {one}" for one in examples), "", f"see also: {see}"]
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(),
        epilog="\n".join(ending),
        **more,
    )
