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

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import jobs  # noqa: E402

KEPT = ROOT / "docs/watch-standstills.json"


def wrong(problems: list[str]) -> list[str]:
    """What was not as the label says, in a word each."""
    found = []
    for one in problems:
        if one.startswith("phase "):
            found.append("phase")
        elif " is not named: " in one or " is named: " in one:
            found.append("name")
        elif one.startswith(("a false word", "no 'a verdict'")) or ", expected " in one:
            found.append("verdict")
        else:
            found.append("end")
    return list(dict.fromkeys(found))


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
        "wrong": wrong(problems),
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
            now = {key: found[key] for key in ("verdict", "wrong", "seconds")}
            first.setdefault(case["name"], now)
    kept = {"machine": machine, "first": first, "cases": cases}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
