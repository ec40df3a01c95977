"""All stacks of a job as one tree: which processes are in a frame, and which are not.

By kind of process and thread; where one or a few leave the others is marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytest_gkd import rank_words
from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.processes.stacks import in_library
from pytest_gkd.watch import own_frames, rank_sets
from pytest_gkd.watch.samples import ProcessSample

WIDTH = 80
# Of a run of frames that the same processes are in, so many are shown at its ends.
HEAD, TAIL = 1, 2
# Which only wait for others' work and tell nothing of the job.
BESIDE = ("ray-system", "helper", "compiler")
OUTER, INNER = 60, 140  # frames of one stack
DEEPEST = 6  # further branches are not indented any more
_NUMBERS = re.compile(r"\d+")


@dataclass
class Node:
    """A frame and the processes that are in it; the root of a tree has no frame.

    ``here`` are those that go no deeper. ``is_odd`` says that its processes are few,
    and that most of the others went another way at this frame.
    """

    frame: Frame | None = None
    members: list[ProcessSample] = field(default_factory=list)
    here: list[ProcessSample] = field(default_factory=list)
    children: dict[tuple[str, str, int], Node] = field(default_factory=dict)
    is_odd: bool = False

    def ordered(self) -> list[Node]:
        """The children, those with most processes first."""
        return sorted(self.children.values(), key=lambda one: -len(one.members))


@dataclass(frozen=True)
class Group:
    """One kind of process and one of its threads, with the tree of their stacks."""

    kind: str
    thread: str
    members: tuple[ProcessSample, ...]
    root: Node

    @cached_property
    def size(self) -> int:
        """Of how many a process is one: the world size, where that is known."""
        told = [one.role.world_size or 0 for one in self.members]
        return max([len(self.members), *told]) if self.is_ranked else len(self.members)

    @cached_property
    def is_ranked(self) -> bool:
        return rank_sets.ranked(self.members)

    def label(self, some: Sequence[ProcessSample]) -> str:
        """``0-6/8`` for ranks, else the pid of one process, else ``3 of 4``."""
        if self.is_ranked:
            ranks = (r for one in some if (r := one.role.rank) is not None)
            return f"{rank_words.spans(ranks)}/{self.size}"
        if len(some) == 1:
            return some[0].place
        return f"{len(some)}/{self.size}"


@dataclass(frozen=True)
class Tree:
    """The groups, and what is not in them.

    ``idle`` counts helper threads that only wait for work; ``blind`` are processes
    without stacks.
    """

    groups: tuple[Group, ...]
    idle: int = 0
    blind: tuple[ProcessSample, ...] = ()

    def text(self, width: int = WIDTH) -> str:
        """For people; every line fits the width."""
        lines = []
        for group in self.groups:
            who = f"{len(group.members)} processes{rank_sets.nodes(group.members)}"
            if len(group.members) == 1:
                who = group.members[0].label
            lines.append(f"{group.kind}, {group.thread}: {who}")
            lines += _lines(group, group.root, 1)
            lines.append("")
        if self.idle:
            threads = "thread" if self.idle == 1 else "threads"
            lines.append(f"({self.idle} idle helper {threads} not shown)")
        for one in self.blind:
            why = one.problem or "it has no Python frames"
            lines.append(f"{one.label}: no stacks: {why.splitlines()[0]}")
        return "\n".join(_cut(line, width) for line in lines).rstrip()

    def to_json(self) -> dict[str, Any]:
        """Each tree as nested ``name``, ``value``, ``children``, as flame graphs take.

        ``value`` is the number of processes.
        """
        return {
            "schema": 1,
            "groups": [
                {
                    "kind": group.kind,
                    "thread": group.thread,
                    "size": group.size,
                    "members": [
                        {
                            "pid": one.local_pid,
                            "node": one.node,
                            "rank": one.role.rank,
                            "name": one.role.name,
                        }
                        for one in group.members
                    ],
                    "tree": _json(group, group.root),
                }
                for group in self.groups
            ],
            "idle_threads": self.idle,
            "without_stacks": [one.local_pid for one in self.blind],
        }


def build(processes: Iterable[ProcessSample]) -> Tree:
    """The tree of these processes' stacks; main threads first."""
    stacks: dict[tuple[str, str], list[tuple[ProcessSample, tuple[Frame, ...]]]] = {}
    idle, blind = 0, []
    for process in processes:
        if process.role.kind in BESIDE:
            continue
        if not process.threads:
            if process.problem:
                blind.append(process)
            continue
        for thread in process.threads:
            if frames := _bounded(own_frames.own(thread)):
                key = (kind_of(process), thread_name(thread))
                stacks.setdefault(key, []).append((process, frames))
            else:
                idle += 1
    groups = [
        _group(kind, thread, found)
        for (kind, thread), found in sorted(
            stacks.items(), key=lambda item: (item[0][1] != MAIN, -len(item[1]))
        )
    ]
    return Tree(tuple(groups), idle, tuple(blind))


