"""Keep what a matrix run measured: ``python matrix/keep.py MACHINE`` writes
docs/fault-times.json from .gkd/matrix/. MACHINE says in words what it ran on.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

KEPT = ("outcome", "cause", "verdict_after_s", "run_s")


def main(machine: str) -> None:
    """Write the file, without the messages, which hold paths of the machine."""
    root = Path(__file__).parent.parent
    measured = [json.loads(p.read_text()) for p in root.glob(".gkd/matrix/*.json")]
    faults = {
        entry["fault"]: {key: entry[key] for key in KEPT}
        for entry in sorted(measured, key=lambda entry: entry["fault"])
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = {"machine": machine, "date": today, "faults": faults}
    (root / "docs/fault-times.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
