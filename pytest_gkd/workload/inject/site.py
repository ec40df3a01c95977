"""Where an injected fault is placed, and how it is undone afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.stage_api import StageContext


class Site(contextlib.ExitStack):
    """One stage with its fault; closing it undoes what was changed in this process.

    ``folder`` is for the fault's own files, ``gkd`` is the running stage's context.
    """

    def __init__(self, gkd: StageContext, fault: FaultSpec) -> None:
        super().__init__()
        self.gkd = gkd
        self.fault = fault
        self.folder = gkd.run_dir / "fault"
        self.folder.mkdir(exist_ok=True)
        self._is_told = False

    def inject(self) -> None:
        """Inject it. Immediate effects are reported here, others later."""
        module = importlib.import_module(f"{__package__}.{self.fault.group}")
        does = getattr(module, self.fault.does)
        later = does(self, **self.fault.arguments)
        if later is not LATER and not self._is_told:
            self.triggered()

    def triggered(self, at: float | None = None) -> None:
        """The fault took effect; forked processes may report it as well.

        ``at`` is in seconds of ``time.monotonic()``; None means now.
        """
        self._is_told = True
        self.gkd.triggered(at)

    def settings(self, **values: Any) -> None:
        """Let the stage see other settings, with the fault's own origin."""
        before = self.gkd.settings
        given = dict.fromkeys(values, before.origin("inject"))
        origins = {**before.origins, **given}
        self.gkd.settings = dataclasses.replace(before, **values, origins=origins)
        self.callback(setattr, self.gkd, "settings", before)

    def environ(self, name: str, value: str | None) -> None:
        """Set a variable for this process and its children; None removes it."""
        self.callback(_set_variable, name, os.environ.get(name))
        _set_variable(name, value)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute by ``value``."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> object:
        """Call ``around`` instead of a function, which is its first argument."""
        before = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(before, *args, **kwargs)

        self.replace(owner, name, call)
        return LATER

    def repeat(self, act: Callable[[], bool]) -> object:
        """Call ``act`` in a thread until it returns True or the stage ends."""
        over = threading.Event()
        self.callback(over.set)

        def watch() -> None:
            while not (over.wait(POLL_S) or act()):
                pass

        threading.Thread(target=watch, name="fault", daemon=True).start()
        return LATER

    def train_file(self, name: str = "train.jsonl") -> Path:
        """The path of a file of the fault's own, which the stage uses as its data."""
        path = self.folder / name
        self.settings(train_files=(str(path),))
        return path

    def no_hub(self) -> None:
        """Like a node without a network; port 9 is the discard port."""
        self.environ("HF_ENDPOINT", "http://127.0.0.1:9")
        self.environ("NO_PROXY", "127.0.0.1")

    def copied_model(self, role: str = "student") -> Path:
        """A copy of the student's (or the teacher's) directory, used instead of it.

        A job that names no models gets both by name, so that only one is changed.
        """
        from pytest_gkd.workload.models import inputs, model_paths

        job = inputs.resolve(self.gkd.settings, self.gkd.run_dir)
        names = {"student": job.student, "teacher": job.teacher}
        found = model_paths.locate(names[role], job.origin(role))
        if found is None:
            raise FileNotFoundError(f"{names[role]} is not here to be copied")
        copy = self.folder / role
        shutil.copytree(found.directory, copy, symlinks=False)
        names[role] = str(copy)
        self.settings(**names, train_files=job.train_files)
        return copy


LATER = object()
POLL_S = 0.01


@contextlib.contextmanager
def changed(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON object in a file, written back at the end."""
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    yield value
    path.write_text(json.dumps(value), "utf-8")


def checked(result: int) -> None:
    """Raise OSError with the call's errno; its library was loaded with use_errno."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
