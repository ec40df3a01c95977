"""What went wrong in a run of ranks, and on which of them it began.

Pure: it reads a ``RankRun`` and names the cause. The order of the questions is that
from cause to consequence: what a rank's text says outright, then who died first, then
who failed for a reason of its own, and only then who was waited for.
"""

from __future__ import annotations

from typing import Any

from pytest_gkd.processes.tree import exit_name
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.ranks import flight_recorder
from pytest_gkd.workload.ranks.rank_plan import RENDEZVOUS, RankPlan
from pytest_gkd.workload.ranks.rank_records import RankRecord, RankRun
from pytest_gkd.workload.ranks.rank_texts import (
    ABSENT,
    OF_A_PEER,
    WATCHDOG,
    evidence,
    last_words,
    name_ranks,
    raised_at,
    stack,
    texts,
    told,
)


class RankError(RuntimeError):
    """A rank failed for a reason of its own, told in its own words."""


def judge(run: RankRun) -> Exception | None:
    """The error to raise for this run, None when every rank found everything right."""
    plan, records = run.plan, run.records
    if run.fork_error:
        return StageFault(
            "comm.world-size",
            f"a rank could not be forked ({run.fork_error}); expected room for "
            f"{plan.world_size} processes",
            facts=_facts(run),
        )
    if all(record.found is not None and record.code == 0 for record in records):
        return _wrong(run)
    return (
        _sizes(run)
        or _told(run)
        or _died(run)
        or _raised(run)
        or _launcher(run)
        or _slow(run)
        or _absent(run)
        or _stuck(run)
    )


def _wrong(run: RankRun) -> StageFault | None:
    """Every rank came to the end; were all sums right?"""
    text = wrong_values(run.records)
    if not text:
        return None
    parts = {
        rank
        for record in run.records
        if record.found is not None
        for rank in record.found.get("wrong_parts", ())
    }
    if len(parts) == 1:
        text = f"rank {parts.pop()}'s own part is wrong wherever it is gathered; {text}"
    return StageFault("comm.wrong-result", text, facts=_facts(run))


def _sizes(run: RankRun) -> StageFault | None:
    """Ranks that were told different world sizes."""
    told: dict[int, list[int]] = {}
    for record in run.records:
        for mark in record.marks:
            if mark["what"] == RENDEZVOUS:
                told.setdefault(mark.get("world_size", run.plan.world_size), []).append(
                    record.rank
                )
    if len(told) < 2:
        return None
    states = "; ".join(
        f"{name_ranks(ranks)} with {size}" for size, ranks in sorted(told.items())
    )
    return StageFault(
        "comm.world-size",
        f"the ranks were started with different world sizes: {states}; expected one "
        "for all",
        facts={**_facts(run), "world_sizes": {str(s): r for s, r in told.items()}},
    )


def wrong_values(records: tuple[RankRecord, ...]) -> str:
    """The first wrong value of each rank that saw one, a line each; empty if none."""
    lines = []
    for record in records:
        wrong = record.found["wrong"] if record.found is not None else []
        for entry in wrong[:1]:
            more = f" ({len(wrong)} operations were wrong)" if len(wrong) > 1 else ""
            lines.append(
                f"rank {record.rank}: {entry['kind'].replace('_', '-')} of "
                f"{entry['dtype']}[{entry['count']}] gave {entry['got']}, expected "
                f"{entry['expected']} at index {entry['index']}{more}"
            )
    if lines and len(lines) < len(records):
        right = [
            r.rank for r in records if r.found is not None and not r.found["wrong"]
        ]
        lines.append(f"right on {name_ranks(right)}")
    return "\n".join(lines)


def _told(run: RankRun) -> StageFault | None:
    """The cause that a rank's own text names."""
    found = told(run)
    if found is None:
        return None
    cause, message, lines = found
    return StageFault(cause, message, facts=_facts(run), evidence=lines)


