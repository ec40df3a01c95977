"""The classes that AReaL's programs read their configuration into."""

from __future__ import annotations

import re

from pytest_gkd.job.sources import classes
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError

CONFIG = "areal/api/cli_args.py"
CODE = rf"{CONFIG}|areal/experimental/.*config.*\.py|examples/.*"
TAKES = re.compile(r"\bload_expr_config\(\s*[^,()]+(?:\([^()]*\))?,\s*(?P<name>\w+)")
# Classes that a user's own program may take.
ROOTS = ("GRPOConfig", "PPOConfig", "SFTConfig", "RWConfig", "DPOConfig")
HANDED_ON = (
    *("vLLMConfig", "SGLangConfig", "DistributedDataParallelConfig"),
    *("FP8EngineConfig", "SwanlabConfig"),
)


def read(files: Files) -> Schema:
    """The classes, as classes.typed returns them."""
    if CONFIG not in files:
        raise SourceError(f"it has no {CONFIG}")
    return classes.typed(files, CODE, TAKES, ROOTS, HANDED_ON)


def completed(schema: Schema, _release: str, _last: str, older: Schema) -> Schema:
    """Adds the examples of an older release, which an installed package lacks."""
    programs = {**older["programs"], **schema["programs"]}
    return {
        **schema,
        "programs": programs,
        "classes": {**older["classes"], **schema["classes"]},
    }


SOURCE = Source({"areal": ("areal/**/*.py", "examples/**/*.py")}, read, completed)
