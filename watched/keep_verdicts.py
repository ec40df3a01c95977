"""Keep what a run of the cases showed, from .gkd/watched/, for the documentation.

``python watched/keep_verdicts.py MACHINE`` writes docs/watch-standstills.json; MACHINE
says in words what it ran on.

What a case showed the first time it was judged stays beside what it shows now.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jobs

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs/watch-standstills.json"


def entry(case: dict[str, Any], shown: dict[str, Any], today: str) -> dict[str, Any]:
    """What is kept of a case: no texts of it, which hold paths of the machine."""
    told = shown["told"] or {}
    # What follows the last is the job's own output.
    problems = [one for one in shown["problems"] if not one.startswith("it printed: ")]
    return {
        "job": case["job"],
        "where": case.get("where", ""),
        "how": case["how"],
        "expected": shown["expected"],
        "verdict": told.get("word") or ("" if problems else "finished"),
        "phase": told.get("phase", ""),
        "who": told.get("who", ""),
        "seconds": shown["seconds"],
        "released": bool(case.get("release")) and not problems,
        "right": not problems,
        "skipped": shown["skipped"],
        "date": today,
    }


def main(machine: str) -> None:
    """Write the file; cases that did not run stay as they are there."""
    before = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    first, cases = before.get("first", {}), before.get("cases", {})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for case in jobs.cases():
        path = ROOT / f".gkd/watched/{case['name']}.json"
        if not path.exists():
            continue
        found = entry(case, json.loads(path.read_text()), today)
        cases[case["name"]] = found
        if not found["skipped"]:
            now = {key: found[key] for key in ("verdict", "right", "seconds")}
            first.setdefault(case["name"], now)
    kept = {"machine": machine, "first": first, "cases": cases}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
