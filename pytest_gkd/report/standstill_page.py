"""Renders a standstill that ``gkd watch`` has kept as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.language import tr, tr_filled
from pytest_gkd.report import flame, templates
from pytest_gkd.report.page_texts import Files, cut, diagnosis
from pytest_gkd.report.record import REPORT

TEMPLATE = "standstill.html.jinja"
TREE = "tree.json"
MOST_PROCESSES = 300
DOES_CHARS = 200
LARGEST_BYTES = 64 << 20
MIB = 1 << 20


def read(folder: Path) -> dict[str, Any] | None:
    """The report of a standstill that a directory holds, with sanitized texts; None if
    it holds another."""
    found = _json(folder / REPORT)
    is_one = "since_s" in found and "waits" in found
    return sanitize.data(found) if is_one else None


def html(told: Mapping[str, Any], folder: Path) -> str:
    """The page of a standstill, as ``read`` has it, kept in ``folder``."""
    causes = [diagnosis(one) for one in told.get("causes") or ()]
    fixes = causes[0]["advice"] if causes else []
    sure = "" if told.get("confidence") == "certain" else " (likely)"
    odd = [str(pid) for pid in told.get("odd_pids") or ()]
    names = sorted(path.name for path in (folder / "stacks").glob("*.txt"))
    names.sort(key=lambda name: name.removesuffix(".txt") not in odd)
    page = {
        "verdict": f"{told.get('verdict')} for {told['since_s']:.0f} s in "
        f"{told.get('phase') or 'an unknown phase'}{sure}",
        "mark": "failed",
        "when": cut("; ".join(map(str, told.get("why") or ()))),
        "label": tr("First:") if fixes else tr("Look here:"),
        "first": cut(str([*fixes, *told["waits"], ""][0])),
        "causes": causes,
        "standstill": parts(told, folder),
        "files": [
            {**file, "name": f"{file['name']}{_doing(told, file['name'])}"}
            for file in Files(folder).ends(f"stacks/{one}" for one in names)
        ],
    }
    return templates.load(TEMPLATE).render(page=page)


def parts(told: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the template's part on a standstill shows, on any page."""
    problems, odd = [*told.get("problems", ())], told.get("odd_pids") or ()
    try:
        graphs, is_whole = flame.graphs(_json(folder / TREE), odd)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        graphs, is_whole = [], True
        problems.append(f"{TREE} cannot be drawn: {type(error).__name__}; see tree.txt")
    return {
        "why": _texts(told.get("why")),
        "waits": _texts(told.get("waits")),
        "suspects": [_suspect(one) for one in told.get("suspects") or ()],
        "evidence": _texts(told.get("evidence")),
        "processes": _tree(told.get("processes") or (), odd),
        "graphs": graphs,
        "is_whole": is_whole,
        "problems": _texts(problems),
    }


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none, or it cannot be read as one."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return {}
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _texts(lines: Any) -> list[str]:
    return [cut(tr_filled(str(line))) for line in lines or ()]


def _suspect(one: Mapping[str, Any]) -> str:
    sure = "" if one.get("seen") else "perhaps "
    check = f"; {one.get('where')}: {one['command']}" if one.get("command") else ""
    return cut(f"{sure}{one.get('observation')} [{one.get('cause')}]{check}")


def _doing(told: Mapping[str, Any], name: str) -> str:
    """What the process does whose stacks a file has; empty if it is not told."""
    pid = Path(name).stem
    said = (one for one in told.get("processes") or () if str(one.get("pid")) == pid)
    does = next((one.get("does") for one in said), None)
    return f": {cut(str(does), DOES_CHARS)}" if does else ""


def _tree(
    processes: Sequence[Mapping[str, Any]], odd: Sequence[int]
) -> list[dict[str, Any]]:
    """The processes below one another, those without a parent here on top."""
    shown: dict[Any, dict[str, Any]] = {
        one["pid"]: {
            "does": cut(str(one.get("does") or one.get("command")), DOES_CHARS),
            "is_odd": one["pid"] in odd,
            "use": f"state {one.get('state')}, {one.get('cpu_s', 0):.1f} s of CPU, "
            f"{one.get('rss_bytes', 0) / MIB:.0f} MiB",
            "below": [],
        }
        for one in processes[:MOST_PROCESSES]
    }
    top: list[dict[str, Any]] = []
    for one in processes[:MOST_PROCESSES]:
        parent = shown.get(one.get("ppid")) if one.get("ppid") != one["pid"] else None
        place = top if parent is None else parent["below"]
        place.append(shown[one["pid"]])
    return top