def kind_of(process: ProcessSample) -> str:
    """What a process is one of: its kind, an actor's also with its class."""
    kind, name = process.role.kind, process.role.name.partition(" #")[0]
    if kind.startswith("ray-") and name.startswith("ray::"):
        return name.partition(" ")[0].partition(".")[0]
    return name or kind if kind == "process" else kind


def thread_name(thread: Thread) -> str:
    """A thread's name with its numbers as N, so that ranks' threads are alike."""
    if thread.is_main:
        return MAIN
    return f"thread {_NUMBERS.sub('N', thread.name)}" if thread.name else "other thread"


def _bounded(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Both ends of a stack that recursion has made deep: trees are walked so, too."""
    between = len(frames) - OUTER - INNER
    if between <= 0:
        return frames
    gap = Frame("…", 0, f"{between} more frames")
    return (*frames[:OUTER], gap, *frames[-INNER:])


def _group(
    kind: str, thread: str, found: Sequence[tuple[ProcessSample, tuple[Frame, ...]]]
) -> Group:
    root = Node()
    for process, frames in found:
        node = root
        _join(node.members, process)
        for frame in frames:
            line = 0 if in_library(frame) else frame.line
            key = (frame.function, frame.file, line)
            node = node.children.setdefault(key, Node(frame))
            _join(node.members, process)
        _join(node.here, process)
    _level(root)
    _mark(root)
    return Group(kind, thread, tuple(root.members), root)


def _level(node: Node) -> None:
    """End all at Python's frames where some have no native ones below these.

    Of a busy machine py-spy may tell the native frames of some processes only.
    """
    children = node.children.values()
    if node.here and all(one.frame and one.frame.is_native for one in children):
        node.children, node.here = {}, list(node.members)
    for child in node.children.values():
        _level(child)


def _join(members: list[ProcessSample], process: ProcessSample) -> None:
    if not any(one.pid == process.pid for one in members):
        members.append(process)


def _mark(node: Node) -> None:
    """Mark children that hold few of the processes where another holds most."""
    whole = len(node.members)
    most = max((len(one.members) for one in node.children.values()), default=0)
    for child in node.children.values():
        few = len(child.members) <= max(1, whole // 4)
        child.is_odd = few and most * 2 > whole and len(child.members) < most
        if not child.is_odd:
            _mark(child)


# -- text --------------------------------------------------------------------------


def _lines(group: Group, root: Node, depth: int) -> list[str]:
    """What is below a node, a run of frames with the same processes after another."""
    found = []
    indent = "  " * min(depth, DEEPEST)
    if root.here and root.children:
        found.append(f"{indent}{group.label(root.here)} stand here")
    for child in root.ordered():
        run, node = [child], child
        while len(node.children) == 1 and not node.here:
            node = next(iter(node.children.values()))
            run.append(node)
        label = group.label(child.members) if len(group.members) > 1 else ""
        pad = " " * len(label)
        mark = "* " if child.is_odd else "  "
        shown = _folded([one.frame for one in run if one.frame])
        for number, text in enumerate(shown):
            lead = f"{mark}{label or pad}" if not number else f"  {pad}"
            end = ""
            if not number and child.is_odd:
                one = len(child.members) == 1
                end = f"  <- leave{'s' if one else ''} the others here"
            found.append(f"{indent[2:]}{lead} {text}{end}")
        found += _lines(group, node, depth + 1)
    return found


def _folded(frames: Sequence[Frame]) -> list[str]:
    """The ends of a run of frames, and the innermost that is the program's own."""
    if len(frames) <= HEAD + TAIL + 2:
        return [str(frame) for frame in frames]
    own = own_frames.last_own(frames)
    ends = {*range(HEAD), *range(len(frames) - TAIL, len(frames))}
    kept = sorted(ends | {number for number, one in enumerate(frames) if one == own})
    found, last = [], -1
    for number in kept:
        if between := number - last - 1:
            found.append(f"… {between} frame{'s' * (between > 1)}")
        found.append(str(frames[number]))
        last = number
    return found


def _cut(line: str, width: int) -> str:
    """To the width; a mark at its end stays, and the middle of what is before goes."""
    if len(line) <= width:
        return line
    text, sign, mark = line.partition("  <- ")
    room = width - len(sign + mark) - 1
    half = room * 2 // 3
    return f"{text[:half]}…{text[len(text) - (room - half) :]}{sign}{mark}"


def _json(group: Group, node: Node) -> dict[str, Any]:
    frame = node.frame
    return {
        "name": str(frame) if frame else group.kind,
        "value": len(node.members),
        "members": group.label(node.members),
        "pids": [one.pid for one in node.members],
        "odd": node.is_odd,
        "children": [_json(group, child) for child in node.ordered()],
    }
