"""Teacher, trainer and rollout engine as Ray actors.

A local Ray, started for this job and stopped with it. Weights go directly from the
trainer's actor to the rollout's, over a group of their own; Ray only carries the calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import stacks, tree
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload import exit_reasons
from pytest_gkd.workload.engine import compiling
from pytest_gkd.workload.environment import ray_cluster
from pytest_gkd.workload.layouts import ray_actors
from pytest_gkd.workload.layouts.job_config import JobConfig
from pytest_gkd.workload.sync import transfer
from pytest_gkd.workload.sync.transfer import Transfer

ROLES = (ray_actors.Rollout, ray_actors.Trainer, ray_actors.Teacher)
NAMESPACE = "pytest-gkd"
PLACEMENT_BUDGET_S = 30.0
TRIES = 5
OBJECT_STORE_BYTES = 200 << 20


class RayLayout:
    """Three actors, each in its own process, in one placement group."""

    name = "ray"
    ends_by_itself = False

    def __init__(self, config: JobConfig, gkd: StageContext) -> None:
        self.config = config
        self.gkd = gkd
        self._group: Any = None
        self._started = False
        self._remotes: dict[type[ray_actors.Role], Remote] = {}

    def start_engine(self) -> Any:
        self.connect()
        with compiling.told(
            self.gkd,
            "starting the rollout actor and its engine",
            on_gpu=self.config.settings.gpus > 0,
        ):
            # The trainer's process imports in parallel; it is needed right after.
            self._actor(ray_actors.Trainer)
            return self._actor(ray_actors.Rollout).wait_until_made()

    def load_trainer(self) -> tuple[Any, Any]:
        trainer = self._actor(ray_actors.Trainer).wait_until_made()
        return trainer, trainer.of("source")

    def load_teacher(self) -> Any:
        return self._actor(ray_actors.Teacher).wait_until_made()

    def transfer(self, engine: Any, source: Any) -> Transfer:
        return transfer.choose(engine, source, self.gkd.working_s, opens_memory=False)

    def close(self) -> None:
        if not self._started:
            return
        import ray

        for remote in self._remotes.values():
            # The engine's own processes end with the actor; Ray ends the rest.
            ray.kill(remote.actor, no_restart=True)
        self._remotes = {}
        ray.shutdown()

    # -- placement -------------------------------------------------------------------

    def connect(self) -> None:
        """Start our own Ray and place the actors in it, once."""
        if self._group is not None:
            return
        # Read when Ray is imported, here and in the actors.
        os.environ.update(ray_cluster.own_environ(os.environ))
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self.gkd.step("starting Ray")
        import ray

        settings = self.config.settings
        temporary = self.gkd.run_dir / "r"
        temporary.mkdir(exist_ok=True)
        self._started = True
        ray.init(
            address="local",
            # The three share cores, which Ray's accounting does not allow for.
            num_cpus=max(settings.cpus, len(ROLES)),
            num_gpus=settings.gpus,
            include_dashboard=False,
            namespace=NAMESPACE,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temporary),
            configure_logging=False,
        )
        self.gkd.step("placing the actors")
        needs = bundles(settings.gpus, settings.tensor_parallel_size)
        self._group = place(needs, min(PLACEMENT_BUDGET_S, self.gkd.working_s(0.5)))

    def _actor(self, role: type[ray_actors.Role]) -> Remote:
        """The actor of ``role``, created on the first call."""
        if role in self._remotes:
            return self._remotes[role]
        self.connect()
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        settings = self.config.settings
        number = ROLES.index(role)
        needs = bundles(settings.gpus, settings.tensor_parallel_size)[number]
        title = role.__name__.lower()
        actor = ray.remote(role).options(
            name=title,
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        )
        self._remotes[role] = Remote(actor.remote(self.config), title, self.gkd)
        return self._remotes[role]


def where_import_waits(role: str, gkd: StageContext) -> str:
    """Where the actor ``role`` is blocked if it is in an import that only waits."""
    for one in tree.descendants(os.getpid()):
        if f"ray::{role.capitalize()}" not in tree.describe(one):
            continue
        # Ray's own threads in it wake up now and then.
        if any(exit_reasons.only_wait(partial(list, [one])) for _ in range(TRIES)):
            place = gkd.report_dir / "stacks" / gkd.stage
            found = stacks.collect(one.pid, gkd.run_dir / "armed", place)
            if found and "_find_and_load" in found[0].text:
                return stacks.innermost(found[0].text, one.pid)
    return ""


def bundles(gpus: int, tensor_parallel_size: int) -> list[dict[str, float]]:
    """What rollout, trainer and teacher (in this order) need, as Ray resources.

    One GPU each if there are enough, else trainer and teacher share one, and on a
    machine with one GPU all three do.
    """
    if not gpus:
        return [{"CPU": 1.0} for _ in ROLES]
    beside = 0.5 if gpus < tensor_parallel_size + 2 else 1.0
    shares = [float(tensor_parallel_size), beside, beside]
    if gpus == tensor_parallel_size == 1:
        shares = [0.4, 0.3, 0.3]
    return [{"CPU": 1.0, "GPU": share} for share in shares]


def place(needs: list[dict[str, float]], budget_s: float) -> Any:
    """A placement group of ``needs``, ready.

    Ray waits for resources silently and forever; its table of groups knows at once if
    they are infeasible. Raises StageFault ``ray.no-resources``.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    group = placement_group(needs)
    deadline = monotonic() + budget_s
    while not group.wait(0.2):
        state = placement_group_table(group)["stats"]["scheduling_state"]
        if state != "INFEASIBLE" and monotonic() < deadline:
            continue
        offered = ray.cluster_resources()
        short = [
            f"{name}: {wanted:g} wanted, {offered.get(name, 0.0):g} there"
            for name in sorted({name for need in needs for name in need})
            if (wanted := sum(need.get(name, 0.0) for need in needs))
            > offered.get(name, 0.0)
        ]
        raise StageFault(
            "ray.no-resources",
            f"Ray cannot place the {len(needs)} actors ({state}): "
            f"{'; '.join(short) or 'each resource is there, but not on one node'}",
            facts={"state": state, "wanted": needs, "offered": offered},
        )
    return group


