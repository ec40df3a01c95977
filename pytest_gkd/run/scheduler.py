"""pytest-xdist's scheduler for stages: one worker runs one lane, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from pytest_gkd.language import tr_filled
from pytest_gkd.stage_plan import PlannedStage, lanes

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


@dataclass
class LaneScheduling:
    """Hands each worker its whole lane, then tells it that nothing follows.

    Implements xdist's ``Scheduling`` protocol. A worker holds back its last test until
    it knows what follows, so the shutdown is sent with the lane. If a worker is lost,
    its replacement gets the rest of the lane. Tests that are not stages form lanes of
    their own on workers without a lane, or follow the last lane.
    """

    workers: int
    plan: Callable[[], Sequence[PlannedStage]]
    config: pytest.Config | None = None  # as in xdist's own; other plugins read it
    _collections: dict[WorkerController, list[str]] = field(default_factory=dict)
    _queues: deque[list[str]] | None = None
    _tests: set[str] = field(default_factory=set)
    _running: dict[WorkerController, list[str]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[WorkerController]:
        return list(self._running)

    @property
    def collection_is_completed(self) -> bool:
        if self._queues is not None:
            return True
        return len(self._collections) >= self.workers

    @property
    def tests_finished(self) -> bool:
        return (
            self._queues is not None
            and not self._queues
            and not any(self._running.values())
        )

    @property
    def has_pending(self) -> bool:
        return bool(self._queues) or any(self._running.values())

    def add_node(self, node: WorkerController) -> None:
        self._running[node] = []

    def add_node_collection(
        self, node: WorkerController, collection: Sequence[str]
    ) -> None:
        self._collections[node] = list(collection)

    def schedule(self) -> None:
        if self._queues is None:
            first = next(iter(self._collections.values()))
            self._tests = set(first)
            self._queues = deque(self._lanes(first))
        self._check_collections()
        for node, collection in self._collections.items():
            if node.shutting_down or self._running.get(node):
                continue
            if self._queues:
                mine = self._queues.popleft()
                self._running[node] = mine
                node.send_runtest_some([collection.index(nodeid) for nodeid in mine])
            node.shutdown()

    def _check_collections(self) -> None:
        # A test unknown to one of them would be silently skipped.
        for node, collection in self._collections.items():
            for nodeid in sorted(self._tests ^ set(collection)):
                told = (
                    f"not every worker has collected {nodeid} ({node.gateway.id} or "
                    "one before it has not): a conftest.py or a plugin chooses "
                    "different tests in each process"
                )
                raise pytest.UsageError(tr_filled(told))

    def _lanes(self, collection: Sequence[str]) -> list[list[str]]:
        stages = [stage for stage in self.plan() if stage.nodeid in collection]
        queues = [[s.nodeid for s in lane] for lane in lanes(stages, self.workers)]
        mine = {stage.nodeid for stage in stages}
        rest = [nodeid for nodeid in collection if nodeid not in mine]
        free = self.workers - len(queues)
        if rest and free > 0:
            queues += [rest[at::free] for at in range(free) if rest[at::free]]
        elif rest:
            queues[-1] += rest
        return queues

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        nodeid = self._collections[node][item_index]
        self._running[node].remove(nodeid)

    def mark_test_pending(self, item: str) -> None:
        raise NotImplementedError("a stage is not run twice")

    def remove_pending_tests_from_node(
        self, node: WorkerController, indices: Sequence[int]
    ) -> None:
        raise NotImplementedError("a lane is not divided")

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that a lost worker was running; the rest of its lane is requeued."""
        left = self._running.pop(node)
        self._collections.pop(node, None)
        if not left:
            return None
        if left[1:] and self._queues is not None:
            self._queues.appendleft(left[1:])
        return left[0]
