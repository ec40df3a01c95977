"""The files of models that a job names: a directory, or the hub's local cache."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pytest_gkd import checkpoint, hub_cache
from pytest_gkd.job import tokenizer_ids
from pytest_gkd.job.shell_values import Word

MOST_BYTES = 1 << 20
# A tokenizer with at least this fraction of the tokens at other ids is a different one;
# with fewer it has gained or lost special tokens.
OTHER = 0.01


# The variables that a job's script sets for it: they name its hub caches.
_named: ContextVar[Mapping[str, str]] = ContextVar("_named", default={})  # noqa: B039


@contextmanager
def in_caches_of(environment: Mapping[str, Word]) -> Iterator[None]:
    """Looks for models in the caches that these variables name if they are certain
    (HF_HOME, HF_HUB_CACHE, MODELSCOPE_CACHE), not in this process's own.
    """
    certain = {n: w.text.value for n, w in environment.items()}
    token = _named.set({n: text for n, text in certain.items() if text is not None})
    try:
        yield
    finally:
        _named.reset(token)


def directory(name: Any, place: Path | None = None) -> Path | None:
    """The directory of the model of that name, if its config.json is on this machine.

    ``place`` is the directory that a relative path is tried from before the current
    one.
    """
    if not isinstance(name, str) or not name:
        return None
    try:
        for path in ((place or Path()) / name, Path(name).expanduser()):
            if (path / "config.json").is_file():
                return path
    except (OSError, ValueError, RuntimeError):  # a NUL, a ~user who does not exist
        return None
    if not hub_cache.is_hub_id(name):
        return None
    environ = {**os.environ, **_named.get()}
    return hub_cache.snapshot(name, environ) or hub_cache.modelscope(name, environ)


def config(name: Any, place: Path | None = None) -> Mapping[str, Any]:
    """A model's config.json; that of its language model if it has several parts.

    Empty if this machine has none that can be read.
    """
    found = _json(directory(name, place), "config.json")
    return {**found, **checkpoint.text_part(found)}


def vocabulary(name: Any, place: Path | None = None) -> int | None:
    """The entries of a model's embedding by its config.json; None without one."""
    size = config(name, place).get("vocab_size")
    return size if type(size) is int else None


def other_tokenizer(student: Any, teacher: Any) -> tuple[str, bool]:
    """How the teacher's tokenizer.json differs from the student's, and if it matters.

    Empty if the same tokens have the same ids, or if one of the files is not here.
    """
    places = [directory(name) for name in (student, teacher)]
    files = [place / "tokenizer.json" for place in places if place]
    try:
        if len(files) < 2 or filecmp.cmp(files[0], files[1], shallow=False):
            return "", False
        ours = dict(tokenizer_ids.read(files[0]))
        count, moved, theirs = len(ours), {}, 0
        for token, number in tokenizer_ids.read(files[1]):
            theirs += 1
            if ours.get(token) == number:
                del ours[token]
            elif token in ours:
                moved[token] = number
    except (OSError, ValueError, RecursionError):
        return "", False
    if not ours or not theirs:
        return "", False
    token = next(iter(ours))
    text = (
        f"{len(ours)} of the student's {count} tokens have another id in the "
        f"teacher's tokenizer.json or none, such as "
        f"{token.decode('utf-8', 'replace')[:40]!r} ({ours[token]} "
        f"against {moved.get(token, 'none')})"
    )
    return text, len(ours) > OTHER * count


def _json(place: Path | None, name: str) -> dict[str, Any]:
    try:
        if place is None or (place / name).stat().st_size > MOST_BYTES:
            return {}
        found = json.loads((place / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
