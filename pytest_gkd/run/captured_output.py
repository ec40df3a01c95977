"""The files that pytest captures a stage's output in, and xdist's channel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_gkd.processes.procfs import Descriptor


def cut_captured(descriptors: Iterable[int], limit_bytes: int) -> None:
    """Keep only the last ``limit_bytes`` of what was captured.

    pytest reads all of it into memory and sends it to the controller: for 1 GB that
    took over 20 s.
    """
    for number in descriptors:
        size_bytes = os.fstat(number).st_size
        if size_bytes <= limit_bytes:
            continue
        with open(os.dup(number), "rb+", buffering=0) as file:  # noqa: PTH123
            file.seek(size_bytes - limit_bytes)
            end = file.read(limit_bytes)
            note = f"({size_bytes - limit_bytes} bytes before this were dropped)\n"
            # Descriptors 1 and 2 share this file position and continue writing there.
            file.seek(0)
            file.truncate()
            file.write(note.encode() + end)


def captured_descriptors() -> list[Descriptor]:
    """pytest's own descriptors of the files that stdout and stderr go to, if any.

    Those files are unnamed; a named one is where the user sends the output, with -s.

    1 and 2 point there only while a test runs; these always do, so that the controller
    can read what a stage printed however the stage ends.
    """
    found = []
    for stream in (1, 2):
        if os.fstat(stream).st_nlink:
            continue
        target = Descriptor.of(stream)
        for entry in Path("/proc/self/fd").iterdir():
            number = int(entry.name)
            if number > 2 and target.is_same(number):
                found.append(Descriptor(number, target.file))
                break
    return found


def channel_descriptors(config: pytest.Config) -> list[Descriptor]:
    """The descriptors over which pytest-xdist's worker talks to the controller."""
    for plugin in config.pluginmanager.get_plugins():
        gateway = getattr(getattr(plugin, "channel", None), "gateway", None)
        if gateway is not None:
            ends = gateway._io
            return [Descriptor.of(end.fileno()) for end in (ends.infile, ends.outfile)]
    return []
