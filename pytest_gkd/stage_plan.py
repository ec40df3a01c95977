"""Which stages run, in which lane and order, for how long, and what blocks what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_gkd.options import Budget, SettingsError, near
from pytest_gkd.stage_specs import BY_NAME, LANE_ORDER, STAGES, STARTS_ENGINE, USES_GPUS

DEFAULT_LANE = "host"
DEFAULT_BUDGET_S = 60.0


@dataclass(frozen=True)
class StageItem:
    """One collected test that is a stage, as its marker describes it.

    ``lane``, ``needs`` and ``timeout_s`` are None if the marker does not set them.
    """

    nodeid: str
    name: str
    lane: str | None = None
    needs: tuple[str, ...] | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class PlannedStage:
    """One stage that will run. ``budget_s`` is in seconds.

    It starts when ``needs`` and ``after`` are over, and not at all if one of ``needs``
    did not pass.
    """

    nodeid: str
    name: str
    lane: str
    needs: tuple[str, ...]
    budget_s: float
    after: tuple[str, ...] = ()


def mentioned(expression: str) -> tuple[str, ...]:
    """The built-in stages whose full name a ``-k`` expression contains and selects."""
    words = set(re.findall(r"[\w-]+", expression))
    names = [stage.name for stage in STAGES if stage.name in words]
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return tuple(names)  # -k accepts names that Python does not; it will decide
    return tuple(n for n in names if _selects(tree, f"stages/test_{n}.py::test_{n}"))


def _selects(node: ast.expr, nodeid: str) -> bool:
    if isinstance(node, ast.BoolOp):
        parts = [_selects(value, nodeid) for value in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _selects(node.operand, nodeid)
    return not isinstance(node, ast.Name) or node.id.lower() in nodeid


def build(
    items: Iterable[StageItem],
    selected: Sequence[str] | None,
    budgets: Sequence[Budget],
    others: Iterable[str] | None = (),
    *,
    gpus: int = 0,
    exclusive: bool = False,
) -> tuple[PlannedStage, ...]:
    """Build the plan, in report order.

    ``selected`` are the names to keep, None for all. The first matching one of
    ``budgets`` applies. A need that is not selected is dropped: the stage then creates
    what it needs. ``others`` are stages that exist besides ``items``, None if not all
    are known; ``gpus`` is the number in use, each for one process at a time if
    ``exclusive``. Raises SettingsError for two stages with the same name, a need that
    names no stage, and cyclic needs.
    """
    found = list(items)
    known = {item.name for item in found} | {*BY_NAME, *(others or ())}
    seen: dict[str, str] = {}
    for item in found:
        if item.name in seen:
            raise SettingsError(
                f"two tests are the stage {item.name!r}: {seen[item.name]} and "
                f"{item.nodeid}. Give one of them another name in its marker."
            )
        seen[item.name] = item.nodeid
        for need in item.needs or ():
            if others is not None and need not in known:
                raise SettingsError(
                    f"{item.nodeid}: the stage {item.name!r} needs {need!r}, and "
                    f"there is no such stage{near(need, known)}"
                )
    kept = [item for item in found if selected is None or item.name in selected]
    names = {item.name for item in kept}
    planned = []
    for item in kept:
        spec = BY_NAME.get(item.name)
        all_needs = item.needs if item.needs is not None else spec.needs if spec else ()
        planned.append(
            PlannedStage(
                nodeid=item.nodeid,
                name=item.name,
                lane=item.lane or (spec.lane if spec else DEFAULT_LANE),
                needs=tuple(need for need in all_needs if need in names),
                budget_s=_budget(item, all_needs, names, budgets, gpus),
                after=_after(item.name, names, exclusive) if gpus else (),
            )
        )
    order = {stage.name: position for position, stage in enumerate(STAGES)}
    planned.sort(key=lambda stage: order.get(stage.name, len(order)))
    return _needs_first(planned)


def _after(name: str, names: set[str], exclusive: bool) -> tuple[str, ...]:
    """The stage that starts the engine, for a stage that uses GPUs besides it; the
    other way round if each GPU is for one process at a time."""
    first = tuple(stage for stage in STARTS_ENGINE if stage in names)[:1]
    beside = tuple(stage for stage in USES_GPUS if stage in names)
    if exclusive:
        return beside if name in first else ()
    return first if name in USES_GPUS else ()


def _budget(
    item: StageItem,
    needs: Iterable[str],
    names: set[str],
    budgets: Sequence[Budget],
    gpus: int,
) -> float:
    for budget in budgets:
        if budget.stage in (item.name, "all"):
            return budget.seconds
    if item.timeout_s is not None:
        return item.timeout_s
    spec = BY_NAME.get(item.name)
    own = spec.budget(gpus) if spec else DEFAULT_BUDGET_S
    if spec is not None and spec.option:
        return own  # it uses no engine of ours
    # A stage that has to start the engine itself also gets the engine's budget.
    shared = (BY_NAME[need] for need in needs if need in BY_NAME and need not in names)
    return own + sum(stage.budget(gpus) for stage in shared if stage.shared)


def _needs_first(stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """The same stages, each after its needs, otherwise in the given order."""
    done: list[PlannedStage] = []
    left = list(stages)
    while left:
        missing = {stage.name for stage in left}
        following = next((s for s in left if not missing & {*s.needs, *s.after}), None)
        if following is None:
            circle = " and ".join(
                f"{s.name} (needs {', '.join(s.needs)})" for s in left
            )
            raise SettingsError(f"these stages need each other in a cycle: {circle}")
        done.append(following)
        left.remove(following)
    return tuple(done)


def lanes(stages: Sequence[PlannedStage], workers: int) -> list[list[PlannedStage]]:
    """The stages of each worker, in the order it runs them.

    One worker per lane; with fewer workers than lanes, the last ones are merged. A lane
    keeps the order of the plan, in which needs come first, so that no worker waits for
    a stage that is queued behind the waiting one. (The stages that LANE_ORDER moves
    need nothing.)
    """
    by_lane: dict[str, list[PlannedStage]] = {}
    for stage in stages:
        by_lane.setdefault(stage.lane, []).append(stage)
    groups = [_in_lane_order(lane, group) for lane, group in by_lane.items()]
    while len(groups) > max(1, workers):
        joined = {stage.name for stage in [*groups.pop(), *groups.pop()]}
        groups.append([stage for stage in stages if stage.name in joined])
    return groups


def _in_lane_order(lane: str, group: list[PlannedStage]) -> list[PlannedStage]:
    order = LANE_ORDER.get(lane, ())
    ranked = sorted(
        group, key=lambda s: order.index(s.name) if s.name in order else len(order)
    )
    return list(_needs_first(ranked))
