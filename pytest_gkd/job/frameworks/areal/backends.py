"""How AReaL spells a model's backend and its number of GPUs.

areal/api/alloc_mode.py at 4aef98d8: ALLOCATION_GRAMMAR, its transformer,
ParallelStrategy and ModelAllocation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TRAINERS = ("fsdp", "megatron", "archon")
ENGINES = ("sglang", "vllm")
BACKEND = re.compile(
    r"(?P<kind>[a-z]+)(?:\[(?P<name>[A-Za-z_]\w*)\])?:(?:(?P<sizes>(?:[a-z][1-9]\d*)+)"
    r"|\(?attn:(?P<attention>(?:[cdtp][1-9]\d*)+)"
    r"\|ffn:(?P<experts>(?:[detp][1-9]\d*)+)\)?)"
)
SIZE = re.compile(r"([a-z])(\d+)")


@dataclass(frozen=True)
class Backend:
    """A model's backend and sizes; ``experts`` are those of the experts' own split."""

    kind: str
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    experts: tuple[tuple[str, int], ...] = ()

    @property
    def gpus(self) -> int:
        """All of its GPUs."""
        return self.data * self.pipeline * self.tensor * self.context


def read(text: str) -> Backend | None:
    """Parse a backend's spelling, None if it is not one."""
    found = BACKEND.fullmatch(re.sub(r"\s", "", text))
    if found is None or found["kind"] not in (*TRAINERS, *ENGINES):
        return None
    is_engine = found["kind"] in ENGINES
    sizes = dict(_sizes(found["sizes"] or found["attention"]))
    experts = dict(_sizes(found["experts"] or ""))
    known = "dtp" if is_engine else "dtpce"
    if not sizes.keys() <= set(known) or (is_engine and found["experts"]):
        return None
    return Backend(
        found["kind"],
        sizes.get("d", 1),
        sizes.get("p", 1),
        sizes.get("t", 1),
        sizes.get("c", 1),
        experts.get("e", 1) if experts else sizes.get("e", 1),
        tuple(experts.items()),
    )


def allocation(text: str) -> list[Backend] | None:
    """The parts of an ``allocation_mode``, None if it is invalid: a + separates parts
    with their own GPUs, a | parts that share them (ALLOCATION_GRAMMAR).
    """
    found: list[Backend] = []
    for component in re.sub(r"\s", "", text).split("+"):
        whole = read(component)
        together = [whole] if whole else [read(one) for one in component.split("|")]
        if None in together:
            return None
        several = [one for one in together if one]
        if len({one.gpus for one in several}) > 1:
            return None
        found += several
    return found


def _sizes(text: str) -> Iterator[tuple[str, int]]:
    for name, size in SIZE.findall(text):
        yield name, int(size[:9])


def faults(backend: Backend) -> Iterator[str]:
    """Sizes that AReaL refuses."""
    if backend.kind == "fsdp" and (backend.pipeline > 1 or backend.expert > 1):
        yield "FSDP has no pipeline (p) and no expert parallelism (e)"
    own = dict(backend.experts)
    pipeline = own.get("p", backend.pipeline)
    split = pipeline * own.get("t", 1) * backend.expert
    if pipeline != backend.pipeline:
        text = f"attn has p{backend.pipeline} and ffn p{pipeline}"
        yield f"{text}: they must be the same"
    elif "d" in own and own["d"] * split != backend.gpus:
        yield f"attn has {backend.gpus} GPUs and ffn {own['d'] * split}"
    elif (own or backend.expert > 1) and backend.gpus % split:
        text = f"its {backend.gpus} GPUs cannot be divided"
        yield f"{text} by p * t * e of the experts = {split}"
