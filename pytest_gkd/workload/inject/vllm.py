"""Models that cannot be served, and engines that do not come up or answer wrongly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from pytest_gkd.workload import engine as engines
from pytest_gkd.workload.inject.site import LATER, Site
from pytest_gkd.workload.inject.watch import strike_process

ENGINE_TITLE = "VLLM::EngineCore"


def no_weights(site: Site) -> None:
    """A model directory in which everything is but the weights."""
    for path in _weight_files(site.copied_model()):
        path.unlink()


def truncated_weights(site: Site) -> None:
    """A weights file that ends in the middle, as after a copy that was cut off."""
    path = _weight_files(site.copied_model())[-1]
    os.truncate(path, path.stat().st_size // 2)


def unknown_architecture(site: Site, *, config: dict[str, Any]) -> None:
    """A model whose config names what neither vLLM nor transformers know."""
    path = site.copied_model() / "config.json"
    values = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(values | config), "utf-8")


def small_cache(site: Site, *, cache_bytes: int) -> None:
    """Fewer bytes for the KV cache than one sequence of full length needs."""
    site.replace(engines, "cache_bytes", lambda config, tokens: cache_bytes)


def settings_alone(site: Site) -> None:
    """The fault's settings are all of it."""
    del site


def engine_killed(site: Site) -> object:
    """The engine's process is ended from outside as soon as it is there."""
    return strike_process(site, ENGINE_TITLE, signal.SIGKILL)


def engine_stopped(site: Site) -> object:
    """The engine's process is stopped as soon as it is there, and stays."""
    return strike_process(site, ENGINE_TITLE, signal.SIGSTOP)


def scrambled_weights(site: Site) -> object:
    """In the engine, after its start, one matrix holds its own numbers reordered."""
    start = engines.Engine.__init__

    def start_and_scramble(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self._llm.apply_model(_scramble)
        site.struck()

    site.replace(engines.Engine, "__init__", start_and_scramble)
    return LATER


def _scramble(model: Any) -> None:
    import torch

    matrices = [p for p in model.parameters() if p.dim() == 2]
    for matrix in matrices[1:]:
        order = torch.randperm(matrix.shape[0], device=matrix.device)
        matrix.data.copy_(matrix.data[order])


def _weight_files(directory: Path) -> list[Path]:
    patterns = ("*.safetensors", "*.bin", "*.index.json")
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    return sorted(found)
