"""The classes that ROLL's programs read their YAML into, and the names they accept."""

from __future__ import annotations

import re

from pytest_gkd.job.sources import classes
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

CONFIG = "roll/configs/base_config.py"
CODE = r"roll/configs/\w+\.py|roll/pipeline/.*config\.py|examples/start_\w+\.py"
TAKES = re.compile(r"\bdata_class=(?P<name>\w+)")
# Classes that a user's own program may take.
ROOTS = ("RLVRConfig", "AgenticConfig", "DistillConfig", "SFTConfig", "DPOConfig")
# Megatron's arguments and vLLM's sampling get them as a whole.
HANDED_ON = ("TrainingArguments", "GeneratingArguments")
TEMPLATE = re.compile(r"@register_chat_template\(\s*[\"']([\w.-]+)")
MEGATRON = "mcore_adapter/src/mcore_adapter/training_args.py"
# strategy_config.get("fsdp_size", 1), and the same on a copy of it.
READ = re.compile(r"_?config(?:\.get\(|\.pop\(|\[)\s*[\"'](\w+)[\"']")


def read(files: Files) -> Schema:
    """The classes, as classes.typed returns them, and names.

    ``templates`` are those of ``data_args.template``, ``megatron`` and ``fsdp2`` the
    keys of ``strategy_config`` for a strategy of that name.
    """
    if CONFIG not in files:
        raise SourceError(f"it has no {CONFIG}")
    own = {name: text for name, text in files.items() if name != MEGATRON}
    found = classes.typed(own, CODE, TAKES, ROOTS, HANDED_ON)
    template = own.get("roll/datasets/chat_template.py", "")
    fsdp = "".join(matching(own, r"roll/.*fsdp.*\.py").values())
    megatron = classes.dataclasses(matching(files, re.escape(MEGATRON)))
    found["templates"] = sorted(set(TEMPLATE.findall(template)))
    found["fsdp2"] = sorted(set(READ.findall(fsdp)))
    found["megatron"] = sorted(
        {name for one in megatron.values() for name in one["fields"]}
    )
    return found


def completed(schema: Schema, _release: str, _last: str, older: Schema) -> Schema:
    """Adds the start scripts and Megatron's names, which an installed copy lacks."""
    return {
        **schema,
        "programs": {**older["programs"], **schema["programs"]},
        "megatron": schema["megatron"] or older["megatron"],
    }


SOURCE = Source(
    {"roll": ("roll/**/*.py", "examples/start_*.py", MEGATRON)}, read, completed
)
