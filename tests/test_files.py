"""Files written whole or not at all (pytest_gkd.files)."""

from __future__ import annotations

import json
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd.files import write_json

# A disk that is full, without filling one: no file of this process may grow past 100
# bytes.
WRITES_ON_A_FULL_DISK = """
import pathlib, resource, sys
from pytest_gkd.files import write_json
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
write_json(pathlib.Path(sys.argv[1]), {"new": "x" * 1000})
"""


def test_no_directory_is_made_for_a_file(tmp_path: Path) -> None:
    """That of a report needs its marker."""
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "a/report.json", {"schema": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"old": 1})
    write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"new": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_on_a_full_disk_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"old": 1}')
    done = fresh_python.run("-c", WRITES_ON_A_FULL_DISK, str(path))
    assert "File too large" in done.stderr
    assert json.loads(path.read_text()) == {"old": 1}


def test_data_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"old": 1}')
    with pytest.raises(TypeError):
        write_json(path, {("a", "tuple"): "is no key"})
    assert json.loads(path.read_text()) == {"old": 1}


def test_a_number_that_json_has_not_is_written_as_json(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"loss": float("nan"), "all": [float("inf")]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "r.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert found == {"loss": "nan", "all": ["inf"]}
