"""What is found wrong with train files: from outside, on loading, and row by row."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.fault import StageFault
from pytest_gkd.settings import Settings
from pytest_gkd.workload import datafiles, datarows, dataset_load, inputs, prompts

GOOD = '{"prompt": "What is salt?"}\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


Write = Callable[[str, "str | bytes"], Path]


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def fault_of(*files: Path | str) -> StageFault:
    with pytest.raises(StageFault) as caught:
        datafiles.check_files([str(file) for file in files], "--gkd-train-files")
    json.dumps(caught.value.facts)
    return caught.value


def rows_fault(*files: Path, batch_size: int = 1, **options: Any) -> StageFault:
    with pytest.raises(StageFault) as caught:
        report(*files, batch_size=batch_size, **options)
    json.dumps(caught.value.facts)
    return caught.value


def report(
    *files: Path,
    column: str | None = None,
    limit: int = 100,
    batch_size: int = 1,
    lengths: datarows.Lengths | None = None,
) -> datarows.DataReport:
    found = datafiles.check_files([str(file) for file in files], "--gkd-train-files")
    dataset = dataset_load.load(found, files[0].parent / "cache")
    return datarows.check_rows(
        dataset,
        found,
        lengths or prompts.RoughRenderer(),
        prompt_column=column,
        max_prompt_length=limit,
        batch_size=batch_size,
    )


# From outside.


def test_a_missing_file_is_named_with_its_near_neighbour(write: Write) -> None:
    path = write("train.jsonl", GOOD)
    fault = fault_of(path.with_name("Train.json"))
    assert fault.cause == "data.file-missing"
    assert fault.facts["near"] == [str(path)]
    assert fault.message.startswith("--gkd-train-files: ")


def test_a_glob_names_every_file_it_matches(write: Write, tmp_path: Path) -> None:
    write("b.jsonl", GOOD)
    write("a.jsonl", GOOD)
    found = datafiles.check_files([str(tmp_path / "*.jsonl")], "x")
    assert [Path(file.path).name for file in found] == ["a.jsonl", "b.jsonl"]


def test_a_glob_without_a_match_is_a_missing_file(tmp_path: Path) -> None:
    assert fault_of(tmp_path / "*.parquet").cause == "data.file-missing"


def test_a_file_with_glob_characters_in_its_name_is_taken_as_it_is(
    write: Write,
) -> None:
    path = write("train[1].jsonl", GOOD)
    assert datafiles.check_files([str(path)], "x")[0].path == str(path)


def test_a_directory_points_to_the_files_in_it(write: Write) -> None:
    path = write("train.jsonl", GOOD)
    fault = fault_of(path.parent)
    assert fault.cause == "data.file-missing"
    assert fault.facts["near"] == [str(path)]


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


def test_an_unreadable_file_is_a_matter_of_permission(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("train.jsonl", GOOD)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads every file")
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
        ("t.csv", "prompt,answer\na,b\n", "not JSON"),
        ("t.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-9], "cannot be unpacked"),
        ("t.json", '[{"prompt": "a"}, {"pro', "not a JSON array"),
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
        gzip.compress(GOOD.encode()),
    ],
    ids=["byte order mark", "indented array", "gzip"],
)
def test_other_spellings_of_json_are_taken(write: Write, content: bytes) -> None:
    assert datafiles.check_files([str(write("t.json", content))], "x")[0].kind == "json"


def test_a_missing_file_is_reported_without_heavy_imports(tmp_path: Path) -> None:
    code = (
        "import sys; from pytest_gkd.workload import datafiles, datarows, lengths\n"
        "from pytest_gkd.fault import StageFault\n"
        f"try: datafiles.check_files([{str(tmp_path / 'x')!r}], 'x')\n"
        "except StageFault as fault: print(fault.cause)\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'datasets'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["data.file-missing", "[]"]


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
    path = write("t.jsonl", '{"query": "a", "answer": "b"}\n')
    fault = rows_fault(path)
    assert fault.cause == "data.schema"
    assert str(path) in fault.message
    assert fault.facts == {
        "prompt_column": "prompt",
        "columns": ["query", "answer"],
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


class Words:
    """One token per word; the bound is the number of characters."""

    def __init__(self) -> None:
        self.measured = 0

    def lengths(self, prompts: Sequence[Any]) -> list[int]:
        self.measured += len(prompts)
        return [len(prompt.split()) for prompt in prompts]

    def bound(self, prompt: Any) -> int:
        return len(prompt)


def lines(*texts: str) -> str:
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def test_prompts_over_the_limit_are_counted_and_the_rest_kept(write: Write) -> None:
    path = write("t.jsonl", lines("a b c", "a b c d e f", "abcdefgh"))
    found = report(path, limit=4, lengths=Words())
    assert (found.fitting_rows, found.too_long_rows, found.longest_tokens) == (2, 1, 6)


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
    monkeypatch.setattr(datarows, "MEASURED_ROWS", 10)
    path = write("t.jsonl", lines(*["abcdefgh"] * 1000))
    words = Words()
    found = report(path, limit=4, lengths=words)
    assert found.measured_rows == words.measured <= 21
    assert found.unsure_rows == 1000 - found.measured_rows


def test_a_batch_that_the_sample_misses_is_still_found(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datarows, "MEASURED_ROWS", 10)
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
    tokenizer = Tokens()
    assert inputs.prompt_ids(job, settings, 2, tokenizer) == [
        list(b"<first>"),
        list(b"<second>"),
    ]
    with pytest.raises(StageFault) as caught:
        inputs.prompt_ids(job, settings, 4, tokenizer)
    assert caught.value.cause == "data.too-long"


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
    assert renderer.bound(prompt) >= renderer.lengths([prompt])[0]