@dataclass
class Remote:
    """A proxy for an object in an actor: has its methods, each with a time limit."""

    actor: Any
    role: str
    gkd: StageContext
    part: str = ""
    kills: int = field(default_factory=exit_reasons.oom_kills)

    def wait_until_made(self) -> Remote:
        """Return once the actor's object exists; raises what its creation raised."""
        self._call("", "")
        return self

    def of(self, part: str) -> Remote:
        """Another object in the same actor."""
        return replace(self, part=part)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(self.part, name, *args, **kwargs)

        return call

    def _call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        answer = self.actor.call.remote(part, method, *args, **kwargs)
        # A little more than the enclosing operation's limit, which names both sides.
        budget_s, extra_s = self.gkd.working_s(0.5), self.gkd.extra()
        asked = ".".join(filter(None, (part, method)))
        asked = f"{asked}()" if asked else "its start"
        try:
            found = self._get(answer, budget_s, extra_s)
        except ray.exceptions.GetTimeoutError as error:
            raise self._silent(asked, budget_s) from error
        except ray.exceptions.ActorDiedError as error:
            raise exit_reasons.actor_fault(
                self.role, asked, str(error), self.kills
            ) from error
        if isinstance(found, StageFault):
            raise found
        return found

    def _get(self, answer: Any, budget_s: float, extra_s: float) -> Any:
        """The answer; waits longer by what the stage is granted beyond its budget."""
        import ray

        while True:
            try:
                return ray.get(answer, timeout=budget_s)
            except ray.exceptions.GetTimeoutError:
                budget_s = self.gkd.extra() - extra_s
                if budget_s <= 0:
                    raise
                extra_s += budget_s

    def _silent(self, asked: str, budget_s: float) -> StageFault:
        """The fault when the actor is alive but does not answer."""
        stopped = exit_reasons.stopped()
        where = "" if stopped else where_import_waits(self.role, self.gkd)
        if where:
            return StageFault(
                "env.import-stuck",
                f"an import in the {self.role} actor does not return: it uses no "
                f"processor and waits in {where}",
                facts={"actor": self.role},
            )
        held = "".join(f"{one}: " for one in stopped[:1])
        return StageFault(
            "teacher.unreachable" if self.role == "teacher" else "ray.get-timeout",
            f"{held}the {self.role} actor had not answered {asked} in {budget_s:.0f} s",
            facts={
                "actor": self.role,
                "asked": asked,
                "waited_s": budget_s,
                **exit_reasons.stopped_facts(stopped),
            },
        )
