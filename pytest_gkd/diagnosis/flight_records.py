"""Tells from the ranks' flight recorders which collective a rank did not enter.

torch keeps the last collectives of each process group with their sequence numbers
(torch/csrc/distributed/c10d/FlightRecorder.hpp); it writes them as a pickle, and
returns them as JSON. TorchComms does the same, but for what the numbers count
(comms/torchcomms/hooks/fr/FlightRecorder.cpp; see ``counted``).
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pytest_gkd import rank_words

Record = Mapping[str, Any]
MOST_ENTRIES = 1000
# A collective's tensors and the dimensions of one, a group's ranks, the groups, a word.
MOST_TENSORS, MOST_DIMENSIONS, MOST_RANKS, MOST_GROUPS = 256, 64, 100_000, 64
MOST_LETTERS = 300
# What a person reads: entries, those with stacks, letters of a text, of other values.
MOST_READ, MOST_STACKS, MOST_TEXT, VALUE_LETTERS = 200, 5, 4000, 24
_NUMBERS = ("collective_seq_id", "time_created_ns")
_WORDS = ("profiling_name", "recorder", "state")
# Not compared: what not all ranks of a group take part in, and what makes no tensor.
_ALONE = ("send", "recv", "batch_op_issue", "new_window", "split")


class RecordError(ValueError):
    """Not a flight record; the text says why."""


@dataclass(frozen=True)
class Missing:
    """The collective that some ranks entered last and others did not.

    ``sequence`` counts the collectives of the process group ``group``; ``sizes`` are
    the shapes of the inputs, ``behind`` has the last sequence number of each rank that
    is behind. Ranks ``without_record`` were stopped, killed, or had not created the
    group yet. The fields go as they are into the facts of a report.
    """

    group: str
    sequence: int
    operation: str
    sizes: list[list[int]]
    dtypes: list[str]
    entered_by: list[int]
    behind: dict[str, int]
    without_record: list[int]

    def text(self) -> str:
        """On one line."""
        pairs = zip(self.dtypes, self.sizes, strict=False)
        tensors = ", ".join(f"{dtype}{size}" for dtype, size in pairs) or "no tensor"
        line = f"collective {self.sequence}, {self.operation} of {tensors}: entered by "
        line += f"{rank_words.name(self.entered_by)}"
        for rank, at in self.behind.items():
            line += f"; rank {rank} had entered {at}"
        if self.without_record:
            line += f"; no record of {rank_words.name(self.without_record)}"
        return line


class _Plain(pickle.Unpickler):
    """Creates dictionaries, lists, strings and numbers, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise RecordError(f"it holds {module}.{name}, which no flight record does")


