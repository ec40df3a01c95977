"""The other nodes of a job's Ray cluster, as a helper process finds them.

The helper (``ray_helper_process``) joins the cluster; what each node answers is read by
``node_answers``.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.clock import monotonic
from pytest_gkd.processes import background, resource_use
from pytest_gkd.watch.node_answers import Seen, read
from pytest_gkd.watch.ray_helper_process import START_S, Helper, NoAnswerError, Raylet
from pytest_gkd.watch.samples import NodeSample, ProcessSample

USE_EVERY_S = 3.0
USE_LIMIT_S = 5.0
AGAIN_S = 60.0  # after the helper has failed
REST = "the rest of the Ray cluster"


class RayNodes:
    """Looks at a job on the other nodes of its Ray cluster.

    ``last`` is the newest answer. ``notes`` are for the user, once each.
    """

    def __init__(self) -> None:
        self.last = Seen()
        self.notes: list[str] = []
        self._lock = threading.Lock()
        self._helper: Helper | None = None
        self._failed_at = float("-inf")
        self._asked_at = float("-inf")
        self._asking: Future[Seen] | None = None
        self._known: dict[str, tuple[int, str]] = {}  # number and name, by Ray's id
        self._named: set[str] = set()  # nodes that the user was told of
        self._held: dict[str, tuple[ProcessSample, ...]] = {}

    def refresh(self, raylet: int, jobs: Collection[str], now: float) -> None:
        """Ask how much the job's processes use there, if it is time; never waits."""
        if not raylet or not jobs or now < self._asked_at + USE_EVERY_S:
            return
        if self._asking is None or self._asking.done():
            self._asked_at = now
            ask = self.begin(raylet, jobs, "use", USE_LIMIT_S)
            self._asking = ask

    def begin(
        self, raylet: int, jobs: Collection[str], look: str, limit_s: float
    ) -> Future[Seen]:
        """Ask all nodes at once in the background; see ``node_agent`` for the looks.

        A node that does not answer is in the result with its problem.
        """
        if not raylet or not jobs:
            done: Future[Seen] = Future()
            done.set_result(self.last)
            return done
        some = sorted(jobs)
        return background.begin(
            "gkd-nodes", lambda: self._look(raylet, some, look, limit_s)
        )

    def close(self) -> None:
        """End the helper, and with it what it has on other nodes."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _look(self, raylet: int, jobs: list[str], look: str, limit_s: float) -> Seen:
        if not self._lock.acquire(timeout=limit_s + START_S):
            return _hidden(self.last, "an earlier question is not answered yet")
        try:
            was, now = self.last, self._ask(raylet, jobs, look, limit_s)
            self._tell(was, now)
            self.last = now
            return now
        finally:
            self._lock.release()

    def _ask(self, raylet: int, jobs: list[str], look: str, limit_s: float) -> Seen:
        request = {"jobs": jobs, "look": look, "limit_s": limit_s}
        try:
            return self._seen(self._running(raylet).ask(request, limit_s))
        except NoAnswerError as error:
            return _hidden(self.last, str(error))

    def _running(self, pid: int) -> Helper:
        if self._helper is not None and self._helper.why_ended is None:
            return self._helper
        if monotonic() < self._failed_at + AGAIN_S:
            why = self._helper.why_ended if self._helper else None
            raise NoAnswerError(why or "what looks there could not be started")
        self._failed_at = monotonic()
        raylet = Raylet.of(pid)
        if raylet is None:
            raise NoAnswerError("this machine's raylet has ended")
        self._helper = Helper(raylet)
        return self._helper

    def _tell(self, was: Seen, now: Seen) -> None:
        seen = [one.name for one in now.nodes if not one.problem]
        if new := [name for name in seen if name not in self._named]:
            self._named.update(new)
            self.notes.append(f"also looked at, through Ray: {', '.join(new[:8])}")
        before = {one.name: one.problem for one in was.nodes}
        for one in now.nodes:
            if one.problem and not before.get(one.name):
                self.notes.append(f"{one.name} is not seen: {one.problem}")

    # -- what the answers mean ---------------------------------------------------------

    def _seen(self, rows: Sequence[Mapping[str, Any]]) -> Seen:
        now = monotonic()
        found = Seen()
        hosts = Counter(str(row["host"]) for row in rows if row["alive"])
        for row in rows:
            key, address = str(row["id"]), str(row["address"])
            if row["own"]:
                # A job's data may go by other interfaces than Ray's.
                own = {address, *resource_use.own_addresses()}
                found = replace(found, addresses=found.addresses | own)
                continue
            host = str(row["host"])
            alone = host and hosts[host] == 1
            told = sanitize.line(host if alone else address)[:60]
            known = self._known.setdefault(key, (len(self._known) + 1, told))
            number, name = known
            why = sanitize.line(str(row["why"]))[:200]
            seen = Seen()
            if row["answer"]:
                try:
                    seen = read(row["answer"], name, number, now)
                    self._held[key] = seen.processes
                    seen = replace(seen, addresses=seen.addresses | {address})
                except (KeyError, TypeError, ValueError, zlib.error) as error:
                    why = f"its answer cannot be read: {type(error).__name__}: {error}"
            elif row["alive"] and why == "idle":  # nothing of the job was there
                seen, why = Seen(addresses=frozenset((address,))), ""
            elif not row["alive"] and not self._held.get(key):
                continue  # a node that others have used
            is_lost = not row["alive"]
            node = NodeSample(
                name, why, is_lost, number, sanitize.line(key), seen.servers
            )
            found = _joined(found, seen, node)
            if node.is_lost:
                who = ", ".join(one.label for one in self._held[key][:4])
                text = f"Ray has lost {name}, where {who} ran: {why}"
                found = replace(found, lost=(*found.lost, text))
        return found


def _joined(found: Seen, seen: Seen, node: NodeSample) -> Seen:
    unseen = (f"{node.name} is not seen: {node.problem}",) if node.problem else ()
    return Seen(
        (*found.nodes, node),
        found.processes + seen.processes,
        found.gpus + seen.gpus,
        found.gpus_at_work or seen.gpus_at_work,
        found.remote + seen.remote,
        (*found.unseen, *seen.unseen, *unseen),
        found.lost,
        found.addresses | seen.addresses,
        {**found.dumps, **seen.dumps},
    )


def _hidden(was: Seen, why: str) -> Seen:
    """All nodes as they were, and none of them seen."""
    nodes = was.nodes or (NodeSample(REST),)
    hidden = tuple(o if o.is_lost else replace(o, problem=why) for o in nodes)
    unseen = tuple(f"{one.name} is not seen: {one.problem}" for one in hidden)
    return Seen(nodes=hidden, unseen=unseen, lost=was.lost)
