"""Unchanged files of the frameworks, against their values read by hand.

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

from pytest_gkd.job import check

FACTS = sorted((Path(__file__).parent / "upstream").glob("*.toml"))


def jobs() -> list[Any]:
    found = []
    for path in FACTS:
        facts = tomllib.loads(path.read_text("utf-8"))
        for number, file in enumerate(facts["file"]):
            one = {**facts, **file}
            found.append(pytest.param(one, id=f"{path.stem}-{number}"))
    return found


def job_file(one: dict[str, Any], place: Path, folder: Path) -> Path:
    """The file or, where a page holds a job in some of its lines, these alone."""
    path: Path = place / one["path"]
    if not path.is_file():
        pytest.skip(f"GKD_UPSTREAM has no {one['repository']} with {one['path']}")
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != one["sha256"]:
        pytest.skip(f"{path} is not that of commit {one['commit']}")
    if "lines" not in one:
        return path
    first, last = one["lines"]
    part = folder / f"job{one.get('as', '.sh')}"
    part.write_text("\n".join(raw.decode().split("\n")[first - 1 : last]) + "\n")
    return part


@pytest.mark.parametrize("one", jobs())
def test_an_upstream_file_means_what_was_read_by_hand(
    one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "GKD_UPSTREAM" not in os.environ:
        pytest.skip("GKD_UPSTREAM is not set")
    place = Path(os.environ["GKD_UPSTREAM"], one["repository"].replace("/", "+"))
    path = job_file(one, place, tmp_path)
    # Its relative paths are meant from the top of the repository.
    monkeypatch.chdir(place)
    found = check.check(path, one.get("arguments", ()), one["framework"])
    uncertain = one.get("undetermined", [])
    told = {name: value.value for name, value in found.values.items()}
    assert {name: told.get(name) for name in one["values"]} == one["values"]
    sources = {name: found.values[name].source for name in uncertain}
    assert sources == dict.fromkeys(uncertain, "undetermined")
    if "faults" in one:
        faults = [f for f in found.findings if f.level != "note"]
        keys = [f"{f.level} {f.key.lstrip('-')}" for f in faults]
        assert keys == one["faults"], faults
