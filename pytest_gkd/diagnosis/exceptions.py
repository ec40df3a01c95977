"""Parses the exceptions in a text: class, message, frames, and how they are chained.

Tracebacks may be broken up by process names, other processes' lines, colours, rich's
boxes and a terminal's width, and may be nested in others: Ray's, a data loader's, an
exception group's, torch elastic's.
"""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pytest_gkd.diagnosis import launcher_summary, prefixes
from pytest_gkd.diagnosis.patterns import Match, Pattern
from pytest_gkd.diagnosis.scan import uncoloured
from pytest_gkd.diagnosis.stack_dump import Frame

# Lines of a message; lines, neither frame nor code, after which a traceback is given
# up.
MOST_LINES, MOST_LOST = 20, 300
# How much of a source line is kept.
MOST_CODE = 200
# Possible terminal widths, and how many lines of exactly that width prove one.
WIDTHS, FULL_LINES = range(60, 241), 4

# Of a long text, this many of the first and last parts with tracebacks are parsed, this
# much of each.
FIRST, LAST, PART, BEHIND, BEFORE = 8, 16, 1 << 16, 1 << 15, 400
# How far above a line a traceback that does not contain it may still belong to it.
NEAR = 60_000

_MARK = prefixes.MARK
_RAY = Pattern(
    rb"^(?P<raised>.*Error\(?\w*\)?: )? *(?:Exception raised in creation task: )?"
    rb"(?:The actor died because of an error raised in its creation task, )?"
    rb"ray::[^\r\n]*\(pid=\d+"
)
_LINKS = {
    "cause": b"The above exception was the direct cause",
    "context": b"During handling of the above exception",
}
# A frame as Python, loguru and rich print it, then as IPython does.
_FRAME = Pattern(
    rb"^(?:>? *File \"(?P<file>[^\"\r\n]+)\", line (?P<line>\d{1,9}),? in (?P<name>.+?)"
    rb"| *(?P<file2>\S+):(?P<line2>\d{1,9}) in (?P<name2>[\w.<>]+)) *$"
)
_NOTEBOOK = Pattern(
    rb"^(?:File (?P<file>[^\"]+):(?P<line>\d{1,9})"
    rb"|(?P<file2>Cell In ?\[\d+\]), line (?P<line2>\d{1,9})"
    rb"|(?P<file3>Input In \[\d+\]), in <cell line: (?P<line3>\d{1,9})>)"
    rb"(?:, in (?P<name>[\w.<>]+))?(?:\(.*\))?$"
)
# That of a file that Python cannot read, which has no functions yet.
_UNREADABLE = Pattern(rb"^ *File \"(?P<file>[^\"\r\n]+)\", line (?P<line>\d{1,9})$")
# The line of a frame among those around it, as rich and IPython mark it.
_POINTED = Pattern(
    rb"^ *(?:\xe2\x9d\xb1|-+>) *(?P<line>\d{1,9}) (?:\xe2\x94\x82| )*(?P<code>.+)$"
)
_NUMBERED = Pattern(rb"^ *\d{1,9}(?: |$)")
# The start of one in the text of an exception.
_QUOTED = Pattern(rb"[\"'`]Traceback \(most recent|\(most recent call last\):?\\+n")
# The first part of one, if the terminal or the box was too narrow for it.
_PART = Pattern(rb"^ *(?:File \"[^\"]*$|File \".*line[ \d,in]*$|/[^\s:]*(?::\d*)?$)")
_TO_NAME = Pattern(rb"\S:\d+(?: in)?$")
_NAMED = Pattern(
    rb"^ *(?P<type>(?:[A-Za-z_]\w*\.|<locals>\.)*(?:[A-Za-z_]\w*(?:Error|Exception"
    rb"|Group|Exit|Interrupt|Fault|Timeout|Warning|Failure|Died)|Exception"
    rb"|Stop(?:Async)?Iteration)"
    rb"(?:\([\w.]+\))?)(?::(?: (?P<message>.*))?)?$"
)
_DOTTED = Pattern(
    rb"^ *(?P<type>(?:[A-Za-z_]\w*\.)+(?:<locals>\.)?[A-Z]\w*)"
    rb"(?::(?: (?P<message>.*))?)?$"
)
# A class of the program's own script, but no log level, bar or metric.
_PLAIN = Pattern(
    rb"^ *(?P<type>[A-Z]\w*[a-z]\w*): (?P<message>[^ ].*)$",
    unless=rb"(?i)^ *(?:info|warn|debug|epoch|step|iter|train|eval|load|progress|note"
    rb"|process)|\d%",
)
_MEMBER = Pattern(rb"^[ +]*\+-[+-]*-{8,} (?:\d+|\.\.\.) -{8,}$")
_TREE = Pattern(rb"^ *(?:\| ?|\+ (?:Exception Group ))")
_FOLDED = Pattern(rb" *\[repeated \d+x across cluster\].*")
_NUMBER = re.compile(rb"\d+")
# How a line begins that continues none.
_OWN = re.compile(
    rb"Traceback \(most recent call last\)|\[?(?:INFO|WARN(?:ING)?|ERROR|DEBUG"
    rb"|CRITICAL|FATAL)\b"
)
_SIDES = "│┃║╭╰╮╯".encode()
_BOXED = tuple(one.encode() for one in "│┃║╭╰")
# What ends a message.
_AFTER = (b'"""', b"+--")
# Line endings that are drawn, not cut off.
_NOT_CUT = (b"^", b"-", b"=", b"*", *(one.encode() for one in "│┃║╭╰╮╯"))


