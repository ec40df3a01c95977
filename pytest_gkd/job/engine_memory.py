"""What each GPU of an inference engine, vLLM or SGLang, must hold, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packaging.version import Version

from pytest_gkd.job.models import WIDTHS, Model

GIB = 1 << 30
# CUDA graphs that vLLM captures outside its share, unless it is eager; an estimate.
GRAPH_BYTES = GIB // 2
# vLLM's default max_num_seqs on GPUs of 70 GiB and more (engine/arg_utils.py,
# get_batch_defaults).
MOST_SEQUENCES = 1024
# A release that has Model Runner V2 as the default of dense models (a 0.26.0 ran on it
# unasked), and the prompt tokens whose logits that makes at once.
V2, SCORED = "0.26", 1024
Parts = dict[str, int]


@dataclass(frozen=True)
class Engine:
    """What an engine's memory depends on; ``sequences`` run at once.

    ``share`` is vLLM's gpu_memory_utilization, or SGLang's mem_fraction_static, which
    covers weights and cache alone (model_runner.py, profile_max_num_token). ``sleeps``
    says that it frees its memory while the trainer works, ``scores`` that it is asked
    for the log-probabilities of prompts, as a teacher is: of ``scored_tokens`` at once,
    or if that is 0, of all tokens that it computes at once. ``release`` is vLLM's,
    empty if not known.
    """

    model: Model
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    share: float = 0.9
    length: int = 0
    sequences: int = 1
    batched_tokens: int = 8192
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    sleeps: bool = False
    scores: bool = False
    scored_tokens: int = 0
    eager: bool = False
    kind: str = "vllm"
    release: str = ""


def weights(engine: Engine) -> int:
    """Bytes of the weights on one of the engine's GPUs."""
    whole = engine.model.loaded_bytes(engine.dtype)
    return math.ceil(whole / (engine.tensor * engine.pipeline))


def working(engine: Engine) -> int:
    """The peak of vLLM's profiling step beside weights and cache.

    A layer's peak on ``batched_tokens`` (residual, input, gate and other factor, their
    product), or the sampler's logits of all sequences, in float32 with their
    probabilities and the sorted ones (vLLM, gpu_model_runner.py, profile_run and
    _dummy_sampler_run).
    """
    model, width = engine.model, WIDTHS[engine.dtype]
    inner = max(layer.inner for layer in model.layers)
    layer = (2 * model.width + 3 * inner / engine.tensor) * width
    sampled = engine.sequences * model.vocab * 12
    return int(max(engine.batched_tokens * layer, sampled))


def working_in_share(engine: Engine) -> int:
    """The part of the GPU's memory that the engine's share covers."""
    return 0 if engine.kind == "sglang" else working(engine)


def one_cache(engine: Engine) -> int:
    """Bytes of one full-length sequence's cache on one GPU; key and value heads are
    replicated if there are fewer than ranks (vLLM, get_num_kv_heads).
    """
    whole = engine.model.cache_bytes(engine.length, engine.cache_dtype)
    return math.ceil(whole / (engine.tensor * engine.pipeline))


def scoring(engine: Engine) -> int:
    """What prompt log-probabilities take outside vLLM's share: the logits of a chunk of
    a prompt, a slice of them without padding, and their float32 log-softmax (vLLM 0.32,
    v1/worker/gpu_model_runner.py, _get_prompt_logprobs_dict); or, where Model Runner V2
    is the default, the logits of two chunks of SCORED tokens (gpu/sample/
    prompt_logprob.py). vLLM's profiling does not count them. SGLang holds those
    of all prompts that are computed at once: in float32, selected, and as
    log-probabilities (sglang 0.5.9 to 0.5.16, layers/logits_processor.py, forward).
    """
    if not engine.scores:
        return 0
    if engine.kind == "sglang":
        tokens = min(engine.batched_tokens, engine.scored_tokens or math.inf)
        return int(tokens) * engine.model.vocab * 12
    tokens = min(engine.batched_tokens, engine.length)
    if engine.release and Version(engine.release) >= Version(V2):
        tokens = min(tokens, 2 * SCORED)
        return tokens * engine.model.vocab * WIDTHS[engine.dtype]
    return tokens * engine.model.vocab * (2 * WIDTHS[engine.dtype] + 4)


def serving(engine: Engine, memory: int | None) -> Parts:
    """An engine at work: its cache fills its share of the GPU, whatever the load (vLLM,
    v1/worker/gpu_worker.py, determine_available_memory).
    """
    own = weights(engine), working(engine)
    cache = one_cache(engine) * engine.sequences
    if memory is not None:
        inside = own[0] + working_in_share(engine)
        cache = max(int(engine.share * memory) - inside, 0)
    return {
        f"engine's weights {engine.dtype}": own[0],
        "engine's activations": own[1],
        f"KV cache {engine.cache_dtype}": cache,
        "prompts' logits": scoring(engine),
        "CUDA graphs": 0 if engine.eager else GRAPH_BYTES,
    }


def beside(engine: Engine, memory: int | None) -> Parts:
    """What an engine holds while the trainer works: only its CUDA graphs if asleep
    (vLLM, device_allocator/cumem.py), else everything.
    """
    if not engine.sleeps:
        return serving(engine, memory)
    return {"CUDA graphs": 0 if engine.eager else GRAPH_BYTES}
