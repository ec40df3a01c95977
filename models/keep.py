"""Keep what runs of the models found: ``python models/keep.py MACHINE``.

Writes docs/model-runs.json from .gkd/models/, from which docs/models.md is made. What
it holds of models that were not run again stays. MACHINE says what it ran on.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import make

KEPT = ("failed", "cause", "difference_nats", "run_s")


def main(machine: str) -> None:
    """Write the file, without the messages, which hold paths of the machine."""
    root = Path(__file__).parent.parent
    record = root / "docs/model-runs.json"
    runs: dict[str, dict[str, Any]] = (
        json.loads(record.read_text())["models"] if record.exists() else {}
    )
    for path in root.glob(".gkd/models/*.json"):
        entry = json.loads(path.read_text())
        kept = {key: entry[key] for key in KEPT}
        runs.setdefault(entry["model"], {})[entry["layout"]] = kept
    runs = {name: runs.get(name, {}) for name in make.shapes()}
    # Of runs kept before, too: what was open then may be known by now.
    for name, layouts in runs.items():
        for layout, run in layouts.items():
            if run["failed"]:
                known = make.known(name, layout) or {}
                run |= {"whose": known.get("whose"), "why": known.get("why")}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = {"machine": machine, "date": today, "models": runs}
    record.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
