"""A launch script's file: whether it is one, and which lines bash cuts off."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_gkd.job.findings import CheckError, Finding

CAUSE = "config.missing-value"
# Of 1,529 upstream scripts the longest has 52,048 bytes (NeMo-RL, ultra_launch.sh), of
# their configurations 37,578 (verl, _generated_ppo_megatron_trainer.yaml). A file of
# MOST_BYTES takes at most a second and 100 MB, whatever it holds.
MOST_BYTES = 1 << 17
SHELLS = re.compile(rb"#!.*\b(?:bash|sh|dash|ksh|zsh)\b")
# The most lines that are reported; the others have the same cause.
MOST_LOST = 5


def text_of(path: Path, *, is_script: bool = True) -> str:
    """The text of a file. Raises CheckError if bash would not read it as a script."""
    try:
        if path.is_dir():
            raise CheckError(f"{path} is a directory; give the launch script in it")
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise CheckError(f"{path} {what}; give the path of a launch script")
        raw = start_of(path, MOST_BYTES + 1)
    except OSError as error:
        raise CheckError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        size = max(path.stat().st_size, len(raw)) / 1e6
        raise CheckError(
            f"{path} has {size:.1f} MB, and a job's file is read up to "
            f"{MOST_BYTES >> 10} KiB: give the launch script or configuration itself, "
            "and let data lie in files of its own"
        )
    if b"\0" in raw:
        raise CheckError(f"{path} is binary (it has NUL bytes), no launch script")
    if is_script and not is_shells(raw):
        said = raw.partition(b"\n")[0].decode("utf-8", "replace").strip()
        raise CheckError(f"{path} is not a bash script; its first line is {said[:200]}")
    return raw.decode("utf-8", "replace")


def is_shells(raw: bytes) -> bool:
    """Whether a shell would read it: no NUL byte, and no shebang of another program."""
    other = raw.startswith(b"#!") and not SHELLS.match(raw.partition(b"\n")[0])
    return not other and b"\0" not in raw


def start_of(path: Path, most: int) -> bytes:
    """The first bytes of a file, whatever size it reports; raises OSError."""
    with path.open("rb") as file:
        return file.read(most)


def losses(
    path: Path, text: str, lost: Iterable[tuple[str, int, str]]
) -> Iterator[Finding]:
    """Words that bash never passes to the command that they are meant for.

    ``lost`` are the lines that look like options but that bash takes for commands.
    """
    if "\r\n" in text:
        yield _finding(
            str(path),
            text[: text.index("\r\n")].count("\n") + 1,
            "lines end as on Windows (CR LF): bash takes the CR for a part of the last "
            "word, and a backslash before it joins no lines; convert the file with "
            "dos2unix or sed -i 's/\\r$//'",
        )
    lines = text.replace("\r\n", "\n").split("\n")
    told: set[tuple[str, int]] = set()
    for file, line, option in lost:
        if (file, line) in told or len(told) >= MOST_LOST:
            continue
        told.add((file, line))
        before = lines[line - 2] if file == str(path) and line > 1 else ""
        yield _finding(
            file,
            line,
            f"bash takes this line for a command of its own: {option[:60]} is not "
            f"given to the command above it{_why(before)}",
        )


def _why(before: str) -> str:
    """What ended the command on the line before."""
    if re.search(r"\\[ \t]+$", before):
        return ", which ends at the blank after the backslash in the line before"
    if before.lstrip().startswith("#"):
        return ", which ends at the comment in the line before"
    if re.search(r"\s#[^\"']*$", before):
        return ", which ends at the comment after the backslash in the line before"
    if not before.strip():
        return ", which ends at the empty line before"
    return ": the line before has no backslash at its end"


def _finding(file: str, line: int, message: str) -> Finding:
    return Finding(CAUSE, "error", message, file, line, "")


def exists(path: str) -> bool:
    """Whether there is a file or directory of that name here."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False
