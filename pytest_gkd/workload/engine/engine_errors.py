"""Keeps the exception that ended an engine process during its start.

vLLM logs it in that process and raises a different one here, which says to look above.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from pytest_gkd.own_faults import own_fault
from pytest_gkd.stage_api import StageFault

RECORD = "error.json"
TEXT_CHARS = 4000
# Where workers and core log that they could not start (vLLM 0.21 to 0.33). Filters of
# these stay when an engine configures vLLM's logging anew; handlers do not.
LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
# Configuration keys that transformers 5 moved or renamed: code that reads them was
# written for another release.
MOVED_KEYS = ("rope_theta", "rope_scaling", "torch_dtype")


class EngineStartError(RuntimeError):
    """An engine process ended with an exception, whose class name this class takes:
    the catalogue then recognises it in every layout."""


class _Keeper(logging.Filter):
    """Writes down the first exception that is logged, in any process of the engine."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        directory = os.environ.get("VLLM_RPC_BASE_PATH")
        if error is None or not directory:
            return True
        own = own_fault(error)
        found = {
            "own": own and own.to_json(),
            "type": type(error).__name__,
            "text": str(error)[:TEXT_CHARS],
            "missing": _missing(error),
        }
        # Consequences of the first one, in other processes, are not kept.
        with (
            contextlib.suppress(OSError),
            Path(directory, RECORD).open("x", encoding="utf-8") as file,
        ):
            json.dump(found, file)
        return True


def keep() -> None:
    """From now on, record the exceptions that this process and its forks log."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_Keeper())


def forget(directory: str) -> None:
    """Remove what a previous engine left in its ``socket_dir``."""
    (Path(directory) / RECORD).unlink(missing_ok=True)


def kept(directory: str, model: str) -> Exception | None:
    """What ended the engine of that ``socket_dir``, as it would have been raised here.

    None if none of its processes logged an exception.
    """
    try:
        text = (Path(directory) / RECORD).read_text("utf-8")
        found: dict[str, Any] = json.loads(text)
    except (OSError, ValueError):
        return None
    if found["own"]:
        return StageFault.from_json(found["own"])
    if found["missing"]:
        return _missing_fault(found["missing"], model)
    named: type[EngineStartError] = type(found["type"], (EngineStartError,), {})
    return named(f"{found['text']} (in a process of the engine, as it started)".strip())


def missing_key(error: AttributeError, model: str) -> StageFault | None:
    """The fault if ``error`` says that the config of ``model`` lacks a key.

    None for attributes of other objects, and for keys that have moved.
    """
    found = _missing(error)
    return _missing_fault(found, model) if found else None


def _missing(error: BaseException) -> dict[str, str] | None:
    from transformers import PretrainedConfig, __version__

    if (
        not isinstance(error, AttributeError)
        or not isinstance(error.obj, PretrainedConfig)
        or error.name in MOVED_KEYS
    ):
        return None
    kind = type(error.obj).__name__
    return {"key": error.name, "class": kind, "transformers": __version__}


def _missing_fault(found: dict[str, Any], model: str) -> StageFault:
    key, kind = found["key"], found["class"]
    return StageFault(
        "config.missing-value",
        f"vLLM reads {key} from the model's configuration: config.json in "
        f"{model} has no such key, and {kind} of transformers {found['transformers']} "
        "no default for it",
        facts={"key": key, "model": model, "class": kind},
    )
