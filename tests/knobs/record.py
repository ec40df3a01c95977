"""Record which names of the advice exist in packages that CI does not install.

    python tests/knobs/record.py verl-0.9.1-py3-none-any.whl \
        trl-1.16.0-py3-none-any.whl deepspeed-0.19.8.tar.gz \
        LightRFT.tar nccl.tar verl-recipe.tar peft-0.21.2-py3-none-any.whl \
        sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl

Wheels and source archives come from the package index (``pip download --no-deps``),
the ``.tar`` files from ``git archive HEAD`` of the repositories. Writes recorded.json
beside this file: for each archive the names that were found in it and where. What is
recorded of archives that are not given stays.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pytest_gkd.diagnosis import catalogue

HERE = Path(__file__).parent
TEXT = (".py", ".yaml", ".yml", ".cc", ".h", ".sh", ".json")
KINDS = {
    "verl": "verl-0",
    "trl": "trl-",
    "deepspeed": "deepspeed-",
    "lightrft": "LightRFT",
    "nccl": "nccl",
    "recipe": "verl-recipe",
    "peft": "peft-",
    "sglang": "sglang-",
}

# Where the name must stand, so that a test or an example proves nothing.
WITHIN = {
    "deepspeed": "/deepspeed/",
    "nccl": "src/",
    "recipe": "gkd/megatron/",
    "sglang": "sglang/srt/arg_groups/fields/",
}


def files(archive: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every source file in a wheel or a tar archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            for name in packed.namelist():
                if name.endswith(TEXT):
                    yield name, packed.read(name).decode("utf-8", "replace")
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            if member.isfile() and member.name.endswith(TEXT):
                stream = packed.extractfile(member)
                assert stream is not None
                yield member.name, stream.read().decode("utf-8", "replace")


def yaml_keys(text: str) -> dict[str, int]:
    """Dotted keys of a YAML mapping, with their line; lists are not entered."""
    found: dict[str, int] = {}
    stack: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"( *)([\w-]+):", line)
        if match is None:
            continue
        indent = len(match[1])
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, match[2]))
        found[".".join(key for _, key in stack)] = number
    return found


def pattern(kind: str, name: str) -> str:
    """What proves a name in the sources of its kind."""
    last = name.rpartition(".")[2]
    if kind == "trl":
        return rf"class {last}\b|^    {last}:|^        {last} \("
    if kind == "lightrft":
        return rf"[\"']{last}[\"']|def {last}\b"
    if kind == "deepspeed":
        first = name.partition(".")[0] if name[0] != "z" else last
        return rf"(?:def|class) {first}\b|[\"']{first}[\"']|^    {first}:|{first}\.py"
    if kind == "sglang":
        return rf"^    {last}:"
    if kind == "peft":
        return rf"def {last}\b"
    if kind == "nccl":
        plain = last.removeprefix("NCCL_")
        return rf"\"{plain}\"|{last}\b"
    return re.escape(last)


def prove(kind: str, name: str, archive: Path) -> str | None:
    """Where the name stands in the archive, as ``file:line``, or None."""
    if kind == "verl" and name.startswith("module:"):
        path = name.removeprefix("module:").replace(".", "/")
        return next((n for n, _ in files(archive) if n.startswith(path)), None)
    if kind == "verl":
        for path, text in files(archive):
            if "/_generated_" in path and path.endswith(".yaml"):
                line = yaml_keys(text).get(name)
                if line is not None:
                    return f"{path}:{line}"
        return None
    for path, text in files(archive):
        if WITHIN.get(kind, "") not in path:
            continue
        match = re.search(pattern(kind, name), text, re.MULTILINE)
        if match is not None:
            return f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
    return None


def of_transformers(name: str) -> bool:
    """Whether a TRL argument is one that TRL inherits from transformers."""
    from transformers import TrainingArguments

    return any(field.name == name for field in dataclasses.fields(TrainingArguments))


def wanted() -> dict[str, set[str]]:
    """The names to prove, by the kind of archive."""
    names: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for rule in catalogue.load().values():
        for fix in rule.fixes:
            for knob in fix.knobs:
                kind, _, name = knob.partition(":")
                if kind == "verl" and name.startswith("recipe:"):
                    names["recipe"].add(name.removeprefix("recipe:"))
                elif kind == "env" and name.startswith("NCCL_"):
                    names["nccl"].add(name)
                elif kind in names and not (kind == "trl" and of_transformers(name)):
                    names[kind].add(name)
    return names


def main(archives: list[str]) -> int:
    """Prove every name; returns 1 when one is not found."""
    recorded = json.loads((HERE / "recorded.json").read_text())
    missing = 0
    for kind, names in wanted().items():
        given = [Path(a) for a in archives if Path(a).name.startswith(KINDS[kind])]
        if not given:
            continue
        archive = given[0]
        proofs = {name: prove(kind, name, archive) for name in sorted(names)}
        for name, proof in proofs.items():
            if proof is None:
                missing += 1
                sys.stderr.write(f"{kind}: {name} is not in {archive.name}\n")
        found = {name: proof for name, proof in proofs.items() if proof}
        recorded[kind] = {"archive": archive.name, "names": found}
    text = json.dumps(recorded, indent=1, sort_keys=True) + "\n"
    (HERE / "recorded.json").write_text(text)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
