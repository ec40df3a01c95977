"""``-k NAME`` in other people's repositories: their tests come first."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from test_plugin import Run

# What a shell starts in the background ignores SIGINT, and so do its children.
INTERRUPT = """signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)"""
THEIRS = "def test_data_of_mine(): pass\ndef test_other(): pass"


@pytest.mark.parametrize("quiet", [(), ("-q",), ("-n1",)])
def test_a_project_that_has_not_opted_in_keeps_its_own_tests(
    tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/test_pipeline.py").write_text("def test_extract(): pass\n")
    run = Run(tmp_path, "-k", "data", *quiet)
    assert run.code == 0
    assert "1 passed, 2 deselected" in run.text or "1 passed" in run.text
    assert not (tmp_path / ".gkd").exists()
    assert run.shows(
        "gkd: -k 'data' chose tests of yours only; pytest --gkd-stages=data runs data"
    )
    asked = Run(tmp_path, "-k", "data", env={**os.environ, "LANGUAGE": "zh"})
    assert asked.shows("gkd: -k 'data' 只选中了你自己的测试；运行 data 请用 pytest *")


def test_a_keyword_that_names_no_stage_is_not_spoken_of(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    assert "gkd: " not in Run(tmp_path, "-k", "other").text


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_where_no_test_is_chosen_the_stage_runs(
    tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    (tmp_path / "test_probe.py").write_text("def test_other(): pass")
    run = Run(tmp_path, "-k", "data", "--junitxml=j.xml", *quiet)
    assert run.outcomes() == {"data": "passed"}
    assert run.code == 0
    assert run.shows("gkd: -k 'data' chose no test here, so data runs now (*)")
    assert "test_data" in (tmp_path / "j.xml").read_text()


@pytest.mark.needs("datasets")
def test_the_stage_that_then_runs_decides_the_exit_code(tmp_path: Path) -> None:
    run = Run(tmp_path, "-k", "data", "--gkd-train-files=absent.jsonl")
    assert run.code == pytest.ExitCode.TESTS_FAILED
    (tmp_path / "test_probe.py").write_text("def test_other(): pass")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    assert Run(tmp_path, "-k", "data").code == 0


def test_a_file_that_cannot_be_read_comes_before_any_stage(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("import absent_module")
    run = Run(tmp_path, "-k", "data", "-q")
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert not (tmp_path / ".gkd").exists()
    assert run.shows("gkd: -k 'data' chose nothing yet: a file could not be read *")


@pytest.mark.parametrize(
    ("code", "conftest"),
    [
        (2, INTERRUPT),
        (7, "pytest.exit('enough', returncode=7)"),
        (3, "raise RuntimeError('a plugin of theirs')"),
    ],
)
def test_a_session_that_was_ended_is_not_one_without_tests(
    tmp_path: Path, code: int, conftest: str
) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    hook = f"""
        import os, signal
        import pytest

        def pytest_collection(session):
            {conftest}
    """
    (tmp_path / "conftest.py").write_text(textwrap.dedent(hook))
    run = Run(tmp_path, "-k", "data")
    assert run.code == code
    assert not (tmp_path / ".gkd").exists()
    assert "chose no test here" not in run.text
    assert "runs now" not in run.text
    if code == 2:
        assert run.shows("gkd: -k 'data' chose nothing yet: the session was ended *")


@pytest.mark.parametrize("what", ["directory", "link"])
def test_what_cannot_be_read_below_stages_opts_nothing_in(
    tmp_path: Path, what: str
) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    theirs = tmp_path / "stages/test_theirs.py"
    theirs.parent.mkdir()
    theirs.mkdir() if what == "directory" else theirs.symlink_to("absent")
    run = Run(tmp_path, "-k", "data", "test_probe.py")
    assert run.code == 0
    assert run.shows("gkd: -k 'data' chose tests of yours only; *")


@pytest.mark.needs("datasets")
@pytest.mark.parametrize(
    ("ini", "args", "why"),
    [
        ("gkd_keyword = true", (), "gkd_keyword is set"),
        ("gkd_batch_size = 2", (), "gkd_batch_size is set"),
        ("", ("--gkd-batch-size=2",), "--gkd-batch-size is given"),
    ],
)
def test_a_project_that_has_opted_in_gets_the_stage_beside_its_tests(
    tmp_path: Path, ini: str, args: tuple[str, ...], why: str
) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    run = Run(tmp_path, "-k", "data", "-q", *args)
    assert run.outcomes() == {"data": "passed"}
    assert "2 passed" in run.text
    assert run.shows(f"gkd: -k 'data' chose data too, since {why} (*)")


@pytest.mark.needs("datasets")
def test_stages_of_ones_own_opt_in(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(THEIRS)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/test_mine.py").write_text(
        "import pytest\n\n@pytest.mark.gkd_stage('mine')\ndef test_mine(): pass\n"
    )
    run = Run(tmp_path, "-k", "data")
    assert run.outcomes() == {"data": "passed"}
    assert run.shows("*since stages/test_mine.py is there*")


@pytest.mark.parametrize("tests", [THEIRS, "def test_other(): pass"])
def test_a_project_can_opt_out(tmp_path: Path, tests: str) -> None:
    (tmp_path / "test_probe.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ngkd_keyword = false\ngkd_batch_size = 2\n"
    )
    run = Run(tmp_path, "-k", "data")
    assert "gkd: " not in run.text
    assert not (tmp_path / ".gkd").exists()
