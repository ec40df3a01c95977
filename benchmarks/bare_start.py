"""The bare start that the green pass is measured against: one LLM(), one generate().

    python benchmarks/bare_start.py MODEL

The same model, engine mode and eager execution as the stages; nothing is tuned but the
KV cache, which by default takes half the machine's memory and then mostly times zeroing
that (VLLM_CPU_KVCACHE_SPACE, in GiB).
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], enforce_eager=True, dtype="float32")
    print(llm.generate(["a few words"], SamplingParams(max_tokens=16))[0].outputs[0])


if __name__ == "__main__":
    main()
