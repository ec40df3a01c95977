"""What may import what, and what a run without stages must not import at all."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fresh_python
import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "ray", "transformers", "datasets", "numpy", "pyarrow")
# What the plugin itself needs, but only when stages run.
OURS = (
    "psutil",
    "pytest_gkd.run.controller",
    "pytest_gkd.run.session",
    "pytest_gkd.run.worker",
)

RUNS_PYTEST = """
import json, sys
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
print()
print(json.dumps([int(code), sorted(sys.modules)]))
"""


def imported(directory: Path, *args: str) -> set[str]:
    """The modules of a pytest process that ran one ordinary test, which passed."""
    (directory / "test_it.py").write_text("def test_it(): pass\n")
    done = fresh_python.run("-c", RUNS_PYTEST, *args, cwd=directory, check=True)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stdout
    assert "pytest_gkd.plugin" in modules
    return set(modules)


def test_an_ordinary_run_imports_the_plugin_and_no_more_of_it(
    tmp_path: Path,
) -> None:
    found = imported(tmp_path)
    assert found.isdisjoint(HEAVY)
    assert found.isdisjoint(OURS)
    ours = {name for name in found if name.startswith("pytest_gkd.")}
    names = ("near_names", "options", "plugin", "stage_specs", "time_spans")
    assert ours == {f"pytest_gkd.{name}" for name in names}


def test_a_k_that_names_no_stage_costs_no_more_than_the_plan(tmp_path: Path) -> None:
    found = imported(tmp_path, "-k", "test_it")
    assert found.isdisjoint(HEAVY)
    assert found.isdisjoint(OURS)


def test_the_process_that_controls_the_stages_imports_nothing_heavy() -> None:
    done = fresh_python.run(
        "-c",
        "import json, sys, pytest_gkd.run.session, pytest_gkd.__main__\n"
        "print(json.dumps(sorted(sys.modules)))",
        check=True,
    )
    assert set(json.loads(done.stdout)).isdisjoint(HEAVY)


def test_modules_import_only_what_lies_below_them() -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


PRIVATE = re.compile(r"_[A-Za-z]\w*")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of the plugin's modules that a test imports, reads or replaces."""
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("pytest_gkd")
        for alias in node.names
    }
    yield from (name for name in ours if PRIVATE.fullmatch(name))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner), name) if owner in ours:
                pass
            case ast.Call(args=[ast.Name(owner), ast.Constant(str(name)), *_]) if (
                owner in ours
            ):
                pass
            case _:
                continue
        if PRIVATE.fullmatch(name):
            yield f"{owner}.{name}"


def test_no_test_reaches_into_a_private_name() -> None:
    found = {
        path.name: [*private_names(ast.parse(path.read_bytes()))]
        for path in (ROOT / "tests").glob("*.py")
    }
    assert {name: names for name, names in found.items() if names} == {}
