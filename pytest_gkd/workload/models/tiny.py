"""Makes the models and prompts of a run for which the user names none.

A student and a teacher of the Qwen2 shape with one byte-level tokenizer, and a file of
prompts, all seeded and small. Only numpy and safetensors are needed, so that making
them does not wait for torch. They are kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.files import cache_directory
from pytest_gkd.workload.models import tiny_model, tiny_text

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Tiny:
    """Where the made models and prompts lie; all paths are absolute.

    ``train_file`` is JSONL with chat messages under ``prompt``, 288 rows that are
    shorter than 64 tokens.
    """

    root: Path
    student: Path
    teacher: Path
    train_file: Path


def make(fallback_dir: Path) -> Tiny:
    """The models and prompts: from the cache when whole, else made now.

    The cache is ``$XDG_CACHE_HOME`` or ``~/.cache``; where that cannot be written,
    ``fallback_dir`` takes its place. Several processes may call this at once.
    """
    name = f"tiny-{content_version()}"
    home = cache_directory()
    if home is not None:
        try:
            return _kept(home / name)
        except OSError:
            pass  # not writable, or full: the caller's directory may do
    return _kept(fallback_dir.absolute() / name)


def content_version() -> str:
    """Changes with the sources of the made files, and so with what they write."""
    digest = hashlib.sha256()
    for source in (__file__, tiny_model.__file__, tiny_text.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:12]


def is_whole(root: Path) -> bool:
    """Whether every file that ``root``'s manifest promises is there, unchanged."""
    try:
        promised = json.loads((root / MANIFEST).read_text("utf-8"))
        return bool(promised) and all(
            _digest(root / name) == digest for name, digest in promised.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def write(root: Path) -> None:
    """Write models, prompts and the manifest (last) into the directory ``root``."""
    made = (("student", tiny_model.STUDENT), ("teacher", tiny_model.TEACHER))
    for name, shape in made:
        at = root / name
        at.mkdir(parents=True)
        _write_json(at / "config.json", tiny_model.model_config(shape))
        _write_json(at / "generation_config.json", tiny_model.generation_config())
        _write_json(at / "tokenizer.json", tiny_text.tokenizer())
        _write_json(at / "tokenizer_config.json", tiny_text.tokenizer_config())
        tiny_model.write_weights(at / "model.safetensors", shape)
    (root / "prompts.jsonl").write_text(tiny_text.prompt_lines(), "utf-8")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = [path.relative_to(root).as_posix() for path in files]
    _write_json(root / MANIFEST, {name: _digest(root / name) for name in names})


def _kept(root: Path) -> Tiny:
    if not is_whole(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
        try:
            write(draft)
            draft.chmod(0o755)  # mkdtemp makes it private; the cache need not be
            _put_in_place(draft, root)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Tiny(
        root=root,
        student=root / "student",
        teacher=root / "teacher",
        train_file=root / "prompts.jsonl",
    )


def _put_in_place(draft: Path, root: Path) -> None:
    """Rename ``draft`` to ``root``; another process may be doing the same.

    Raises OSError when ``root`` still is not whole after a few tries.
    """
    for _ in range(5):
        try:
            draft.rename(root)
        except OSError:  # something is there
            if is_whole(root):
                return
            # It goes in one rename, never half of it under this name; and it is kept,
            # for what changed it may be a training run of the user's.
            changed = f"{root.name}.changed-{time.time_ns()}-{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):  # another process was first
                root.rename(root.with_name(changed))
        else:
            return
    raise OSError(f"{root} could not be put in place")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), "utf-8")
