"""Classes of a user's own program: read from its file, and nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gkd.job.arguments import UNKNOWN
from pytest_gkd.job.check import Checked, check

AREAL = """\
import sys
open({canary!r}, "w").write("imported")
from dataclasses import dataclass, field
from areal.api.cli_args import GRPOConfig, load_expr_config
from mine import Tools

@dataclass
class MyConfig(GRPOConfig):
    max_turns: int = field(default=3)
    tools: Tools = field(default_factory=Tools)

def main(args):
    config, _ = load_expr_config(args, MyConfig)
"""
MINE = """\
from dataclasses import dataclass
raise SystemExit("imported")

@dataclass
class Tools:
    timeout: float = 1.0
"""
YAML = "rollout: {backend: 'vllm:d2t1'}\nactor: {path: a, backend: 'fsdp:d2'}\n"
SKYRL = """\
import sys
open({canary!r}, "w").write("imported")
from dataclasses import dataclass
from skyrl.train.config import AlgorithmConfig, make_config

@dataclass
class MyAlgorithm(AlgorithmConfig):
    my_coef: float = 0.1

MyConfig = make_config(algorithm_cls=MyAlgorithm)

def main():
    cfg = MyConfig.from_cli_overrides(sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    canary = str(tmp_path / "canary")
    (tmp_path / "train.py").write_text(AREAL.format(canary=canary))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "main_mine.py").write_text(SKYRL.format(canary=canary))
    return tmp_path


def areal(folder: Path, more: str) -> Checked:
    (folder / "job.yaml").write_text(YAML + more)
    (folder / "run.sh").write_text("python train.py --config job.yaml\n")
    return check(folder / "run.sh", framework="areal")


def skyrl(folder: Path, more: str) -> Checked:
    text = "python main_mine.py trainer.policy.model.path=a "
    (folder / "run.sh").write_text(f"{text}{more}\n")
    return check(folder / "run.sh", framework="skyrl")


def unknown(found: Checked) -> list[tuple[str, str]]:
    some = [f for f in found.findings if f.cause == UNKNOWN]
    return [(f.level, f.key) for f in some]


def test_areal_knows_the_fields_of_a_derived_class(folder: Path) -> None:
    found = areal(folder, "max_turns: 4\ntools: {timeout: 2.0}\n")
    assert not unknown(found)
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("max_turn: 4\n", "max_turn"),
        ("max_turns: many\n", "max_turns"),
        ("tools: {timeouts: 2.0}\n", "tools.timeouts"),
        ("actor.nothing: 1\n", "actor.nothing"),
    ],
)
def test_areal_judges_keys_against_it(folder: Path, more: str, key: str) -> None:
    if key.startswith("actor"):
        (folder / "job.yaml").write_text(YAML)
        text = "python train.py --config job.yaml actor.nothing=1\n"
        (folder / "run.sh").write_text(text)
        found = check(folder / "run.sh", framework="areal")
    else:
        found = areal(folder, more)
    assert set(unknown(found)) == {("error", key)}


def test_skyrl_knows_the_fields_of_a_derived_class(folder: Path) -> None:
    assert not unknown(skyrl(folder, "trainer.algorithm.my_coef=0.5"))
    found = skyrl(folder, "trainer.algorithm.my_coeff=0.5")
    assert unknown(found) == [("error", "trainer.algorithm.my_coeff")]
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("class MyConfig(GRPOConfig)", "class MyConfig(Unknown)"),
        ("class MyConfig(GRPOConfig)", "class MyConfig(MyConfig)"),
        ("class MyConfig(GRPOConfig)", "class MyConfig(GRPOConfig"),
        ("load_expr_config(args, MyConfig)", "load_expr_config(args, chosen())"),
        ("@dataclass\n", ""),
        ("import sys", "\0"),
        ("import sys", "x = " + "-" * 20_000 + "1"),
    ],
)
def test_what_cannot_be_told_is_a_warning(
    folder: Path, before: str, after: str
) -> None:
    program = folder / "train.py"
    program.write_text(program.read_text().replace(before, after))
    found = areal(folder, "max_turns: 4\n")
    assert unknown(found) == [("warning", "max_turns")]
    assert not (folder / "canary").exists()
