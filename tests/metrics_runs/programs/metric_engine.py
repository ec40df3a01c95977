"""A small scheduler of an engine: requests, running and waiting, and KV blocks.

A model of a queue, not a run of a model: prompts and answers have drawn lengths, each
running request takes one token after another, and a request waits while there is no
block for it. What is broken is named in ``Run.fault``'s words.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from metric_loops import Plan, Record

BLOCKS, BLOCK, SEATS = 4000, 16, 64


class Engine:
    """One engine; ``records`` yields what its statistics of ten seconds say."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.random, self.at = plan, random.Random(plan.seed), 0
        self.waiting: deque[list[int]] = deque()  # prompt, tokens made, tokens to make
        self.running: list[list[int]] = []
        self.lost = 0  # blocks of requests that were given up and never freed
        self.preempted = 0
        self.hits = 48.0

    def fault(self, name: str, default: float = 0.0) -> float:
        """The value of a fault or event that has set in."""
        if self.at >= self.plan.at > 0 and name in self.plan.fault:
            return float(self.plan.fault[name])
        at, value = self.plan.events.get(name, (0, default))
        return float(value) if at and self.at >= at else default

    def records(self) -> Iterator[Record]:
        """The statistics of each ten seconds."""
        while self.at < self.plan.steps:
            self.at += 1
            yield self._ten_seconds()

    def _arrive(self, second: int) -> int:
        """How many requests come: a steady stream, or a batch of a rollout."""
        idle = self.plan.events.get("idle")  # from then on for so many ten seconds
        if idle and idle[0] <= self.at < idle[0] + idle[1]:
            return 0
        burst = self.plan.events.get("rollouts")
        if burst:
            return int(burst[1]) if (second % (int(burst[0]) * 10)) == 0 else 0
        since = max(0, self.at - self.plan.at)
        rate = 1.6 * self.fault("arrivals", 1.0) + self.fault("more") * since
        return int(rate) + (self.random.random() < rate % 1)

    def _ten_seconds(self) -> Record:
        prompt = made = 0
        since = max(0, self.at - self.plan.at)
        slow = 1.0 + self.fault("slower") * since
        step = min(1.0, 1 / slow) * self.fault("speed", 1.0)
        blocks = int(self.fault("blocks", BLOCKS))
        accept = self.fault("accept")  # of a drafted token, by what proposes it
        if accept:
            accept *= max(0.0, 1 - self.fault("drafts_age") * since)
            accept = min(0.98, max(0.02, accept + self.random.uniform(-0.02, 0.02)))
            step *= (1 + accept + accept**2 + accept**3) / 2.5
        for second in range(10):
            for _ in range(self._arrive((self.at - 1) * 10 + second)):
                length = min(2000, int(self.random.lognormvariate(6.2, 0.5)))
                self.waiting.append([int(self.random.gauss(300, 60)), 0, length])
            while self.waiting and len(self.running) < self.fault("seats", SEATS):
                first = self.waiting[0]
                if self._used() + first[0] // BLOCK + 1 > blocks:
                    break
                self.running.append(self.waiting.popleft())
                prompt += first[0]
            speed = int(45 * step * self.random.uniform(0.9, 1.1))
            for request in list(self.running):
                request[1] += speed
                made += speed
                if request[1] >= request[2]:
                    self.running.remove(request)
                    if self.random.random() < self.fault("keeps_blocks"):
                        self.lost += (request[0] + request[2]) // BLOCK
            while self._used() > blocks and self.running:
                self.waiting.appendleft(self.running.pop())
                self.preempted += 1
        goal = self.fault("hit_rate", 48.0)
        self.hits += 0.2 * (goal - self.hits) + self.random.uniform(-0.4, 0.4)
        used = min(1.0, self._used() / blocks) * 100
        drafted = {"accept": accept} if accept else {}
        return drafted | {
            "step": self.at,
            "prompt": prompt / 10,
            "made": made / 10,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "preempted": self.preempted,
            "used": used,
            "hits": max(0.0, self.hits),
            "time/step": 10.0,
        }

    def _used(self) -> int:
        return self.lost + sum((a + b) // BLOCK + 1 for a, b, _ in self.running)
