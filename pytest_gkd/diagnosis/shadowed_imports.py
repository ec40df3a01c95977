"""The user's files that hide installed packages or standard-library modules.

``import datasets`` takes the first on ``sys.path``: the directory of the script, of
``python -m`` or of a conftest.py, then PYTHONPATH, precede the standard library and
site-packages. A directory without ``__init__.py`` hides nothing: a regular package or
module wins over it wherever it is (PEP 420).
"""

from __future__ import annotations

import importlib.machinery
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# What a job imports. Each is a package, so a single file of that name is another's.
PACKAGES = {
    *("accelerate", "datasets", "deepspeed", "flash_attn", "huggingface_hub", "numpy"),
    *("pandas", "peft", "pyarrow", "pydantic", "ray", "safetensors", "tokenizers"),
    *("torch", "transformers", "triton", "trl", "verl", "vllm", "wandb"),
}
# Not imported by ordinary programs.
UNUSED = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtle", "turtledemo"}
SUFFIXES = tuple(importlib.machinery.all_suffixes())


class Shadow(NamedTuple):
    """A user's file that is imported instead of the installed module."""

    name: str
    file: Path
    hidden: Path

    @property
    def is_certain(self) -> bool:
        """Whether it cannot be the package itself, such as a checkout of its source."""
        return self.name in PACKAGES and self.file.name != "__init__.py"

    def __str__(self) -> str:
        if self.name in PACKAGES:
            what = f"{self.file} hides the installed package {self.name}"
        else:
            what = f"{self.file} hides the module of Python's own {self.name}"
        return f"{what} ({self.hidden})"


def find(path: Iterable[str]) -> list[Shadow]:
    """The shadows on a module search path, such as ``sys.path``."""
    installed = _installed()
    library = [_real(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    found: dict[str, Shadow] = {}
    before_library = True
    for entry in dict.fromkeys(_real(text) for text in path):
        if entry in library:
            before_library = False
        if entry in installed:
            break
        if any(place in (entry, *entry.parents) for place in (*library, *installed)):
            continue
        for name, file in _modules(entry):
            if name in PACKAGES:
                hidden = _look(name, installed)
            elif before_library and name in sys.stdlib_module_names - UNUSED:
                hidden = _look(name, library)
            else:
                continue
            if hidden is not None and hidden != file:
                found.setdefault(name, Shadow(name, file, hidden))
    return list(found.values())


def met(failure: str) -> Shadow | None:
    """The shadow that an import in this process hit, by its error and traceback.

    Its file is in the traceback, or the error names what the real module has.
    """
    for shadow in find(sys.path):
        if str(shadow.file) in failure or f"module '{shadow.name}' has no" in failure:
            return shadow
    return None


def _installed() -> list[Path]:
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [_real(text) for text in (*places, *site.getsitepackages())]


def _real(text: str) -> Path:
    return Path(os.path.realpath(text or "."))


def _modules(directory: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:  # no directory: an archive, or gone
        return
    for entry in entries:
        name = entry.name.partition(".")[0]
        known = name in PACKAGES or name in sys.stdlib_module_names
        if known and (file := _look(name, [directory])) is not None:
            yield name, file


def _look(name: str, places: Iterable[Path]) -> Path | None:
    """The file that an import of the name would execute, a package before a module."""
    kinds = (f"{name}/__init__", name)
    tried = (
        Path(f"{place}/{kind}{suffix}")
        for place in places
        for kind in kinds
        for suffix in SUFFIXES
    )
    return next((file for file in tried if file.is_file()), None)
