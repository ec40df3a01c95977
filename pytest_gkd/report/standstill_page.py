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
    stood = tr("{word} for {time} in {phase}").format(
        word=tr(str(told.get("verdict"))),
        time=f"{told['since_s']:.0f} s",
        phase=told.get("phase") or tr("an unknown phase"),
    )
    sure = "" if told.get("confidence") == "certain" else f" ({tr('likely')})"
    odd = [str(pid) for pid in told.get("odd_pids") or ()]
    names = sorted(path.name for path in (folder / "stacks").glob("*.txt"))
    names.sort(key=lambda name: name.removesuffix(".txt") not in odd)
    page = {
        "verdict": f"{stood}{sure}",
        "mark": "failed",
        "when": cut(tr("; ").join(_texts(told.get("why")))),
        "label": tr("First:") if fixes else tr("Look here:"),
        "first": cut([*fixes, *_texts(told["waits"]), ""][0]),
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
        cannot = tr("{file} cannot be drawn: {why}; see tree.txt")
        problems.append(cannot.format(file=TREE, why=type(error).__name__))
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
    sure = "" if one.get("seen") else tr("perhaps ")
    check = ""
    if one.get("command"):
        command = str(one["command"])
        check = f"{tr('; ')}{tr(str(one.get('where')))}{tr(': ')}{command}"
    return cut(f"{sure}{tr(str(one.get('observation')))} [{one.get('cause')}]{check}")


def _doing(told: Mapping[str, Any], name: str) -> str:
    """What the process does whose stacks a file has; empty if it is not told."""
    pid = Path(name).stem
    said = (one for one in told.get("processes") or () if str(one.get("pid")) == pid)
    does = next((one.get("does") for one in said), None)
    return tr(": ") + cut(tr_filled(str(does)), DOES_CHARS) if does else ""


def _does(one: Mapping[str, Any]) -> str:
    does = one.get("does")
    return tr_filled(str(does)) if does else str(one.get("command"))


def _tree(
    processes: Sequence[Mapping[str, Any]], odd: Sequence[int]
) -> list[dict[str, Any]]:
    """The processes below one another, those without a parent here on top."""
    shown: dict[Any, dict[str, Any]] = {
        one["pid"]: {
            "does": cut(_does(one), DOES_CHARS),
            "is_odd": one["pid"] in odd,
            "use": tr("state {state}, {seconds} s of CPU, {size} MiB").format(
                state=one.get("state"),
                seconds=f"{one.get('cpu_s', 0):.1f}",
                size=f"{one.get('rss_bytes', 0) / MIB:.0f}",
            ),
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
