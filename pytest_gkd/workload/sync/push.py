"""Whether these weights may be pushed, and whether the push has arrived.

vLLM does not raise for missing tensors, an empty update or a NaN, and silently casts a
wrong dtype. So the set is checked before it is sent, and afterwards what the engine
holds is compared with what the trainer has.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.sync.broadcast import Info

Digests = Mapping[str, str]

# How the loaders of vLLM 0.32, and torch's copies, complain about a tensor.
_LOADERS_WORDS = re.compile(
    r"dimension|shape|\bsize|no module or parameter named|KeyError", re.IGNORECASE
)


@dataclass(frozen=True)
class ParameterMap:
    """Which of the engine's parameters takes which of the trainer's tensors.

    ``engine_names`` maps the trainer's name to the engine's. ``unmapped`` are trainer
    names that vLLM's tables map to no parameter, ``unfilled`` engine names (with their
    dtype and shape in ``parameters``) that no tensor maps to. ``by_content`` are
    trainer names whose tensor the engine holds in another form, as shards or
    transposed; they are compared by a checksum that ignores the form.
    """

    engine_names: Mapping[str, str]
    parameters: Mapping[str, tuple[str, tuple[int, ...]]]
    unmapped: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    by_content: frozenset[str] = frozenset()

    def dtypes(self) -> dict[str, str]:
        """The engine's dtype for each tensor that has a counterpart there."""
        return {n: self.parameters[at][0] for n, at in self.engine_names.items()}


def read_map(
    names: Iterable[str], answer: Mapping[str, Any], *, shards: bool
) -> ParameterMap:
    """Parse the answer of ``WeightReceiver.gkd_parameters`` for ``names``.

    ``shards`` says that the engine holds each parameter in parts.
    """
    known = {
        name: (str(dtype), tuple(shape))
        for name, (dtype, shape) in answer["parameters"].items()
    }
    engine_names = dict(answer["engine_names"])
    taken = set(engine_names.values())
    return ParameterMap(
        engine_names,
        known,
        tuple(name for name in names if name not in engine_names),
        tuple(name for name in known if name not in taken),
        frozenset(engine_names) if shards else frozenset(),
    )


def by_content(
    mapped: ParameterMap,
    digests: Callable[[ParameterMap], tuple[Digests, Digests]],
) -> ParameterMap:
    """``mapped``, with those tensors marked that the engine holds in another form.

    Some architectures keep a matrix transposed (GPT-2), or reorder its rows. To be
    called while engine and trainer hold the same checkpoint; ``digests`` gives the
    engine's and the trainer's. A tensor with other content is still compared exactly,
    so that the difference is found.
    """
    engine, trainer = digests(mapped)
    apart = {n for n in mapped.engine_names if engine.get(n) != trainer.get(n)}
    if not apart or mapped.by_content:
        return mapped
    # A bias of a reordered matrix may be reordered too: if all zeros, it does not show.
    modules = {_module(name) for name in apart}
    suspects = frozenset(n for n in mapped.engine_names if _module(n) in modules)
    engine, trainer = digests(replace(mapped, by_content=suspects))
    other_form = frozenset(n for n in suspects if engine.get(n) == trainer.get(n))
    return replace(mapped, by_content=other_form)


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def check_set(infos: Iterable[Info], base: ParameterMap, now: ParameterMap) -> None:
    """Check, before anything is sent, that the tensors to be sent fit the engine.

    ``base`` is the map just after the engine loaded the same checkpoint: a tensor
    without a place even then may belong to an architecture that our tables do not
    cover, and only vLLM can tell. Raises StageFault ``sync.name-or-shape``.
    """
    # An unknown architecture leaves some names unmapped; all of them is a wrong prefix.
    strange = set(base.unmapped) if now.engine_names else set()
    unknown = [name for name in now.unmapped if name not in strange]
    missing = [name for name in now.unfilled if name not in base.unfilled]
    problem = ""
    if unknown:
        problem = (
            f"{len(unknown)} of the trainer's tensors have no parameter in the engine: "
            f"{some(unknown)}"
            + (f"; the engine waits for {some(missing)}" if missing else "")
        )
    elif missing:
        problem = (
            f"{len(missing)} of the engine's parameters are not among the tensors that "
            f"the trainer sends: {some(missing)}"
        )
    if problem:
        facts = {"unknown": unknown[:10], "missing": missing[:10]}
        raise StageFault("sync.name-or-shape", problem, facts=facts)
    check_shapes(infos, base, now)


