"""The environment stage's child processes: they import packages and start Ray.

Each function runs in its own interpreter and reports one JSON object per line to a file
descriptor, before and after each step, so that a crash or a hang can be attributed to
the step in progress. The file descriptor is separate from stdout, where packages print
whatever they like.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging.handlers
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gkd import files
from pytest_gkd.clock import monotonic
from pytest_gkd.processes.import_clock import ImportClock
from pytest_gkd.workload.environment.extensions import goes_without


class Reporter:
    """Writes events; each reaches the file before the next step is tried."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **event: Any) -> None:
        """Write one event; the values must be JSON."""
        files.append_line(self._descriptor, files.json_line(event))

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[dict[str, Any]]:
        """Report ``what`` as begun, then as done or failed; go on after a failure.

        What the block puts in the dictionary is reported with the end.
        """
        self.say(begin=what)
        start = monotonic()
        found: dict[str, Any] = {}
        try:
            yield found
        # SystemExit and KeyboardInterrupt too: some packages exit on import.
        except BaseException as error:
            self.say(
                failed=what,
                error=type(error).__name__,
                text=str(error),
                missing=getattr(error, "name", None),
                errno=getattr(error, "errno", None),
                trace=traceback.format_exc(limit=-6),
                **found,
            )
        else:
            self.say(done=what, seconds=round(monotonic() - start, 2), **found)


def prepare(descriptor: int) -> Reporter:
    """Disable garbage collection (imports make no garbage, and it takes a fifth of
    their time); dump stacks on a crash, and on SIGUSR1 even while C code holds the
    GIL."""
    gc.disable()
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, chain=False)
    return Reporter(descriptor)


def import_packages(descriptor: int, modules: list[str]) -> None:
    """Import each module, then look inside them."""
    reporter = prepare(descriptor)
    ImportClock(lambda seconds: reporter.say(importing=seconds)).start()
    for module in modules:
        with reporter.doing(f"import {module}") as found:
            loaded = importlib.import_module(module)
            found["version"] = str(getattr(loaded, "__version__", ""))
            found["file"] = getattr(loaded, "__file__", None)
    look_inside(reporter)
    sys.stderr.flush()
    # A normal interpreter exit takes a second and proves nothing here.
    os._exit(0)


def look_inside(reporter: Reporter) -> None:
    """Inspect what was imported: torch's build, vLLM's native parts. Then report the
    end."""
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "version"):
        with reporter.doing("torch's CUDA") as found:
            found["torch"] = _torch_build()
    if "vllm" in sys.modules:
        with reporter.doing("vLLM's platform") as found:
            found["platform"], found["kernels"] = _vllm_platform()
        for name in _vllm_extensions():
            with reporter.doing(f"import vllm.{name}") as found:
                _import_extension(f"vllm.{name}", found)
    reporter.say(end=True)


def _torch_build() -> dict[str, Any]:
    import torch

    build: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.version.cuda is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build["available"] = torch.cuda.is_available()
            build["devices"] = torch.cuda.device_count()
        build["complaints"] = [str(warning.message) for warning in caught]
        # Without a device torch.cuda.get_arch_list() is empty; this one is not.
        build["archs"] = torch._C._cuda_getArchFlags().split()
    return build


def _vllm_platform() -> tuple[str, list[str]]:
    """vLLM's platform, and what failed while it loaded its kernels.

    vLLM picks one of several libraries by platform and CPU, and logs a failure as a
    warning instead of raising it; an engine would fail later, on the first operator.
    """
    complaints = logging.handlers.BufferingHandler(sys.maxsize)
    complaints.setLevel(logging.WARNING)
    logger = logging.getLogger("vllm")
    logger.addHandler(complaints)
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    logger.removeHandler(complaints)
    # A build for another platform lacks this library, and nothing is wrong with that.
    failed = [
        text
        for text in map(logging.LogRecord.getMessage, complaints.buffer)
        if "Failed to import" in text and "No module named 'vllm." not in text
    ]
    return str(current_platform.device_name or current_platform.device_type), failed


def _vllm_extensions() -> list[str]:
    """vLLM's extension modules, except the kernels: those are variants of one library,
    and no two of them can be loaded into one process."""
    import vllm

    folder = Path(vllm.__path__[0])
    names = {path.name.partition(".")[0] for path in folder.glob("*.so")}
    return sorted(name for name in names if not name.startswith("_C"))


def _import_extension(module: str, found: dict[str, Any]) -> None:
    import vllm

    try:
        importlib.import_module(module)
    except Exception as error:
        found["without"] = goes_without(Path(vllm.__path__[0]), module, error)
        raise


def _leave_out_helpers() -> list[str]:
    """Start Ray without its autoscaler, log forwarder and API server.

    A task needs none of them: GCS, raylet, its two agents and the worker are what fails
    in practice. They take two fifths of the CPU time of a start (1.6 of 4 s, Ray 2.60
    on 2 cores) and a second of ray.shutdown(). Ray has switches for two of them, which
    ray.init() does not pass on; a release without these methods starts them. Returns
    what was left out.
    """
    from ray._private.node import Node

    def skip(self: Any, *args: Any, **options: Any) -> None:
        # The raylet's command line contains the API server's address.
        self._webui_url = ""

    names = ("start_monitor", "start_log_monitor", "start_api_server")
    there = [name for name in names if hasattr(Node, name)]
    for name in there:
        setattr(Node, name, skip)
    return there


def start_ray(descriptor: int, directory: str) -> None:
    """Start our own Ray in ``directory``, run one task, and stop it."""
    reporter = prepare(descriptor)
    began = monotonic()
    try:
        with reporter.doing("import ray") as found:
            import ray

            found["version"] = ray.__version__
        if "ray" not in sys.modules:
            return
        with reporter.doing("ray.init") as found:
            found["left_out"] = _leave_out_helpers()
            # "local" starts a new one whatever RAY_ADDRESS says. The object store gets
            # little more than Ray's minimum (75 MiB).
            ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                log_to_driver=False,
                _temp_dir=directory,
            )
        if ray.is_initialized():
            with reporter.doing("a Ray task") as found:

                def where() -> int:
                    return os.getpid()

                # Defined in here, it is pickled by value: a worker that cannot import
                # this package can still run it.
                found["worker_pid"] = ray.get(ray.remote(where).remote())
                found["resources"] = ray.cluster_resources()
                found["ready_s"] = round(monotonic() - began, 2)
        with reporter.doing("ray.shutdown"):
            ray.shutdown()
    finally:
        reporter.say(end=True)
        sys.stderr.flush()
        os._exit(0)