@dataclass
class Raised:
    """One exception with its traceback, the outermost frame first.

    ``type`` is the class as printed, empty if the text ends before it; ``process`` is
    the prefix of its lines (``(WorkerDict pid=7)``). ``came`` says how it relates to
    the others: it has the one before it as its direct ``cause``, it was raised while
    that was being handled (``context``), or it is printed ``within`` another's message:
    that of another process, or of a group's member. ``start``, ``at`` and ``end`` are
    byte offsets in the text: where its first line begins, where the line with its class
    does, and where its message ends.
    """

    process: str
    start: int
    came: str = ""
    type: str = ""
    message: str = ""
    frames: list[Frame] = field(default_factory=list)
    at: int = -1
    end: int = 0


# Chained exceptions: the first cause first, the one raised last at the end.
Chain = tuple[Raised, ...]


def read(text: bytes) -> list[Chain]:
    """The exceptions in a text with tracebacks, in the order of their first lines."""
    processes: dict[bytes, _Reader] = {}
    timed, hosts = prefixes.are_timed(text), prefixes.hosts(text)
    for start, end, line in _lines(text):
        host = next(filter(line.startswith, hosts), b"")
        line = line.removeprefix(host)
        who, line = prefixes.untimed(line) if timed else (b"", line)
        process, own = prefixes.split(line)
        own = prefixes.untimed(own)[1] if timed and process else own
        if (begun := prefixes.off_the_bar(own)) is not own:
            inner, own = prefixes.split(begun)
            process += inner
        process += who
        reader = processes.get(host + process)
        if reader is None:
            reader = _Reader(process.decode("utf-8", "replace"))
            processes[host + process] = reader
        reader.take(own.rstrip(), start, end)
    done = [chain for reader in processes.values() for chain in reader.finish()]
    return sorted(done, key=lambda chain: min(one.start for one in chain))


class Collector:
    """Keeps the parts of a long text, fed block by block, that contain tracebacks.

    The first are cut out on the way. Later blocks with tracebacks are kept, only the
    last of them, and are cut at the end: a failing log may contain thousands of
    tracebacks.
    """

    def __init__(self) -> None:
        self._first: list[_Part] = []
        self._later: deque[_Block] = deque(maxlen=LAST)
        self._small = b""
        self._kept = b""
        self._offset = 0  # the end of what was examined

    def feed(self, block: bytes) -> None:
        """Take the next bytes."""
        self._small = self._small + block if self._small else block
        if len(self._small) >= PART:
            self._look()

    def _look(self) -> None:
        block, self._small = self._small, b""
        base = self._offset - len(self._kept)
        if self._first:
            self._first[-1].fill(block, self._offset)
        if self._later and self._later[-1].end == self._offset:
            self._later[-1].behind = block[:PART]
        seam = self._kept[1 - len(_MARK) :] + block[: len(_MARK) - 1]
        if _MARK in block or _MARK in seam:
            found = _Block(base, self._kept, block)
            if len(self._first) < FIRST:
                found.seen = found.cut(self._first, FIRST)
            if len(self._first) == FIRST:
                self._later.append(found)
        self._offset += len(block)
        self._kept = block[-BEFORE:]

    def chains(self) -> list[Chain]:
        """The exceptions in what was kept, with their offsets in the whole text."""
        found = []
        for part in self.parts:
            for chain in read(bytes(part.text)):
                for one in chain:
                    one.start += part.start
                    one.end += part.start
                    one.at += part.start if one.at >= 0 else 0
                found.append(chain)
        return found

    @property
    def parts(self) -> list[_Part]:
        """The parts that were kept, in the order of the text."""
        if self._small:
            self._look()
        later = self._first[-1:]
        for block in self._later:
            block.cut(later)
        return [*self._first, *later[len(self._first[-1:]) :][-LAST:]]


