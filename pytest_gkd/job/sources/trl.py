"""The options of TRL, transformers and accelerate, from their classes and calls."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Mapping
from typing import Any

import yaml

from pytest_gkd.job import dataclass_options, documents
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

CONFIGS = r"trl/(?:.*_config|scripts/.*|experimental/utils)\.py"
SCRIPTS = r"trl/(?:scripts/[a-z]\w*|experimental/\w+/\w+)\.py"
EXAMPLES = r"examples/scripts/.*\.py"
SHIPPED = r"trl/accelerate_configs/\w+\.yaml"
ROOT_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments")


def classes(text: str, known: Mapping[str, Any]) -> dataclass_options.Classes:
    """The dataclasses and enums of a file; most have none, and parsing is slow."""
    has_any = re.search(r"@(?:\w+\.)?dataclass|Enum\)", text)
    return dataclass_options.classes(text, known) if has_any else {}


def transformers(files: Files) -> Schema:
    """What the configurations of TRL, ms-swift and others inherit from transformers."""
    known: dict[str, Any] = {}
    for text in files.values():
        known |= classes(text, known)
    return {"classes": {name: known[name] for name in ROOT_CLASSES}}


def accelerate(files: Files) -> Schema:
    """The options of ``accelerate launch``, and the keys of its configuration."""
    known = dataclass_options.classes(
        files["accelerate/commands/config/config_args.py"]
    )
    keys = sorted(dataclass_options.fields("ClusterConfig", known))
    launch = added_arguments(files["accelerate/commands/launch.py"])
    return {"launch": launch, "config": keys}


def added_arguments(text: str) -> dict[str, dict[str, Any]]:
    """The options of all ``add_argument("--name", ...)`` in a module, by spelling."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        if node.func.attr != "add_argument" or not names:
            continue
        given = {k.arg: k.value for k in node.keywords}
        action = ast.unparse(given["action"]).strip("'") if "action" in given else ""
        # argparse takes the first long name as the key.
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


def trl(files: Files) -> Schema:
    """TRL's classes, the scripts that read them, and the launcher's configurations."""
    known: dict[str, Any] = {"TrainingArguments": {"bases": [], "fields": {}}}
    programs: dict[str, Any] = {}
    for name, text in matching(files, CONFIGS).items():
        for own, found in classes(text, known).items():
            # trl/scripts/vllm_serve.py has a class of a common name.
            alone = own in known or name.endswith("/vllm_serve.py")
            known[f"{_stem(name)}.{own}" if alone else own] = found
    for name, text in matching(files, SCRIPTS).items():
        programs |= program(name, text, known)
    for name, text in matching(files, EXAMPLES).items():
        for own, found in classes(text, known).items():
            known[f"{_stem(name)}.{own}"] = found
        programs |= program(name, text, known)
    used = {c for one in programs.values() for c in one["classes"]}
    del known["TrainingArguments"]
    shipped = matching(files, SHIPPED)
    return {
        "classes": {n: c for n, c in known.items() if "." not in n or n in used},
        "programs": programs,
        "accelerate_configs": {
            _stem(name): yaml.load(text, documents.LOADER)  # noqa: S506 - a safe one
            for name, text in shipped.items()
        },
        "commands": commands(files, programs),
        "none": "_accept_none"
        in "".join(matching(files, r"trl/scripts/_hf.*").values()),
    }


def commands(files: Files, programs: Mapping[str, Any]) -> list[str]:
    """The subcommands of ``trl``: each has a script."""
    text = "".join(
        matching(files, r"trl/(?:cli/commands/__init__|cli|cli/main)\.py").values()
    )
    named = set(re.findall(r"TrainingCommand\(\"(\w+)\"\)", text))
    named |= {n for n in map(_stem, programs) if f"make_{n}_parser" in text}
    if not named:
        raise SourceError("the subcommands of trl are not found")
    named |= {"vllm-serve", "env"}
    return sorted(name.replace("vllm_serve", "vllm-serve") for name in named)


def program(name: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """A script and the classes that it reads its options into, if all are known."""
    if not re.search(r"(?:Trl|HfArgument)Parser\(", text):  # parsing is slow
        return {}
    found = dataclass_options.program(text)
    alone = {own: f"{_stem(name)}.{own}" for own in found["classes"]}
    own = [alone[c] if alone[c] in known else c for c in found["classes"]]
    try:
        dataclass_options.union_of(own, known)
    except KeyError:
        return {}
    return {name: {**found, "classes": own}} if own else {}


def _stem(name: str) -> str:
    return posixpath.basename(name).rpartition(".")[0]


def removed(schema: Schema, release: str, older: list[tuple[str, Schema]]) -> Schema:
    """For each class, the fields of older releases that it no longer has.

    Each with the last of these releases that has it, and the first that does not.
    """
    gone: Schema = {}
    known = schema["classes"]
    for name in known:
        try:
            now = dataclass_options.fields(name, known)
        except KeyError:  # an enum, or a class of an example that does not apply here
            continue
        for number, (last, old) in enumerate(older):
            follow = [r for r, _ in older[number + 1 :]] + [release]
            if "bases" not in old["classes"].get(name, {}):
                continue
            for key in old["classes"][name]["fields"]:
                if key not in now:
                    gone.setdefault(name, {})[key] = [last, follow[0]]
    return gone


def completed(schema: Schema, release: str, last: str, older: Schema) -> Schema:
    """A schema that was read, with what only the record of an older release can tell.

    That is removed fields, and the scripts of TRL's examples/, which an installed
    package lacks.
    """
    gone = {name: dict(keys) for name, keys in older.get("removed", {}).items()}
    for name, keys in removed(schema, release, [(last, older)]).items():
        gone.setdefault(name, {}).update(keys)
    programs = schema.get("programs", {})
    classes = {**older["classes"], **schema["classes"]}
    for name, one in older.get("programs", {}).items():
        if name.startswith("examples/") and classes.keys() >= set(one["classes"]):
            programs[name] = one
            own = {c: classes[c] for c in one["classes"] if "." in c}
            schema["classes"] |= own
    return {**schema, "removed": gone}


TRANSFORMERS = Source(
    {
        "transformers": (
            "transformers/trainer_utils.py",
            "transformers/debug_utils.py",
            "transformers/training_args.py",
            "transformers/training_args_seq2seq.py",
        )
    },
    transformers,
    completed,
)
ACCELERATE = Source(
    {
        "accelerate": (
            "accelerate/commands/launch.py",
            "accelerate/commands/config/config_args.py",
        )
    },
    accelerate,
)
TRL = Source(
    {
        "trl": (
            "trl/**/*_config.py",
            "trl/scripts/*.py",
            "trl/experimental/utils.py",
            "trl/experimental/*/*.py",
            "trl/accelerate_configs/*.yaml",
            "trl/cli.py",
            "trl/cli/main.py",
            "trl/cli/commands/__init__.py",
        )
    },
    trl,
    completed,
    ("transformers", "accelerate"),
)
