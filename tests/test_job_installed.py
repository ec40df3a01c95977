"""``gkd check`` beside an installed framework: its own copy is read, and never run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from pytest_gkd.job import check, releases
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.sources import SOURCES, files

VERL = "verl/trainer/config/_generated_ppo_trainer.yaml"
KEYS = """\
actor_rollout_ref:
  model: {path: null}
  actor: {use_dynamic_bsz: true, of_the_fork: 3, entropy_coeff: 0}
  rollout: {name: vllm, n: 1, nnodes: 0, n_gpus_per_node: 8}
data: {train_batch_size: 77, max_prompt_length: 512}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
START = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor."
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays out files and a distribution's metadata where modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(name: str, told: str, sources: dict[str, str]) -> Path:
        (tmp_path / f"{name}-0.dist-info").mkdir()
        (tmp_path / f"{name}-0.dist-info/METADATA").write_text(told)
        for file, text in sources.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        return tmp_path

    return lay_out


def version(number: str, name: str = "verl") -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"


def faults(found: Checked) -> list[str]:
    return [f.message for f in found.findings if f.level == "error"]


def notes(found: Checked) -> list[str]:
    return [f.message for f in found.findings if f.level == "note"]


@pytest.mark.parametrize(
    ("number", "rules"),
    [("0.9.2.dev0+mine", "0.9.1"), ("0.9.0.dev1", "0.8.0"), ("0.7.1", "0.8.0")],
)
def test_a_forks_own_keys_and_defaults_count(
    number: str, rules: str, install: Install
) -> None:
    runs = "raise SystemExit('it was imported')"
    place = install("verl", version(number), {VERL: KEYS, "verl/__init__.py": runs})
    found = check.check(START + "of_the_fork=4")
    assert faults(found) == []
    assert (found.release, found.values["train_batch_size"].value) == (number, 77)
    assert found.release_by == f"read from {place}/verl; rules of {rules}"
    assert "verl" not in sys.modules
    (fault,) = faults(check.check(START + "of_the_frok=4"))
    assert fault.startswith(f"verl {number} has no key")
    assert "of_the_fork" in fault


def test_changed_files_of_a_recorded_release_are_read(install: Install) -> None:
    install("verl", version("0.9.1"), {VERL: KEYS})
    assert "rules of 0.9.1" in check.check(START + "of_the_fork=4").release_by
    asked = check.check(START + "of_the_fork=4", framework="verl==0.9.1")
    assert asked.release_by == "--framework"
    assert any("has no key" in fault for fault in faults(asked))


@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_what_is_read_is_what_was_recorded(package: str) -> None:
    installed = metadata.version(package)
    if installed not in releases.recorded(package):
        pytest.skip(f"{package} {installed} is not recorded")
    _, texts = files.texts(SOURCES[package])
    schema = dict(releases.release(package, installed).schema)
    assert schema.pop("digest") == files.digest(texts)
    schema.pop("removed", None)  # is told by older releases
    assert json.loads(json.dumps(SOURCES[package].read(texts))) == schema
    assert releases.judge(package).by == "the installed one"


def test_the_installed_release_may_be_asked_for(install: Install) -> None:
    install("verl", version("0.9.2.dev0"), {VERL: KEYS})
    found = check.check(START + "of_the_fork=4", framework="verl==0.9.2.dev0")
    assert "read from" in found.release_by
    assert "read from" in check.check(START + "n=1", framework="verl").release_by
    with pytest.raises(CheckError, match=r"0\.9\.3 is neither installed nor recorded"):
        check.check(START + "of_the_fork=4", framework="verl==0.9.3")


@pytest.mark.parametrize("told", ["", "Name: verl\n\n", "Version: what?\n"])
def test_broken_metadata_is_no_obstacle(told: str, install: Install) -> None:
    install("verl", told, {VERL: KEYS})
    found = check.check(START + "of_the_fork=4")
    assert faults(found) == []
    assert "rules of 0.9.1" in found.release_by
    assert found.release in ("of unknown version", "what?")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"verl/trainer/config/ppo_trainer.yaml": KEYS}, "has no trainer/config/_gen"),
        ({VERL: "- a list"}, "laid out otherwise (CheckError: "),
        ({VERL: "a: {b: 1}"}, "has no key actor_rollout_ref.model.path"),
        ({VERL: "a: [" * 500}, "nested deeper"),
        ({VERL: BOMB}, "stands for more than"),
        ({VERL: "#" * (33 << 20)}, "has more than is read"),
        ({"verl.py": "x = 1"}, "is not found where"),
    ],
)
def test_another_layout_is_told_and_the_newest_recorded_judges(
    sources: dict[str, str], why: str, install: Install
) -> None:
    install("verl", version("1.2.3"), sources)
    found = check.check(START + "use_dynamic_bsz=True")
    (told,) = [text for text in notes(found) if "installed" in text]
    assert told.startswith("the installed verl 1.2.3 is not read, but 0.9.1: ")
    assert why in told
    assert (found.release, found.release_by) == ("0.9.1", "the newest recorded")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(install: Install) -> None:
    place = install("verl", version("1.2.3"), {VERL: KEYS})
    (place / VERL).parent.chmod(0)
    try:
        found = check.check(START + "use_dynamic_bsz=True")
    finally:
        (place / VERL).parent.chmod(0o755)
    assert any("is not read" in text for text in notes(found))
