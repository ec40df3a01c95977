"""All stacks of a job as nested boxes: a flame graph with its root on top.

Of trees as ``gkd watch`` keeps them in tree.json (see watch.stack_tree).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.language import marked, tr

# What a page can hold: boxes, and lines of all of them.
MOST_BOXES = 600
MOST_FRAMES = 1500
FRAME_CHARS = 160
# Branches within branches; a frame below has no box of its own any more.
DEEPEST = 40
# Of a longer run of frames without a branch, those between are folded.
SHOWN = 6
TOP, BOTTOM = 2, 3


LEAVES, WAITED = marked("leaves the others here"), marked("waited for")


@dataclass(frozen=True)
class Box:
    """Frames that the same processes are in, from the outermost one, and those that
    branch off below; ``weight`` is the number of processes, ``here`` how many of them
    go no deeper. ``mark`` is what sets them apart from the others, if anything does."""

    who: str
    weight: int
    mark: str
    top: Sequence[str]
    folded: Sequence[str]
    bottom: Sequence[str]
    here: int
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Graph:
    """One kind of process and one of its threads."""

    title: str
    boxes: Sequence[Box]


def graphs(
    tree: Mapping[str, Any], odd: Iterable[int] = ()
) -> tuple[list[Graph], bool]:
    """The graphs of a tree, main threads first, and whether all of it is in them.

    ``odd`` are the pids that others wait for.
    """
    room = _Room()
    found = []
    for group in tree.get("groups") or ():
        many = len(group["members"])
        told = tr("{kind}, {thread}: {number} processes")
        told = tr("{kind}, {thread}: {number} process") if many == 1 else told
        about = {name: group[name] for name in ("kind", "thread")}
        title = _text(told.format(number=many, **about))
        ranks = all(one["rank"] is not None for one in group["members"])
        named = "" if many == 1 else "rank" if ranks else "process"
        boxes = [
            box
            for node in group["tree"]["children"]
            if (box := _box(node, named, room, set(odd) if many > 1 else set()))
        ]
        found.append(Graph(title, boxes))
    return found, room.is_enough


class _Room:
    def __init__(self) -> None:
        self.boxes, self.frames, self.is_enough = MOST_BOXES, MOST_FRAMES, True


def _box(
    node: Mapping[str, Any], named: str, room: _Room, odd: set[int], depth: int = 0
) -> Box | None:
    """The box of a node and those in it; ``named`` is what its processes are called."""
    if room.boxes <= 0 or room.frames <= 0 or depth > DEEPEST:
        room.is_enough = False
        return None
    room.boxes -= 1
    mark = (
        LEAVES
        if node["odd"]
        else WAITED
        if odd and odd.issuperset(node["pids"])
        else ""
    )
    odd = set() if mark else odd  # said once, where it begins
    first, frames = node, [_text(node["name"])]
    while len(node["children"]) == 1 and _is_run(node):
        node = node["children"][0]
        frames.append(_text(node["name"]))
    if len(frames) > room.frames:
        frames, room.is_enough = frames[: room.frames], False
    room.frames -= len(frames)
    top, folded, bottom = frames, [], []
    if len(frames) > SHOWN:
        top, folded, bottom = frames[:TOP], frames[TOP:-BOTTOM], frames[-BOTTOM:]
    below = [
        box
        for child in node["children"]
        if (box := _box(child, named, room, odd, depth + 1))
    ]
    deeper = sum(child["value"] for child in node["children"])
    return Box(
        _who(named, _text(first["members"])),
        max(1, int(first["value"])),
        mark,
        top,
        folded,
        bottom,
        max(0, int(node["value"]) - deeper) if below else 0,
        below,
    )


def _text(text: Any) -> str:
    return sanitize.line(str(text)[:FRAME_CHARS])


def _who(named: str, members: str) -> str:
    """Its label for people: of ranks it has their numbers and the world size."""
    if named != "rank":
        return members if named else ""
    several = any(sign in members for sign in "-,")
    return f"rank{'s' * several} {members}"


def _is_run(node: Mapping[str, Any]) -> bool:
    """Whether all of its processes are in its only child, and none leaves there."""
    child = node["children"][0]
    return bool(child["value"] == node["value"] and not child["odd"])
