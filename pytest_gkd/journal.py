"""Files that survive a killed process: workers' events, verdicts, the report."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gkd.clock import monotonic
from pytest_gkd.procfs import Descriptor

# Of these events only the newest counts: a stage may say a million of them.
STATES = ("step",)
STATE_SUFFIX = ".state"
STATE_LOOK_S = 0.5
LINE_BYTES = 16 * 1024 * 1024


class EventWriter:
    """Appends events to a file, one JSON line each, in one write call.

    A line is either whole or, when the process is killed inside the write, missing
    its end; readers wait for the newline. What only tells of a state overwrites what
    was said of it before, in a file beside.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open(path, os.O_APPEND)
        self._state_path = path.with_suffix(STATE_SUFFIX)
        self._state: Descriptor | None = None
        self._looked_at = 0.0
        self._torn = False

    def _open(self, path: Path, flags: int) -> Descriptor:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Descriptor.of(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600))

    def write(self, event: dict[str, Any]) -> None:
        """Write one event; values that JSON does not know become their text.

        Raises OSError, with the path, where that cannot be done.
        """
        line = (json.dumps(event, default=str) + "\n").encode("utf-8", "replace")
        is_state = event.get("event") in STATES
        try:
            if is_state:
                self._overwrite(line)
            else:
                self._append(line)
        except OSError as error:
            path = self._state_path if is_state else self._path
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _overwrite(self, line: bytes) -> None:
        # Said a thousand times a second, and to look a path up costs more than that.
        looks = monotonic() > self._looked_at + STATE_LOOK_S
        if (
            self._state is None
            or not self._state.is_open()
            or (looks and not self._state.is_same(self._state_path))
        ):
            self._state = self._open(self._state_path, 0)
        if looks:
            self._looked_at = monotonic()
        os.pwrite(self._state.number, line, 0)

    def _append(self, line: bytes) -> None:
        # A stage may have closed it, as os.closerange does, or cleared the directory.
        if not (self._file.is_open() and self._file.is_same(self._path)):
            self._file = self._open(self._path, os.O_APPEND)
        # What a full disk cut off is a line of its own, which no reader takes.
        written = os.write(self._file.number, b"\n" * self._torn + line)
        self._torn = written < len(line) + self._torn
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class EventReader:
    """Reads what was appended to every ``*.jsonl`` of a directory since last time.

    An event's ``t`` is held to what ``clock`` here (seconds) proves of it: it was
    written between the last look at the end of its file and this one. A process whose
    clock is frozen or moved can neither shorten nor lengthen its budget.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._files: dict[Path, BinaryIO] = {}
        self._states: dict[Path, bytes] = {}
        self._looked: dict[Path, float] = {}
        self._began = clock()
        self.unreadable = 0

    def read(self, limit_bytes: int = -1) -> Iterator[dict[str, Any]]:
        """New events, each with ``worker``, the name of its file; of each file at most
        ``limit_bytes``, and the rest of a line.

        One counts as read when the next is asked for: an interrupt amid its handling
        loses nothing, it comes again. Lines that are no events are counted in
        ``unreadable``. What was read from stays open: to clear the directory takes
        nothing away.
        """
        known = (path for path in self._files if path.suffix != STATE_SUFFIX)
        for path in sorted({*self._directory.glob("*.jsonl"), *known}):
            earliest = self._looked.get(path, self._began)
            looked = self._clock()
            for file in self._files_of(path):
                yield from self._events(file, path, earliest, limit_bytes)
                left = os.fstat(file.fileno()).st_size - file.tell()
                if 0 <= limit_bytes <= left:
                    break  # the rest comes the next time, before anything else
            else:
                self._looked[path] = looked
            yield from self._state(path, earliest)

    def _files_of(self, path: Path) -> Iterator[BinaryIO]:
        """The file that was there and, where another has its name now, that one."""
        known = self._files.get(path)
        if known is not None:
            yield known
            if Descriptor.of(known.fileno()).is_same(path):
                return
        try:
            self._files[path] = path.open("rb")
        except FileNotFoundError:
            return
        yield self._files[path]
        if known is not None:
            known.close()

    def _events(
        self, file: BinaryIO, path: Path, earliest: float, limit_bytes: int
    ) -> Iterator[dict[str, Any]]:
        at = file.tell()
        data = file.read(limit_bytes)
        if 0 <= limit_bytes <= len(data) and not data.endswith(b"\n"):
            data += file.readline(LINE_BYTES)
        file.seek(at)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= LINE_BYTES:
            whole = len(data)  # no event is so long: it is read away
        for line in data[:whole].splitlines(keepends=True):
            event = _event(line)
            if event is not None:
                yield self._placed(event, path, earliest)
            elif line.strip():
                self.unreadable += 1
            at += len(line)
            file.seek(at)

    def _state(self, path: Path, earliest: float) -> Iterator[dict[str, Any]]:
        for file in self._files_of(path.with_suffix(STATE_SUFFIX)):
            # Past the buffer, which would give again what was there before.
            line = os.pread(file.fileno(), LINE_BYTES, 0).partition(b"\n")[0]
            event = _event(line)
            # One that cannot be read is just being written.
            if event is not None and line != self._states.get(path):
                yield self._placed(event, path, earliest)
                self._states[path] = line

    def _placed(
        self, event: dict[str, Any], path: Path, earliest: float
    ) -> dict[str, Any]:
        if "t" in event:
            event["t"] = _within(event["t"], earliest, self._clock())
        return {**event, "worker": path.stem}

    def close(self) -> None:
        """Nothing is read any more."""
        while self._files:
            self._files.popitem()[1].close()


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line says; None for one that was cut off, or that another hand wrote."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _within(at: Any, earliest: float, latest: float) -> float:
    """A time of another process, as far as it can be true."""
    if not isinstance(at, (int, float)) or not at <= latest:
        return latest
    return max(at, earliest)


def memory_file(name: str) -> Path:
    """A new file in memory, under the name by which other processes can open it.

    It is there while this process lives, whatever becomes of disks and directories.
    """
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}")


def write_json(path: Path, data: Any) -> None:
    """Write a whole file or leave the old one: write beside it, then rename."""
    write_whole(path, json_text(data))


def json_text(data: Any) -> str:
    """As it stands in a file; values that JSON does not know become their text."""
    return json.dumps(_finite(data), indent=1, default=str) + "\n"


def write_whole(path: Path, text: str) -> None:
    """As write_json, of a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        write_private(temporary, text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, whatever the umask; no link is
    followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8", "replace"))


def _finite(data: Any) -> Any:
    """NaN and infinities, which JSON has not, as their names."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


class VerdictReader:
    """Reads how stages of other workers ended, as the controller writes it down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._outcomes: dict[str, str] = {}

    def outcome(self, name: str) -> str | None:
        """The stage's outcome, None while it is open."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a full disk cut it off
                verdict = json.loads(line)
                self._outcomes[verdict["stage"]] = verdict["outcome"]
        return self._outcomes.get(name)
