"""Records the keys and defaults of a framework's release, for ``gkd check``.

    python tools/record_schema.py WHEEL [--before WHEEL...] [--examples DIR]

Of verl, the trees that it generates of its own configuration; of TRL, transformers and
accelerate, the classes and calls that make their command lines. ``--before`` are wheels
of older releases, to tell what they had; ``--examples`` is TRL's folder of that name,
which no wheel has. Nothing of a package is imported. Writes
pytest_gkd/job/schemas/NAME-RELEASE.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from pytest_gkd.job import dataclass_options

PLACE = Path(__file__).parents[1] / "pytest_gkd/job/schemas"
Files = Mapping[str, str]


def files(wheel: Path, wanted: str) -> dict[str, str]:
    """A wheel's files of matching names, with their texts."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(wanted, name)]
        return {name: archive.read(name).decode() for name in names}


# -- verl --------------------------------------------------------------------------

TREE = r"verl/trainer/config/_generated_ppo_(?:(\w+?)_)?trainer\.yaml"
FSDP = "dp"  # model_engine's own name for it


def flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a tree by its whole name; an empty mapping is a value."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{above}.{key}" if above else str(key))
    else:
        yield above, tree


def verl(wheel: Path) -> dict[str, Any]:
    """The keys under FSDP, and for each other ``model_engine=`` what differs."""
    engines = {}
    for name, text in files(wheel, TREE).items():
        found = re.fullmatch(TREE, name)
        engines[(found and found[1]) or FSDP] = dict(flat(yaml.safe_load(text)))
    common = engines[FSDP]
    schema: dict[str, Any] = {"keys": common, "engines": {}}
    for engine, own in sorted(engines.items()):
        changed = {k: v for k, v in own.items() if common.get(k, ...) != v}
        absent = sorted(common.keys() - own.keys())
        schema["engines"][engine] = {"changed": changed, "absent": absent}
    return schema


# -- transformers, accelerate, TRL ---------------------------------------------------

ENUMS = r"transformers/(?:trainer_utils|debug_utils|training_args(?:_seq2seq)?)\.py"
CONFIGS = r"trl/(?:.*_config|scripts/.*|experimental/utils)\.py"
SCRIPTS = r"trl/(?:scripts/[a-z]\w*|experimental/\w+/\w+)\.py"
SHIPPED = r"trl/accelerate_configs/\w+\.yaml"


def transformers(wheel: Path) -> dict[str, Any]:
    """What the configurations of TRL, ms-swift and others inherit."""
    known: dict[str, Any] = {}
    for text in files(wheel, ENUMS).values():
        known |= dataclass_options.classes(text, known)
    names = ("TrainingArguments", "Seq2SeqTrainingArguments")
    return {"classes": {name: known[name] for name in names}}


def accelerate(wheel: Path) -> dict[str, Any]:
    """The options of ``accelerate launch``, and the keys of its configuration."""
    (text,) = files(wheel, r"accelerate/commands/launch\.py").values()
    (config,) = files(wheel, r"accelerate/commands/config/config_args\.py").values()
    known = dataclass_options.classes(config)
    keys = sorted(dataclass_options.fields("ClusterConfig", known))
    return {"launch": added_arguments(text), "config": keys}


