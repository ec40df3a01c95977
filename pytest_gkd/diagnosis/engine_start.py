"""Where the start of a vLLM engine went, as its log tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_gkd.diagnosis.patterns import Pattern

_N = rb"(\d{1,6}(?:\.\d{1,6})?)"
# As vLLM 0.21 to 0.32 print them (model_executor/model_loader/default_loader.py,
# v1/worker/gpu_model_runner.py, compilation/backends.py and monitor.py,
# v1/engine/core.py), and older releases, which have "takes" and no "memory".
_PARTS = {
    "weights_s": Pattern(rb"\bLoading weights took " + _N + rb" seconds"),
    "model_s": Pattern(
        rb"\bModel loading took [\d.]{1,12} GiB(?: memory)? and " + _N + rb" seconds"
    ),
    "dynamo_s": Pattern(rb"\bDynamo bytecode transform time: " + _N + rb" s\b"),
    "compile_s": Pattern(rb"\btorch\.compile t(?:akes|ook) " + _N + rb" s in total"),
    "graphs_s": Pattern(rb"\bGraph capturing finished in " + _N + rb" secs"),
    "init_s": Pattern(
        rb"\binit engine \(profile, create kv cache, warmup model\) took " + _N + rb" s"
    ),
}
_NO_CACHE = Pattern(rb"vLLM's torch\.compile cache is disabled")


@dataclass(frozen=True)
class EngineStart:
    """Seconds; None for what the log does not tell.

    Of several processes the slowest of each, for which the others wait. ``model_s``
    contains ``weights_s``; ``init_s`` contains ``compile_s``, of which ``dynamo_s``,
    and ``graphs_s``. ``keeps_compiled`` is false where vLLM says that its cache is off.
    """

    weights_s: float | None = None
    model_s: float | None = None
    dynamo_s: float | None = None
    compile_s: float | None = None
    graphs_s: float | None = None
    init_s: float | None = None
    keeps_compiled: bool = True

    @property
    def seconds(self) -> float:
        """The parts that follow one another."""
        return (self.model_s or self.weights_s or 0.0) + (self.init_s or 0.0)


def of(texts: Iterable[bytes]) -> EngineStart | None:
    """What the logs of one run say; None if no engine tells of its start."""
    slowest: dict[str, float] = {}
    keeps = True
    for text in texts:
        for name, part in _PARTS.items():
            took = (float(match[1]) for match in part.finditer(text))
            if (most := max(took, default=-1.0)) >= 0:
                slowest[name] = max(most, slowest.get(name, 0.0))
        keeps = keeps and _NO_CACHE.search(text) is None
    return EngineStart(**slowest, keeps_compiled=keeps) if slowest else None
