"""What an engine is started with: dtype, context, cache. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gkd.checkpoint import cache_elements
from pytest_gkd.options import Settings

CPU_CACHE_BYTES = 32 << 20
CPU_CACHE_LIMIT = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with; plain data, so that it can be sent.

    ``dtype`` is a torch name; ``max_model_len`` in tokens; ``kv_cache_bytes`` None
    leaves the size to vLLM and ``gpu_memory_utilization``. ``socket_dir`` has a short
    path, since UNIX sockets lie there.
    """

    model: str
    settings: Settings
    dtype: str
    max_model_len: int
    kv_cache_bytes: int | None
    socket_dir: str
    offline: bool
    architectures: tuple[str, ...] = ()

    @property
    def multiprocess(self) -> bool:
        """vLLM's default: engine core and workers as processes of their own."""
        return self.settings.layout == "split"


def choose_dtype(
    config: Mapping[str, Any], device: str, *, bfloat16: bool = True
) -> str:
    """The dtype for engine, trainer and teacher alike, so that weights compare.

    On a CPU float32, where greedy tokens of two implementations agree. On a GPU the
    checkpoint's own; attention kernels there want 16 bits, so not float32. vLLM refuses
    ``bfloat16`` on GPUs below compute capability 8.0, such as T4 and V100.
    """
    if device == "cpu":
        return "float32"
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    named = named.removeprefix("torch.")
    if named == "float16" or not bfloat16:
        unstable = config.get("model_type") in WITHOUT_FLOAT16
        return "float32" if unstable and not bfloat16 else "float16"
    return "bfloat16"


# vLLM refuses these in float16 (vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS).
WITHOUT_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")


def cache_bytes(config: Mapping[str, Any], tokens: int) -> int | None:
    """Bytes of float32 KV cache on a CPU for sequences of ``tokens`` tokens.

    Room for a few of them and never more than needed: memory that is asked for is
    zeroed, at about 1 GiB a second. None when ``config`` does not have the usual keys.
    """
    elements = cache_elements(config)
    if elements is None:
        return None
    # A block of 128 tokens more than asked for.
    one = 4 * elements * (tokens + 128)
    return max(CPU_CACHE_BYTES, one, min(CPU_CACHE_LIMIT, 4 * one))
