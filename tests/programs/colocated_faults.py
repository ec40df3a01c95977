"""Pushes weights into a real engine, rightly and wrongly; what came of it, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload.layouts import layout as layouts
from pytest_gkd.workload.layouts.job_config import job_config
from pytest_gkd.workload.layouts.local_layouts import Colocated
from pytest_gkd.workload.models import inputs


def outcome(function: Any) -> dict[str, Any]:
    try:
        function()
    except StageFault as fault:
        return {"cause": fault.cause, "message": fault.message}
    return {"cause": None}


class Dropping(Colocated):
    """Its transfer loses what ``loses`` says and reports success."""

    loses = "nothing"

    def transfer(self, engine: Any, source: Any) -> Any:
        whole = super().transfer(engine, source)

        def push(infos: Any) -> int:
            if self.loses == "all":
                return 1
            if self.loses == "half":
                sent = list(source.tensors(infos))
                engine.load(iter(sent[: len(sent) // 2]))
                return 1
            return whole.push(infos)

        return SimpleNamespace(transport=whole.transport, why=whole.why, push=push)


class Renamed:
    """A trainer whose list of tensors is not what the engine expects."""

    def __init__(self, trainer: Any, change: Any) -> None:
        self._trainer = trainer
        self._change = change

    def parameter_info(self) -> Any:
        return self._change(self._trainer.parameter_info())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def announced(job: Any, change: Any) -> dict[str, Any]:
    trainer, source = job.training
    source.trainer = Renamed(trainer, change)
    job.__dict__["training"] = (source.trainer, source)
    try:
        return outcome(job.push_weights)
    finally:
        source.trainer = trainer
        job.__dict__["training"] = (trainer, source)


def main(base: Path) -> dict[str, Any]:
    settings = Settings(layout="colocated")
    gkd = StageContext(settings, base, base / "report")
    given = inputs.resolve(settings, base)
    config = job_config(settings, given, base)
    layout = Dropping(config, gkd)
    job = layouts.Job(gkd, config, layout)
    found: dict[str, Any] = {}

    loaded = job.check_served("at the start")
    found["compiles"] = not sys.modules["torch._dynamo.config"].disable
    job.trainer.snapshot()
    for name, change in {
        "renamed": lambda infos: [("module." + n, d, s) for n, d, s in infos],
        "missing": lambda infos: infos[:-1],
        "misshapen": lambda infos: [
            (n, d, [*s[:-1], s[-1] + 1] if n == infos[3][0] else s) for n, d, s in infos
        ],
    }.items():
        found[name] = announced(job, change)
    found["untouched"] = job.engine_digests() == loaded

    job.trainer.perturb(seed=1)
    for loses in ("all", "half"):
        layout.loses = loses
        job.push_weights()
        found[f"lost {loses}"] = outcome(lambda: job.check_served("after the push"))
    layout.loses = "nothing"
    job.push_weights()
    pushed = job.check_served("after the push")
    found["changed"] = [sum(pushed[n] != loaded[n] for n in loaded), len(loaded)]
    job.trainer.restore()
    job.push_weights()
    found["restored"] = job.check_served("after the push back") == loaded

    _, tensor = next(iter(job.trainer.named_tensors()))
    tensor[0, 0] = float("nan")
    found["nan"] = outcome(job.push_weights)

    # Another engine takes the place of the broken one, in this very process.
    job.close(for_another=True)
    fresh = layouts.Job(gkd, config, Colocated(config, gkd))
    found["fresh"] = fresh.check_served("in the new engine") == loaded
    found["answers"] = len(fresh.generate([[1, 2, 3]], 4)[0].token_ids)
    return found


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result), "utf-8")
    os._exit(0)
