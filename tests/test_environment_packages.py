"""Damaged packages and contradicting requirements are told from one another."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.environment.package_damage import judge_damage
from pytest_gkd.workload.environment.package_versions import (
    Installed,
    judge_versions,
    overlap,
)

LIMIT_S = 60


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
