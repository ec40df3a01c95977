"""How ``gkd COMMAND --help`` is laid out: like a page of a manual."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gkd.columns import cells, wrapped
from pytest_gkd.language import marked, tr

USAGE = marked("usage: ")


class Formatter(argparse.HelpFormatter):
    """argparse's own, in the user's language; exit statuses and examples keep their
    lines."""

    def format_help(self) -> str:
        # argparse ends its headings in a colon of its own.
        colon = tr(": ").strip()
        return re.sub("(?m)(?<=[^ -~]):$", colon, super().format_help())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            _filled(line, width, indent) if line else "" for line in text.splitlines()
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        if text.isascii():
            return super()._split_lines(text, width)
        return wrapped("", text, width=width)

    def _format_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: str | None
    ) -> str:
        if prefix is not None:
            return super()._format_usage(usage, actions, groups, prefix)
        text = super()._format_usage(usage, actions, groups, USAGE)
        told = tr(USAGE)
        lines = text.removeprefix(USAGE).split(f"\n{' ' * len(USAGE)}")
        return told + f"\n{' ' * cells(told)}".join(lines)


def _filled(line: str, width: int, indent: str) -> str:
    if line.startswith(("  gkd ", "  pytest ")):
        return indent + line  # an example, to be copied
    status = re.match(r"  \S+ +", line) if line.startswith("  ") else None
    first = indent + (status[0] if status else "")
    text = line.removeprefix(status[0] if status else "")
    return "\n".join(wrapped(first, text, " " * len(first), width))


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
    exit status; ``see`` names what else to read. ``more`` is for argparse. All but the
    examples is translated.
    """
    statuses = [f"  {status!s:3}  {tr(text)}" for status, text in exits.items()]
    ending = [tr("exit status:"), *statuses, "", tr("examples:")]
    ending += [
        *(f"  {one}" for one in examples),
        "",
        tr("see also: {see}").format(see=see),
    ]
    told, page = tr(summary), tr("{summary}. {details}")
    return commands.add_parser(
        name,
        help=told,
        description=page.format(
            summary=f"{told[0].upper()}{told[1:]}", details=tr(details)
        ).strip(),
        epilog="\n".join(ending),
        **more,
    )
