"""Misleading environment variables: one row of variables.toml per variable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


class Remark(NamedTuple):
    """A remark on a variable; ``kind`` is value (a bad one), misread or setting.

    ``ends_job`` is how its reader fails on a bad value, if it does.
    """

    kind: str
    text: str
    ends_job: str = ""


@dataclass(frozen=True)
class Variable:
    """What to say about one variable.

    ``always`` is said whenever it is set; ``when`` maps a value to what is said then.
    ``valid`` is a regular expression for good values (matching the whole value, case
    insensitive) and ``expected`` the same in words. ``ends_job`` is how the program
    that reads it fails at startup on any other value, if it does; ``gpu_only``
    restricts that to jobs on GPUs. ``is_choice`` marks a ``when`` for values that may
    well be intended, ``is_hint`` an ``always`` for a variable that does work.
    """

    name: str
    always: str = ""
    when: Mapping[str, str] = field(default_factory=dict)
    valid: str = ""
    expected: str = ""
    ends_job: str = ""
    gpu_only: bool = False
    is_choice: bool = False
    is_hint: bool = False

    def remarks(self, value: str, *, gpus: bool) -> list[Remark]:
        """The remarks on a value; ``gpus`` is whether the job has any."""
        said = f"{self.name}={value}"
        if self.valid and not re.fullmatch(self.valid, value, re.IGNORECASE):
            ends_job = self.ends_job if gpus or not self.gpu_only else ""
            text = f"{said}: expected {self.expected}"
            return [
                Remark(
                    "value",
                    f"{text}; {ends_job}." if ends_job else f"{text}.",
                    ends_job,
                )
            ]
        found = []
        if self.always:
            found.append(Remark("misread", f"{self.name} {self.always}"))
        if text := self.when.get(value.upper(), ""):
            found.append(Remark("setting", f"{said} {text}"))
        return found


_TABLE = tomllib.loads(Path(__file__).with_name("variables.toml").read_text("utf-8"))


def _variable(name: str, kind: str = "", **own: Any) -> Variable:
    shared = _TABLE["kind"].get(kind, {})
    row = Variable(name, **{**shared, **own})
    return replace(row, always=row.always.replace("{name}", name))


VARIABLES = tuple(_variable(**row) for row in _TABLE["variable"])
GONE_FROM_VLLM: dict[str, str] = _TABLE["gone_from_vllm"]
# Removed variables whose value asks for what is now the only way.
AS_IT_IS = frozenset({("VLLM_USE_V1", "1")})
KNOWN = frozenset({row.name for row in VARIABLES} | set(_TABLE["known"]["names"]))
