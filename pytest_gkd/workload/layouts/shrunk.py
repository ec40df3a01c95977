"""Replaces the user's models by copies with fewer layers (--gkd-shrink).

Run as a program it works out beforehand what will be copied, for the run's header:
pytest's own process reads no model, and a file system may hang. Nothing heavy is
imported there.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import typed_json
from pytest_gkd.options import AUTO, FEW, Settings
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.engine import engine_config
from pytest_gkd.workload.layouts import random_weights
from pytest_gkd.workload.layouts.estimate import STAGES, Estimate
from pytest_gkd.workload.layouts.job_config import job_config
from pytest_gkd.workload.models import model_paths, shrink
from pytest_gkd.workload.models.inputs import Inputs, named
from pytest_gkd.workload.models.shrink import ShrunkCopy

ROLES = ("student", "teacher")


def inputs_of(gkd: StageContext, inputs: Inputs) -> Inputs:
    """The inputs for a stage: ``inputs``, or copies of the models, made on first use.

    If student and teacher are the same model, they share a copy. Raises as ``plan_all``
    and ``ShrunkCopy.write`` do, and RuntimeError if no random weights could be created.
    """
    if gkd.settings.shrink is None or not any(named(gkd.settings)):
        return inputs
    plans = plan_all(gkd.settings, inputs)
    made: dict[str, Any] = {}
    for role, plan in plans.items():
        first = next(one for one in plans if plans[one].source == plan.source)
        made[role] = str(_copy(gkd, plan, gkd.run_dir / "shrunk" / first))
    if plans:
        gkd.fact("shrunk", f"on {told(plans)}")
    return dataclasses.replace(inputs, **made)


def plan_all(settings: Settings, inputs: Inputs) -> dict[str, ShrunkCopy]:
    """What to copy for each role whose model has more layers than requested.

    Raises StageFault ``checkpoint.missing`` for a model that is not on this machine,
    and as ``shrink.plan`` does.
    """
    layers = None if settings.shrink in (FEW, AUTO) else int(settings.shrink or 0)
    found = {}
    for role in ROLES:
        name, origin = getattr(inputs, role), inputs.origin(role)
        located = model_paths.locate(name, origin)
        if located is None:
            what = "is not on this machine, and only files that are here can be copied "
            what += f"with fewer layers ({settings.origin('shrink')}); fetch it first"
            raise paths.fault("checkpoint.missing", name, origin, what)
        random = settings.shrink_weights == "random"
        plan = shrink.plan(located.directory, origin, layers, random=random)
        if plan is not None:
            found[role] = plan
    return found


def told(plans: dict[str, ShrunkCopy]) -> str:
    """``a copy of student and teacher with 2 of 32 layers``."""
    roles: dict[str, list[str]] = {}
    for role, plan in plans.items():
        roles.setdefault(plan.text, []).append(role)
    return ", ".join(
        f"a copy of {' and '.join(which)} with {text}" for text, which in roles.items()
    )


def _copy(gkd: StageContext, plan: ShrunkCopy, place: Path) -> Path:
    """The copy in ``place``, written now unless it exists; all of it or nothing."""
    if place.exists():
        return place
    gkd.step(f"copying {plan.text} of {plan.source}")
    place.parent.mkdir(exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent))
    plan.write(draft)
    if plan.tensors is None:
        # In a separate process: torch's threads would make this one unsafe to fork.
        settings = gkd.settings
        dtype = engine_config.choose_dtype(
            plan.config, settings.device, bfloat16=settings.bfloat16
        )
        # Another model of the same shape must get different weights.
        seed = zlib.crc32(str(plan.source).encode())
        order = random_weights.Order(draft, dtype, seed, settings.trust_remote_code)
        done = subprocess.run(
            [sys.executable, "-P", "-m", random_weights.__name__],
            input=typed_json.dumps(order),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise RuntimeError(
                "no model with random weights could be made of config.json: "
                f"{done.stderr[-2000:]}"
            )
    draft.rename(place)
    return place


def decide(settings: Settings, stages: Collection[str]) -> tuple[str | None, str]:
    """What ``settings.shrink`` resolves to on this machine, and why, in words.

    ``auto`` becomes None if no stage among ``stages`` would be refused with the full
    models. What cannot be decided yet is left to the stages, which name the cause.
    """
    student, teacher = named(settings)
    if student is None or teacher is None:
        return None, "no model was named, and the tiny ones are not copied"
    inputs = Inputs(student, teacher, (), origins=settings.origins)
    origin = settings.origin("shrink")
    try:
        plans = plan_all(settings, inputs)
        if settings.shrink == AUTO:
            problem = _refusal(settings, inputs, stages)
            if not problem:
                return None, f"full models, by {origin}: by their files they fit"
            origin = f"{origin}: with the full models {problem}"
    except StageFault as fault:
        chosen = None if settings.shrink == AUTO else settings.shrink
        return chosen, f"not known yet what {origin} comes to: {fault.message}"
    if not plans:
        return None, f"full models: none has more layers than {origin} leaves"
    chosen = FEW if settings.shrink == AUTO else settings.shrink
    return chosen, f"{', '.join(STAGES)} run on {told(plans)}, by {origin}"


def _refusal(settings: Settings, inputs: Inputs, stages: Collection[str]) -> str:
    """Why the full models do not fit this machine; empty if they may."""
    estimate = Estimate(job_config(settings, inputs, Path()), inputs)
    try:
        for stage in STAGES:
            if stage in stages:
                estimate.judge(stage)
    except StageFault as fault:
        return fault.message
    return ""


@dataclass(frozen=True)
class Question:
    """The arguments for ``decide`` in another process."""

    settings: Settings
    stages: tuple[str, ...]


if __name__ == "__main__":
    asked = typed_json.loads(Question, sys.stdin.read())
    sys.stdout.write(json.dumps(decide(asked.settings, asked.stages)))
