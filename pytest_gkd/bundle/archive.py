"""Writes an archive atomically, private to the user, and never over another file."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path


class OutputError(Exception):
    """Where no archive can be written; the text says why, and what to do."""


def refuse_existing(output: Path) -> None:
    """Raise OutputError if there is anything at a path, even a broken link."""
    if os.path.lexists(output):
        raise OutputError(
            f"{output}: exists, and nothing is overwritten; move it away or name "
            "another file with --output"
        )
    if not output.parent.is_dir():
        raise OutputError(f"{output}: there is no directory {output.parent}")


def write(output: Path, files: Mapping[str, str]) -> int:
    """Write a tar.gz of these texts, mode 0600; returns its size in bytes.

    The same texts give the same bytes. Raises OutputError.
    """
    try:
        return _write(output, files)
    except OSError as error:
        if error.errno == errno.EEXIST:
            refuse_existing(output)
        raise OutputError(f"{output}: {error.strerror or error}") from None


def _write(output: Path, files: Mapping[str, str]) -> int:
    fd, name = tempfile.mkstemp(prefix=".gkd-bundle-", dir=output.parent)  # mode 0600
    made = Path(name)
    try:
        with os.fdopen(fd, "wb") as raw:
            # A fixed time and name, or the same texts would give other bytes.
            with (
                gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w") as tar,
            ):
                for file, text in files.items():
                    data = text.encode("utf-8", "replace")
                    about = tarfile.TarInfo(file)
                    about.size, about.mode = len(data), 0o600
                    tar.addfile(about, io.BytesIO(data))
            raw.flush()
            size = os.fstat(raw.fileno()).st_size
        _put(made, output)
        return size
    finally:
        made.unlink(missing_ok=True)


def _put(made: Path, output: Path) -> None:
    """Give a file its name, unless there is one of that name."""
    try:
        os.link(made, output)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            made.rename(output)
        except OSError:
            with contextlib.suppress(OSError):
                output.unlink()  # the empty one of the line before last
            raise
