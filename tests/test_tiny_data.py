"""``gkd tiny-data``: the smallest slice of a train file that stands for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import tiny_data
from pytest_gkd.job.findings import CheckError


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"prompt": "x" * (10 + n % 50), "answer": "7", "image": None}
        for n in range(500)
    ]
    found[77]["prompt"] = "y"
    found[301]["prompt"] = "z" * 9000
    found[444]["answer"] = ""
    found[445]["image"] = {"bytes": b"png", "path": None}
    return found


def test_json_lines_are_copied_as_they_are(tmp_path: Path) -> None:
    file, output = tmp_path / "train.jsonl", tmp_path / "tiny.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "a" * n}]})
        for n in range(1, 90)
    ]
    lines[50] = (
        '{"messages":  [{"role": "user", "content": "q"}, '
        '{"role": "assistant", "content": ""}]}'
    )
    lines[60] = "{broken"
    file.write_text("\n".join([*lines, ""]) + "\n")
    before = file.read_bytes()
    found = tiny_data.write(file, output, 8)
    assert file.read_bytes() == before
    kept = output.read_text().splitlines()
    assert kept == [lines[one.row] for one in found.kept]
    assert len(kept) == 8
    why = {one.row: one.why for one in found.kept}
    assert why[88] == "the longest"
    assert why[0] == "the shortest" or why[50] == "the shortest"
    assert "that is not valid JSON" in why[60]
    assert 50 in why
    assert found.rows == 89


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_keeps_its_schema_and_odd_rows(suffix: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import dataset, feather, parquet

    file, output = tmp_path / f"train{suffix}", tmp_path / f"tiny{suffix}"
    table = pyarrow.Table.from_pylist(rows())
    table = table.replace_schema_metadata({"huggingface": "{}"})
    if suffix == ".parquet":
        parquet.write_table(table, file, row_group_size=64)
    else:
        feather.write_feather(table, file, compression="uncompressed")
    found = tiny_data.write(file, output, 6)
    assert [one.row for one in found.kept if "even" not in one.why][-3:] == [
        301,
        444,
        445,
    ]
    again = dataset.dataset(output, format=tiny_data.TABLES[suffix]).to_table()
    assert again.schema.equals(table.schema, check_metadata=True)
    assert again.to_pylist() == [rows()[one.row] for one in found.kept]
    assert {one.row for one in found.kept} >= {77, 301, 444, 445}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    file, output = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text("{}\n")
    output.write_text("mine\n")
    with pytest.raises(CheckError, match="already exists and is kept"):
        tiny_data.write(file, output, 3)
    assert output.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("no.jsonl", None, "does not exist"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.txt", "x", ".txt is not one of .jsonl"),
        ("a.json", "[\n{}]", "is one JSON list"),
        ("a.parquet", "PAR1", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(
    name: str, text: str | None, says: str, tmp_path: Path
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    file, output = tmp_path / name, tmp_path / "out"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckError) as caught:
        tiny_data.write(file, output, 3)
    assert says in str(caught.value)
    assert not output.exists()


def test_the_command_writes_beside_who_calls_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"prompt": "a"}\n' * 40)
    command = [sys.executable, "-m", "pytest_gkd", "tiny-data", "data/train.jsonl"]
    done = subprocess.run(
        [*command, "--rows=3"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.startswith("train.tiny.jsonl: 3 of 40 rows of data/train.jsonl")
    assert len((tmp_path / "train.tiny.jsonl").read_text().splitlines()) == 3
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 2


def test_a_broken_line_is_told_whatever_else_it_is(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"a": "x"}\n{"a": "xx"}\nbroken, and the longest\n')
    found = tiny_data.write(file, tmp_path / "few.jsonl", 16)
    assert found.kept[-1].why == "the longest, a line that is not valid JSON"