def check_shapes(infos: Iterable[Info], base: ParameterMap, now: ParameterMap) -> None:
    """Check that each tensor has the shape of the engine's parameter for it.

    Except those that ``base`` lists as the same in another form. Raises StageFault
    ``sync.name-or-shape``.
    """
    for name, _, shape in infos:
        partner = now.engine_names.get(name)
        if partner is None or name in base.by_content:
            continue
        expected = now.parameters[partner][1]
        if shape != expected:
            raise StageFault(
                "sync.name-or-shape",
                f"the trainer's {name} has shape {list(shape)}; expected "
                f"{list(expected)}, the shape of the engine's {partner}",
                facts={"name": name, "shape": shape, "expected": expected},
            )


def refusal(
    error: Exception, infos: Iterable[Info], base: ParameterMap
) -> StageFault | None:
    """The fault if the engine's loader raised ``error`` over names or shapes.

    vLLM's own text names no tensor. The suspects are those that already before the push
    had no parameter, or one of another shape. None if there is no such tensor, or the
    text is about something else.
    """
    text = str(error).strip().partition("\n")[0]
    if not _LOADERS_WORDS.search(text):
        return None
    suspects = []
    for name, _, shape in infos:
        partner = base.engine_names.get(name)
        if partner is None:
            suspects.append(f"{name} has no parameter in the engine")
        elif shape != base.parameters[partner][1]:
            expected = list(base.parameters[partner][1])
            suspects.append(f"{name} has shape {list(shape)}, the engine's {expected}")
    if not suspects:
        return None
    return StageFault(
        "sync.name-or-shape",
        f"the engine refused the push; {suspects[0]}"
        + (f", and {len(suspects) - 1} more" if suspects[1:] else "")
        + f" ({type(error).__name__}: {text[:120]})",
        facts={"suspects": suspects[:10]},
    )


def check_finite(nonfinite: list[str], total: int) -> None:
    """Check that no tensor holds NaN or infinity. Raises StageFault ``train.nan``."""
    if nonfinite:
        raise StageFault(
            "train.nan",
            f"{len(nonfinite)} of {total} tensors to be pushed hold NaN or infinity: "
            f"{some(nonfinite)}",
            facts={"tensors": nonfinite[:10]},
        )


def differing(engine: Digests, trainer: Digests) -> list[str]:
    """The names of tensors that differ, or exist on one side only."""
    found = [name for name in trainer if engine.get(name) != trainer[name]]
    return found + [name for name in engine if name not in trainer]


def check_equal(
    engine: Digests, trainer: Digests, when: str, cause: str = "sync.not-applied"
) -> None:
    """Check by digests that the engine holds the trainer's weights.

    ``when`` completes the sentence, such as ``after the push``. Raises StageFault
    ``cause``.
    """
    if not trainer:
        raise StageFault(cause, f"{when} there is no tensor that could be compared")
    others = differing(engine, trainer)
    if others:
        total = len({*engine, *trainer})
        shown = [
            "(tensors without a name in common)" if n == "*" else n for n in others
        ]
        raise StageFault(
            cause,
            f"{len(others)} of {total} tensors in the engine differ from the "
            f"trainer's {when}: {some(shown)}",
            facts={"differing": len(others), "tensors": total, "first": shown[:3]},
        )


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def whole(ranks: list[dict[str, str]], *, shards: bool) -> dict[str, str]:
    """One digest per tensor, from those of all the engine's ranks.

    Shards add up. A tensor that ranks hold in common (norms, shared key-value heads)
    has the same checksum on each, and counts once.
    """
    if not shards:
        return ranks[0]
    values: dict[str, set[int]] = defaultdict(set)
    for name, value in itertools.chain.from_iterable(rank.items() for rank in ranks):
        values[name].add(int(value, 16))
    return {name: f"{sum(values[name]) % (1 << 64):016x}" for name in sorted(values)}
