"""Unchanged files of the frameworks, with what was read in them by hand.

The files are not ours to ship: GKD_UPSTREAM names a folder with the checkouts, each at
the commit that tests/upstream/*.toml tells, as OWNER+NAME.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

FACTS = sorted((Path(__file__).parent / "upstream").glob("*.toml"))


def jobs() -> list[Any]:
    found = []
    for path in FACTS:
        facts = tomllib.loads(path.read_text("utf-8"))
        for number, file in enumerate(facts["file"]):
            one = {**facts, **file}
            found.append(pytest.param(one, id=f"{path.stem}-{number}"))
    return found


def job_file(
    one: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The file or, where a page holds a job in some of its lines, these alone.

    Its relative paths are meant from the top of the repository.
    """
    if "GKD_UPSTREAM" not in os.environ:
        pytest.skip("GKD_UPSTREAM is not set")
    place = Path(os.environ["GKD_UPSTREAM"], one["repository"].replace("/", "+"))
    path: Path = place / one["path"]
    if not path.is_file():
        pytest.skip(f"GKD_UPSTREAM has no {one['repository']} with {one['path']}")
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != one["sha256"]:
        pytest.skip(f"{path} is not that of commit {one['commit']}")
    monkeypatch.chdir(place)
    if "lines" not in one:
        return path
    first, last = one["lines"]
    part = folder / f"job{one.get('as', '.sh')}"
    part.write_text("\n".join(raw.decode().split("\n")[first - 1 : last]) + "\n")
    return part