def _died(run: RankRun) -> StageFault | None:
    """The first rank in time that ended without a word."""
    dead = [
        record
        for record in run.records
        if record.code is not None
        and record.raised is None
        and (record.code != 0 or record.found is None)
        and not any(WATCHDOG.search(text) for _, text in record.log_tail)
    ]
    if not dead:
        return None
    first = min(dead, key=lambda record: record.ended_at or 0.0)
    place = "after" if first.found is not None or _is_behind(run, first) else "in"
    others = [record for record in run.records if record is not first]
    at = ""
    if others:
        furthest = max(others, key=_distance)
        at = f", while rank {furthest.rank} was in {furthest.operation}"
    return StageFault(
        "comm.peer-died",
        f"rank {first.rank} (pid {first.pid}) ended with {exit_name(first.code)} "
        f"{place} {first.operation}{at}; expected it to reach the end",
        facts={**_facts(run), "rank": first.rank, "ended_with": exit_name(first.code)},
        evidence=last_words(first)
        + tuple(line for other in others[:2] for line in evidence(other, OF_A_PEER)),
    )


def _raised(run: RankRun) -> RankError | None:
    """The first rank in time whose exception is not about another rank."""
    own = [
        record
        for record in run.records
        if record.raised is not None and not OF_A_PEER.search(record.raised["error"])
    ]
    if not own:
        return None
    first = min(own, key=raised_at)
    assert first.raised is not None
    return RankError(
        f"rank {first.rank} failed in {first.raised['at']}: {first.raised['error']}\n"
        f"(its log: {first.log})"
    )


def _launcher(run: RankRun) -> Exception | None:
    if not run.launcher_error:
        return None
    if run.host_lost is not None:
        return StageFault(
            "comm.peer-died",
            f"process {run.host_lost}, which holds the ranks' store as torchrun's "
            "agent does, was ended from outside, and the ranks with it; expected it to "
            "outlive them",
            facts={**_facts(run), "host_pid": run.host_lost},
        )
    if run.import_stuck:
        return StageFault(
            "env.import-stuck",
            "import torch does not return in the launcher of the ranks: after "
            f"{run.waited_s:.1f} s it uses no processor and waits",
            facts={**_facts(run), "package": "torch"},
        )
    return RankError(
        f"the {run.plan.world_size} ranks were not running after {run.waited_s:.1f} s: "
        f"{run.launcher_error}"
    )


def _slow(run: RankRun) -> RankError | None:
    """The budget ended while every rank made progress, none of them out of step."""
    now = run.started_at + run.waited_s
    since = {
        r.rank: now - max((m["t"] for m in r.marks), default=0) for r in run.records
    }
    entered = [record.entered for record in run.records]
    if (
        any(r.raised or r.code is not None or r.is_stopped for r in run.records)
        or min(since.values()) >= run.plan.timeout_s
        or max(entered) - min(entered) > 1
    ):
        return None
    places = "; ".join(
        f"rank {r.rank} was in {r.operation} for {since[r.rank]:.1f} s"
        for r in run.records[:8]
    )
    return RankError(
        f"the {run.plan.world_size} ranks were not done after {run.waited_s:.1f} s, "
        f"all the time that the stage had for them: {places}"
    )


def _absent(run: RankRun) -> StageFault | None:
    """The rendezvous was not completed: who came, who did not."""
    if all(record.joined for record in run.records):
        return None
    came = [r for r in run.records if any(m["what"] == RENDEZVOUS for m in r.marks)]
    absent = [record for record in run.records if record not in came]
    states = "; ".join(f"rank {r.rank} {_state(r)}" for r in absent)
    places: dict[str, list[int]] = {}
    for record in run.records:
        for mark in record.marks:
            if mark["what"] == RENDEZVOUS and "at" in mark:
                places.setdefault(mark["at"], []).append(record.rank)
    if not states and len(places) > 1:
        states = "they looked for each other in different places, " + "; ".join(
            f"{name_ranks(ranks)} at {place}" for place, ranks in places.items()
        )
    if not states:
        late = name_ranks([r.rank for r in run.records if not r.joined])
        states = f"all came, and {late} could not connect to the others"
    return StageFault(
        "comm.rendezvous",
        f"{len(came)} of {run.plan.world_size} ranks came to the rendezvous within "
        f"{run.waited_s:.1f} s: {states}",
        facts={
            **_facts(run),
            "joined": len(came),
            "missing_ranks": [record.rank for record in absent],
        },
        evidence=tuple(
            line for record in came[:2] for line in evidence(record, OF_A_PEER)
        )
        + tuple(line for record in absent[:2] for line in stack(record)),
    )


