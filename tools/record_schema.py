"""Records the keys and defaults of a release of verl, for ``gkd check``.

    python tools/record_schema.py verl-0.9.1-py3-none-any.whl...

Reads the trees that verl generates of its own configuration
(verl/trainer/config/_generated_ppo_*_trainer.yaml) from a wheel; nothing of it is
imported. Writes pytest_gkd/job/schemas/verl-RELEASE.json: the
keys under FSDP, and for each other engine (``model_engine=``) what differs.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PLACE = Path(__file__).parents[1] / "pytest_gkd/job/schemas"
TREE = re.compile(r"verl/trainer/config/_generated_ppo_(?:(\w+?)_)?trainer\.yaml")
FSDP = "dp"  # model_engine's own name for it


def flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a tree by its whole name; an empty mapping is a value."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{above}.{key}" if above else str(key))
    else:
        yield above, tree


def record(wheel: Path) -> Path:
    """Write the schema of one wheel; its path."""
    release = wheel.name.split("-")[1]
    engines = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if found := TREE.fullmatch(name):
                tree = yaml.safe_load(archive.read(name))
                engines[found[1] or FSDP] = dict(flat(tree))
    common = engines[FSDP]
    schema: dict[str, Any] = {"keys": common, "engines": {}}
    for engine, own in sorted(engines.items()):
        changed = {k: v for k, v in own.items() if common.get(k, ...) != v}
        absent = sorted(common.keys() - own.keys())
        schema["engines"][engine] = {"changed": changed, "absent": absent}
    path = PLACE / f"verl-{release}.json"
    path.write_text(json.dumps(schema, indent=0, sort_keys=True) + "\n")
    return path


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(record(Path(argument)))
