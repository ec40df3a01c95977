"""Says what is wrong with a path that the user gave. Standard library only."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from pytest_gkd.near_names import near_names as names_near
from pytest_gkd.stage_api import StageFault

# What git leaves in place of a large file that git-lfs did not fetch.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def near_names(path: Path, suffixes: tuple[str, ...]) -> list[str]:
    """At most three existing paths with a name similar to that of ``path``, best first.

    They are siblings of ``path``, or, if its parent does not exist either, of its first
    component that does not. Only files that end in one of ``suffixes`` count.
    """
    path = path.absolute()
    while not path.parent.is_dir():
        path = path.parent
    try:
        siblings = [
            entry.name
            for entry in os.scandir(path.parent)
            if entry.name.lower().endswith(suffixes) or entry.is_dir()
        ]
    except OSError:
        return []
    # Case is the most common difference, and would count in full.
    folded = {name.lower(): name for name in siblings}
    found = names_near(path.name.lower(), folded)
    return [str(path.parent / folded[name]) for name in found]


def did_you_mean(names: list[str]) -> str:
    """``; near it there is x or y``, or nothing."""
    return "; near it there is " + " or ".join(names) if names else ""


def first_missing(path: Path) -> Path:
    """The first component of ``path``, from the root down, that does not exist."""
    path = path.absolute()
    while not path.parent.exists() and path.parent != path:
        path = path.parent
    return path


def fault(
    cause: str, path: Path | str, origin: str, problem: str, /, **facts: Any
) -> StageFault:
    """The fault for ``path``, named by ``origin``; ``problem`` follows its name."""
    facts = {"path": str(path), "origin": origin, **facts}
    return StageFault(cause, f"{origin}: {path} {problem}", facts=facts)


def missing(
    cause: str,
    path: Path,
    origin: str,
    expected: str,
    suffixes: tuple[str, ...] = ("",),
) -> StageFault:
    """The fault for ``path``, which does not exist.

    ``expected`` names what should have been there, such as ``a model directory``, and
    ``suffixes`` are the endings of such file names.
    """
    near = near_names(path, suffixes)
    gap = first_missing(path)
    if path.is_symlink():
        what = f"is a link to {path.readlink()}, which does not exist"
    else:
        what = "does not exist"
        if gap != path.absolute():
            what += f", nor does {gap}"
    return fault(
        cause,
        path,
        origin,
        f"{what}; expected {expected}{did_you_mean(near)}",
        near=near,
        nearest=next(iter(near), ""),
        directory=str(gap.parent),
        absent=True,
    )


def denied(path: Path, origin: str, error: OSError) -> StageFault:
    """The fault for ``path``, which this user may not read."""
    what = f"cannot be read by user id {os.geteuid()}: {error.strerror}"
    with contextlib.suppress(OSError):
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        what += f" (its mode is {mode:03o}, its owner user id {status.st_uid})"
    return fault("env.permission", path, origin, what, user_id=os.geteuid())


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that starts with ``start`` is only a pointer to the real one."""
    return start.startswith(LFS_POINTER)
