"""Records that survive a killed process: workers' events, and stages' verdicts."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.files import append_line, json_line, json_object
from pytest_gkd.processes.procfs import Descriptor
from pytest_gkd.stage_events import KINDS, STATES, Event, Verdict
from pytest_gkd.stage_plan import PlannedStage

# Saved before any stage can monkeypatch it, as in files.
_pwrite = os.pwrite

LINE_BYTES = 16 * 1024 * 1024


class MemoryFile:
    """A new in-memory file, which this user's other processes open by its ``path``.

    It exists until it is closed, whatever happens to disks and directories, and nobody
    can truncate it. Raises OSError if memory or file descriptors have run out.
    """

    def __init__(self, name: str) -> None:
        number = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file = os.fdopen(number, "rb", buffering=0)
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.path = Path(f"/proc/{os.getpid()}/fd/{number}")

    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, limit_bytes: int, at: int) -> bytes:
        """Up to ``limit_bytes`` from offset ``at``."""
        limit_bytes = max(0, min(limit_bytes, self.size() - at))
        return os.pread(self._file.fileno(), limit_bytes, at)

    def close(self) -> None:
        """Others keep it only if they have it open; its path may be reused."""
        self._file.close()


@dataclass(frozen=True)
class EventPaths:
    """Where a process writes its events, and its states, of which the latest counts."""

    events: Path
    states: Path | None = None


class EventWriter:
    """Appends events to a file, one JSON line each.

    An event that only reports a state overwrites the previous one in a file of its own,
    if there is one.
    """

    def __init__(self, paths: EventPaths) -> None:
        self._events = _Output(paths.events, os.O_APPEND)
        self._states = _Output(paths.states, 0) if paths.states else None

    def write(self, event: Event) -> None:
        """Write one event; values that JSON cannot represent become strings.

        Raises OSError, with the path, if that fails.
        """
        keys = {"event": event.kind, **vars(event)}
        del keys["worker"]  # implied by the file
        line = json_line(keys, _plain)
        states = self._states if isinstance(event, STATES) else None
        try:
            if states is not None:
                _pwrite(states.number(), line, 0)
            else:
                append_line(self._events.number(), line)
        except OSError as error:
            path = (states or self._events).path
            raise OSError(error.errno, error.strerror, str(path)) from None

    def close(self) -> None:
        self._events.close()
        if self._states is not None:
            self._states.close()


class _Output:
    """An existing file, held open, although a stage may close any descriptor."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self._flags = os.O_WRONLY | flags
        self._open = Descriptor.of(os.open(path, self._flags))

    def number(self) -> int:
        """Its descriptor, reopened if closed. Raises OSError if that fails."""
        if not self._open.is_open():
            found = Descriptor.of(os.open(self.path, self._flags))
            if found.file != self._open.file:
                os.close(found.number)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            self._open = found
        return self._open.number

    def close(self) -> None:
        if self._open.is_open():
            os.close(self._open.number)


class _Worker:
    """The reading state of one worker: ``at`` is the offset of the next byte to read,
    ``looked`` when the end was last reached."""

    def __init__(self, name: str, looked: float) -> None:
        self.name = name
        self.events = MemoryFile(f"gkd-events-{name}")
        self.states = MemoryFile(f"gkd-states-{name}")
        self.looked = looked
        self.at = 0
        self.state = b""


class EventReader:
    """Reads the new events of each worker that has been added.

    An event's ``t`` is clamped to what our ``clock`` (seconds) proves: it was written
    between the previous look at the end of its file and this one. A process whose clock
    is frozen or shifted can neither shorten nor extend its budget.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self.unreadable = 0

    def add(self, name: str) -> EventPaths:
        """Create a worker's files. Raises OSError as MemoryFile does.

        They are in memory and open here from the start: no event is lost to a directory
        that a stage clears, a disk that it fills or a descriptor that it closes.
        """
        if name not in self._workers:
            self._workers[name] = _Worker(name, self._clock())
        worker = self._workers[name]
        return EventPaths(worker.events.path, worker.states.path)

    def names(self) -> list[str]:
        return list(self._workers)

    def position(self, name: str) -> tuple[int, int]:
        """How many bytes of a worker's events have been read, and how many exist."""
        worker = self._workers.get(name)
        return (worker.at, worker.events.size()) if worker else (0, 0)

    def read(
        self, limit_bytes: int | None = None, only: str | None = None
    ) -> Iterator[Event]:
        """New events, each with its ``worker``, from all workers or ``only`` one: up to
        ``limit_bytes`` per worker, plus the rest of a line.

        An event counts as read once the next is requested: if its handling is
        interrupted, nothing is lost, as it comes again. Lines that are not events are
        counted in ``unreadable``.
        """
        for worker in list(self._workers.values()):
            if only not in (None, worker.name):
                continue
            earliest = worker.looked
            looked = self._clock()
            # Read first, so that events written before a state are reported before it.
            state = worker.states.read(LINE_BYTES, 0)
            size = worker.events.size()
            yield from self._events(worker, earliest, size, limit_bytes)
            if limit_bytes is None or size - worker.at < limit_bytes:
                worker.looked = looked
            yield from self._state(worker, state, earliest)

    def _events(
        self, worker: _Worker, earliest: float, size: int, limit_bytes: int | None
    ) -> Iterator[Event]:
        left = size - worker.at
        data = worker.events.read(
            left if limit_bytes is None else limit_bytes, worker.at
        )
        if len(data) < left and not data.endswith(b"\n"):
            more = worker.events.read(LINE_BYTES, worker.at + len(data))
            data += more[: more.find(b"\n") + 1] or more
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= LINE_BYTES:
            whole = len(data)  # no event is this long: skip it
        for line in data[:whole].splitlines(keepends=True):
            event = _event(line)
            if event is not None:
                yield self._placed(event, worker, earliest)
            elif line.strip():
                self.unreadable += 1
            worker.at += len(line)

    def _state(self, worker: _Worker, state: bytes, earliest: float) -> Iterator[Event]:
        line = state.partition(b"\n")[0]
        event = _event(line)
        # An unreadable one is just being written.
        if event is not None and line != worker.state:
            yield self._placed(event, worker, earliest)
            worker.state = line

    def _placed(self, event: Event, worker: _Worker, earliest: float) -> Event:
        event.t = _within(event.t, earliest, self._clock())
        event.worker = worker.name
        return event

    def close(self) -> None:
        """Stop reading; only processes that have the files open can still write."""
        while self._workers:
            _, worker = self._workers.popitem()
            worker.events.close()
            worker.states.close()


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, PlannedStage) else str(value)


def _event(line: bytes) -> Event | None:
    """Parse a line; None for one that was cut off, or that something else wrote."""
    keys = json_object(line)
    try:
        return typed_json.read(KINDS[keys.pop("event")], keys)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None


def _within(at: Any, earliest: float, latest: float) -> float:
    """Another process's timestamp, clamped to what is possible."""
    if not isinstance(at, (int, float)) or not at <= latest:
        return latest
    return max(at, earliest)


def verdict_on(verdicts: Path, name: str) -> str | None:
    """How another worker's stage ended, as recorded by the controller in ``verdicts``;
    None while it is open."""
    said = map(_event, verdicts.read_bytes().splitlines())
    found = {v.stage: v.outcome for v in said if isinstance(v, Verdict)}
    return found.get(name)
