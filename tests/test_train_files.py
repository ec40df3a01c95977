"""What is found wrong with train files: from outside, on loading, and row by row."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import socket
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import fresh_python
import pytest

from pytest_gkd.diagnosis import catalogue, diagnose
from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import (
    dataset_load,
    first_prompts,
    json_lines,
    prompts,
    survey,
    train_files,
    train_rows,
    trainer_notes,
)
from pytest_gkd.workload.inject.data import without_rights_of_root
from pytest_gkd.workload.models import inputs, tiny, tokenizer_load

GOOD = '{"prompt": "What is salt?"}\n'
INI = "gkd_train_files in tox.ini"
# Without the time, which would be in the names of tests.
GZIP_CUT = gzip.compress(GOOD.encode() * 99, mtime=0)[:-9]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


Write = Callable[[str, "str | bytes"], Path]


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def fault_of(*files: Path | str) -> StageFault:
    with pytest.raises(StageFault) as caught:
        train_files.check_files([str(file) for file in files], "--gkd-train-files")
    json.dumps(caught.value.facts)
    return caught.value


def rows_fault(*files: Path, batch_size: int = 1, **options: Any) -> StageFault:
    with pytest.raises(StageFault) as caught:
        report(*files, batch_size=batch_size, **options)
    json.dumps(caught.value.facts)
    return caught.value


def rows_in(*files: Path) -> dataset_load.Rows:
    found = train_files.check_files([str(file) for file in files], "--gkd-train-files")
    return dataset_load.open_rows(found, files[0].parent / "cache")


def report(
    *files: Path,
    column: str | None = None,
    limit: int = 100,
    batch_size: int = 1,
    lengths: prompts.RoughRenderer | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> train_rows.DataReport:
    return train_rows.check_rows(
        rows_in(*files),
        lengths or prompts.RoughRenderer(),
        prompt_column=column,
        max_prompt_length=limit,
        batch_size=batch_size,
        origin=Settings().origin,
        progress=progress,
    )


# From outside.


def test_a_missing_file_is_named_with_its_near_neighbour(write: Write) -> None:
    path = write("train.jsonl", GOOD)
    write("train.log", b"of the run before")
    fault = fault_of(path.with_name("Train.json"))
    assert fault.cause == "data.file-missing"
    assert fault.facts["near"] == [str(path)]
    assert fault.message.startswith("--gkd-train-files: ")


@pytest.mark.parametrize("name", ["trian.jsonl", "trian.csv", "deep/er/x.parquet"])
def test_the_advice_for_a_missing_file_is_for_that_file(
    write: Write, name: str
) -> None:
    path = write("train" + Path(name).suffix, GOOD)
    fault = fault_of(path.parent / name)
    fixes = diagnose.advice(
        catalogue.load()["data.file-missing"],
        diagnose.STAGE_FRAMEWORKS,
        fault.facts,
        stage="data",
    )
    near = [f"--gkd-train-files={path}"] if name.startswith("trian") else []
    wanted = [*near, f"ls -l {path.parent}", f"ls -l {path.parent / name}"]
    assert [fix.rpartition(": ")[2] for fix in fixes] == wanted
    assert "parquet, JSON, CSV or Arrow" in fault.message


def test_a_glob_names_every_file_it_matches(write: Write, tmp_path: Path) -> None:
    write("b.jsonl", GOOD)
    write("a.jsonl", GOOD)
    found = train_files.check_files([str(tmp_path / "*.jsonl")], "x")
    assert [Path(file.path).name for file in found] == ["a.jsonl", "b.jsonl"]


def test_a_glob_without_a_match_is_a_missing_file(tmp_path: Path) -> None:
    assert fault_of(tmp_path / "*.parquet").cause == "data.file-missing"


def test_a_name_that_datasets_takes_for_a_pattern_is_told(write: Write) -> None:
    fault = fault_of(write("train[1].jsonl", GOOD))
    assert fault.cause == "data.file-missing"
    assert "exists, but datasets takes its name for a pattern" in fault.message


def test_a_link_to_itself_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to("train.jsonl")
    assert fault_of(tmp_path / "train.jsonl").cause == "data.file-missing"


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_packed_is_read_whatever_its_name(write: Write, name: str) -> None:
    assert report(write(name, gzip.compress(GOOD.encode() * 5))).rows == 5


def test_a_directory_of_shards_is_loaded_whole_and_its_files_are_looked_at(
    tmp_path: Path,
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        write_parquet(shards / f"train-{number}.parquet", {"prompt": ["a", "b"]})
    assert report(shards).rows == 6
    (shards / "train-1.parquet").write_bytes(b"PAR1 cut off")
    assert "train-1.parquet is truncated" in fault_of(shards).message


def test_of_a_directory_only_the_files_that_datasets_reads_are_looked_at(
    tmp_path: Path,
) -> None:
    shards = tmp_path / "shards"
    hidden = shards / ".cache/huggingface/download"
    hidden.mkdir(parents=True)
    write_parquet(shards / "train.parquet", {"prompt": ["a", "b"]})
    (hidden / "train.parquet.lock").touch()
    (hidden / "train.parquet.metadata").write_text("a commit")
    (shards / "labels.json").write_text("no JSON")
    assert report(shards).rows == 2


def test_a_directory_without_data_is_not_one(write: Write, tmp_path: Path) -> None:
    assert fault_of(tmp_path).cause == "data.file-missing"
    write("config.json", "{}")
    assert "a model's directory" in fault_of(tmp_path).message


def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    os.mkfifo(path)
    fault = fault_of(path)  # opening it would not return
    assert fault.cause == "data.loader-stall"
    assert fault.facts["file_type"] == "a pipe"


def test_a_socket_is_not_a_train_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert fault_of(path).cause == "data.loader-stall"


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_a_file_without_rows_is_empty(write: Write, content: str) -> None:
    assert fault_of(write("train.jsonl", content)).cause == "data.empty"


def test_an_unreadable_file_is_a_matter_of_permission(write: Write) -> None:
    path = write("train.jsonl", GOOD)
    path.chmod(0)
    with without_rights_of_root():
        assert fault_of(path).cause == "env.permission"


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("t.parquet", b"PAR1" + b"x" * 100, "truncated"),
        ("t.parquet", b"PAR1PAR1", "truncated"),
        ("t.parquet", b"PAR1" + b"\xff\xff\xff\x7fPAR1", "damaged"),
        ("t.parquet", GOOD, "not parquet"),
        ("t.jsonl", b"PAR1" + b"\0" * 8 + b"PAR1", "its name says JSON"),
        ("t.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs"),
        ("t.jsonl", b"<!DOCTYPE html>", "HTML"),
        ("t.jsonl", GOOD.encode("utf-16"), "UTF-16"),
        ("t.jsonl", b"PK\x03\x04....", "zip"),
        ("t.txt", "prompt,answer\na,b\n", "not JSON"),
        ("t.arrow", GOOD, "is no Arrow file"),
        ("t.jsonl.gz", GZIP_CUT, "cannot be unpacked"),
        ("t.json", '[{"prompt": "a"}, {"pro', "not a JSON array"),
        (
            "t.jsonl",
            GOOD + '{"prompt": "a \\ud83d b"}\n',
            ":2 holds \\ud83d, half of a",
        ),
        ("t.jsonl", GOOD + '{"a": {"b": 1, "b": 2}}\n', ":2 has the key 'b' twice"),
    ],
)
def test_content_that_is_not_what_it_should_be_is_corrupt(
    write: Write, name: str, content: str | bytes, part: str
) -> None:
    fault = fault_of(write(name, content))
    assert fault.cause == "data.corrupt"
    assert part in fault.message


def test_a_bad_line_is_named_by_number_with_its_text(write: Write) -> None:
    path = write("t.jsonl", GOOD + "\n" + GOOD + "{'prompt': 'python'}\n" + GOOD)
    fault = fault_of(path)
    assert fault.cause == "data.corrupt"
    assert f"{path}:4 is not JSON" in fault.message
    assert fault.evidence == ((str(path), 4, "{'prompt': 'python'}"),)


def test_a_last_line_that_stops_short_was_cut_off(write: Write) -> None:
    fault = fault_of(write("t.jsonl", GOOD * 2 + '{"prompt": "What'))
    assert "t.jsonl:3 is cut off" in fault.message


def test_a_cut_off_end_is_seen_in_a_file_too_large_to_read_first(write: Write) -> None:
    fault = fault_of(write("t.jsonl", GOOD * 20_000 + '{"prompt": "What'))
    assert "t.jsonl:20001 is cut off" in fault.message


def test_a_byte_that_is_not_utf8_is_named_by_line(write: Write) -> None:
    fault = fault_of(write("t.jsonl", GOOD.encode() + b'{"prompt": "caf\xe9"}\n'))
    assert fault.cause == "data.corrupt"
    assert "t.jsonl:2 is not UTF-8: byte 0xe9" in fault.message


def test_a_line_that_is_no_object_has_no_columns(write: Write) -> None:
    fault = fault_of(write("t.jsonl", GOOD + '"just text"\n'))
    assert fault.cause == "data.schema"
    assert ":2 holds a JSON str" in fault.message


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD.encode(),
        json.dumps([{"prompt": "a"}], indent=1).encode(),
        gzip.compress(GOOD.encode(), mtime=0),
    ],
    ids=["byte order mark", "indented array", "gzip"],
)
def test_other_spellings_of_json_are_taken(write: Write, content: bytes) -> None:
    assert (
        train_files.check_files([str(write("t.json", content))], "x")[0].kind == "json"
    )


def test_a_missing_file_is_reported_without_heavy_imports(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pytest_gkd.workload.data import lengths, train_files, train_rows\n"
        "from pytest_gkd.stage_api import StageFault\n"
        f"try: train_files.check_files([{str(tmp_path / 'x')!r}], 'x')\n"
        "except StageFault as fault: print(fault.cause)\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'datasets'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    assert fresh_python.output(code).split() == ["data.file-missing", "[]"]


# Loading and rows.


def test_every_row_counts_and_both_formats_load_together(
    write: Write, tmp_path: Path
) -> None:
    parquet = write_parquet(tmp_path / "a.parquet", {"prompt": ["one", "two"]})
    found = report(parquet, write("b.jsonl", GOOD * 3))
    assert (found.rows, found.fitting_rows, found.kind) == (5, 5, "text")


def test_a_bad_line_deep_in_a_file_is_named_when_loading_fails(write: Write) -> None:
    middle = GOOD * 30_000 + "oops\n" + GOOD * 30_000
    fault = rows_fault(write("t.jsonl", middle))
    assert fault.cause == "data.corrupt"
    assert "t.jsonl:30001 is not JSON" in fault.message


def test_a_parquet_file_with_a_damaged_page_is_named(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "a.parquet", {"prompt": ["x"] * 9})
    bad = write_parquet(
        tmp_path / "b.parquet", {"prompt": [f"p{i}" for i in range(999)]}
    )
    raw = bytearray(bad.read_bytes())
    raw[4:200] = b"\xff" * 196
    bad.write_bytes(raw)
    fault = rows_fault(good, bad)
    assert fault.cause == "data.corrupt"
    assert str(bad) in fault.message


@pytest.mark.parametrize("columns", [["prompt"], ["prompt", "answer"]])
def test_a_parquet_file_without_rows_is_empty_whatever_its_types(
    tmp_path: Path, columns: list[str]
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {name: [] for name in columns})
    fault = rows_fault(path)
    assert fault.cause == "data.empty"
    assert fault.facts["path"] == str(path)


def test_no_prompt_column_lists_what_there_is(write: Write) -> None:
    path = write("t.jsonl", '{"ask": "a", "answer": "b"}\n')
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert str(path) in fault.message
    assert fault.facts == {
        "prompt_column": "prompt",
        "columns": ["ask", "answer"],
        "column": "",
        "path": str(path),
    }


def test_a_named_column_that_is_missing_has_its_near_name(write: Write) -> None:
    fault = rows_fault(write("t.jsonl", GOOD), column="promt")
    assert "--gkd-prompt-column" in fault.message
    assert "did you mean 'prompt'" in fault.message


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": None}, "is null"),
        ({"prompt": "  "}, "is empty"),
        ({"other": 1}, "is null"),
    ],
)
def test_an_unusable_row_is_named_by_file_and_line(
    write: Write, row: dict[str, Any], part: str
) -> None:
    path = write("t.jsonl", GOOD + "\n" + GOOD + json.dumps(row) + "\n" + GOOD)
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert fault.message.startswith(f"{path}:4: column 'prompt' ")
    assert part in fault.message
    assert fault.facts["row"] == 2


def test_a_row_of_another_type_is_named_by_line(write: Write) -> None:
    fault = rows_fault(write("t.jsonl", GOOD * 3 + '{"prompt": 5}\n' + GOOD))
    assert fault.cause == "data.schema"
    assert "t.jsonl:4: column 'prompt' is int 5" in fault.message


def test_a_type_that_makes_datasets_fail_is_named_by_line(write: Write) -> None:
    # The blank line makes datasets fail with "Expected object or value".
    fault = rows_fault(write("t.jsonl", GOOD + "\n" + GOOD + '{"prompt": 5}\n'))
    assert fault.cause == "data.schema"
    assert "t.jsonl:4: column 'prompt' is '5', a number" in fault.message


def test_a_row_of_the_second_parquet_file_is_counted_from_its_start(
    tmp_path: Path,
) -> None:
    first = write_parquet(tmp_path / "a.parquet", {"prompt": ["x"] * 3})
    second = write_parquet(tmp_path / "b.parquet", {"prompt": ["x", None, None]})
    fault = rows_fault(first, second)
    assert fault.message.startswith(f"{second} row 1: ")
    assert fault.facts["bad_rows"] == 2


def test_a_column_of_numbers_holds_no_prompts(write: Write) -> None:
    fault = rows_fault(write("t.jsonl", '{"prompt": 1}\n{"prompt": 2}\n'))
    assert fault.cause == "data.schema"
    assert "of type int" in fault.message


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "without messages"),
        ([{"role": "assistant", "content": "a"}], "without a turn of the user"),
        ([{"content": "a"}], "message 0 has no role"),
        ([{"from": "human", "value": "a"}], "it has from, value"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": " "}], "message 0 has no text"),
        ([{"role": "user", "content": 3}], "message 0 has int 3 as content"),
        (["hello"], "message 0 is str 'hello'"),
    ],
)
def test_badly_formed_messages_are_told_apart(messages: list[Any], part: str) -> None:
    assert part in prompts.problem(messages, "messages")


def test_a_tool_may_return_nothing(write: Write) -> None:
    silent = [{"role": role, "content": ""} for role in prompts.SILENT]
    assert "tool" in prompts.SILENT
    assert prompts.problem([USER, *silent], "messages") == ""
    path = write("t.jsonl", rows_of({"messages": [USER, *silent]}))
    rows = rows_in(path)
    (table,) = rows.tables(["messages"])
    seen = survey.survey(table.column(0).combine_chunks())
    assert seen is not None
    assert not len(seen.odd)


@pytest.mark.parametrize(
    "silent",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
        {"role": "tool", "content": None},
    ],
)
def test_a_call_or_a_tool_may_have_no_content(
    write: Write, silent: dict[str, Any]
) -> None:
    path = write("t.jsonl", rows_of({"prompt": [USER, silent, USER]}))
    assert report(path).kept_rows == 1
    kept = prompts.as_messages([USER, silent | {"name": None}, USER])[1]
    assert kept == silent  # templates ask whether the content is none
    mute = {"role": "assistant", "content": None}
    assert "no content" in prompts.problem([USER, mute, USER], "messages")


def test_bad_messages_are_found_through_datasets(write: Write) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"
    bad = json.dumps({"messages": [{"role": "user", "text": "a"}]}) + "\n"
    fault = rows_fault(write("t.jsonl", good * 5 + bad))
    assert "t.jsonl:6: column 'messages'" in fault.message
    assert "it has role, text" in fault.message


def test_fewer_rows_than_a_batch_are_too_few(write: Write) -> None:
    fault = rows_fault(write("t.jsonl", GOOD * 3), batch_size=4)
    assert fault.cause == "data.empty"
    assert fault.facts == {"rows": 3, "batch_size": 4}


class Words(prompts.RoughRenderer):
    """One token per word; the bound is the number of bytes."""

    def __init__(self) -> None:
        self.measured = 0

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        self.measured += len(prompts)
        return [len(prompt.split()) for prompt in prompts]

    def bounds(self, sizes: prompts.Sizes) -> Any:
        return sizes.ascii_bytes + sizes.other_bytes


class Turns(Words):
    """Of a student whose template knows no roles but those that all know."""

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        return [1] * len(prompts)

    def takes(self, role: str) -> bool:
        return False


def lines(*texts: str) -> str:
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def test_prompts_over_the_limit_are_counted_and_the_rest_kept(write: Write) -> None:
    path = write("t.jsonl", lines("a b c", "a b c d e f", "abcdefgh"))
    found = report(path, limit=4, lengths=Words())
    assert (found.fitting_rows, found.too_long_rows, found.longest_tokens) == (2, 1, 6)
    # The outlier is dropped: what must fit into the context is the longest that stays.
    assert found.longest_fitting_tokens == 3


def test_a_batch_that_the_length_filter_leaves_short_names_the_numbers(
    write: Write,
) -> None:
    path = write("t.jsonl", lines("a b c d e", "a b c d e f", "a"))
    fault = rows_fault(path, limit=4, batch_size=2, lengths=Words())
    assert fault.cause == "data.too-long"
    assert fault.facts == {
        "rows": 3,
        "fitting_rows": 1,
        "measured_rows": 3,
        "limit_tokens": 4,
        "shortest_too_long_tokens": 5,
        "longest_tokens": 6,
        "batch_size": 2,
    }


def test_only_a_sample_of_many_rows_is_cut_into_tokens(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_rows, "MEASURED_ROWS", 10)
    path = write("t.jsonl", lines(*["abcdefgh"] * 1000))
    words = Words()
    found = report(path, limit=4, lengths=words)
    assert found.measured_rows == words.measured <= 21
    assert found.unsure_rows == 1000 - found.measured_rows


def test_what_was_not_measured_is_estimated_and_said_to_be(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_rows, "MEASURED_ROWS", 200)
    # Every second one is too long: a sample with an even stride would see one kind.
    path = write("t.jsonl", lines(*["a b c d e f", "abcdefgh"] * 2000))
    found = report(path, limit=4, lengths=Words())
    assert found.kept_rows == pytest.approx(2000, abs=600)
    assert found.kept_rows > found.fitting_rows
    assert str(found).startswith(f"about {found.kept_rows} of 4000 prompts fit (estim")
    assert report(path, limit=4, lengths=Words()) == found


def test_a_batch_larger_than_the_sample_is_found_among_those_that_may_not_fit(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_rows, "MEASURED_ROWS", 10)
    path = write("t.jsonl", lines(*["abcdefgh"] * 1000))
    found = report(path, limit=4, batch_size=500, lengths=Words())
    assert found.fitting_rows >= 500


def test_of_few_rows_all_are_measured(write: Write) -> None:
    path = write("t.jsonl", lines(*["a b c d e f", "abcdefgh"] * 300))
    found = report(path, limit=4, lengths=Words())
    assert (found.kept_rows, found.unsure_rows) == (300, 0)
    assert str(found).startswith("300 of 600 prompts fit, column")


def test_a_prompt_that_cannot_fit_is_not_cut_into_tokens(write: Write) -> None:
    words = Words()
    found = report(
        write("t.jsonl", lines("a b", "c " * 50_000)), limit=4, lengths=words
    )
    assert (found.kept_rows, found.too_long_rows, words.measured) == (1, 1, 1)


def test_progress_is_told_as_rows_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_load, "TABLE_ROWS", 10)
    told: list[int] = []
    report(write("t.jsonl", GOOD * 25), progress=told.append)
    assert told == [10, 20, 25]


# Forms of conversations and the columns that common datasets have.

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def rows_of(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"instruction": "i", "input": "", "output": "o"}, "instruction + input"),
        (
            {"instruction": "i", "context": "c", "response": "r"},
            "instruction + context",
        ),
        ({"instruction": "i", "output": "o"}, "instruction"),
        ({"question": "q", "answer": "a"}, "question"),
        ({"problem": "q", "solution": "s", "answer": "a"}, "problem"),
        ({"query": "q", "response": "r"}, "query"),
        ({"input": "q", "label": "l"}, "input"),
        ({"context_messages": [USER]}, "context_messages"),
        ({"messages": [USER, ANSWER], "id": 1}, "messages"),
        ({"conversations": [USER, ANSWER]}, "conversations"),
        ({"prompt": "q", "completion": "c"}, "prompt"),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "chosen"),
        (
            {"data_source": "x", "prompt": [USER], "reward_model": {"style": "rule"}},
            "prompt",
        ),
        ({"text": "t"}, "text"),
    ],
)
def test_the_prompt_column_of_common_datasets_is_found(
    write: Write, row: dict[str, Any], column: str
) -> None:
    found = report(write("t.jsonl", rows_of(*[row] * 5)))
    assert (found.column, found.kept_rows) == (column, 5)


def test_an_instruction_and_its_input_are_one_prompt() -> None:
    column = prompts.choose_column(["instruction", "input"], None, "x")
    assert (
        column.of({"instruction": "Sum up.", "input": "A text."}) == "Sum up.\nA text."
    )
    assert column.of({"instruction": "Sum up.", "input": ""}) == "Sum up."
    assert column.of({"instruction": "", "input": None}) is None


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"messages": [{"role": "human", "content": "q"}]}, "role 'human'"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "as ShareGPT"),
        ({"prompt": json.dumps([USER])}, "text that spells out a list of messages"),
        ({"prompt": str([USER])}, "text that spells out a list of messages"),
        ({"prompt": [USER, ANSWER]}, "the answer is in the prompt"),
        ({"prompt": "q", "data_source": "x", "reward_model": {}}, "data made for verl"),
        ({"prompt": [[USER]]}, "message 0 is list"),
        ({"chosen": "Human: q\n\nAssistant: a"}, "holds question and answer"),
        ({"prompt": [{**USER, "role": "system"}]}, "without a turn of the user"),
        ({"prompt": {"role": "user", "content": "q"}}, "of type dict"),
    ],
)
def test_a_form_that_trainers_read_otherwise_is_told(
    write: Write, row: dict[str, Any], part: str
) -> None:
    fault = rows_fault(write("t.jsonl", rows_of(*[row] * 5)), lengths=Turns())
    assert fault.cause == "data.schema"
    assert part in fault.message
    # Where every row is so, no advice is to drop them.
    assert "some_rows" not in fault.facts


def test_the_first_row_with_a_strange_role_is_told(write: Write) -> None:
    human = {"role": "human", "content": "q"}
    plain = [{"messages": [USER, ANSWER]}] * 3
    odd = {"messages": [{**USER, "tool": {"a": 1}}, human]}  # no plain type
    for last in ({"messages": [USER, human]}, odd):
        path = write("t.jsonl", rows_of(*plain, last, last))
        fault = rows_fault(path, lengths=Turns())
        assert "t.jsonl:4: column 'messages' has messages of role" in fault.message


def test_a_type_that_datasets_lacks_is_a_matter_of_schema(tmp_path: Path) -> None:
    import pyarrow

    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    column = pyarrow.array([[("role", "user")]], kind)
    fault = rows_fault(write_parquet(tmp_path / "a.parquet", {"prompt": column}))
    assert fault.cause == "data.schema"
    assert "map<string, string" in fault.message


def test_the_made_students_template_takes_what_chats_hold(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    load = tokenizer_load.load
    renderer = prompts.Renderer(
        load(str(tmp_path / "student"), "x", trust_remote_code=False)
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    tool = {"role": "tool", "content": "3"}
    rendered = renderer.text([{"role": "user", "content": parts}, call, tool])
    assert "user\none two<|im_end|>" in rendered
    assert "tool\n3<|im_end|>" in rendered


def test_text_in_arrows_newest_layout_is_read(tmp_path: Path) -> None:
    import pyarrow

    texts = pyarrow.array(["one", "two"], pyarrow.string_view())
    assert report(write_parquet(tmp_path / "a.parquet", {"prompt": texts})).rows == 2


CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "taken"),
    [
        ("", "human", True),  # nothing to know a role by
        (CHATML, "critic", True),
        (CHATML, "human", False),  # which is the user elsewhere
        (CHATML, "User", False),
        (CHATML + "{% if role == 'gpt' %}{% endif %}", "gpt", True),
        (
            "{% for m in messages if m['role'] == 'user' %}x{% endfor %}",
            "critic",
            False,
        ),
        ("{{ raise_exception('only user') }}", "critic", False),
    ],
)
def test_what_a_chat_template_does_with_a_role_is_tried(
    tmp_path: Path, template: str, role: str, taken: bool
) -> None:
    tiny.write(tmp_path)
    student = str(tmp_path / "student")
    tokenizer = tokenizer_load.load(student, "x", trust_remote_code=False)
    tokenizer.chat_template = template or None
    assert prompts.Renderer(tokenizer).takes(role) is taken


def test_without_a_tokenizer_no_role_is_strange(write: Write) -> None:
    row = {"messages": [USER, {"role": "critic", "content": "1"}]}
    assert report(write("t.jsonl", rows_of(row))).rows == 1


def test_text_that_is_not_utf8_is_told_by_row(tmp_path: Path) -> None:
    import pyarrow

    raw = pyarrow.array([b"ok", b"caf\xe9"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, *raw.buffers()[1:])
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": texts}), tmp_path / "a.parquet"
    )
    fault = rows_fault(tmp_path / "a.parquet")
    assert fault.cause == "data.corrupt"
    assert "a.parquet row 1 is not UTF-8" in fault.message


@pytest.mark.parametrize("kind", ["csv", "arrow", "disk", "dict", "folder"])
def test_what_else_datasets_reads_is_read(tmp_path: Path, kind: str) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"prompt": ["one", "two, and more"]})
    path = tmp_path / f"data.{kind}"
    if kind == "csv":
        made.to_csv(path)
    elif kind == "folder":
        path.mkdir()
        made.to_json(path / "train.jsonl")
    elif kind == "dict":
        datasets.DatasetDict({"train": made, "test": made}).save_to_disk(path)
    else:
        made.save_to_disk(tmp_path / "data.disk")
        if kind == "arrow":
            path = next((tmp_path / "data.disk").glob("*.arrow"))
    assert report(path).rows == 2


def test_several_configurations_are_told_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "x.jsonl").write_text(GOOD)
    configs = "".join(
        f"- config_name: {name}\n  data_files: {name}/*\n" for name in "ab"
    )
    (tmp_path / "d/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    fault = rows_fault(tmp_path / "d")
    assert fault.cause == "data.file-missing"
    assert "['a', 'b']" in fault.message


def test_splits_without_one_for_training_are_told(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"prompt": ["one"]})
    datasets.DatasetDict({"test": made, "dev": made}).save_to_disk(tmp_path / "d")
    fault = rows_fault(tmp_path / "d")
    assert fault.cause == "data.schema"
    assert "no split train; it has test, dev" in fault.message


@pytest.mark.needs("datasets")
@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("HF_ENDPOINT", "http://127.0.0.1:9", "cannot be reached"),
        ("HF_HUB_OFFLINE", "1", "OfflineModeIsEnabled"),
    ],
)
def test_a_name_that_no_hub_answers_for_is_told_at_once(
    tmp_path: Path, variable: str, value: str, part: str
) -> None:
    # A process of its own: datasets reads these variables when it is imported.
    code = (
        "from pathlib import Path; from pytest_gkd.stage_api import StageFault\n"
        "from pytest_gkd.workload.data import dataset_load, train_files\n"
        f"files = train_files.check_files(['no-such-lab/no-such-data'], {INI!r})\n"
        f"try: dataset_load.open_rows(files, Path({str(tmp_path)!r}))\n"
        "except StageFault as fault: print(fault.cause, fault.message)"
    )
    environ = {variable: value, "NO_PROXY": "*", "HF_HOME": str(tmp_path)}
    said = fresh_python.output(code, environ, tmp_path)
    # What only the loader finds out is not blamed on the command line either.
    assert said.startswith(f"env.hub-unreachable {INI}: no-such-lab/no-such-data ")
    assert part in said


def test_a_wrong_path_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/prompts", "some/train.parquet", "train"):
        assert fault_of(name).cause == "data.file-missing"


def test_images_are_not_for_a_student_that_reads_text(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    student = tmp_path / "student"
    images = [[{"bytes": b"x"}], []]
    path = write_parquet(
        tmp_path / "a.parquet", {"prompt": ["a", "b"], "images": images}
    )
    rows = rows_in(path)
    job = inputs.Inputs(str(student), str(student), (str(path),))
    with pytest.raises(StageFault, match="filled in 1 of the first 2 rows"):
        trainer_notes.check_media(rows, job)
    made = dataclasses.replace(job, made=("student",))
    assert trainer_notes.check_media(rows, made) == []
    (student / "preprocessor_config.json").write_text("{}")
    assert trainer_notes.check_media(rows, job) == []


def media_of(tmp_path: Path, columns: dict[str, Any]) -> list[str]:
    tiny.write(tmp_path)
    student = str(tmp_path / "student")
    prompts_of = ["a"] * len(next(iter(columns.values())))
    path = write_parquet(tmp_path / "a.parquet", {"prompt": prompts_of, **columns})
    rows = rows_in(path)
    job = inputs.Inputs(student, student, (str(path),))
    return [note.text for note in trainer_notes.check_media(rows, job)]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("images", [["a", "b"], [], None]),
        ("image", [b"bytes", b"", None]),
        ("image", [{"bytes": b"x", "path": None}, None, None]),
        ("videos", [["a.mp4"], [], None]),
    ],
)
def test_filled_media_are_counted_in_the_first_rows_only(
    tmp_path: Path, column: str, values: list[Any]
) -> None:
    with pytest.raises(StageFault, match="filled in 334 of the first 1000 rows") as one:
        media_of(tmp_path, {column: values * 500})
    assert ("TRL" in one.value.message) == (column != "videos")
    assert ("verl" in one.value.message) == (column != "image")


def test_media_that_trainers_do_not_stop_for_are_noted(tmp_path: Path) -> None:
    (said,) = media_of(tmp_path, {"audio": ["a.wav"], "video": ["a.mp4"]})
    assert said.startswith("Columns 'video' and 'audio' are no part of a prompt")
    assert "TRL" not in said


def test_parts_of_messages_that_are_no_text_are_noted(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    for content, count in ((parts, 1), (parts[1:], 0)):
        path = tmp_path / f"parts-{count}.jsonl"
        path.write_text(rows_of({"messages": [{"role": "user", "content": content}]}))
        tiny.write(tmp_path / str(count))
        student = tmp_path / str(count) / "student"
        rows = rows_in(path)
        job = inputs.Inputs(str(student), str(student), (str(path),))
        notes = trainer_notes.check_media(rows, job)
        assert [note.id for note in notes] == ["data.media-parts"] * count


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    table = pyarrow.Table.from_arrays([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, path)
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert "two columns of the name 'prompt'" in fault.message


@pytest.mark.parametrize("pack", [gzip, lzma, bz2])
def test_a_packed_file_that_breaks_off_far_from_its_start_is_corrupt(
    write: Write, pack: Any
) -> None:
    text = "".join(lines(os.urandom(30).hex()) for _ in range(3000)).encode()
    suffix = {gzip: "gz", lzma: "xz", bz2: "bz2"}[pack]
    fault = rows_fault(write(f"t.jsonl.{suffix}", pack.compress(text)[:-9]))
    assert fault.cause == "data.corrupt"
    assert "cannot be unpacked" in fault.message


@pytest.mark.parametrize("name", ["t.zip", "t.jsonl"])
def test_json_in_a_zip_archive_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside.jsonl", GOOD * 3)
    assert report(path).rows == 3
    files = train_files.check_files([str(path)], "x")
    assert len(list(dataset_load.first_rows(files))) == 3
    path = tmp_path / f"bad-{name}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside.jsonl", GOOD + '{"prompt": null}\n')
    assert f"{path} row 1: column 'prompt' is null" in rows_fault(path).message
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("inside.txt", "no data")
    assert "is a zip archive" in fault_of(path).message


@pytest.mark.parametrize("first", ["a.json", "a.zip", "a.parquet", "a.jsonl"])
def test_a_row_of_the_second_file_is_found_there(write: Write, first: str) -> None:
    path = write(first, json.dumps([json.loads(GOOD)] * 3))
    if first.endswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inside.jsonl", GOOD * 3)
    elif first.endswith("parquet"):
        write_parquet(path, {"prompt": ["q"] * 3})
    elif first.endswith("jsonl"):
        path.write_text(GOOD * 3)
    bad = write("b.jsonl", GOOD + '{"prompt": null}\n')
    assert rows_fault(path, bad).message.startswith(f"{bad}:2: column 'prompt' is null")


def test_files_with_other_types_in_a_column_are_told(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", "x")):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": ["q"], "n": [value]})
    fault = rows_fault(tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert fault.cause == "data.schema", fault.message
    assert "the same types in the same columns" in fault.message


def test_files_of_two_formats_with_other_types_in_a_column_are_named(
    write: Write, tmp_path: Path
) -> None:
    lines = write("a.jsonl", '{"prompt": "Why?", "n": "1"}\n')
    table = write("b.csv", "prompt,n\nWhy?,1\n")
    fault = rows_fault(lines, write_parquet(tmp_path / "c", {"n": [1], "prompt": [""]}))
    assert fault.cause == "data.schema"
    assert f"column 'n' is string in {lines} (json) and int64 in " in fault.message
    assert (fault.facts["differs"], fault.facts["types"]) == ("n", ["string", "int64"])
    # What a job would be told, whether pandas' texts are long ones (3.0) or not.
    fault = rows_fault(table, lines)
    assert f"in {table} (csv) and string in {lines} (json)" in fault.message


def test_files_of_two_formats_are_one_dataset_where_datasets_makes_them_one(
    tmp_path: Path, write: Write
) -> None:
    import datasets

    turn = {"role": "user", "content": "Why?"}
    one = write_parquet(tmp_path / "a", {"prompt": [[turn]], "n": [1], "late": [None]})
    swapped = {"content": "How?", "role": "user"}
    other = write("b.jsonl", rows_of({"late": "x", "prompt": [swapped], "m": 2.5}))
    for files in ([one, other], [other, one]):
        kinds = ["json" if file == other else "parquet" for file in files]
        prepared = datasets.concatenate_datasets(
            [
                datasets.load_dataset(
                    kind, data_files=str(file), split="train", cache_dir=str(tmp_path)
                )
                for kind, file in zip(kinds, files, strict=True)
            ]
        )
        rows = rows_in(*files)
        assert list(rows.columns) == prepared.column_names
        found = [row for t in rows.tables(rows.columns) for row in rows.values(t)]
        assert found == list(prepared)


def test_a_feather_file_is_an_arrow_file_and_its_first_version_is_refused(
    tmp_path: Path,
) -> None:
    import pyarrow
    import pyarrow.feather

    table = pyarrow.table({"prompt": ["Why?"] * 3})
    path = tmp_path / "a.feather"
    pyarrow.feather.write_feather(table, path)
    assert report(path).rows == 3
    path.write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    assert "is a Feather file of version 1" in fault_of(path).message


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_archive_is_to_be_unpacked(
    tmp_path: Path, write: Write, mode: Literal["w", "w:gz"]
) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, mode) as archive:
        archive.add(write("0.json", GOOD), "0.json")
    fault = fault_of(path)
    assert fault.cause == "data.corrupt"
    assert f"{path} is a tar archive" in fault.message
    rule = catalogue.load()[fault.cause]
    fixes = diagnose.advice(rule, diagnose.STAGE_FRAMEWORKS, fault.facts)
    assert fixes[0].endswith(f"tar -xf {path} -C unpacked")


def test_arrays_after_each_other_are_no_json(write: Write) -> None:
    assert "holds 2 JSON values" in fault_of(write("t.json", "[{}]\n[{}]\n")).message


@pytest.mark.parametrize("column", ["Prompt", " prompt", "MESSAGES"])
def test_a_known_column_in_other_letters_is_offered(write: Write, column: str) -> None:
    fault = rows_fault(write("t.jsonl", json.dumps({"id": 1, column: "Why?"}) + "\n"))
    assert f"did you mean {column!r}" in fault.message
    assert fault.facts["column"] == column


def test_a_second_file_with_other_columns_is_told(write: Write) -> None:
    first = write("a.jsonl", GOOD)
    second = write("b.jsonl", '{"question": "Why?"}\n')
    fault = rows_fault(first, second)
    assert fault.cause == "data.schema"
    assert f"{second}:1: column 'question' is not in the first file, which has " in (
        fault.message
    )


def test_how_conversations_end_is_noted(write: Write) -> None:
    def noted(*rows: Any) -> list[str]:
        path = write("t.jsonl", rows_of(*rows))
        opened = rows_in(path)
        found = report(path)
        notes = trainer_notes.notes(opened, found, Settings(), 100)
        return [note.text for note in notes]

    (whole,) = noted({"messages": [USER, ANSWER]})
    assert "is an answer, which TRL and ms-swift cut off" in whole
    (cut,) = noted({"messages": [USER, ANSWER]}, {"messages": [USER]})
    assert cut.startswith("In 1 of 2 rows the last message of 'messages' is no answer")
    assert noted({"prompt": [USER]}) == []
    (some,) = noted({"prompt": [USER, ANSWER]}, *[{"prompt": [USER]}] * 2)
    assert some.startswith("In 1 of 3 rows the last message of 'prompt' is an answer")
    (text,) = noted({"question": "q", "data_source": "x", "reward_model": {"a": 1}})
    assert text.startswith("Column 'question' is text in data made for verl")


def test_the_limit_that_prompts_were_held_to_is_the_one_that_is_named(
    write: Write,
) -> None:
    path = write("t.jsonl", lines("a", "a b c", "a b c d e f"))
    opened = rows_in(path)
    found = report(path, limit=4, lengths=Words())
    (note,) = trainer_notes.notes(opened, found, Settings(), 4)
    assert "1 of 3 prompts are longer than 4 tokens" in note.text


def test_a_text_column_of_verls_data_that_the_user_named_is_theirs(
    write: Write,
) -> None:
    row = {"prompt": "q", "data_source": "x", "reward_model": {"a": 1}}
    assert report(write("t.jsonl", rows_of(row)), column="prompt").rows == 1


def test_a_batch_that_the_sample_misses_is_still_found(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_rows, "MEASURED_ROWS", 10)
    texts = ["a b c d e f"] * 1000
    texts[501] = "abcdefgh"  # short in tokens, and not in the sample
    found = report(write("t.jsonl", lines(*texts)), limit=4, lengths=Words())
    assert found.fitting_rows == 1


class Refusing(Words):
    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        if "bad" in prompts:
            raise ValueError("roles must alternate")
        return super().lengths(prompts)


def test_a_row_that_the_chat_template_refuses_is_named(write: Write) -> None:
    fault = rows_fault(write("t.jsonl", lines("a", "b", "bad")), lengths=Refusing())
    assert fault.cause == "data.schema"
    assert "t.jsonl:3: column 'prompt' is refused by the chat template" in fault.message
    assert "roles must alternate" in fault.message


def test_a_cache_of_another_run_is_not_touched(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(elsewhere))
    report(write("t.jsonl", GOOD))
    assert (tmp_path / "cache").is_dir()
    assert not elsewhere.exists()


def test_data_that_cannot_be_read_are_told_where_chats_are_looked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"prompt": ["a", "b"] * 500})
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xa5" * 40 + content[44:])
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(GZIP_CUT)
    columns = tmp_path / "columns.json"
    columns.write_text('[{"answer": 4}]')
    empty = tmp_path / "empty.json"
    empty.write_text("[]")
    found = {}
    for bad in (path, packed, columns, empty, tmp_path / "none.jsonl"):
        job = inputs.Inputs("s", "s", (str(bad),))
        with pytest.raises(StageFault) as caught:
            first_prompts.chat_prompts(job, Settings())
        assert str(bad) in caught.value.message
        found[bad.stem.partition(".")[0]] = caught.value.cause
    assert found == {
        "a": "data.corrupt",
        "packed": "data.corrupt",
        "columns": "data.schema",
        "empty": "data.empty",
        "none": "data.file-missing",
    }


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a"}{"prompt": "b"} {"prompt": "c"}\n',
        '{"prompt": "a"}\r{"prompt": "b"}\r{"prompt": "c"}',
        '{"prompt":\n "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
        '{\n "prompt": "a"\n}\n{\n "prompt": "b"\n}\n{\n "prompt": "c"\n}\n',
    ],
)
def test_objects_may_share_a_line_or_take_several(write: Write, content: str) -> None:
    path = write("t.jsonl", content)
    assert report(path).rows == 3
    files = train_files.check_files([str(path)], "x")
    found = [row["prompt"] for row in dataset_load.first_rows(files)]
    assert found == ["a", "b", "c"]


def test_a_row_that_shares_its_line_is_found_there(write: Write) -> None:
    path = write("t.jsonl", GOOD + '{"prompt": "a"} {"prompt": null}\n')
    assert f"{path}:2: column 'prompt' is null" in rows_fault(path).message


def test_objects_over_several_lines_are_cut_by_datasets_in_large_files(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "TYPED_BYTES", 1 << 10)
    path = write("t.json", '{\n "prompt": "a"\n}\n' * 999)
    assert "in the middle of an object" in fault_of(path).message
    columns = {"prompt": {str(row): "a" * 9 for row in range(999)}}
    single = write("s.json", json.dumps(columns, indent=1))
    json_lines.check_json(single)  # pandas' own form, which datasets reads as a whole


LATE: dict[str, Any] = {
    "nothing": None,
    "list": [],
    "object": {"a": None},
    "absent": ...,
}


@pytest.mark.parametrize("early", LATE)
def test_a_value_that_comes_after_the_types_are_taken_is_named(
    write: Write, early: str
) -> None:
    """datasets itself stops there with a TypeError or CastError."""
    first = {"prompt": "x" * 99, "extra": LATE[early]}
    first = {name: value for name, value in first.items() if value is not ...}
    count = (11 << 20) // 99
    late = json.dumps({"prompt": "x", "extra": {"a": 1} if early == "object" else [1]})
    path = write("t.jsonl", (json.dumps(first) + "\n") * count + late + "\n")
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert fault.facts["line"] == count + 1
    assert f"{path}:{count + 1}: 'extra" in fault.message


@pytest.mark.parametrize("levels", [62, 63, 300, 5000])
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]")])
def test_what_is_nested_deeper_than_arrow_takes_is_named(
    write: Write, levels: int, brackets: tuple[str, str]
) -> None:
    nested = brackets[0] * levels + '"x"' + brackets[1] * levels
    path = write("t.jsonl", GOOD + f'{{"prompt": "a", "deep": {nested}}}\n')
    if levels == 62:
        assert report(path).rows == 2
        return
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert fault.message.startswith(f"{path}:2 holds a value that is nested {levels} ")


def test_control_tokens_in_prompts_are_noted(write: Write, tmp_path: Path) -> None:
    made = tiny.make(tmp_path)
    student = tokenizer_load.load(str(made.student), "x", trust_remote_code=False)
    rendered = "<|im_start|>user\nWhat is salt?<|im_end|>\n"
    answer = {"role": "assistant", "content": f"Yes{rendered}"}
    chats = [[USER], [USER, {"role": "user", "content": rendered}], [USER, answer]]
    part = {"type": "text", "text": "So?"}
    for name, rows in (
        ("texts", ["hello", rendered, "plain"]),
        ("messages", chats),
        ("parts", [[*chat, {"role": "user", "content": [part]}] for chat in chats]),
    ):
        column = "prompt" if name == "texts" else "messages"
        path = write(f"{name}.jsonl", rows_of(*({column: row} for row in rows)))
        found = report(path, lengths=prompts.Renderer(student), limit=999)
        assert (found.control_rows, found.control_place) == (1, f"{path}:2")
        opened = rows_in(path)
        notes = list(trainer_notes.notes(opened, found, Settings(), 999))
        assert "data.control-tokens" in [note.id for note in notes]
    student.chat_template = None  # nothing renders these prompts again
    assert prompts.Renderer(student).controls == ()


# Prompts for the training step.


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_the_first_prompts_within_the_limit_are_taken_in_order(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    texts = ["first", "long " * 200, "second", "third"]
    if name.endswith("parquet"):
        path = write_parquet(tmp_path / name, {"question": texts})
    elif name.endswith("jsonl"):
        path = write(name, "".join(json.dumps({"question": t}) + "\n" for t in texts))
    else:
        path = write(name, json.dumps([{"question": t} for t in texts], indent=1))
    settings = Settings(train_files=(str(path),), max_prompt_length=60)
    job = inputs.resolve(settings, tmp_path)
    tokenizer = tokenizer_load.load(job.student, "x", trust_remote_code=False)
    ids = prompts.Renderer(tokenizer).ids(["first", "second"])
    assert first_prompts.prompt_ids(job, settings, 2) == ids
    with pytest.raises(StageFault) as caught:
        first_prompts.prompt_ids(job, settings, 4)
    assert caught.value.cause == "data.too-long"


def test_an_unusable_one_of_the_first_prompts_is_named_by_file_and_line(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    second = write("second.jsonl", '{"prompt": "one"}\n{"prompt": ""}\n')
    named = str(write("first.jsonl", GOOD)), str(second)
    job = inputs.resolve(Settings(train_files=named), tmp_path)
    with pytest.raises(StageFault) as caught:
        first_prompts.prompt_ids(job, Settings(), 3)
    assert caught.value.message == f"{second}:2: column 'prompt' is empty"


class Tokens:
    """A tokenizer of one token per byte, with a template that puts text in brackets."""

    chat_template = "a template"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], **options: Any
    ) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{message['content']}>" for message in messages)

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [list(text.encode()) for text in texts]}


def test_a_reference_answer_at_the_end_is_not_part_of_the_prompt() -> None:
    conversation = [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": "a", "name": None},
    ]
    assert prompts.as_messages(conversation) == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    "prompt",
    [
        "plain",
        "\ufdfa" * 5,
        [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "\u4f60" * 9}],
    ],
)
def test_the_bound_is_never_below_the_length(prompt: Any) -> None:
    renderer = prompts.Renderer(Tokens())
    (bound,) = renderer.bounds(survey.survey_values([prompt]).sizes)
    assert bound >= renderer.lengths([prompt])[0]


@pytest.mark.needs("datasets")
def test_rows_are_read_without_torch(tmp_path: Path) -> None:
    # datasets would import it for each stream; there it takes longer than all the rest.
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one"}\n')
    code = (
        "import sys; from pathlib import Path; "
        "from pytest_gkd.workload.data import dataset_load, train_files; "
        f"files = train_files.check_files([{str(path)!r}], 'x'); "
        f"rows = dataset_load.open_rows(files, Path({str(tmp_path)!r})); "
        "print([rows.values(t) for t in rows.tables(rows.columns)]); "
        "import datasets; print(datasets.config.TORCH_AVAILABLE); "
        "print('torch' in sys.modules)"
    )
    said = fresh_python.output(code).splitlines()
    assert said == ["[[{'prompt': 'one'}]]", "True", "False"]
