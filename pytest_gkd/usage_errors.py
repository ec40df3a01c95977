"""What argparse refuses, told in the user's language."""

from __future__ import annotations

import re

from pytest_gkd.language import marked, tr, tr_filled

# What argparse says (Lib/argparse.py, 3.11 to 3.13), and how it is told in a catalogue.
_REFUSALS = (
    (
        r"argument (?P<name>\S+): invalid choice: (?P<value>.+) \(choose from "
        r"(?P<known>.+)\)",
        marked("argument {name}: {value} is none of {known}"),
    ),
    (
        r"argument (?P<name>\S+): invalid \w+ value: (?P<value>.+)",
        marked("argument {name}: {value} is not a value for it"),
    ),
    (
        r"argument (?P<name>\S+): expected (?:one|at least one) argument",
        marked("argument {name}: a value is missing"),
    ),
    (
        r"argument (?P<name>\S+): (?P<problem>.+)",
        marked("argument {name}: {problem}"),
    ),
    (
        r"unrecognized arguments: (?P<words>.+)",
        marked("unrecognized arguments: {words}"),
    ),
    (
        r"the following arguments are required: (?P<names>.+)",
        marked("the following arguments are required: {names}"),
    ),
)


def refusal(message: str) -> str:
    """What argparse says of arguments that it refuses, in the user's language."""
    for pattern, text in _REFUSALS:
        found = re.fullmatch(pattern, message, re.DOTALL)
        if found and tr(text) != text:
            return tr(text).format_map(found.groupdict())
    return tr_filled(message)
