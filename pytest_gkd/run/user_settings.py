"""The user's settings: options over ini over defaults, adapted to this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from pytest_gkd import fault_specs, options
from pytest_gkd.options import OPTIONS, Settings, SettingsError
from pytest_gkd.processes import gpus, shell_line
from pytest_gkd.run import job_settings, option_origins
from pytest_gkd.run.selection import Selection

# For reading the headers of two models; without an answer the run starts anyway.
SHRINK_S = 30.0


def read(config: pytest.Config) -> Settings:
    """Options over ini over defaults, with ``auto`` resolved for this machine."""
    origin, given, values = {}, {}, dict[str, Any]()
    usable = gpus.usable()
    job = job_settings.read(config, usable.ranks)
    for option in OPTIONS:
        one = option_origins.given(config, option)
        one = job.instead_of(one, option) if job else one
        origin[option.name] = one.origin
        if one.value:
            given[option.name] = one.origin
        value = options.read_value(option, one.value, one.origin)
        if option.name == "train_files":
            value = tuple(option_origins.files(dataclasses.replace(one, value=value)))
        elif option.name in ("student", "teacher") and value:
            value = option_origins.model(value, one.base)
        elif option.name == "launch" and value:
            values["launch_dir"] = str(one.base)
            if problem := shell_line.problem(value, one.base):
                raise SettingsError(f"{one.origin}: {problem}")
        values[option.name] = value
    if values["beta"] > 1:
        raise SettingsError(
            f"{origin['beta']}: {values['beta']:g} is not a number between 0 and 1"
        )
    if values["temperature"] == 0:
        raise SettingsError(f"{origin['temperature']}: '0' is not a number above 0")
    if values["shrink"]:
        options.check_layers(values["shrink"], origin["shrink"])
    share = values["gpu_memory_utilization"]
    if share is not None and not 0 < share <= 1:
        raise SettingsError(
            f"{origin['gpu_memory_utilization']}: {share!r} "
            "is not a fraction above 0 and up to 1"
        )
    if values["learning_rate"] is None:
        # Measured on a 135M pretrained student: at 1e-4 and above the loss on one
        # repeated batch rises, at 1e-5 it falls; random tiny weights need larger steps.
        values["learning_rate"] = 1e-5 if values["student"] else 1e-3
    if values["inject"]:
        needed = _fault(values["inject"], origin["inject"]).settings
        values |= needed
        origin |= dict.fromkeys(needed, origin["inject"])
        given |= dict.fromkeys(needed, origin["inject"])
    cpus = len(os.sched_getaffinity(0))
    values["layout"], values["layout_why"] = options.choose_layout(
        values["layout"],
        usable.ranks,
        has_ray=_is_installed("ray"),
        origin=origin["layout"],
        exclusive=usable.exclusive,
        tensor_parallel_size=values["tensor_parallel_size"],
    )
    values["gpu_memory_utilization"] = options.choose_memory(
        values["gpu_memory_utilization"],
        values["layout"],
        usable.ranks,
        values["tensor_parallel_size"],
    )
    values["world_size"], values["world_size_why"] = options.choose_world_size(
        values["world_size"], usable.ranks, cpus, origin["world_size"]
    )
    return Settings(
        **values,
        gpus=len(usable.cards),
        gpus_why=usable.why,
        bfloat16=usable.bfloat16,
        exclusive=usable.exclusive,
        cpus=cpus,
        origins=given,
        job=job.told if job else None,
    )


def decide_shrink(read: Settings, stages: tuple[str, ...]) -> Settings:
    """Resolve --gkd-shrink in a subprocess, as this process reads no model.

    Without an answer, ``auto`` leaves the models as they are, and the stages find out
    why.
    """
    if read.shrink is None:
        return read
    question = {"settings": dataclasses.asdict(read), "stages": stages}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest_gkd.workload.layouts.shrunk"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=SHRINK_S,
            check=False,
        )
        problem = done.stderr[-500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"the models' files could not be read in {SHRINK_S:g} s"
    if problem:
        shrink = None if read.shrink == options.AUTO else read.shrink
        why = f"not known yet what {read.origin('shrink')} comes to: {problem}"
    else:
        shrink, why = json.loads(done.stdout)
    return dataclasses.replace(read, shrink=shrink, shrink_why=why)


def _is_installed(name: str) -> bool:
    """Whether a package is installed, as opposed to a directory of that name."""
    found = find_spec(name)
    return found is not None and found.origin is not None


def _fault(name: str, origin: str) -> fault_specs.FaultSpec:
    try:
        return fault_specs.find(name)
    except fault_specs.UnknownFaultError as error:
        raise SettingsError(f"{origin}: {error} gkd faults lists them all.") from None


def check_inject(read: Settings, selection: Selection) -> None:
    """Raise SettingsError for a fault in a stage that is not selected."""
    if read.inject is None:
        return
    origin = read.origin("inject")
    stage = _fault(read.inject, origin).stage
    if stage not in selection.builtin:
        raise SettingsError(
            f"{origin}: {read.inject!r} targets stage {stage}, which is not "
            f"selected ({', '.join(selection.builtin) or 'no built-in stage is'})"
        )
