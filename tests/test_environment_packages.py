"""Damaged packages and contradicting requirements are told from one another."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.package_damage import judge_damage
from pytest_gkd.workload.environment.package_versions import (
    NEEDED,
    Installed,
    judge_versions,
    overlap,
    read_installed,
)

LIMIT_S = 60
ALL = frozenset(NEEDED)


# -- several records of one package ------------------------------------------------


def wheel(folder: Path, version: str, requires: str = "") -> Path:
    """A wheel of ``twice``, whose one module's size depends on the release."""
    info = f"twice-{version}.dist-info"
    said = f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n"
    said += f"Requires-Dist: {requires}\n" if requires else ""
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    module = f"__version__ = {version!r}\n" + "#" * len(version)
    path = folder / f"twice-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("twice/__init__.py", module)
        archive.writestr(f"{info}/METADATA", said)
        archive.writestr(f"{info}/WHEEL", tag)
        digest = base64.urlsafe_b64encode(hashlib.sha256(module.encode()).digest())
        row = f"twice/__init__.py,sha256={digest.decode().rstrip('=')},{len(module)}"
        archive.writestr(f"{info}/RECORD", f"{row}\n")
    return path


@pytest.mark.parametrize(
    ("first", "second", "more", "imported"),
    [
        ("1.0", "2.0.1", [], "1.0"),
        ("1.0", "2.0.1", ["--upgrade"], "2.0.1"),
        ("2.0.1", "1.0", [], "2.0.1"),
        ("2.0.1", "1.0", ["--upgrade"], "1.0"),
    ],
)
def test_of_two_records_in_one_directory_that_of_the_files_is_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
    more: list[str],
    imported: str,
) -> None:
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    for options, version in (([], first), (more, second)):
        made = wheel(tmp_path, version)
        subprocess.run([*pip, *options, "--target", place, made], check=True)
    assert len([*place.glob("*.dist-info")]) == 2
    said = (place / "twice/__init__.py").read_text()
    assert f"__version__ = {imported!r}" in said  # what pip leaves
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    installed = read_installed(["twice"])
    assert installed["twice"].version == imported
    (note,) = [one for one in judge_versions(installed, ALL) if isinstance(one, Note)]
    assert f"{place} has several records of twice: 1.0 and 2.0.1" in note.text
    assert f"its files are those of {imported}" in note.text
    assert judge_damage(["twice"], LIMIT_S) == []


def test_of_two_records_that_both_fit_or_neither_the_first_is_judged_and_that_is_told(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = installed.parent / "half-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 2.0\n")
    (installed / "lib.so").unlink()
    found = read_installed(["half"])["half"]
    assert "1.0 and 2.0; which of them its files are of cannot be told" in found.several
    assert f"{found.version} is judged" in found.several


def test_a_directory_that_is_searched_twice_has_no_second_record(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(installed.parent), *sys.path])
    assert not read_installed(["half"])["half"].several


# -- damage ------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``half`` as an installer leaves it; its folder."""
    package, info = tmp_path / "half", tmp_path / "half-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    records = []
    for name, text in (("__init__.py", b"x = 1\n"), ("lib.so", bytes(100))):
        (package / name).write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        records.append(f"half/{name},sha256={digest},{len(text)}")
    records += ["half-1.0.dist-info/RECORD,,", "../../../bin/half,sha256=00,9"]
    (info / "RECORD").write_text("\n".join(records) + "\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return package


def test_a_package_as_it_was_installed_is_whole(installed: Path) -> None:
    assert judge_damage(["half"], LIMIT_S) == []


def test_a_file_that_is_shorter_than_installed_is_damage(installed: Path) -> None:
    (installed / "lib.so").write_bytes(bytes(50))
    (fault,) = judge_damage(["half"], LIMIT_S)
    assert fault.cause == "env.package-damaged"
    assert fault.facts["package"] == "half"
    assert f"{installed}/lib.so has 50 bytes, and 100 were" in fault.message


def test_a_file_that_is_gone_is_damage(installed: Path) -> None:
    (installed / "lib.so").unlink()
    (fault,) = judge_damage(["half"], LIMIT_S)
    assert "lib.so is gone" in fault.message


def test_looking_for_damage_ends_when_its_time_is_up(installed: Path) -> None:
    (installed / "lib.so").unlink()
    assert judge_damage(["half"], -1.0) == []


def test_a_module_without_a_distribution_is_passed_over() -> None:
    assert judge_damage(["no_such_module_here"], LIMIT_S) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("<2", "<3,>=1.5", True),
        ("<1.31", "<3,>=1.31", False),
        ("==1.4", "~=1.2", True),
        ("==1.*", ">=2", False),
        (">1,<3", "!=2", True),
        ("", "<0.5", True),
    ],
)
def test_two_requirements_overlap_or_not(one: str, other: str, expected: bool) -> None:
    assert overlap(Requirement(f"x{one}"), Requirement(f"x{other}")) is expected


def conflict(one: str, other: str) -> StageFault:
    base = {n: Installed(n, "1.0") for n in ("torch", "transformers")}
    asking = {
        "datasets": Installed("datasets", "1.0", (f"hub{one}",)),
        "vllm": Installed("vllm", "2.0", (f"hub{other}",)),
        "hub": Installed("hub", "2.4"),
    }
    found = judge_versions(base | asking)
    return next(item for item in found if isinstance(item, StageFault))


def test_a_contradiction_names_both_that_ask_and_what_to_install_together() -> None:
    fault = conflict("<2", ">=2")
    assert "vllm 2.0 requires hub>=2: no release meets both" in fault.message
    assert fault.facts["together"] == ["datasets", "vllm", "hub"]
    assert "fitting" not in fault.facts


def test_an_unmet_requirement_that_can_be_met_says_with_which_release() -> None:
    fault = conflict("<2", ">=1.5")
    assert "no release" not in fault.message
    assert fault.facts["fitting"] == "hub<2,>=1.5"
