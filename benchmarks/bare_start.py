"""The bare start that the green pass is measured against: one LLM(), one generate().

    python benchmarks/bare_start.py MODEL

The same model, engine mode and eager execution as the stages; nothing is tuned but the
KV cache, which by default takes half the machine's memory and then mostly times zeroing
that (VLLM_CPU_KVCACHE_SPACE, in GiB). The last line says in JSON how many seconds each
part took.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    times = [time.perf_counter()]
    from vllm import LLM, SamplingParams

    times.append(time.perf_counter())
    llm = LLM(model=sys.argv[1], enforce_eager=True, dtype="float32")
    times.append(time.perf_counter())
    llm.generate(["a few words"], SamplingParams(max_tokens=16))
    times.append(time.perf_counter())
    spent = [late - early for early, late in itertools.pairwise(times)]
    print(json.dumps(dict(zip(("imports", "engine", "work"), spent, strict=True))))


if __name__ == "__main__":
    main()
