"""The options of slime and miles, with those of their Megatron-LM and SGLang.

``options`` are those of Megatron's parser, which takes the framework's own, and
``served`` those that SGLang's takes. A default that only running the packages would
tell is "?".
"""

from __future__ import annotations

import ast
import re

from pytest_gkd.job.sources.add_argument import Options, Sources, functions, tables
from pytest_gkd.job.sources.files import Files, Schema, Source, matching, outline

MEGATRON = ("training/**/*.py", "core/transformer/*.py", "core/*.py")
ARGUMENTS = "megatron/training/arguments.py"
SERVER, ROUTER = "sglang/srt/server_args.py", "sglang_router/router_args.py"
# A class that may be an option's type, or whose fields may be options.
IS_TYPE = re.compile(r"class\s.*Enum|^    \w+:\s", re.M)


def megatron(files: Files) -> Options:
    """All of Megatron-LM's options."""
    own = {
        name: text if name == ARGUMENTS else outline(text, IS_TYPE)
        for name, text in matching(files, r"megatron/.*").items()
    }
    sources = Sources(own)
    options = Options(sources)
    for function in functions(sources.trees[ARGUMENTS]):
        if not function.name.startswith("_add_"):
            continue
        constants = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            match node:
                case ast.Call(
                    func=ast.Name(id="ArgumentGroupFactory"), args=[ast.Name(id=name)]
                ):
                    given = {k.arg: k.value for k in node.keywords}
                    excluded = given.get("exclude") or ast.List(elts=[])
                    if isinstance(excluded, ast.Name):
                        excluded = constants[excluded.id]
                    options.fields(name, sources.value(excluded))
        options.calls(function)
    return options


def read(files: Files, package: str) -> Schema:
    """What the parser of ``package``, slime or miles, accepts."""
    options = megatron(files)
    arguments = f"{package}/utils/arguments.py"
    sglang = f"{package}/backends/sglang_utils/arguments.py"
    mine = Sources({name: files[name] for name in (arguments, sglang)})
    options.sources = mine
    tree = mine.trees[arguments]
    provider = f"get_{package}_extra_args_provider"
    for function in functions(tree, provider, "_pre_parse_mode"):
        options.calls(function)
    for text in matching(files, rf"{package}/\w+/args\.py").values():  # the dashboard
        options.calls(ast.parse(text))
    theirs = Sources({name: files[name] for name in (SERVER, ROUTER)})
    served_options = Options(mine)
    for function in functions(mine.trees[sglang]):
        if function.name in ("add_sglang_arguments", "add_sglang_router_arguments"):
            served_options.calls(function)
    served_options.sources = theirs
    router = next(functions(theirs.classes["RouterArgs"], "add_cli_args"))
    served_options.calls(router, "", ("host", "port"))
    prefixes = {"sglang": "skipped_args", "eval-sglang": "_EVAL_SKIPPED_SERVER_ARGS"}
    for prefix, constant in prefixes.items():
        fallback = mine.constants.get("_SKIPPED_SERVER_ARGS")
        node = mine.constants.get(constant) or (prefix == "sglang" and fallback)
        if not node:
            continue
        skipped = mine.value(node)
        served_options.annotated("ServerArgs", prefix, skipped)
        server = next(functions(theirs.classes["ServerArgs"], "add_cli_args"))
        served_options.calls(server, prefix, skipped)
    return tables({"options": options, "served": served_options})


def source(package: str) -> Source:
    """Where the sources of slime or miles are."""
    return Source(
        {
            package: (
                f"{package}/utils/arguments.py",
                f"{package}/backends/sglang_utils/arguments.py",
                f"{package}/*/args.py",
            ),
            "megatron": tuple(f"megatron/{glob}" for glob in MEGATRON),
            "sglang": (SERVER,),
            "sglang_router": (ROUTER,),
        },
        lambda files: read(files, package),
    )
