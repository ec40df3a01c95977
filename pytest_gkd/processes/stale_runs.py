"""``gkd clean``: finds what dead runs left behind, and removes it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.columns import padded
from pytest_gkd.language import marked, tr, tr_filled
from pytest_gkd.processes import cleanup, manifest, procfs
from pytest_gkd.processes.manifest import Manifest, RunLine

SCHEMA = 1
NOTHING_LEFT, LEFT = 0, 1
COMMON = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - where runs lie by default

# What happens to a thing: with --yes, and in a dry run.
DOES = {
    True: (marked("ended"), marked("removed")),
    False: (marked("would end"), marked("would remove")),
}


@dataclass
class Thing:
    """A process, a shared memory segment or a directory, and what becomes of it.

    ``left`` says why it is kept; empty if it is not. ``facts`` go into the JSON.
    """

    kind: str
    name: str
    left: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self, *, done: bool) -> dict[str, Any]:
        action = DOES[done][self.kind != "process"]
        return {
            "kind": self.kind,
            "name": self.name,
            "action": "left" if self.left else action,
            "why": self.left or None,
            **self.facts,
        }


@dataclass
class Run:
    """One run: its directory, whether it is dead, and what is left of it."""

    path: Path
    state: str
    why: str
    things: list[Thing] = field(default_factory=list)


def clean(*, yes: bool) -> list[Run]:
    """Inspect every run of this user; with ``yes``, clean up after dead ones.

    Only what a run's own manifest names, if it is still the same thing: same pid and
    start time, same device and inode. A run whose pytest process lives is not touched.
    """
    runs = []
    for path, link in manifest.find([Path(tempfile.gettempdir()), *COMMON]):
        run = _look(path, yes=yes)
        if run is not None:
            runs.append(run)
        gone = run is None or (yes and run.state == cleanup.DEAD and not _stays(run))
        if link is not None and gone and not path.exists():
            link.unlink(missing_ok=True)
    return runs


def _stays(run: Run) -> bool:
    return any(thing.left for thing in run.things)


def _look(path: Path, *, yes: bool) -> Run | None:
    if not path.exists():
        return None
    if not manifest.is_trusted(path) or not path.name.startswith(manifest.RUN_PREFIX):
        # Another user's, or writable by others: not ours to act upon.
        return None
    try:
        found = manifest.read((path / manifest.LIST).read_bytes())
    except OSError:
        return None
    if found.run is None:
        return Run(path, cleanup.ELSEWHERE, "its manifest does not name the run")
    state, why = cleanup.state(found.run)
    run = Run(path, state, why)
    if state == cleanup.DEAD:
        run.things += _processes(found, found.run, yes=yes)
        run.things += _memory(found, found.run, yes=yes)
        run.things += _folders(found, path, yes=yes)
    return run


def _processes(found: Manifest, run: RunLine, *, yes: bool) -> Iterator[Thing]:
    search = cleanup.Search(run, found.processes, ())
    ports = _ports(list(search.now()))
    if yes:
        result = cleanup.end(search)
        seen = [*((process, "") for process in result.ended), *result.left]
    else:
        seen = [(search.describe(s), _refusal(s.pid)) for s in search.now().values()]
    for process, why in seen:
        facts = {
            "pid": process.pid,
            "start": process.start,
            "stage": process.stage or None,
            "ports": ports.get(process.pid, []),
        }
        yield Thing(marked("process"), str(process), why, facts)


def _refusal(pid: int) -> str:
    """Why a process could not be ended; empty if it could."""
    owner = procfs.user(pid)
    foreign = owner not in (None, os.geteuid())
    return f"it belongs to another user (uid {owner})" if foreign else ""


def _ports(pids: list[int]) -> dict[int, list[int]]:
    """The TCP ports that each process listens on and so blocks for others."""
    found: dict[int, list[int]] = {}
    for pid in pids:
        try:
            # As `ss -ltnp` shows them; psutil called it connections() before 6.0.
            process = psutil.Process(pid)
            ask = getattr(process, "net_connections", None) or process.connections
            listening = {c.laddr.port for c in ask("tcp") if c.status == "LISTEN"}
        except psutil.Error:
            continue
        if listening:
            found[pid] = sorted(listening)
    return found


def _memory(found: Manifest, run: RunLine, *, yes: bool) -> Iterator[Thing]:
    if run.boot != manifest.boot():
        return  # it went with the machine
    present = [s for s in found.segments if (procfs.SHM / s.name).exists()]
    holders = cleanup.Holders() if present else None
    ours = set(cleanup.Search(run, found.processes, ()).now()) if present else set()
    for segment in present:
        assert holders is not None
        why = holders.refusal(segment, but=ours)
        if why is None:
            continue  # the name belongs to another file by now
        size = cleanup.segment_size(segment)
        if yes and not why:
            why = cleanup.remove_segment(segment)
        path = str(procfs.SHM / segment.name)
        facts = {"path": path, "bytes": size, "stage": segment.stage or None}
        name = f"{path} ({cleanup.megabytes(size)})"
        yield Thing(marked("shared memory"), name, why, facts)


def _folders(found: Manifest, run_dir: Path, *, yes: bool) -> Iterator[Thing]:
    for folder in found.folders:
        if not cleanup.is_same(folder):
            continue
        path = Path(folder.path)
        size = cleanup.tree_size(path)
        why = cleanup.remove_folder(folder) or "" if yes else ""
        yield _folder(path, size, why)
    size = cleanup.tree_size(run_dir)
    yield _folder(run_dir, size, cleanup.remove_tree(run_dir) if yes else "")


def _folder(path: Path, size: int, why: str) -> Thing:
    text = f"{path} ({cleanup.megabytes(size)})"
    return Thing(marked("directory"), text, why, {"path": str(path), "bytes": size})


# -- output ----------------------------------------------------------------------------


def exit_status(runs: list[Run], *, yes: bool) -> int:
    """1 if anything of a dead run is left: not removable, or this was a dry run."""
    dead = [run for run in runs if run.state == cleanup.DEAD]
    left = any(_stays(run) for run in dead) if yes else bool(dead)
    return LEFT if left else NOTHING_LEFT


def to_json(runs: list[Run], *, yes: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "dry_run": not yes,
        "runs": [
            {
                "run_dir": str(run.path),
                "state": run.state,
                "why": run.why,
                "things": [thing.to_json(done=yes) for thing in run.things],
            }
            for run in runs
        ],
    }


def report_text(runs: list[Run], *, yes: bool) -> str:
    """One block per run, then what to do next."""
    lines = []
    for run in runs:
        if run.state != cleanup.DEAD:
            lines.append(tr_filled(f"{run.path}: left alone: {run.why}"))
            continue
        lines.append(tr_filled(f"{run.path}: {run.why}"))
        lines += [f"  {_line(thing, done=yes)}" for thing in run.things]
    dead = [run for run in runs if run.state == cleanup.DEAD]
    if not dead:
        lines.append(tr("nothing is left of dead runs"))
    elif not yes:
        lines.append(tr("nothing was changed; run gkd clean --yes to do it"))
    elif any(_stays(run) for run in dead):
        lines.append(tr("not everything could be removed; see above"))
    return "\n".join(lines)


def _line(thing: Thing, *, done: bool) -> str:
    name = thing.facts.get("stage")
    stage = tr(", stage {name}").format(name=name) if name else ""
    numbers = ", ".join(str(port) for port in thing.facts.get("ports", ()))
    ports = tr(", listens on port {ports}").format(ports=numbers) if numbers else ""
    action = DOES[done][thing.kind != "process"]
    told = padded(tr("left alone" if thing.left else action), 13)
    why = tr(": ") + tr_filled(thing.left) if thing.left else ""
    return f"{told} {tr(thing.kind)} {thing.name}{stage}{ports}{why}"
