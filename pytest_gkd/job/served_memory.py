"""What the servers that a job's script starts (rollout or teacher) must hold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pytest_gkd.job import engine_memory
from pytest_gkd.job.engine_memory import Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.memory import (
    CONTEXT,
    CONTEXT_BYTES,
    RESERVE,
    RESERVE_BYTES,
    Row,
    judged,
    shares,
)
from pytest_gkd.job.models import WIDTHS, Model
from pytest_gkd.job.sources import files

MOST = 1e9
SHARES = tuple(round(0.05 * step, 2) for step in range(19, 1, -1))


class Served(NamedTuple):
    """A server by its options, which are None if not given.

    ``role`` is "rollout server" or "teacher"; ``kind`` vllm or sglang; ``keys`` are the
    options for what may be changed, by Engine's field names. ``doubt`` says why nothing
    is known.
    """

    role: str
    model: Any
    sizes: Mapping[str, Any] = {}
    kind: str = "vllm"
    keys: Mapping[str, str] = {}
    doubt: str = ""


def engine(of: Served, model: Model) -> Engine:
    """The server's engine. Raises CheckError if something is not certain."""
    if of.doubt:
        raise CheckError(of.doubt)
    said = {name: value for name, value in of.sizes.items() if value is not None}
    share = said.pop("share", 0.9 if of.kind == "vllm" else None)
    if share is None:
        raise CheckError("SGLang chooses mem_fraction_static by the GPU")
    if not isinstance(share, float | int) or not 0 < share <= 1:
        raise CheckError(f"its share of the GPU is {str(share)[:40]}")
    dtype = said.pop("dtype", "auto")
    dtype = model.stored_dtype if dtype == "auto" else dtype
    if dtype not in WIDTHS:
        raise CheckError(f"its dtype is {str(dtype)[:40]}")
    eager = bool(said.pop("eager", False))
    for name, value in said.items():
        if type(value) is not int or not 0 < value < MOST:
            raise CheckError(f"its {name} is {str(value)[:40]}")
    is_sglang = of.kind == "sglang"
    # SGLang starts without room for a full-length sequence, and refuses longer
    # requests. Nor does it run all sequences in a dry run.
    length = said.pop("length", 0) or (1 if is_sglang else model.positions)
    if not length:
        raise CheckError("nothing says how long its sequences may be")
    sequences = said.pop("sequences", 1 if is_sglang else 256)
    gpus = said.get("tensor", 1) * said.get("pipeline", 1)
    return Engine(
        model,
        gpus=gpus,
        share=float(share),
        length=length,
        sequences=sequences,
        dtype=dtype,
        # To vLLM fp16 and bf16 cost the same; with float32 weights the cache is
        # float32, too.
        cache_dtype=dtype,
        scores=of.role == "teacher",
        eager=eager,
        kind=of.kind,
        release=files.version("vllm") or "",
        **said,
    )


def rows(of: Served, own: Engine, memory: int | None) -> list[Row]:
    """Its startup and its serving, on one of its GPUs."""
    parts = engine_memory.serving(own, memory)
    parts = {name: size for name, size in parts.items() if size}
    parts |= {CONTEXT: CONTEXT_BYTES, RESERVE: RESERVE_BYTES}
    return [*shares(memory, of.role, own), judged(of.role, "serving", parts, memory)]


def mended(of: Served, own: Engine, memory: int) -> str:
    """The options with which it fits, one or two; empty if none were found."""
    changes = [change for change in _changes(own) if change[0] in of.keys]
    pairs = itertools.combinations(changes, 2)
    for tried in itertools.chain(((one,) for one in changes), pairs):
        values = dict(tried)
        wide = values.get("tensor", own.tensor)
        changed = dataclasses.replace(own, **values, gpus=wide * own.pipeline)
        if all(row.verdict != "does-not-fit" for row in rows(of, changed, memory)):
            return " and ".join(
                f"{of.keys[name]} {value} (now {getattr(own, name)})"
                for name, value in tried
            )
    return ""


def _changes(own: Engine) -> Iterator[tuple[str, Any]]:
    for share in sorted(SHARES, key=lambda one: abs(one - own.share)):
        yield "share", share
    length = own.length
    while length // 2 >= 512:
        length //= 2
        yield "length", length
    for name in ("batched_tokens", "sequences"):
        size = getattr(own, name)
        while size // 2 >= 16:
            size //= 2
            yield name, size
    for factor in (2, 4, 8):
        yield "tensor", own.tensor * factor