def read(raw: bytes) -> Record:
    """A record as torch writes it (a pickle) or returns it (JSON).

    Raises RecordError. Nothing in a pickle is executed.
    """
    try:
        text = raw.lstrip()[:1] == b"{"
        found = json.loads(raw) if text else _Plain(io.BytesIO(raw)).load()
    except RecordError:
        raise
    except Exception as error:
        why = str(error) or type(error).__name__  # MemoryError says nothing
        raise RecordError(f"neither JSON nor a pickle: {why}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise RecordError("it has no list of entries")
    entries = [one for one in found.get("entries", []) if _plain(one)]
    groups = found.get("pg_config")
    return {
        **found,
        "entries": entries,
        "pg_config": groups if isinstance(groups, dict) else {},
    }


def is_torchcomms(record: Record) -> bool:
    """Whether TorchComms wrote a record; see ``read``.

    It describes a group by its backend, which torch puts before the operation alone.
    """
    entries = [_plain(one) for one in record["entries"]]
    return bool(entries) and all(
        entry.get("process_group", [""])[1:]
        == [str(entry.get("profiling_name")).partition(":")[0]]
        for entry in entries
    )


def counted(record: Record) -> Record:
    """The last collective of each group, numbered from 1, in a record of TorchComms'.

    TorchComms numbers the operations of all groups of a process in one row, so that a
    collective has another number on each rank, and marks one done as soon as the call
    has returned, so that only what was entered can be compared. None is left where the
    record ``is_cut``: it no longer holds the first operation. Each group gets its ranks
    into its name, since several may have the name that a user gave. See ``read``.
    """
    entries = [one for one in map(_plain, record["entries"]) if "process_group" in one]
    is_cut = min(map(_number, entries), default=0) > 0
    names: dict[str, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    for entry in [] if is_cut else entries:
        told, operation = entry["process_group"][0], str(entry.get("profiling_name"))
        if operation.rpartition(":")[2] in _ALONE:
            continue
        if told not in names:
            ranks = _ranks(record["pg_config"].get(told))
            names[told] = f"{told} {ranks}"
            groups[names[told]] = {"ranks": ranks}
        name = names[told]
        number = _number(last[name]) + 1 if name in last else 1
        counts = {"process_group": [name], "collective_seq_id": number}
        last[name] = {**entry, **counts, "recorder": "torchcomms"}
    return {"entries": [*last.values()], "pg_config": groups, "is_cut": is_cut}


def shortened(record: Record) -> str:
    """What is compared of a record, of its last entries, as JSON; see ``read``."""
    entries = [_plain(entry) for entry in record["entries"][-MOST_ENTRIES:]]
    named = dict.fromkeys(e["process_group"][0] for e in entries if "pg_id" not in e)
    groups = {
        name: {"ranks": _ranks(record["pg_config"].get(name))}
        for name in [*named][:MOST_GROUPS]
    }
    return json.dumps({"entries": entries, "pg_config": groups})


def readable(record: Record, most_letters: int) -> dict[str, Any]:
    """The last entries of a record, and what else it has, for a person; see ``read``.

    Stacks, most of a record, only of the last few, and all in bounds: an entry that is
    as torch writes it may hold anything beside that.
    """
    room = _Room(most_letters)
    entries = []
    for number, entry in enumerate(reversed(record["entries"][-MOST_READ:])):
        if room.left <= 0:
            break
        skipped = () if number < MOST_STACKS else ("frames",)
        shown = {name: value for name, value in entry.items() if name not in skipped}
        entries.append(room.fitting(shown))
    others = {name: value for name, value in record.items() if name != "entries"}
    return {**room.fitting(others), "entries": entries[::-1]}


@dataclass
class _Room:
    """Room for so many letters of JSON; in place of what is left out is "..."."""

    left: int

    def fitting(self, value: Any, depth: int = 8) -> Any:
        """A copy of what there is room for, and no deeper."""
        self.left -= len(value) if isinstance(value, str) else VALUE_LETTERS
        if isinstance(value, (dict, list, tuple)) and depth:
            several = islice(value, max(0, self.left // VALUE_LETTERS))
            if isinstance(value, dict):
                named = (name for name in several if isinstance(name, str))
                return {
                    name[:MOST_LETTERS]: self.fitting(value[name], depth - 1)
                    for name in named
                    if self.left > 0
                }
            return [self.fitting(one, depth - 1) for one in several if self.left > 0]
        if isinstance(value, str):
            return value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}..."
        is_short = value is None or isinstance(value, (bool, float))
        is_short |= isinstance(value, int) and abs(value) < 1 << 64
        return value if is_short else "..."


def _plain(entry: Any) -> dict[str, Any]:
    """The fields that are compared; none unless each is as torch writes it.

    What a job has written may be anything, such as lists that hold each other.
    """
    if not isinstance(entry, dict):
        return {}
    sizes = _list(entry.get("input_sizes"), (list, tuple), MOST_TENSORS)
    found: dict[str, Any] = {
        **{name: entry.get(name) for name in _NUMBERS},
        "input_sizes": sizes and [_list(one, int, MOST_DIMENSIONS) for one in sizes],
        "input_dtypes": _words(entry.get("input_dtypes"), MOST_TENSORS),
        "is_p2p": entry.get("is_p2p", False) is True,
    }
    for name in (name for name in _WORDS if name in entry):
        found[name] = next(iter(_words([entry[name]], 1) or ()), None)
    if entry.get("process_group"):
        found["process_group"] = _words(entry["process_group"], 2)
    elif "pg_id" in entry:
        found["pg_id"] = entry["pg_id"] if isinstance(entry["pg_id"], int) else None
    else:
        return {}
    values = [*found.values(), *(found["input_sizes"] or ())]
    counts = (found[name] for name in _NUMBERS)
    is_whole = None not in values and all(
        isinstance(one, int) and 0 <= one < 1 << 64 for one in counts
    )
    return found if is_whole else {}


def _list(value: Any, kind: type | tuple[type, ...], most: int) -> list[Any] | None:
    """The first of a list, or of a tuple, of values of one kind; None for others."""
    if not isinstance(value, (list, tuple)):
        return None
    first = [*value[:most]]
    return first if all(isinstance(one, kind) for one in first) else None


def _words(value: Any, most: int) -> list[str] | None:
    found = _list(value, str, most)
    return found and [one[:MOST_LETTERS] for one in found]


def _ranks(group: Any) -> list[int]:
    """The ranks of a process group, by what a record tells of it; empty for none."""
    told = group.get("ranks") if isinstance(group, dict) else None
    try:
        listed = json.loads(told) if isinstance(told, str) else told
    except (ValueError, RecursionError):
        return []
    return _list(listed, int, MOST_RANKS) or []


def find_missing(records: Mapping[int, Record], silent: list[int]) -> Missing | None:
    """The first collective that not every rank has entered; None if there is none.

    ``records`` are those of the ranks that left one, ``silent`` the other ranks. Ranks
    outside a process group are not waited for in it.
    """
    last: dict[str, dict[int, Any]] = {}
    for rank, record in records.items():
        for entry in record.get("entries", []):
            if entry.get("is_p2p"):
                continue
            newest_by_rank = last.setdefault(_group(entry), {})
            known = newest_by_rank.get(rank, entry)
            newest_by_rank[rank] = max(known, entry, key=_number)
    # The newest group first: what was entered last is what is waited for.
    for group, entries in sorted(
        last.items(), key=lambda item: -max(map(_created, item[1].values()))
    ):
        newest = max(entries.values(), key=_number)
        last_number = _number(newest)
        members = _members(newest, records.values()) or {*records, *silent}
        reached = {
            r: _number(entries[r]) if r in entries else 0
            for r in records
            if r in members
        }
        behind = {str(r): n for r, n in reached.items() if n < last_number}
        without = [rank for rank in silent if rank in members]
        if behind or without:
            return Missing(
                group,
                last_number,
                str(newest.get("profiling_name", "a collective")),
                newest["input_sizes"],
                newest["input_dtypes"],
                [rank for rank, number in reached.items() if number == last_number],
                behind,
                without,
            )
    return None


def _group(entry: Record) -> str:
    """A process group by its name, which is the same on all ranks; its number is not.

    If a rank has several recorders, each ``recorder`` counts on its own.
    """
    names = entry.get("process_group")
    name = names[0] if names else entry["pg_id"]
    return f"{entry['recorder']}:{name}" if "recorder" in entry else f"{name}"


def _members(entry: Record, records: Iterable[Record]) -> set[int]:
    """The ranks of an entry's process group; empty if no record tells."""
    names = entry.get("process_group") or ("",)
    for record in records:
        if ranks := _ranks(record.get("pg_config", {}).get(names[0])):
            return set(ranks)
    return set()


def _number(entry: Record) -> int:
    return int(entry["collective_seq_id"])


def _created(entry: Record) -> int:
    return int(entry["time_created_ns"])