def _stuck(run: RankRun) -> StageFault:
    """Every rank joined, and a collective was not ended: who was waited for."""
    suspects = _suspects(run)
    waiting = [record for record in run.records if record not in suspects]
    furthest = max(waiting or run.records, key=_distance)
    place = furthest.operation
    if waiting and suspects:
        who = "; ".join(
            f"rank {r.rank} {_state(r)}, last in {r.operation}" for r in suspects
        )
        message = (
            f"{name_ranks([r.rank for r in waiting])} waited in {place} for "
            f"{name_ranks([r.rank for r in suspects])}: {who}"
        )
    else:
        message = (
            f"all {run.plan.world_size} ranks were in {place}, which did not end "
            f"within {run.waited_s:.1f} s"
        )
    missing = flight_recorder.find_missing(run.plan)
    recorded = () if missing is None else (("flight recorder", None, missing.text()),)
    return StageFault(
        "comm.collective-timeout",
        message,
        facts={
            **_facts(run),
            "operation": place,
            "late_ranks": [record.rank for record in suspects],
            "flight_recorder": None if missing is None else missing.to_json(),
        },
        evidence=recorded
        + tuple(line for record in waiting[:2] for line in evidence(record, OF_A_PEER))
        + tuple(line for record in suspects[:2] for line in stack(record)),
    )


def _suspects(run: RankRun) -> list[RankRecord]:
    """Stopped ranks, else those behind, else the silent, else those others miss."""
    if stopped := [record for record in run.records if record.is_stopped]:
        return stopped
    furthest = max(record.entered for record in run.records)
    if behind := [record for record in run.records if record.entered < furthest]:
        return behind
    silent = [r for r in run.records if r.raised is None and r.code is None]
    if silent and len(silent) < len(run.records):
        return silent
    missed: set[int] = set()
    for _, text in texts(run):
        for found in ABSENT.finditer(text):
            missed.update(int(rank) for rank in found["ranks"].split(","))
    return [record for record in run.records if record.rank in missed]


# -- words --------------------------------------------------------------------------


def _distance(record: RankRecord) -> tuple[int, bool]:
    return record.entered, record.joined


def _is_behind(run: RankRun, record: RankRecord) -> bool:
    return any(_distance(other) > _distance(record) for other in run.records)


def _state(record: RankRecord) -> str:
    if record.pid is None:
        return "was never started"
    if record.is_stopped:
        return f"(pid {record.pid}) is stopped (SIGSTOP)"
    if record.code is not None:
        return f"(pid {record.pid}) ended with {exit_name(record.code)}"
    return f"(pid {record.pid}) did not arrive"


def _facts(run: RankRun) -> dict[str, Any]:
    return {
        "world_size": run.plan.world_size,
        "backend": run.plan.backend,
        "ranks": [
            {
                "rank": record.rank,
                "operation": record.operation,
                "ended": exit_name(record.code) if record.code is not None else None,
                "error": record.raised["error"][:300] if record.raised else None,
            }
            for record in run.records
        ],
        "flight_records": flight_records(run.plan),
    }


def flight_records(plan: RankPlan) -> list[str]:
    """The flight recorder dumps that ranks have left, by path."""
    paths = [plan.file("flight", rank) for rank in range(plan.world_size)]
    return [str(path) for path in paths if path.exists()]