@dataclass
class _Part:
    start: int
    until: int = 0
    text: bytearray = field(default_factory=bytearray)

    def holds(self, place: int) -> bool:
        return place < self.until and place < self.start + PART - BEFORE

    def fill(self, text: bytes, base: int) -> None:
        """Take this part's share of a text that begins at ``base``."""
        done = self.start + len(self.text)
        if base <= done:
            self.text += text[done - base : max(0, self.until - base)]


@dataclass
class _Block:
    """A block with a traceback, the end of the one before, the start of the next."""

    base: int
    before: bytes
    block: bytes
    behind: bytes = b""
    seen: int = -1

    @property
    def end(self) -> int:
        return self.base + len(self.before) + len(self.block)

    def cut(self, parts: list[_Part], most: int = 1 << 30) -> int:
        """Add its parts, up to ``most`` in all; returns where the first left begins."""
        text = self.before + self.block + self.behind
        at = text.find(_MARK, max(self.seen, len(self.before) - len(_MARK) + 1, 0))
        part = parts[-1] if parts else None
        while 0 <= at < len(self.before) + len(self.block):
            place = self.base + at
            if part is None or not part.holds(place):
                if part is not None:
                    part.fill(text, self.base)
                if len(parts) == most:
                    return at
                begin = text.rfind(b"\n", max(0, at - BEFORE), at) + 1
                begin = self.base + (begin or max(0, at - BEFORE))
                part = _Part(max(begin, part.until if part else 0))
                parts.append(part)
            part.until = min(place + BEHIND, part.start + PART)
            at = text.find(_MARK, at + 1)
        if part is not None:
            part.fill(text, self.base)
        return len(text)


class Near:
    """Finds, among many, the exceptions that a line belongs to, or those before it."""

    def __init__(self, chains: Iterable[Chain]) -> None:
        self._found = sorted(
            (
                (
                    min([one.start for one in chain]),
                    max([one.end for one in chain]),
                    chain,
                )
                for chain in chains
            ),
            key=lambda one: one[0],
        )
        longest = (high - low for low, high, _ in self._found)
        self._reach = max(NEAR, *longest, 0)
        self._told: dict[tuple[int, str], Chain] = {}

    def around(self, at: int, process: str = "") -> Chain:
        """The exceptions that the line at a byte belongs to, or those before it.

        If several processes write at once, those of its own ``process``.
        """
        if (at, process) not in self._told:
            self._told[at, process] = self._look(at, process)
        return self._told[at, process]

    def _look(self, at: int, process: str) -> Chain:
        best, found = (False, False), Chain()
        last = bisect.bisect(self._found, at, key=lambda one: one[0]) - 1
        for low, high, chain in self._found[last::-1] if last >= 0 else ():
            if low + self._reach < at:
                break
            if at < max(high + 1, low + NEAR):
                own = not process or any(one.process == process for one in chain)
                rank = own, own and at <= high
                if not found or rank > best:
                    best, found = rank, chain
        return found


class Places:
    """Finds, among many, the exception that contains a line."""

    def __init__(self, chains: Iterable[Chain]) -> None:
        self._found: dict[str, list[tuple[int, int, Raised, Chain]]] = {}
        for chain in chains:
            for one in chain:
                end = max(one.end, one.start + 1)
                own = self._found.setdefault(one.process, [])
                own.append((one.start, end, one, chain))
        for own in self._found.values():
            own.sort(key=lambda place: place[0])

    def holding(self, at: int, process: str) -> tuple[Chain, Raised | None]:
        """The chain that contains the line at a byte, and the exception in it."""
        own = self._found.get(process, [])
        for number in range(bisect.bisect(own, at, key=lambda one: one[0]) - 1, -1, -1):
            start, end, one, chain = own[number]
            if at < end:
                return chain, one
            if at - start > NEAR:
                break
        return Chain(), None


