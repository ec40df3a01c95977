"""What a layout is built from, and how each part's configuration is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gkd import checkpoint
from pytest_gkd.options import Settings
from pytest_gkd.workload.engine import engine_config
from pytest_gkd.workload.engine.engine_config import EngineConfig
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.models.inputs import Inputs

if TYPE_CHECKING:
    from pytest_gkd.workload.gkd.teacher import Teacher
    from pytest_gkd.workload.gkd.trainer import Trainer
    from pytest_gkd.workload.gkd.weight_source import WeightSource

# A user's tiny prompt limit must still leave room for the stages' own prompts.
MIN_MODEL_LEN = 128
CHECK_TOKENS = 16


@dataclass(frozen=True)
class JobConfig:
    """Plain data, so that any process can build from it."""

    settings: Settings
    teacher: str
    engine: EngineConfig

    def load_trainer(self, device: str) -> tuple[Trainer, WeightSource]:
        from pytest_gkd.workload.gkd.trainer import Trainer
        from pytest_gkd.workload.gkd.weight_source import WeightSource

        trainer = Trainer(
            self.engine.model,
            device=device,
            dtype=self.engine.dtype,
            learning_rate=self.settings.learning_rate,
            trust_remote_code=self.settings.trust_remote_code,
        )
        return trainer, WeightSource(trainer)

    def load_teacher(self, device: str) -> Teacher:
        from pytest_gkd.workload.gkd.teacher import Teacher

        return Teacher(
            self.teacher,
            device=device,
            dtype=self.engine.dtype,
            trust_remote_code=self.settings.trust_remote_code,
        )


def job_config(settings: Settings, inputs: Inputs, run_dir: Path) -> JobConfig:
    """The engine's configuration for these settings and models."""
    if Path(inputs.student).is_dir():
        config = model_files.read_config(Path(inputs.student), inputs.origin("student"))
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            inputs.student, trust_remote_code=settings.trust_remote_code
        ).to_dict()
    config = {**config, **checkpoint.text_part(config)}
    tokens = settings.max_prompt_length + max(settings.max_new_tokens, CHECK_TOKENS)
    tokens = max(tokens, MIN_MODEL_LEN)
    positions = model_files.positions(config)
    if settings.max_prompt_length == Settings.max_prompt_length and positions:
        # A small model must not fail on a limit that nobody asked for.
        tokens = min(tokens, positions)
    on_cpu = settings.device == "cpu"
    cache = engine_config.cache_bytes(config, tokens) if on_cpu else None
    local = all(Path(model).is_dir() for model in (inputs.student, inputs.teacher))
    return JobConfig(
        settings,
        inputs.teacher,
        EngineConfig(
            model=inputs.student,
            settings=settings,
            dtype=engine_config.choose_dtype(
                config, settings.device, bfloat16=settings.bfloat16
            ),
            max_model_len=tokens,
            kv_cache_bytes=cache,
            socket_dir=str(run_dir / "v"),
            offline=local,
            architectures=tuple(config.get("architectures") or ()),
        ),
    )
