"""A model that vLLM runs by transformers' class, beside a trainer; what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.layouts import layout
from pytest_gkd.workload.layouts.job_config import job_config
from pytest_gkd.workload.layouts.local_layouts import Colocated
from pytest_gkd.workload.models import inputs, tiny_text


def tiny(directory: Path) -> Path:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=tiny_text.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    Olmo2ForCausalLM(config).save_pretrained(directory)
    for name, value in (
        ("tokenizer.json", tiny_text.tokenizer()),
        ("tokenizer_config.json", tiny_text.tokenizer_config()),
    ):
        (directory / name).write_text(json.dumps(value), "utf-8")
    return directory


def error(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    return ""


def main(base: Path) -> dict[str, Any]:
    model = str(tiny(base / "m"))
    settings = Settings(layout="colocated", student=model, teacher=model)
    gkd = StageContext(settings, base, base / "report")
    config = job_config(settings, inputs.resolve(settings, base), base)
    job = layout.Job(gkd, config, Colocated(config, gkd))
    job.check_served("at the start")
    trainer = job.trainer
    found = {
        "notes": {note["id"]: note["text"] for note in gkd.facts.get("notes", [])},
        "kept": error(lambda: trainer.check_greedy([1, 2], [3])),
    }

    # What a job's own engine does, which nothing keeps from it.
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile(
        None,
        cls=type(trainer.model.model),
        dynamic_arg_dims={"input_ids": 1},
        enable_if=lambda config: False,
        is_encoder=False,
    )
    found["before"] = error(lambda: trainer.check_greedy([1, 2], [3]))
    found["after"] = error(lambda: type(trainer.model)(trainer.model.config))
    return found


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result), "utf-8")
