"""What a layout is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gkd.options import Settings
from pytest_gkd.workload.engine import engine_config
from pytest_gkd.workload.engine.engine_config import EngineConfig
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.models.inputs import Inputs

# A user's tiny prompt limit must still leave room for the stages' own prompts.
MIN_MODEL_LEN = 128
CHECK_TOKENS = 16


@dataclass(frozen=True)
class JobConfig:
    """What a layout builds from: plain data, so that any process can."""

    settings: Settings
    student: str
    teacher: str
    engine: EngineConfig


def job_config(settings: Settings, inputs: Inputs, run_dir: Path) -> JobConfig:
    """How the engine is to be started for these settings and models."""
    config = engine_config.model_config(
        inputs.student, trust_remote_code=settings.trust_remote_code
    )
    tokens = settings.max_prompt_length + max(settings.max_new_tokens, CHECK_TOKENS)
    tokens = max(tokens, MIN_MODEL_LEN)
    positions = model_files.positions(config)
    if settings.max_prompt_length == Settings.max_prompt_length and positions:
        # A limit that nobody asked for must not be what a small model fails on.
        tokens = min(tokens, positions)
    on_cpu = settings.device == "cpu"
    cache = engine_config.cache_bytes(config, tokens) if on_cpu else None
    local = all(Path(model).is_dir() for model in (inputs.student, inputs.teacher))
    return JobConfig(
        settings,
        inputs.student,
        inputs.teacher,
        EngineConfig(
            model=inputs.student,
            device=settings.device,
            dtype=engine_config.choose_dtype(
                config, settings.device, bfloat16=settings.bfloat16
            ),
            max_model_len=tokens,
            kv_cache_bytes=cache,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
            trust_remote_code=settings.trust_remote_code,
            multiprocess=settings.layout == "split",
            socket_dir=str(run_dir / "v"),
            offline=local,
            architectures=tuple(config.get("architectures") or ()),
        ),
    )
