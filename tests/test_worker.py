"""What a stage's process does with what the stage printed."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from pytest_gkd.run.captured_output import cut_captured
from pytest_gkd.run.exception_text import error_text, without_count

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


@pytest.mark.needs("ray")
@pytest.mark.parametrize("message", ["No room\nfor it: 3", "No room:\n  3 blocks\n"])
def test_an_error_in_an_actor_is_told_by_its_own_words(message: str) -> None:
    from ray.exceptions import RayTaskError

    def start() -> None:
        raise ValueError(message)

    try:
        start()
    except ValueError as error:
        remote = RayTaskError("Engine.start", traceback.format_exc(), error)
    with pytest.raises(ValueError, match="No room") as caught:
        raise remote.as_instanceof_cause()
    assert error_text(caught) == f"ValueError: {message.rstrip()}"
