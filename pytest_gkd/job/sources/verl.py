"""verl's keys, from the trees that it generates of its own configuration."""

from __future__ import annotations

import re
from typing import Any

from pytest_gkd.job import documents
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError

TREE = re.compile(r"verl/trainer/config/_generated_ppo_(?:(\w+?)_)?trainer\.yaml")
MODEL = "actor_rollout_ref.model.path"
FSDP = "dp"  # model_engine's own name for it


def read(files: Files) -> Schema:
    """The keys under FSDP, and for each other ``model_engine=`` what differs."""
    engines = {}
    for name, text in files.items():
        found = TREE.fullmatch(name)
        if found:
            settings = documents.settings_of(text, name)
            engines[found[1] or FSDP] = {one.key: one.value for one in settings}
    common = engines[FSDP]
    if MODEL not in common:
        raise SourceError(f"its configuration has no key {MODEL}")
    changes: dict[str, Any] = {}
    for engine, own in sorted(engines.items()):
        changed = {k: v for k, v in own.items() if common.get(k, ...) != v}
        changes[engine] = {
            "changed": changed,
            "absent": sorted(common.keys() - own.keys()),
        }
    return {"keys": common, "engines": changes}


SOURCE = Source({"verl": ("trainer/config/_generated_ppo_*trainer.yaml",)}, read)
