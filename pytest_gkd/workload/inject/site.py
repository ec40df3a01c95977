"""Where an injected fault is put, and how it is taken back afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.stage_api import StageContext


class Site(contextlib.ExitStack):
    """One stage with its fault; closing it takes back what lies in this process.

    ``folder`` is for files of the fault's own, ``gkd`` the running stage's context.
    """

    def __init__(self, gkd: StageContext, fault: FaultSpec) -> None:
        super().__init__()
        self.gkd = gkd
        self.fault = fault
        self.folder = gkd.run_dir / "fault"
        self.folder.mkdir(exist_ok=True)

    def inject(self) -> None:
        """Do it. One that takes effect at once is told of here, others tell later."""
        module = importlib.import_module(f"{__package__}.{self.fault.group}")
        does = getattr(module, self.fault.does)
        later = does(self, **self.fault.arguments)
        if later is not LATER:
            self.triggered()

    def triggered(self, at: float | None = None) -> None:
        """The fault took effect; forked processes may say so as well.

        ``at`` is in seconds of ``time.monotonic()``; None is now.
        """
        self.gkd.triggered(at)

    def settings(self, **values: Any) -> None:
        """Let the stage see other settings, given by whoever asked for the fault."""
        before = self.gkd.settings
        given = dict.fromkeys(values, before.origin("inject"))
        origins = {**before.origins, **given}
        self.gkd.settings = dataclasses.replace(before, **values, origins=origins)
        self.callback(setattr, self.gkd, "settings", before)

    def environ(self, name: str, value: str | None) -> None:
        """Set a variable for this process and what it starts; None removes it."""
        self.callback(_set_variable, name, os.environ.get(name))
        _set_variable(name, value)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of an attribute; what was there before."""
        before = getattr(owner, name)
        self.callback(setattr, owner, name, before)
        setattr(owner, name, value)
        return before

    def copied_model(self, role: str = "student") -> Path:
        """A copy of the student's (or the teacher's) directory, used in its place.

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


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
