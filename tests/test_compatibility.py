"""What is taken for granted of other packages' releases, held against their files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "contracts", ROOT / "compat/contracts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contracts = load()
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
    given = {
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
    assert f"| {name} (engine.py) | - | **no** |" in contracts.page(given, gone)


def test_every_contract_holds_in_every_release_that_is_recorded() -> None:
    assert contracts.holes(GIVEN, RECORDED) == []


def test_the_page_is_the_one_that_the_record_gives() -> None:
    assert contracts.PAGE.read_text("utf-8") == contracts.page(GIVEN, RECORDED)


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
