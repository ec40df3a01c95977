"""Judges in one pass whether this environment is fit for the job."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pytest_gkd import fault_specs, typed_json
from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import shadowed_imports
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload import loopback
from pytest_gkd.workload.environment import (
    engine_imports,
    gpu,
    gpu_judge,
    host,
    package_versions,
    ray_cluster,
    variable_names,
    variables,
)
from pytest_gkd.workload.environment.findings import FaultsAndNotes
from pytest_gkd.workload.environment.package_damage import judge_bytecode, judge_damage
from pytest_gkd.workload.environment.probe import Outcome, Probe
from pytest_gkd.workload.environment.probe_judge import (
    judge_imports,
    judge_ray,
    judge_shadows,
)

# Bottom up: each imports those before it, so the first failure is the deepest.
IMPORTS: tuple[str, ...] = (
    "torch",
    "safetensors",
    "tokenizers",
    "transformers",
    "datasets",
    "vllm",
)

# Share of the stage's time that the engine's imports may stall before a child redoes
# them.
PATIENCE = 1 / 3


class Imports:
    """The imports of the heavy packages: by a child, or by the engine's lane.

    What an earlier stage of this lane has imported is known to import. Where the
    engine's lane runs, it imports torch and vLLM in the meantime and reports what they
    were built for. If it fails or stalls, a child imports them.
    """

    def __init__(self, gkd: StageContext) -> None:
        self._gkd = gkd
        here = [name for name in IMPORTS[1:-1] if name in sys.modules]
        self._wanted = [name for name in IMPORTS if name not in here]
        gkd.fact("imported_before", here)
        self._probe: Probe | None = None
        self._engine = engine_imports.EngineImports(
            gkd.run_dir, gkd.working_s() * PATIENCE
        )
        self._settle()

    def _settle(self) -> None:
        """Start a child if the engine's lane cannot be relied on."""
        # A fault injected here exists only in this process's environment.
        inject = self._gkd.settings.inject
        here_only = inject and fault_specs.find(inject).stage == self._gkd.stage
        if (
            here_only
            or not set(self._wanted) <= set(engine_imports.MODULES)
            or not (self._engine.proven() or self._engine.advances())
        ):
            self._probe = Probe("import_packages", [self._wanted], self._gkd.output_dir)

    def running(self) -> bool:
        """Whether anything is still running."""
        if self._probe is None:
            self._settle()
        if self._probe is None:
            return not self._engine.proven()
        return self._probe.running()

    def importing_s(self) -> float:
        """How long the imports have taken so far, in seconds."""
        if self._probe is None:
            return self._engine.importing_s()
        return self._probe.so_far().importing_s

    def phase(self) -> str:
        """What is being imported."""
        if self._probe is None:
            return f"{self._engine.outcome().phase} in the engine's lane"
        return self._probe.so_far().phase

    def finish(self, stacks_s: float) -> Outcome:
        """The outcome; see ``Probe.finish``."""
        self._gkd.fact("imported_by_engine", self._probe is None)
        if self._probe is None:
            return self._engine.outcome()
        return self._probe.finish(stacks_s)

    def kill(self) -> None:
        """Kill the child, if there is one."""
        if self._probe is not None:
            self._probe.kill()


