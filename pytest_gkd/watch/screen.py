"""Where the watcher's own words go: lines among the job's output, and a status line.

The job's output is never touched: a terminal's last row is taken out of what scrolls
(DECSTBM, as apt does for its progress), and the relay writes between two parts of it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.columns import padded
from pytest_gkd.diagnosis import translated
from pytest_gkd.language import ENGLISH, current, marked, tr, tr_filled
from pytest_gkd.watch import relay
from pytest_gkd.watch.command import Command
from pytest_gkd.watch.relay import Sign
from pytest_gkd.watch.samples import VERDICTS
from pytest_gkd.watch.terminal import LEAST_ROWS, Terminal, is_terminal

# The lines below a verdict; the other labels are those of a diagnosis.
_LABELS = (marked("wait"), marked("all"))
_LABELLED = re.compile(
    r"  (saw|wait|also|cause|more|note|fix|all|\d\.) +(?:perhaps )?(.*)"
)
# After a verdict that is not certain.
LIKELY = " (likely)"
_STOOD = re.compile(rf"({'|'.join(VERDICTS)}) for (.+) in (\S+?)( \(likely\))?")
_CAUSED = re.compile(r"(.*) \[([\w.-]+)\]")
PART = 3000
WAIT_S = 1.0


class OwnScreen:
    """Standard error, to which nobody else writes: while a job is only attached to."""

    def __init__(self, *, status: bool) -> None:
        self.has_line = status and is_terminal(2)

    @property
    def columns(self) -> int:
        return Terminal(2).size()[1] if self.has_line else 80

    def show(self, line: str) -> None:
        """Draw the status line."""
        self._write(f"\r{line}\x1b[K")

    def say(self, text: str) -> None:
        """Write lines of the watcher's own."""
        self._write("\r\x1b[K" * self.has_line + own_lines(text))

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Take the status line away."""
        if self.has_line:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone; watching goes on
            self.has_line = False


class SharedScreen:
    """The terminal or the files that the job's output goes to, by way of the relay."""

    def __init__(self, command: Command, *, status: bool) -> None:
        self._command = command
        self._wanted = status
        self._waiting: deque[bytes] = deque()
        self._handed = b""
        self._status = b""
        self._rows = 0  # those of the terminal that is divided; 0 before
        self.has_line = status and command.is_placed and self._fits()

    def _fits(self) -> bool:
        user = self._command.user
        return user is not None and user.size()[0] >= LEAST_ROWS

    @property
    def columns(self) -> int:
        user = self._command.user
        return user.size()[1] if user else 80

    def resized(self) -> None:
        """The user's terminal has another size now."""
        self.has_line = self._wanted and self._command.is_placed and self._fits()
        if self._rows and not self.has_line:
            self._waiting.append(self._whole(self._rows))
        self._rows = 0
        self._command.resize(spare=0)

    def show(self, line: str) -> None:
        """Draw the status line."""
        user = self._command.user
        if user is None or not self.has_line:
            return
        rows = user.size()[0]
        # IND and up again: the cursor is not left in the row that is taken.
        divide = f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8"
        begin = divide if rows != self._rows else ""
        if rows != self._rows:
            self._rows = rows
            self._command.resize(spare=1)
        text = f"{begin}\x1b7\x1b[1;{rows - 1}r\x1b[{rows};1H\x1b[2K{line}\x1b[0m\x1b8"
        self._status = relay.PLACED + text.encode("utf-8", "replace")
        self.flush()

    def say(self, text: str) -> None:
        """Write lines of the watcher's own, once the job has ended its own line."""
        part = b""
        told = own_lines(text)
        if self._command.is_placed:
            told = told.replace("\n", "\r\n")
        for line in told.encode("utf-8", "replace").splitlines(keepends=True):
            if len(part) + len(line) > PART:
                self._waiting.append(relay.LINES + part)
                part = b""
            part += line
        self._waiting.append(relay.LINES + part)
        self.flush()

    def flush(self) -> None:
        """Hand the next text to the relay, where it has written the last."""
        shared = self._command.shared
        if not self._command.is_relayed:  # nobody else writes any more
            if self._handed and shared[Sign.TEXT_SHOWN] != shared[Sign.TEXT_TURN]:
                self._command.write(self._handed[1:])  # it ended before it could
            self._handed = b""
            while self._waiting:
                self._command.write(self._waiting.popleft()[1:])
            return
        if shared[Sign.TEXT_SHOWN] != shared[Sign.TEXT_TURN]:
            return
        if self._waiting:
            self._handed = self._waiting.popleft()
            self._command.show(self._handed)
        elif self._status:
            self._handed = b""
            self._command.show(self._status)
            self._status = b""

    def close(self) -> None:
        """Give the last row back, when all that waits is written."""
        self._status = b""
        if self._rows:
            self._waiting.append(self._whole(self._rows))
            self._rows = 0
        until = monotonic() + WAIT_S
        shared = self._command.shared
        while monotonic() < until:
            self.flush()
            shown = shared[Sign.TEXT_SHOWN] == shared[Sign.TEXT_TURN]
            if not self._waiting and (shown or not self._command.is_relayed):
                return
            time.sleep(0.01)

    @staticmethod
    def _whole(rows: int) -> bytes:
        text = f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8"
        return relay.PLACED + text.encode()


def own_lines(text: str) -> str:
    """The watcher's lines, as all that ``gkd`` says beside its answers."""
    lines = sanitize.text(text).splitlines()
    return "".join(f"gkd: {translated_line(line)}\n" for line in lines)


def _where(line: str) -> tuple[str, str]:
    """Where a command is to be run, as a text of the catalogue, and the command."""
    for found in re.finditer(": ", line if line.startswith("        ") else ""):
        where = line[8 : found.start()]
        if tr(where) != where:
            return where, line[found.end() :]
    return "", ""


def translated_line(line: str) -> str:
    """A line of the watcher in the user's language, its label and verdict, too."""
    if current() == ENGLISH:
        return line
    if labelled := _LABELLED.fullmatch(line):
        label, said = labelled.groups()
        if caused := _CAUSED.fullmatch(said):
            said, cause = caused.groups()
            said = f"{translated.title(cause, said)} [{cause}]"
        return f"  {padded(tr(label), 5)} {tr_filled(said)}"
    where, command = _where(line)
    if where:
        return f"        {tr(where)}{tr(': ')}{command}"
    sure = f" ({tr('likely')})"
    if stood := _STOOD.fullmatch(line):
        word, time, phase, likely = stood.groups()
        told = tr("{word} for {time} in {phase}")
        told = told.format(word=tr(word), time=time, phase=phase)
        return told + (sure if likely else "")
    word = next((one for one in VERDICTS if line.startswith(one)), "")
    head, colon, why = line.partition(": ")
    if head in (word, word + LIKELY) and why:
        return tr(word) + sure * (head != word) + tr(colon) + tr_filled(why)
    return tr(word) + tr_filled(line)[len(word) :]
