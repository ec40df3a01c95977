"""Records which environment variables a library's release has, for ``gkd check``.

    python tools/record_variables.py LIBRARY==RELEASE SOURCE [--reads]

SOURCE is a wheel, an unpacked archive or a checkout; nothing of it is imported. Taken
are names with one of PREFIXES: from Python, C and C++ every string that is such a name
as a whole, from compiled files those that end in NUL, NCCL's ``NCCL_PARAM``, which puts
NCCL_ before its names, and the fields of SGLang's environ.py. ``--reads`` takes only
those that Python looks up, for frameworks, which also name variables that they set for
others. Adds to pytest_gkd/job/schemas/variables.json, by library:

- ``releases``: those that were recorded;
- ``names``: the first and the last recorded release that has the name, and where
  vllm/envs.py reads it as a number, or takes some values only: int, float, or these.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

PLACE = Path(__file__).parents[1] / "pytest_gkd/job/schemas/variables.json"
PREFIXES = (
    *("VLLM", "SGLANG", "NCCL", "GLOO", "CUDA", "PYTORCH", "TORCH", "TORCHCOMM"),
    *("TORCHINDUCTOR", "TORCHDYNAMO", "RAY", "HF", "TRANSFORMERS", "TOKENIZERS"),
    "WANDB",
)
NAME = (
    rb"(?!TORCH_LIBRARY_)(?:"
    + "|".join(PREFIXES).encode()
    + rb")_[A-Za-z0-9_]*[A-Za-z0-9]"
)
QUOTED = re.compile(rb"[\"'](" + NAME + rb")[\"']")
WHOLE = re.compile(NAME + rb"(?=\0)")
FIELD = re.compile(rb"^\s+(" + NAME + rb")\s*(?::[^=\n]+)?=\s*_?Env\w*\(", re.MULTILINE)
PARAMETER = re.compile(rb'NCCL_PARAM\(\s*\w+\s*,\s*"(\w+)"')
DEFINED = re.compile(rb"DEFINE_NCCL_PARAM\(\s*\w+\s*,[^,]+,\s*(NCCL_\w+)")
READ = re.compile(
    rb"(?:getenv|environ\.get|environ\.pop|environ|env\.get)[(\[]\s*[\"']("
    + NAME
    + rb")[\"'](?!\]\s*=[^=])"
    + rb"|[\"']("
    + NAME
    + rb")[\"']\s+(?:not\s+)?in\s+(?:os\.)?environ"
)
SOURCES = {".py", ".pyx", ".pxi", ".pxd", ".h", ".hpp", ".cuh", ".cc", ".cpp", ".cu"}
TESTS = re.compile(r"(?:^|/)(?:tests?|testing)/")
INTEGERS = {"int", "maybe_convert_int", "maybe_convert_bool"}


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of a wheel or folder, but for tests."""
    if source.is_file():
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                if not TESTS.search(name):
                    yield name, archive.read(name)
    else:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source).as_posix()
            if path.is_file() and not path.is_symlink() and not TESTS.search(name):
                yield name, path.read_bytes()


def names(name: str, raw: bytes, *, reads: bool) -> set[str]:
    """The variables that one file has."""
    kind = Path(name).suffix
    found: set[bytes] = set()
    if reads:
        if kind == ".py":
            found = {one or other for one, other in READ.findall(raw)}
    elif kind in SOURCES:
        found = {*QUOTED.findall(raw), *DEFINED.findall(raw), *FIELD.findall(raw)}
        found |= {b"NCCL_" + one for one in PARAMETER.findall(raw)}
    elif raw.startswith(b"\x7fELF"):
        found = set(_compiled(raw))
    return {one.decode() for one in found}


def _compiled(raw: bytes) -> Iterator[bytes]:
    """Names that end in NUL; looked for by prefix, as these files are large."""
    for prefix in PREFIXES:
        start = raw.find(wanted := f"{prefix}_".encode())
        while start >= 0:
            found = WHOLE.match(raw, start)
            if found and not re.match(rb"\w", raw[start - 1 : start]):
                yield found[0]
            start = raw.find(wanted, start + 1)


def values(text: str) -> dict[str, Any]:
    """What vllm/envs.py takes for each variable: int, float, or a list of choices."""
    found: dict[str, Any] = {}
    for table in ast.walk(ast.parse(text)):
        if not isinstance(table, ast.Dict):
            continue
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                kind = _kind(key.value, value)
                if kind and re.fullmatch(NAME.decode(), key.value):
                    found[key.value] = kind
    return found


def _kind(name: str, reader: ast.expr) -> Any:
    for call in ast.walk(reader):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        said = [c.value for c in ast.walk(call) if isinstance(c, ast.Constant)]
        if name not in said:
            continue
        if call.func.id == "env_with_choices" and isinstance(call.args[-1], ast.List):
            options = ast.literal_eval(call.args[-1])
            loose = any(k.arg == "case_sensitive" for k in call.keywords)
            return [one.lower() for one in options] if loose else options
        inner = call.args[0] if call.args else None
        is_plain = isinstance(inner, ast.Call | ast.Subscript | ast.BoolOp)
        if is_plain and call.func.id in INTEGERS:
            return "int"
        if is_plain and call.func.id == "float":
            return "float"
    return None


def record(library: str, release: str, source: Path, *, reads: bool) -> None:
    """Add what one release has to the record."""
    kinds: dict[str, Any] = {}
    told: set[str] = set()
    for name, raw in files(source):
        told |= names(name, raw, reads=reads)
        if name == "vllm/envs.py":
            kinds = values(raw.decode())
    whole = json.loads(PLACE.read_text("utf-8")) if PLACE.exists() else {}
    own = whole.setdefault(library, {"releases": [], "names": {}})
    own["releases"] = sorted({*own["releases"], release}, key=Version)
    for name in told:
        before = own["names"].get(name, [release, release])
        first, last = sorted([*before[:2], release], key=Version)[::2]
        kind = kinds.get(name) if last == release else before[2:3] and before[2]
        own["names"][name] = [first, last, *([kind] if kind else [])]
    write(whole)
    print(f"{library} {release}: {len(told)} names")


def write(whole: dict[str, Any]) -> None:
    """The record as a file, with a line for each variable."""
    parts = []
    for key, one in sorted(whole.items()):
        lines = [
            f"{json.dumps(n)}: {json.dumps(one['names'][n])}"
            for n in sorted(one["names"])
        ]
        said = ",\n".join(lines)
        head = f'{json.dumps(key)}: {{"releases": {json.dumps(one["releases"])},'
        parts.append(f'{head} "names": {{\n{said}\n}}}}')
    PLACE.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("source", type=Path)
    parser.add_argument("--reads", action="store_true")
    given = parser.parse_args()
    name, _, release = given.library.partition("==")
    record(name, release, given.source, reads=given.reads)
