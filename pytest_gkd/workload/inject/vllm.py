"""Models that cannot be served, and engines that do not start or answer wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.processes import tree
from pytest_gkd.workload.engine import engine as engines
from pytest_gkd.workload.engine import engine_config
from pytest_gkd.workload.inject.site import Site, changed


def no_weights(site: Site) -> None:
    for path in _weight_files(site.copied_model()):
        path.unlink()


def truncated_weights(site: Site) -> None:
    path = _weight_files(site.copied_model())[-1]
    os.truncate(path, path.stat().st_size // 2)


def adapter(site: Site) -> None:
    """Like an adapter saved by PEFT, without the model's config."""
    directory = site.copied_model()
    for path in (*_weight_files(directory), directory / "config.json"):
        path.rename(path.with_name(f"adapter_{path.name}"))
    settings = {"peft_type": "LORA", "base_model_name_or_path": "some-lab/base"}
    (directory / "adapter_config.json").write_text(json.dumps(settings), "utf-8")


def no_torchvision(site: Site, *, config: dict[str, Any]) -> None:
    """A vision-language model in an environment that lacks what its processor needs."""
    other_config(site, config=config)
    hidden = sys.modules.get("torchvision", ...)

    def show() -> None:
        del sys.modules["torchvision"]
        if hidden is not ...:
            sys.modules["torchvision"] = hidden

    sys.modules["torchvision"] = None  # type: ignore[assignment] # as if not installed
    site.callback(show)


def other_config(site: Site, *, config: dict[str, Any]) -> None:
    """A model whose config does not match it, or is unknown here."""
    with changed(site.copied_model() / "config.json") as values:
        values.update(config)


def untied_head(site: Site) -> None:
    """A separate head in the weights of a model whose config ties it."""
    import torch
    from safetensors.torch import load_file, save_file

    path = site.copied_model() / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, path, metadata={"format": "pt"})


def small_cache(site: Site, *, cache_bytes: int) -> None:
    site.replace(engine_config, "cache_bytes", lambda config, tokens: cache_bytes)


def settings_alone(site: Site) -> None:
    """The settings alone are the fault."""
    del site


def signalled(site: Site, *, title: str, name: str) -> object:
    """The first process with that title gets a signal from outside once it exists."""

    def act() -> bool:
        found = below(title)
        if found:
            site.triggered()
            found[0].send_signal(signal.Signals[name])
        return bool(found)

    return site.repeat(act)


def below(title: str) -> list[psutil.Process]:
    """The processes below this one whose command line contains ``title``."""
    return [p for p in tree.descendants(os.getpid()) if title in tree.describe(p)]


def scrambled_weights(site: Site) -> object:
    return _after_start(site, _scramble)


def spoilt_weights(site: Site) -> object:
    return _after_start(site, _spoil)


def scaled_logits(site: Site, *, factor: float) -> object:
    """After the engine's start, its logits are ``factor`` times what they should be."""

    def scale(model: Any) -> None:
        compute = model.compute_logits
        model.compute_logits = lambda *args: compute(*args) * factor

    return _after_start(site, scale)


def engine_killed_serving(site: Site) -> object:
    def kill_and_ask(generate: Any, *args: Any, **kwargs: Any) -> Any:
        for core in below("VLLM::EngineCore"):
            site.triggered()
            core.kill()
        return generate(*args, **kwargs)

    return site.wrap(engines.Engine, "generate", kill_and_ask)


def gpu_taken(site: Site) -> None:
    program = (
        "import torch; free, _ = torch.cuda.mem_get_info(); "
        "held = torch.empty(int(0.9 * free), dtype=torch.uint8, device='cuda'); "
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    site.callback(other.wait)
    site.callback(other.kill)
    assert other.stdout is not None
    if other.stdout.readline() != "held\n":
        raise RuntimeError("the process that was to take the GPU's memory has ended")


def _after_start(site: Site, change: Callable[[Any], None]) -> object:
    def start_and_change(start: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.llm.apply_model(change)
        site.triggered()

    return site.wrap(engines.Engine, "__init__", start_and_change)


def _scramble(model: Any) -> None:
    import torch

    for matrix in _matrices(model):
        order = torch.randperm(matrix.shape[0], device=matrix.device)
        matrix.copy_(matrix[order])


def _spoil(model: Any) -> None:
    _matrices(model)[0].normal_()


def _matrices(model: Any) -> list[Any]:
    """All but the embedding, without which nothing is left to compare."""
    return [p.data for p in model.parameters() if p.dim() == 2][1:]


def _weight_files(directory: Path) -> list[Path]:
    patterns = ("*.safetensors", "*.bin", "*.index.json")
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    return sorted(found)
