"""The release checklist sees what is missing from what would be published."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import release

pytest.importorskip("hatchling")
if not (release.ROOT / ".git").exists():
    pytest.skip("this is no clone", allow_module_level=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as they are now, in a repository of their own."""
    root = tmp_path_factory.mktemp("tree")
    for path in release.tracked(release.ROOT):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(release.ROOT / path, root / path)
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    release.git(root, "init", "-q")
    release.git(root, "add", "-A")
    release.git(root, *who, "commit", "-q", "-m", "all of it")
    return root


def build(tree: Path, target: str, place: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", place],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (built,) = place.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_all_of_the_package(tree: Path, wheel: Path) -> None:
    assert release.wheel_is_tree(wheel, tree).endswith(" files")
    data = {Path(name).suffix for name in release.wheel_hashes(wheel)}
    assert {".py", ".toml", ".json", ".jinja", ".md", ".typed"} <= data


def test_the_sdist_has_all_of_the_tree(tree: Path, tmp_path: Path) -> None:
    assert release.sdist_is_tree(build(tree, "sdist", tmp_path), tree)


def test_what_a_wheel_lacks_or_has_too_much_is_named(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "pytest_gkd/stages/test_data.py":
                broken = name == "pytest_gkd/plugin.py"
                new.writestr(name, b"broken" if broken else old.read(name))
        new.writestr("pytest_gkd/notes.txt", "mine")
    with pytest.raises(release.ReleaseError) as raised:
        release.wheel_is_tree(changed, tree)
    assert str(raised.value) == (
        "pytest_gkd/stages/test_data.py is only in the tree, pytest_gkd/notes.txt is "
        "only in the wheel, pytest_gkd/plugin.py differs"
    )


def test_the_metadata_are_the_projects(wheel: Path) -> None:
    told = release.wheel_metadata(wheel)
    version = release.tree_version(release.ROOT)
    assert release.metadata(told, version).startswith("Python ")
    told.replace_header("Requires-Python", ">=3.12")
    with pytest.raises(release.ReleaseError, match="is not the classifiers'"):
        release.metadata(told, version)
    with pytest.raises(release.ReleaseError, match=r"Version is '.*', not '9\.9'"):
        release.metadata(told, "9.9")


def test_a_changed_tree_is_not_clean(tree: Path) -> None:
    assert len(release.clean(tree)) == 40
    (tree / "new.txt").touch()
    try:
        with pytest.raises(release.ReleaseError, match=r"new\.txt"):
            release.clean(tree)
    finally:
        (tree / "new.txt").unlink()


@pytest.mark.parametrize(
    ("heading", "good"),
    [
        ("1.2.3 - 2026-12-01", True),
        ("Unreleased", False),
        ("1.2.3", False),
        ("1.2.30 - 2026-12-01", False),
    ],
)
def test_the_changelog_has_a_dated_heading(
    tmp_path: Path, heading: str, good: bool
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 1.2.3\n")
    if good:
        assert release.changelog(tmp_path, "1.2.3") == heading
        return
    with pytest.raises(release.ReleaseError, match=f"newest heading is '{heading}'"):
        release.changelog(tmp_path, "1.2.3")


def test_a_version_is_tagged_once(tree: Path) -> None:
    assert release.untagged(tree, "9.9") == "v9.9"
    release.git(tree, "tag", "v9.9")
    with pytest.raises(release.ReleaseError, match=r"v9\.9 is tagged already"):
        release.untagged(tree, "9.9")


def test_a_command_that_fails_is_told_with_its_last_lines() -> None:
    with pytest.raises(release.ReleaseError, match=r"exited with 3\n +what it said"):
        release.command("bash", "-c", "echo what it said; exit 3")


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(release.ReleaseError, match=r"no Python 3\.99"):
        release.find_python("3.99")


def test_of_a_test_run_that_failed_every_failure_is_named() -> None:
    script = "for n in $(seq 40); do echo FAILED test_$n; done; exit 1"
    with pytest.raises(release.ReleaseError) as raised:
        release.command("sh", "-c", script)
    assert str(raised.value).count("\n        FAILED test_") == 40


def test_what_failed_once_is_told_with_how_many_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GKD_GATE", raising=False)  # whose lock the gate itself holds
    (tmp_path / "test_one.py").write_text(
        "from pathlib import Path\n"
        "def test_fine(): pass\n"
        "def test_second_try():\n"
        "    seen = Path('seen').exists()\n"
        "    Path('seen').touch()\n"
        "    assert seen\n"
    )
    pytest_alone = (sys.executable, "-m", "pytest", "-q", "-p", "no:gkd")
    said = release.command(release.ROOT / ".ci/tests", *pytest_alone, cwd=tmp_path)
    told, _, again = release.told_of_tests(said).partition("; once more and alone: ")
    assert told.startswith("1 failed, 1 passed in ")
    assert again == "test_one.py::test_second_try"
