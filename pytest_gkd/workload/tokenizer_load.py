"""Can the tokenizer and the processor of a model be built?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_gkd.fault import StageFault
from pytest_gkd.workload import collector, modelfiles
from pytest_gkd.workload.modelpaths import locate


def load(name: str, origin: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a model directory or hub id, as transformers loads it.

    Raises StageFault ``tokenizer.load``, ``model.trust-remote-code``,
    ``checkpoint.missing`` or ``env.permission``; what the hub answers is left as is.
    """
    found = locate(name, origin)
    if found is not None:
        try:
            modelfiles.check_tokenizer_files(found.directory, origin)
        except StageFault as fault:
            if not (found.from_hub and fault.facts.get("absent")):
                raise
            found = None  # the hub will bring it
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
        raise  # a package is missing, which is no fault of the tokenizer's files
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise StageFault(
                "model.trust-remote-code",
                f"{origin}: {name} comes with code of its own, and "
                "--gkd-trust-remote-code is off",
                facts={"path": name, "origin": origin},
            ) from error
        if found is None:
            raise
        first = next(iter(str(error).splitlines()), "")
        raise StageFault(
            "tokenizer.load",
            f"{origin}: no tokenizer can be built from {source}: "
            f"{type(error).__name__}: {first}",
            facts={"path": source, "origin": origin},
        ) from error


def load_processor(name: str, origin: str, *, trust_remote_code: bool) -> str | None:
    """The class name of the model's processor; None where the model has none.

    Raises StageFault ``tokenizer.load`` when there is one that cannot be built.
    """
    found = locate(name, origin)
    if found is None or not any(
        (found.directory / file).is_file()
        for file in ("processor_config.json", "preprocessor_config.json")
    ):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(
            str(found.directory), trust_remote_code=trust_remote_code
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise StageFault(
            "tokenizer.load",
            f"{origin}: no processor can be built from {found.directory}: "
            f"{type(error).__name__}: {first}",
            facts={"path": str(found.directory), "origin": origin},
        ) from error
    return type(processor).__name__


def _light_class(directory: Path) -> Any:
    """The tokenizer's class, found without AutoTokenizer where that is safe.

    AutoTokenizer imports torch (measured: 7 s of CPU beside an engine that starts,
    against 1.5 s without). A class that tokenizer_config.json names, that transformers
    knows, and that reads tokenizer.json is what AutoTokenizer would have taken. None
    where this does not hold, or AutoTokenizer is imported already.
    """
    if "transformers.models.auto.tokenization_auto" in sys.modules:
        return None
    config_path = directory / "tokenizer_config.json"
    if not config_path.is_file() or not (directory / "tokenizer.json").is_file():
        return None
    config = json.loads(config_path.read_bytes())
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or config.get("auto_map"):
        return None
    with collector.paused():
        import transformers

        base = transformers.PreTrainedTokenizerFast
        for candidate in (name.removesuffix("Fast") + "Fast", name):
            known = getattr(transformers, candidate, None)
            if isinstance(known, type) and issubclass(known, base):
                return known
    return None
