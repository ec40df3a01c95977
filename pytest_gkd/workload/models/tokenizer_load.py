"""Builds a model's tokenizer and processor."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import collector
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.models.model_paths import locate, reach_hub

# transformers' message if one of its classes needs a package, and pip's names for some
# of those (transformers 5.19, utils/import_utils.py).
_REQUIRED = re.compile(r"(\w+) requires the ([\w-]+) library")
PIP_NAMES = {"pil": "pillow", "jinja": "jinja2", "pytorch": "torch"}


def refusals() -> tuple[type[Exception], ...]:
    """What templates and tokenizers raise for unknown input, such as a role."""
    from jinja2 import TemplateError

    return TemplateError, LookupError, TypeError, ValueError


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text and id of a tokenizer's special tokens.

    Empty for one without a table of its added tokens (transformers'
    MistralCommonBackend).
    """
    added = getattr(tokenizer, "added_tokens_decoder", None)
    table = added if isinstance(added, Mapping) else {}
    return {str(token.content): i for i, token in table.items() if token.special}


def load(name: str, origin: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a model directory or hub id, as transformers loads it.

    Raises StageFault ``tokenizer.load``, ``model.trust-remote-code``,
    ``checkpoint.missing``, ``env.permission``, ``env.hub-unreachable`` or
    ``env.package-missing``; the hub's own errors pass unchanged.
    """
    found = locate(name, origin)
    if found is not None:
        try:
            model_files.check_tokenizer_files(found.directory, origin)
        except StageFault as fault:
            if not (found.from_hub and fault.facts.get("absent")):
                raise
            found = None  # the hub will provide it
    if found is None:
        reach_hub(name, origin)
    source = name if found is None else str(found.directory)
    try:
        light = None if found is None else _light_class(found.directory)
        with collector.paused():
            if light is None:
                from transformers import AutoTokenizer

                return AutoTokenizer.from_pretrained(
                    source, trust_remote_code=trust_remote_code
                )
            return light.from_pretrained(source)
    except ModuleNotFoundError:
        raise  # a missing package is not the fault of the tokenizer's files
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise StageFault(
                "model.trust-remote-code",
                f"{origin}: {name} comes with code of its own, which runs only with "
                "--gkd-trust-remote-code",
                facts={"path": name, "origin": origin},
            ) from error
        if found is None:
            raise
        raise _not_built("tokenizer", source, origin, error) from error


def load_processor(name: str, origin: str, *, trust_remote_code: bool) -> str | None:
    """The class name of the model's processor; None if the model has none.

    Raises StageFault ``tokenizer.load`` if there is one that cannot be built, or
    ``env.package-missing`` if a package is missing.
    """
    found = locate(name, origin)
    if found is None or not model_files.has_processor(found.directory):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(
            str(found.directory), trust_remote_code=trust_remote_code
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise _not_built("processor", str(found.directory), origin, error) from error
    return type(processor).__name__


def _not_built(what: str, path: str, origin: str, error: Exception) -> StageFault:
    """The fault for a tokenizer or processor that transformers refused to build."""
    facts = {"path": path, "origin": origin}
    problem = f"{origin}: no {what} can be built from {path}"
    wanted = _REQUIRED.search(str(error)) if isinstance(error, ImportError) else None
    if wanted is not None:
        package = wanted[2].lower()
        facts["package"] = package = PIP_NAMES.get(package, package)
        problem += f": {wanted[1]} needs the package {package}, which is not installed"
        return StageFault("env.package-missing", problem, facts=facts)
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    problem += f": {type(error).__name__}: {said.strip()}"
    return StageFault("tokenizer.load", problem, facts=facts)


def _light_class(directory: Path) -> Any:
    """The tokenizer's class, found without AutoTokenizer if the result is the same.

    AutoTokenizer imports torch (measured: 7 s of CPU while an engine starts, against
    1.5 s without). It uses the class that tokenizer_config.json names if its own table
    has that class for config.json's model type; what it uses otherwise depends on more
    than is checked here (transformers 5.19, tokenization_auto.py, from_pretrained).
    None if this does not hold, or AutoTokenizer is already imported.
    """
    if "transformers.models.auto.tokenization_auto" in sys.modules:
        return None
    named = _json(directory / "tokenizer_config.json")
    config = _json(directory / "config.json")
    name, model_type = named.get("tokenizer_class"), config.get("model_type")
    if not isinstance(name, str) or not isinstance(model_type, str):
        return None
    if named.get("auto_map") or config.get("auto_map"):
        return None
    if not (directory / "tokenizer.json").is_file():
        return None
    with collector.paused():
        import transformers

        classes, others = _auto_tables(Path(transformers.__file__).parent)
        name = name.removesuffix("Fast")
        if classes.get(model_type) != name or any(
            fnmatch.fnmatch(str(directory).lower(), pattern) for pattern in others
        ):
            return None
        known = getattr(transformers, name, None)
        base = transformers.PreTrainedTokenizerFast
    return known if isinstance(known, type) and issubclass(known, base) else None


def _auto_tables(transformers: Path) -> tuple[dict[str, str], list[str]]:
    """AutoTokenizer's class for each model type, and names that are exceptions.

    Read from its source, since importing it is what costs. Empty if the source does not
    have the expected form.
    """
    tables: dict[str, ast.expr] = {}
    source = transformers / "models/auto/tokenization_auto.py"
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tables[node.targets[0].id] = node.value
    match tables.get("TOKENIZER_MAPPING_NAMES"), tables.get(_EXCEPTIONS):
        case ast.Call(args=[ast.List(elts=pairs)]), ast.List() as others:
            return dict(map(_pair, pairs)), ast.literal_eval(others)
    return {}, []


def _pair(pair: ast.expr) -> tuple[str, str]:
    """Model type and class of ("llama", "LlamaTokenizer" if <it can be> else None)."""
    match pair:
        case ast.Tuple(elts=[ast.Constant(str(kind)), value]):
            best = value.body if isinstance(value, ast.IfExp) else value
            if isinstance(best, ast.Constant) and isinstance(best.value, str):
                return kind, best.value.removesuffix("Fast")
    return "", ""


_EXCEPTIONS = "MODEL_IDS_TO_TOKENIZERS_BACKEND"


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes()) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