class Examination:
    """One pass over the environment, and what it found.

    A child starts a Ray in the background, and another imports the heavy packages
    unless the engine's lane does; this process judges the rest in the meantime.
    """

    def __init__(self, gkd: StageContext) -> None:
        self.gkd = gkd
        self.found = FaultsAndNotes()
        self._deadline = monotonic() + gkd.working_s()

    def run(self) -> FaultsAndNotes:
        """Judge everything. Facts go to the report as soon as they are known."""
        gkd = self.gkd
        gkd.step("starting the import of torch, transformers, datasets and vLLM")
        with contextlib.ExitStack() as on_exit:
            smi = gpu.NvidiaSmi()
            on_exit.callback(smi.stop)
            imports = Imports(gkd)
            on_exit.callback(imports.kill)
            ray, ray_directory = self._start_ray()
            if ray:
                on_exit.callback(ray.kill)
            versions = self._judge_versions()
            self._judge_host()
            self._judge_variables()
            machine = smi.read(max(1.0, self._deadline - monotonic()))
            self._wait(imports, ray)
            outcome = imports.finish(gkd.remaining_s() / 3)
            ray_outcome = ray.finish(gkd.remaining_s() / 3) if ray else None
        self._judge_imports(outcome)
        self._judge_gpus(machine, outcome, versions)
        if ray_outcome and ray_directory:
            self._judge_ray(ray_outcome, ray_directory)
        gkd.fact("notes", [asdict(note) for note in self.found.notes])
        return self.found

    def _start_ray(self) -> tuple[Probe | None, Path | None]:
        unreachable = loopback.problem()
        if unreachable:  # Ray would look for itself until the time is up
            self.found.add([StageFault(loopback.CAUSE, unreachable)])
            self.gkd.fact("ray", "not started")
            return None, None
        if not package_versions.read_installed(["ray"]):
            if self.gkd.settings.layout == "ray":
                text = "ray is not installed, and the layout is 'ray' "
                text += f"({self.gkd.settings.layout_why})."
                facts = {"package": "ray"}
                self.found.add([StageFault("env.package-missing", text, facts)])
            self.gkd.fact("ray", "not installed")
            return None, None
        directory = ray_cluster.make_directory(self.gkd.run_dir)
        environ = {**os.environ, **ray_cluster.own_environ(os.environ)}
        output = self.gkd.output_dir
        return Probe("start_ray", [str(directory)], output, environ), directory

    def _judge_versions(self) -> dict[str, str]:
        self.gkd.step("judging versions against each other")
        installed = package_versions.read_environment()
        importable = package_versions.read_importable()
        self.found.add(package_versions.judge_versions(installed, importable))
        versions = package_versions.versions_table(installed)
        self.gkd.fact("python", platform.python_version())
        self.gkd.fact("versions", versions)
        self.found.add(judge_bytecode(IMPORTS, os.environ))
        return versions

    def _judge_host(self) -> None:
        self.gkd.step("judging disk, memory, limits and compiler")
        ours = {"run directory": self.gkd.run_dir, "report": self.gkd.report_dir}
        items, facts = host.read_host(ours, os.environ, gpus=self.gkd.settings.gpus)
        self.found.add(items)
        self.found.add(host.shadowing(Path.cwd(), (*IMPORTS, "ray", "trl", "verl")))
        for name, value in facts.items():
            self.gkd.fact(name, value)

    def _judge_variables(self) -> None:
        self.gkd.step("judging environment variables")
        source, version = variable_names.read_vllm_source()
        self.found.add(
            variables.judge_variables(
                os.environ,
                gpus=self.gkd.settings.gpus,
                interfaces=variable_names.read_interfaces(),
                vllm_source=source,
                vllm_version=version,
                real_names=variable_names.read_real_names,
            )
        )
        run_dir = self.gkd.run_dir
        raylets = ray_cluster.read_raylets((run_dir, ray_cluster.directory(run_dir)))
        self.found.add(ray_cluster.judge_raylets(raylets, getpass.getuser()))
        frameworks = package_versions.read_installed(ray_cluster.FRAMEWORKS)
        needed = self.gkd.settings.layout == "ray" or bool(frameworks)
        found = ray_cluster.judge_clusters(os.environ, run_dir.parent, needed=needed)
        self.found.add(found)

    def _wait(self, imports: Imports, ray: Probe | None) -> None:
        """Wait until both have ended, or the stage's time is nearly up."""
        said = ""
        while monotonic() < self._deadline:
            self._allow_for(imports)
            running = [imports.phase()] if imports.running() else []
            if ray and ray.running():
                running.append(ray.so_far().phase)
            if not running:
                return
            if (doing := " and ".join(running)) != said:
                self.gkd.step(f"still waiting for: {doing}")
                said = doing
            time.sleep(0.05)

    def _allow_for(self, imports: Imports) -> None:
        """Extend the deadline for imports that make progress."""
        before_s = self.gkd.extra_s.get("imports", 0.0)
        self.gkd.allow("imports", imports.importing_s())
        self._deadline += self.gkd.extra_s.get("imports", 0.0) - before_s

    def _judge_imports(self, outcome: Outcome) -> None:
        # Before the metadata findings: a crash is certain, a wrong pin may be harmless.
        known, self.found.faults = self.found.faults, []
        imports = judge_imports(outcome)
        hidden = judge_shadows(shadowed_imports.find(sys.path))
        # "Not installed" is more informative than "does not import".
        absent = [fault for fault in known if fault.cause == "env.package-missing"]
        failed = dict.fromkeys(
            str(fault.facts.get("package", ""))
            for fault in imports
            if isinstance(fault, StageFault) and fault.cause == "env.package-conflict"
        )
        left_s = self._deadline - monotonic()
        self.found.add(
            [*hidden, *absent, *judge_damage(failed, left_s), *imports, *known]
        )
        done = [e for e in outcome.events if e.get("done", "").startswith("import ")]
        seconds = {one["done"].removeprefix("import "): one["seconds"] for one in done}
        self.gkd.fact("import_s", seconds)
        self.gkd.fact("vllm_platform", outcome.found("platform"))

    def _judge_gpus(
        self, machine: gpu.Machine, outcome: Outcome, versions: dict[str, str]
    ) -> None:
        build = outcome.found("torch")
        torch = typed_json.read(gpu.TorchBuild, build) if build else None
        if torch:
            self.gkd.fact("torch_cuda", torch.cuda)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        for_cuda = gpu_judge.built_for_cuda(versions)
        items = gpu_judge.judge_gpus(
            machine,
            torch,
            visible=visible,
            vllm_for_cuda=for_cuda,
            memory_fraction=self.gkd.settings.gpu_memory_utilization,
            engine_gpus=self.gkd.settings.tensor_parallel_size,
            own_pids=gpu.run_pids(),
        )
        self.found.add(items)
        if for_cuda:
            names = gpu_judge.judge_names(visible, machine.gpus, versions["vllm"])
            self.found.add(names)
        for name, value in gpu.gpu_facts(machine).items():
            self.gkd.fact(name, value)

    def _judge_ray(self, outcome: Outcome, directory: Path) -> None:
        faults = judge_ray(outcome)
        self.found.add(faults)
        if faults:
            ray_cluster.keep_logs(directory, self.gkd.output_dir / "ray-logs")
        self.gkd.fact("ray_start_s", outcome.found("ready_s"))
        # Raises if something left in it cannot be removed.
        shutil.rmtree(directory)
