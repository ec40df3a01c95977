"""What is read of calls of add_argument, held against argparse."""

from __future__ import annotations

import argparse
import ast
import runpy
from pathlib import Path

from pytest_gkd.job.sources import add_argument

SOURCE = """
SIZES = ["small", "big"]
parser.add_argument("--plain")
parser.add_argument("--number", "--long-number", type=int, default=2**10 - 1)
parser.add_argument("--many", type=float, nargs="+", default=[-1.0])
parser.add_argument("--size", choices=SIZES, default="big", dest="how_big")
parser.add_argument("--on", action="store_true")
parser.add_argument("--no-off", action="store_false", dest="off")
parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--must", required=True)
for prefix in ("actor", "critic"):
    parser.add_argument(f"--{prefix}.kind", choices=SIZES)
    parser.add_argument(
        f"--{prefix}.lr", type=float, default=1e-6 if prefix == "actor" else 9e-6
    )
    parser.add_argument(f"--{prefix}.not_on", dest=f"{prefix}.on", action="store_false")
"""


def test_options_are_recorded_as_argparse_makes_them(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    sources = add_argument.Sources({"source.py": SOURCE})
    recorded = add_argument.Options(sources)
    recorded.calls(add_argument.Unrolled({}).visit(ast.parse(SOURCE)))
    parser = argparse.ArgumentParser(add_help=False)
    given = {"parser": parser, "argparse": argparse}
    runpy.run_path(str(tmp_path / "source.py"), given)
    made = {name: a for a in parser._actions for name in a.option_strings}
    assert recorded.keys() == made.keys()
    for name, action in made.items():
        record = recorded[name]
        assert record["key"] == action.dest
        assert record["default"] == action.default
        assert record.get("choices") == action.choices
        assert record.get("required", False) == action.required
        is_flag = action.nargs == 0
        assert (record.get("type") in ("true", "false")) == is_flag
        if not is_flag:
            assert record.get("nargs") == action.nargs
            assert record.get("type", "str") == getattr(action.type, "__name__", "str")
    assert recorded["--no-both"]["type"] == "false"
    assert recorded["--no-off"]["type"] == "false"
