"""Where torch or its like is missing, the tests that need it are skipped."""

from __future__ import annotations

from pathlib import Path

import fresh_python

FINDS = "import importlib.util\ndef test(): assert not importlib.util.find_spec('gone')"


def test_only_the_tests_are_and_nothing_that_runs_beside_them(tmp_path: Path) -> None:
    """transformers asks for accelerate where it can do without, also in a stage."""
    conftest = Path(__file__).with_name("conftest.py").read_text("utf-8")
    named = conftest.replace('"triton"', '"gone"')
    assert named != conftest
    files = {
        "tests/conftest.py": named,
        "tests/test_imports.py": "import gone",
        "tests/test_finds.py": FINDS,
        "stages/test_beside.py": FINDS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = fresh_python.run(
        "-m", "pytest", "-p", "no:gkd", "-v", "tests", "stages", cwd=tmp_path
    )
    assert "1 passed, 2 skipped" in done.stdout, done.stdout
    assert "stages/test_beside.py::test PASSED" in done.stdout
