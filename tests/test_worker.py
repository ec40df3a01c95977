"""What a stage's process does with what the stage printed."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_gkd.run.captured_output import cut_captured
from pytest_gkd.run.exception_text import without_count

COUNTED = """ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (99) is too large. [type=value_error, input_value=A(), \
input_type=A]
    For further information"""


def test_only_the_end_of_a_flood_is_kept_and_what_follows_it(tmp_path: Path) -> None:
    with (tmp_path / "captured").open("wb+", buffering=0) as file:
        os.write(file.fileno(), b"a" * 10_000 + b"the end\n")
        cut_captured([file.fileno()], 100)
        os.write(file.fileno(), b"more\n")
        text = (tmp_path / "captured").read_bytes()
    assert text.startswith(b"(9908 bytes before this were dropped)\naaaa")
    assert text.endswith(b"a" * 92 + b"the end\nmore\n")


def test_what_is_within_the_limit_is_left_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "captured").open("wb+", buffering=0) as file:
        os.write(file.fileno(), b"all of it\n")
        cut_captured([file.fileno()], 100)
        os.write(file.fileno(), b"more\n")
    assert (tmp_path / "captured").read_bytes() == b"all of it\nmore\n"


def test_a_count_of_errors_gives_way_to_the_error() -> None:
    assert without_count(COUNTED) == (
        "ValidationError: max_model_len (99) is too large.\n    For further information"
    )
    assert without_count("ValueError: one\n  two") == "ValueError: one\n  two"
