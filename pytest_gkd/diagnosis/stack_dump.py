"""Parses the stacks of a live process, as py-spy and faulthandler print them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAIN = "MainThread"
_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".rs")
# py-spy's: a title, then ``name (file:line)``; native frames have a library, no line.
_SPY = re.compile(r'Thread (\d+|0x[\da-fA-F]+) \(([^)]*)\)(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"    (\S.*) \(([^()]*)\)$")
_PLACE = re.compile(r"(.*):(\d+)$")
# faulthandler's: the thread that wrote the dump is called the current one.
_FAULT = re.compile(r"(Current t|T)hread (0x[\da-fA-F]+)(?: \[(.*)\])?[^:]*:?$")
_FAULT_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One stack frame: its file as printed, and the line in it.

    ``code`` is that line's text, empty if the traceback does not show it. A native
    frame of a live process has the library as its file, and line 0.
    """

    file: str
    line: int
    function: str
    code: str = field(default="", compare=False)

    @property
    def path(self) -> str:
        """The file with slashes, whatever the system it was printed on."""
        return self.file.replace("\\", "/")

    @property
    def is_native(self) -> bool:
        """Whether it is C, C++ or Rust code, by its file."""
        return not self.line or self.file.endswith(_NATIVE)

    def __str__(self) -> str:
        """``function (file:line)``, as py-spy prints it."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.function} ({place})"


@dataclass(frozen=True)
class Thread:
    """One thread: its frames, the outermost first.

    ``number`` is the OS thread id, 0 if the dump does not give it (faulthandler's is an
    address); ``state`` is py-spy's (``idle``, ``active``).
    """

    name: str
    number: int
    frames: tuple[Frame, ...]
    state: str = ""

    @property
    def is_main(self) -> bool:
        return self.name == MAIN


def threads(text: str, pid: int = 0) -> tuple[Thread, ...]:
    """The threads in one process's dump, the main thread first; empty without frames.

    The main thread is the one that py-spy names so or whose id is ``pid``; in
    faulthandler's dump, which names none, the last. A native frame has line 0.
    """
    found: list[tuple[str, int, str, list[Frame]]] = []
    is_spy = False
    for line in text.splitlines():
        if title := _SPY.match(line):
            is_spy = True
            number = int(title[1]) if title[1].isdecimal() else 0
            name = MAIN if pid and number == pid else title[3] or ""
            found.append((name, number, title[2], []))
        elif title := _FAULT.match(line):
            found.append((title[3] or "", 0, "", []))
        elif found and (frame := _frame(line)):
            found[-1][3].append(frame)
    whole = [one for one in found if one[3]]
    if whole and not is_spy:
        whole[-1] = (MAIN, *whole[-1][1:])
    made = [Thread(n, i, tuple(reversed(f)), s) for n, i, s, f in whole]
    return tuple(sorted(made, key=lambda thread: not thread.is_main))


def _frame(line: str) -> Frame | None:
    if found := _SPY_FRAME.match(line):
        place = _PLACE.match(found[2])
        if place is None:
            return Frame(found[2], 0, found[1])
        return Frame(place[1], int(place[2]), found[1])
    if found := _FAULT_FRAME.match(line):
        return Frame(found[1], int(found[2]), found[3])
    return None
