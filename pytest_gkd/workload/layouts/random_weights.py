"""A program that creates random weights; ``shrunk`` runs it as a separate process."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_gkd import typed_json
from pytest_gkd.workload.models import shrink


@dataclass(frozen=True)
class Order:
    """Weights to create for ``directory``'s config, in ``dtype`` (a torch name)."""

    directory: Path
    dtype: str
    seed: int
    trust_remote_code: bool


def write(order: Order) -> None:
    """Write weights as transformers initializes a new model."""
    import torch
    from transformers import AutoConfig

    from pytest_gkd.workload.gkd.forward import model_class

    directory, trust = order.directory, order.trust_remote_code
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
    torch.manual_seed(order.seed)
    model = model_class(config).from_config(
        config, dtype=getattr(torch, order.dtype), trust_remote_code=trust
    )
    sizes = (one.numel() * one.element_size() for one in model.parameters())
    shrink.check_space(directory, sum(sizes))
    with tempfile.TemporaryDirectory(dir=directory) as draft:
        model.save_pretrained(draft, max_shard_size="10000GB")
        shutil.move(Path(draft, "model.safetensors"), directory)


if __name__ == "__main__":
    write(typed_json.loads(Order, sys.stdin.read()))