def _lines(text: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Each line with its start and end; lines wrapped by a terminal are rejoined."""
    lines, at = [], 0
    for line in text.splitlines(keepends=True):
        shown = uncoloured(line.rstrip(b"\r\n"))
        if b" [repeated " in shown:
            shown = _FOLDED.without(shown)
        lines.append((at, at + len(line), shown))
        at += len(line)
    width = _wrapped_at([line for _, _, line in lines])
    held: tuple[int, bytes] | None = None
    before = b""
    for start, end, line in lines:
        if held is not None and _begins(line, before):
            yield held[0], start, held[1]  # a line of its own
            held = None
        begin, whole = (start, line) if held is None else (held[0], held[1] + line)
        full = 0 < width == _width(line)
        held = (begin, whole) if full and len(whole) < 4000 else None
        before = line
        if held is None:
            yield begin, end, whole
    if held is not None:
        yield held[0], len(text), held[1]


def _wrapped_at(lines: list[bytes]) -> int:
    """The width of the terminal that wrapped the lines, 0 if none did.

    No line is longer, and enough that differ in more than their numbers, with what
    follows, are that long and go on in the next.
    """
    widths = [0 if line.endswith(_NOT_CUT) else _width(line) for line in lines]
    width = max(widths, default=0)
    if width not in WIDTHS or widths.count(width) < FULL_LINES:
        return 0
    cut = {
        (_NUMBER.sub(b"0", line), _NUMBER.sub(b"0", following))
        for line, own, following in zip(lines, widths, lines[1:], strict=False)
        if own == width and not _begins(following, line)
    }
    differ = len({line for line, _ in cut}) > 1 and len(cut) >= FULL_LINES
    return width if differ else 0


def _begins(line: bytes, before: bytes) -> bool:
    """Whether a line can only be one of its own, not the rest of the one before it."""
    first = line.partition(b" ")[0]
    return (
        line.startswith(b"  ")
        or not line.strip()
        or (len(first) > 3 and before.startswith(first))
        or prefixes.bare(line) != line
        or _OWN.match(line) is not None
        or (b": " in line and _class_line(line) is not None)
    )


def _class_line(line: bytes) -> Match | None:
    """The class and the message of an exception, if a line consists of these."""
    return _NAMED.search(line) or _DOTTED.search(line)


def _width(line: bytes) -> int:
    return len(line if line.isascii() else line.decode("utf-8", "replace"))


class _Reader:
    """Assembles the exceptions of one process, line by line."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.done: list[Chain] = []
        self._chain: list[Raised] = []
        self._at = 0  # the last one parsed, by its place in the chain
        self._open: Raised | None = None
        self._indent = 0
        self._lost = 0
        self._part = b""
        self._came = ""
        self._first = False
        self._more = 0  # lines by which the last message may still grow
        # What a line ended that may be another's, and where it was to be inserted.
        self._doubted: tuple[Raised, list[Raised], int, bool] | None = None

    def take(self, line: bytes, start: int, end: int) -> None:
        """Take the next line of the process, without its prefix."""
        boxed = line.lstrip().startswith(_BOXED)
        if boxed:
            line = line.strip().strip(_SIDES).strip()
        elif line.lstrip(b" ").startswith((b"|", b"+")):
            while tree := _TREE.search(line):
                line = line[tree.end() :]
        ray = _RAY.search(line) if b"ray::" in line else None
        if link := next((k for k, words in _LINKS.items() if words in line), ""):
            self._came, self._more = link, 0
        elif launcher_summary.FIRST in line:
            self._first = True
        elif _MARK in line and _QUOTED.search(line) is None:
            self._begin_at(line, line.index(_MARK), start)
        elif b"+-" in line and _MEMBER.search(line):
            self._begin(start, "within", 0)
        elif ray is not None and ray[b"raised"] and self._open is not None:
            self._raised(line, start, end)
            self._begin(start, "within", 0)
        elif ray is not None:
            self._begin(start, self._came, 0)
        elif self._open is not None or self._goes_on(line):
            self._traceback(line, start, end, boxed=boxed)
        elif self._more and line.strip() and not line.lstrip().startswith(_AFTER):
            self._more -= 1
            last = self._chain[self._at]
            last.message = f"{last.message}\n{_text(line)}".lstrip("\n")
            last.end = end
        else:
            self._more = 0

    def finish(self) -> list[Chain]:
        """Everything that was parsed."""
        self._close()
        if self._chain:
            self.done.append(tuple(self._chain))
        return self.done

    def _begin_at(self, line: bytes, mark: int, start: int) -> None:
        """Handle a traceback's first line, which may be in the message of another."""
        before = line[:mark].strip(b" +|-\xe2\x94\x80\xe2\x95\xad")
        indent = len(line) - len(line.lstrip())
        told = self._more and self._chain[self._at].message.rstrip().endswith(":")
        if self._came:
            came = self._came
        elif before.endswith((b"Original", b"traceback :")) or (told and not before):
            came = "within"
        elif self._open is not None and self._open.came and not self._open.frames:
            self._indent = indent  # of a group's member or a Ray task
            return
        else:
            came = ""
        self._begin(start, came, indent)

    def _begin(self, start: int, came: str, indent: int) -> None:
        self._close()
        self._came, self._more, self._part, self._doubted = "", 0, b"", None
        if not came and self._chain:
            self.done.append(tuple(self._chain))
            self._chain, self._at = [], 0
        self._open = Raised(self.process, start, came if self._chain else "")
        self._indent, self._lost = indent, 0

    def _close(self, end: int = 0) -> None:
        """Close the open one and insert it into the chain."""
        made, self._open = self._open, None
        if made is None or not (made.type or made.frames):
            return
        made.end = end or made.end or made.start
        if not self._chain:
            self._at = 0
        elif made.came in _LINKS:
            self._at += 1
        elif self._first:
            self._at = 0
        else:
            behind = range(self._at, len(self._chain))
            group = (n for n in behind if self._chain[n].type.endswith("Group"))
            self._at = next(group, self._at)
        self._first = False
        self._chain.insert(self._at, made)

    def _traceback(self, line: bytes, start: int, end: int, *, boxed: bool) -> None:
        assert self._open is not None
        whole = line
        if self._part:
            space = b" " if _TO_NAME.search(self._part) else b""
            whole = self._part + space + line.strip()
        if frame := _frame(whole):
            self._open.frames.append(frame)
            self._open.end = end
            self._part, self._lost = b"", 0
            return
        if self._part and not _PART.search(whole):
            if found := _UNREADABLE.search(self._part):
                file, number = _text(found[b"file"]), int(found[b"line"])
                self._open.frames.append(Frame(file, number, "<module>"))
                self._lost = 0
            whole = line
        in_part = _PART.search(whole)
        if not in_part and self._raises(line) is None:  # a message may end with a port
            in_part = _TO_NAME.search(whole)
        self._part = whole if in_part and len(whole) < 600 else b""
        if pointed := _POINTED.search(line):
            self._code(pointed[b"code"], int(pointed[b"line"]))
        if self._part or boxed or pointed or not line.strip():
            return
        if not self._raised(line, start, end):
            if not self._lost and not _NUMBERED.search(line):
                self._code(line.strip())
            self._lost += 1
            if self._lost > MOST_LOST:
                self._close()

    def _goes_on(self, line: bytes) -> bool:
        """Whether a frame follows what was taken for the end, which is undone then."""
        if self._doubted is None or not self._more or _frame(line) is None:
            return False
        self._open, self._chain, self._at, self._first = self._doubted
        self._open.type = self._open.message = ""
        self._open.at, self._doubted, self._more = -1, None, 0
        return True

    def _code(self, code: bytes, number: int = 0) -> None:
        """Keep the code of the last frame, unless the line ``number`` is not its."""
        frames = self._open.frames if self._open else []
        if frames and number in (0, frames[-1].line):
            frames[-1] = replace(frames[-1], code=_text(code[:MOST_CODE]))

    def _raises(self, line: bytes) -> Match | None:
        """The class and the message if this line has these, and so ends the open one.

        A class whose name does not tell what it is must stand where the traceback does.
        """
        assert self._open is not None
        indent = len(line) - len(line.lstrip())
        if indent <= self._indent + 2 and (found := _NAMED.search(line)):
            return found
        if indent != self._indent:
            return None
        return _DOTTED.search(line) or (
            _PLAIN.search(line) if self._open.frames else None
        )

    def _raised(self, line: bytes, start: int, end: int) -> bool:
        """Whether this is the line with class and message, which ends it."""
        assert self._open is not None
        found = self._raises(line)
        if found is None:
            return False
        if not _class_line(line):
            self._doubted = (self._open, [*self._chain], self._at, self._first)
        self._open.type = _text(found[b"type"])
        self._open.message = _text(found[b"message"] or b"")
        self._open.at = start
        self._close(end)
        # After a class alone nothing is left of a message.
        self._more = 0 if line.endswith(found[b"type"]) else MOST_LINES
        return True


def _frame(line: bytes) -> Frame | None:
    """The frame that a line shows, if any."""
    found = _FRAME.search(line) if b" in " in line else None
    if found is not None:
        return Frame(
            _text(found[b"file"] or found[b"file2"]),
            int(found[b"line"] or found[b"line2"]),
            _text(found[b"name"] or found[b"name2"]),
        )
    if line.startswith((b"File ", b"Cell In", b"Input In")) and (
        found := _NOTEBOOK.search(line)
    ):
        return Frame(
            _text(found[b"file"] or found[b"file2"] or found[b"file3"]),
            int(found[b"line"] or found[b"line2"] or found[b"line3"]),
            _text(found[b"name"] or b"<module>"),
        )
    return None


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
