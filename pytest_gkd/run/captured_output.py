"""The files that pytest captures a stage's output in, and those it speaks by."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_gkd.processes.procfs import Descriptor


def cut_captured(descriptors: Iterable[int], limit_bytes: int) -> None:
    """Keep only the end of what was captured, where it is longer than ``limit_bytes``.

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
            # The position is shared with descriptors 1 and 2, which write on from it.
            file.seek(0)
            file.truncate()
            file.write(note.encode() + end)


def captured_descriptors() -> list[Descriptor]:
    """pytest's own descriptors of the files that stdout and stderr go to, if any.

    Those have no name; one that has a name is where the user sends the output, with -s.

    1 and 2 point there only while a test runs; these do all the time, so that the
    controller can read what a stage printed however the stage ends.
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
    """What pytest-xdist's worker speaks to the controller by."""
    for plugin in config.pluginmanager.get_plugins():
        gateway = getattr(getattr(plugin, "channel", None), "gateway", None)
        if gateway is not None:
            ends = gateway._io
            return [Descriptor.of(end.fileno()) for end in (ends.infile, ends.outfile)]
    return []
