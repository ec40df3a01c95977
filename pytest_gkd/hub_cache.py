"""Where Hugging Face's libraries keep their downloads, and which models are there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def home(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep what they download and prepare.

    In it, huggingface_hub uses ``hub`` (constants.py) and datasets uses ``datasets``
    (config.py).
    """
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = environ.get("HF_HOME") or f"{cache}/huggingface"
    # Path.expanduser raises for a user without a home.
    return Path(os.path.expanduser(found))  # noqa: PTH111


def models(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, by its own variables and their order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(os.path.expanduser(environ[variable]))  # noqa: PTH111
    return home(environ) / "hub"


def modelscope(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    """Where ModelScope has a model, if its config is there.

    Where modelscope 1.40 looks for it and where earlier releases put it
    (hub/utils/utils.py, find_reusable_legacy_repo_dir; utils/file_utils.py).
    """
    own = environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub"
    place = Path(os.path.expanduser(own))  # noqa: PTH111
    owner, _, name = hub_id.partition("/")
    safe = name.replace(".", "___")
    found = [place / "models" / owner / safe, place / owner / safe]
    found += [place / "models" / owner / name, place / owner / name]
    new = place / "models" / f"{owner}--{name}" / "snapshots"
    found[:0] = sorted(new.glob("*")) if name else []
    try:
        return next((one for one in found if (one / "config.json").exists()), None)
    except (OSError, ValueError):
        return None


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    """The cached snapshot of a model's default branch, if its config is there."""
    place = models(environ) / ("models--" + hub_id.replace("/", "--"))
    try:
        revision = (place / "refs" / "main").read_text("utf-8").strip()
        found = place / "snapshots" / revision
        return found if (found / "config.json").exists() else None
    except (OSError, ValueError):
        return None