def added_arguments(text: str) -> dict[str, dict[str, Any]]:
    """What every ``add_argument("--name", ...)`` of a module adds, by its spellings."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        if node.func.attr != "add_argument" or not names:
            continue
        given = {k.arg: k.value for k in node.keywords}
        action = ast.unparse(given["action"]).strip("'") if "action" in given else ""
        # argparse takes the first long name for the key.
        long = next((n for n in names if n.startswith("--")), names[0])
        option = {"key": long.lstrip("-").replace("-", "_")}
        if action in ("store_true", "store_false", "help"):
            option["type"] = "false" if action == "store_false" else "true"
        elif "type" in given and ast.unparse(given["type"]) in ("int", "float"):
            option["type"] = ast.unparse(given["type"])
        for name in names:
            if name.startswith("-"):
                found |= dict.fromkeys([name, name.replace("_", "-")], option)
    return found


def trl(wheel: Path) -> dict[str, Any]:
    """TRL's classes, the scripts that read them, and the launcher's configurations."""
    known: dict[str, Any] = {"TrainingArguments": {"bases": [], "fields": {}}}
    programs: dict[str, Any] = {}
    for name, text in files(wheel, CONFIGS).items():
        for own, found in dataclass_options.classes(text, known).items():
            # trl/scripts/vllm_serve.py has a class of a common name.
            alone = own in known or name.endswith("/vllm_serve.py")
            stem = posixpath.basename(name).removesuffix(".py")
            known[f"{stem}.{own}" if alone else own] = found
    for name, text in files(wheel, SCRIPTS).items():
        programs |= program(name, text, known)
    shipped = files(wheel, SHIPPED).items()
    return {
        "classes": known,
        "programs": programs,
        "accelerate_configs": {
            posixpath.basename(n).removesuffix(".yaml"): yaml.safe_load(t)
            for n, t in shipped
        },
        "commands": commands(wheel, programs),
        "none": "_accept_none" in "".join(files(wheel, r"trl/scripts/_hf.*").values()),
    }


def commands(wheel: Path, programs: Mapping[str, Any]) -> list[str]:
    """The subcommands of ``trl``: each has a script."""
    texts = files(wheel, r"trl/(?:cli/commands/__init__|cli|cli/main)\.py").values()
    stems = [posixpath.basename(name).removesuffix(".py") for name in programs]
    named = set(re.findall(r"TrainingCommand\(\"(\w+)\"\)", "".join(texts)))
    named |= {n for n in stems if f"make_{n}_parser" in "".join(texts)}
    named |= {"vllm-serve", "env"}
    return sorted(name.replace("vllm_serve", "vllm-serve") for name in named)


def program(name: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """A script, with the classes that it reads its options into, if all are known."""
    stem = posixpath.basename(name).removesuffix(".py")
    found = dataclass_options.program(text)
    own = [f"{stem}.{c}" if f"{stem}.{c}" in known else c for c in found["classes"]]
    try:
        dataclass_options.union_of(own, known)
    except KeyError:
        return {}
    return {name: {**found, "classes": own}} if own else {}


def add_examples(schema: dict[str, Any], folder: Path) -> None:
    """Add the scripts of a folder of examples, with classes of their own."""
    for path in sorted(folder.glob("scripts/**/*.py")):
        text = path.read_text("utf-8")
        name = f"examples/{path.relative_to(folder).as_posix()}"
        for own, found in dataclass_options.classes(text, schema["classes"]).items():
            schema["classes"][f"{path.stem}.{own}"] = found
        schema["programs"] |= program(name, text, schema["classes"])
    used = {c for one in schema["programs"].values() for c in one["classes"]}
    for name in [n for n in schema["classes"] if "." in n and n not in used]:
        del schema["classes"][name]


# -- ms-swift ------------------------------------------------------------------------

SWIFT = (
    r"swift/(?:llm/argument|arguments|trainers|rlhf_trainers|ray|ray_utils|hub|plugin"
    r"|megatron/arguments?)/.*\.py"
)
# The class that each command reads its arguments into (swift/pipelines, 4.6.0).
SWIFT_PROGRAMS = {
    "swift rlhf": "RLHFArguments",
    "swift sft": "SftArguments",
    "swift pt": "PretrainArguments",
    "swift deploy": "DeployArguments",
    "swift rollout": "RolloutArguments",
    "megatron rlhf": "MegatronRLHFArguments",
    "megatron sft": "MegatronSftArguments",
    "megatron pt": "MegatronPretrainArguments",
}


def ms_swift(wheel: Path) -> dict[str, Any]:
    """The classes that ms-swift's commands read their arguments into.

    Those of transformers, which they inherit, stand in its own schema.
    """
    known: dict[str, Any] = {}
    for text in files(wheel, SWIFT).values():
        known |= dataclass_options.classes(text, known)
    used: dict[str, Any] = {}
    waiting = [name for name in SWIFT_PROGRAMS.values() if name in known]
    while waiting:
        name = waiting.pop()
        used[name] = known[name]
        waiting += [base for base in known[name]["bases"] if base in known]
    programs = {name: own for name, own in SWIFT_PROGRAMS.items() if own in used}
    return {"classes": used, "programs": programs}


def gone(schema: dict[str, Any], older: list[tuple[str, Any]]) -> dict[str, list[str]]:
    """The fields of older releases that no class has any more.

    Each with the last of these releases that has it, and the first that has not.
    """

    def keys(one: dict[str, Any]) -> set[str]:
        return {key for own in one["classes"].values() for key in own["fields"]}

    follow = [release for release, _ in older[1:]] + [schema["release"]]
    return {
        key: [release, after]
        for (release, old), after in zip(older, follow, strict=True)
        for key in sorted(keys(old) - keys(schema))
    }


def removed(schema: dict[str, Any], older: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of each class, the fields of older releases that it has no more.

    Each with the last of these releases that has it, and the first that has not.
    """
    gone: dict[str, dict[str, list[str]]] = {}
    known = schema["classes"]
    for name in known:
        try:
            now = dataclass_options.fields(name, known)
        except KeyError:  # an enum, or a class of an example that is not for this one
            continue
        for number, (release, old) in enumerate(older):
            follow = [r for r, _ in older[number + 1 :]] + [schema["release"]]
            if "bases" not in old["classes"].get(name, {}):
                continue
            for key in old["classes"][name]["fields"]:
                if key not in now:
                    gone.setdefault(name, {})[key] = [release, follow[0]]
    return gone


RECORDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "verl": verl,
    "transformers": transformers,
    "accelerate": accelerate,
    "trl": trl,
    "ms_swift": ms_swift,
}


def main() -> None:
    """Record the releases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--before", type=Path, nargs="*", default=[])
    parser.add_argument("--examples", type=Path)
    asked = parser.parse_args()
    name, release = asked.wheel.name.split("-")[:2]
    schema = RECORDERS[name](asked.wheel)
    if asked.examples:
        add_examples(schema, asked.examples)
    if asked.before:
        releases = sorted((Version(w.name.split("-")[1]), w) for w in asked.before)
        older = [(str(version), RECORDERS[name](wheel)) for version, wheel in releases]
        tell = gone if name == "ms_swift" else removed
        schema["removed"] = tell({**schema, "release": release}, older)
    schema.get("classes", {}).pop("TrainingArguments" if name == "trl" else "", None)
    path = PLACE / f"{name.replace('_', '-')}-{release}.json"
    path.write_text(json.dumps(schema, indent=0, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    main()
