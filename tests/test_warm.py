"""``gkd warm``: a model's files into the page cache."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gkd.job import warm
from pytest_gkd.job.findings import CheckError

COMMAND = [sys.executable, "-m", "pytest_gkd", "warm"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as the hub's cache has it: links to blobs."""
    place = tmp_path / "model"
    (place / "sub").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(os.urandom(3 * warm.CHUNK + 5))
    (place / "a.safetensors").symlink_to(tmp_path / "blob")
    (place / "sub/config.json").write_text("{}")
    return place


def test_every_byte_is_read_through_links(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = warm.read(model, lambda done, total: seen.append((done, total)))
    assert (found.files, found.bytes) == (2, 3 * warm.CHUNK + 7)
    assert max(seen) == (found.bytes, found.bytes)
    assert found.stays


def test_what_has_no_room_is_told(model: Path) -> None:
    found = warm.read(model, lambda done, total: None)
    found.available = 10
    assert "the first files are evicted" in warm.text(found)


@pytest.mark.parametrize(
    ("name", "says"), [("no", "does not exist"), ("empty", "no files")]
)
def test_nothing_to_read_is_told(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckError, match=says):
        warm.read(tmp_path / name, lambda done, total: None)


def test_a_terminal_has_a_bar_and_a_pipe_has_none(model: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, str(model)], stdout=subprocess.PIPE, stderr=theirs, timeout=60
    )
    assert b"100 % of 0.03 GB" in os.read(ours, 1 << 16)
    assert b"2 file(s), 0.03 GB read in" in done.stdout
    piped = subprocess.run(
        [*COMMAND, str(model), "--format=json"], capture_output=True, timeout=60
    )
    assert piped.stderr == b""
    assert json.loads(piped.stdout)["files"] == 2
