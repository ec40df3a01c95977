"""What went wrong in a run of ranks, and on which of them it began.

Pure: it reads a ``RankRun`` and names the cause. The checks run from cause to
consequence: what a rank's text says outright, then who died first, then who failed for
a reason of its own, and only then who was waited for.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pytest_gkd import rank_words
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes.tree import exit_name
from pytest_gkd.stage_api import Evidence, StageFault
from pytest_gkd.workload.ranks.rank_plan import RENDEZVOUS
from pytest_gkd.workload.ranks.rank_records import RankRecord, RankRun
from pytest_gkd.workload.ranks.rank_texts import (
    ABSENT,
    OF_A_PEER,
    TOLD,
    WATCHDOG,
    evidence,
    last_words,
    raised_at,
    stack,
    texts,
)


class RankError(RuntimeError):
    """A rank failed for a reason of its own, in its own words."""


def judge(run: RankRun) -> Exception | None:
    """The error to raise for this run, None if every rank found everything correct."""
    if run.fork_error:
        text = f"a rank could not be forked ({run.fork_error}); expected room for "
        text += f"{run.plan.world_size} processes"
        return _fault(run, "comm.world-size", text)
    if all(record.found is not None and record.code == 0 for record in run.records):
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
    """Every rank completed; were all sums correct?"""
    text = wrong_values(run.records)
    if not text:
        return None
    found = (record.found for record in run.records if record.found is not None)
    parts = {rank for one in found for rank in one.get("wrong_parts", ())}
    if len(parts) == 1:
        text = f"rank {parts.pop()}'s own part is wrong wherever it is gathered; {text}"
    return _fault(run, "comm.wrong-result", text)


def _sizes(run: RankRun) -> StageFault | None:
    """Ranks that were started with different world sizes."""
    told = _met(run, "world_size")
    if len(told) < 2:
        return None
    states = "; ".join(
        f"{rank_words.name(ranks)} with {size}" for size, ranks in sorted(told.items())
    )
    text = f"the ranks were started with different world sizes: {states}; expected one "
    text += "for all"
    sizes = {str(size): ranks for size, ranks in told.items()}
    return _fault(run, "comm.world-size", text, world_sizes=sizes)


def _met(run: RankRun, what: str) -> dict[Any, list[int]]:
    """The ranks that reached the rendezvous, by ``what`` they recorded there."""
    found: dict[Any, list[int]] = {}
    for record in run.records:
        for mark in record.marks:
            if mark["what"] == RENDEZVOUS and what in mark:
                found.setdefault(mark[what], []).append(record.rank)
    return found


def wrong_values(records: tuple[RankRecord, ...]) -> str:
    """The first wrong value of each rank that saw one, a line each; empty if none."""
    lines = []
    for record in records:
        wrong = record.found["wrong"] if record.found else []
        for entry in wrong[:1]:
            more = f" ({len(wrong)} operations were wrong)" if len(wrong) > 1 else ""
            text = f"rank {record.rank}: {entry['kind'].replace('_', '-')} of "
            text += f"{entry['dtype']}[{entry['count']}] gave {entry['got']}, expected "
            text += f"{entry['expected']} at index {entry['index']}{more}"
            lines.append(text)
    if lines and len(lines) < len(records):
        right = [r.rank for r in records if r.found and not r.found["wrong"]]
        lines.append(f"right on {rank_words.name(right)}")
    return "\n".join(lines)


def _told(run: RankRun) -> StageFault | None:
    """The cause that a rank's own text names."""
    for cause, pattern, describe in TOLD:
        for record, text in texts(run):
            if found := pattern.search(text):
                message = describe(run, record, found)
                return _fault(run, cause, message, evidence(record, pattern))
    return None


def _died(run: RankRun) -> StageFault | None:
    """The first rank to end without a word."""
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
    others = [record for record in run.records if record is not first]
    after, at = first.found is not None, ""
    if others:
        furthest = max(others, key=_distance)
        at = f", while rank {furthest.rank} was in {furthest.operation}"
        after = after or _distance(furthest) > _distance(first)
    ended = exit_name(first.code)
    text = f"rank {first.rank} (pid {first.pid}) ended with {ended} "
    text += f"in {first.operation}{at}; expected it to reach the end"
    if after:
        text = f"rank {first.rank} (pid {first.pid}) ended with {ended} "
        text += f"after {first.operation}{at}; expected it to reach the end"
    lines = last_words(first) + _of_peers(others)
    facts = {"rank": first.rank, "ended_with": ended}
    return _fault(run, "comm.peer-died", text, lines, **facts)


def _raised(run: RankRun) -> RankError | None:
    """The first rank to raise an exception that is not about another rank."""
    own = [
        record
        for record in run.records
        if record.raised is not None and not OF_A_PEER.search(record.raised["error"])
    ]
    if not own:
        return None
    first = min(own, key=raised_at)
    assert first.raised is not None
    text = f"rank {first.rank} failed in {first.raised['at']}: {first.raised['error']}"
    return RankError(f"{text}\n(its log: {first.log})")


def _launcher(run: RankRun) -> Exception | None:
    if not run.launcher_error:
        return None
    if run.host_lost is not None:
        text = f"process {run.host_lost}, which holds the ranks' store as torchrun's "
        text += "agent does, was ended from outside, and the ranks with it; expected "
        text += "it to outlive them"
        return _fault(run, "comm.peer-died", text, host_pid=run.host_lost)
    if run.import_stuck:
        text = "import torch does not return in the launcher of the ranks: after "
        text += f"{run.waited_s:.1f} s it uses no processor and waits"
        return _fault(run, "env.import-stuck", text, package="torch")
    text = f"the {run.plan.world_size} ranks were not running after "
    text += f"{run.waited_s:.1f} s: {run.launcher_error}"
    return RankError(text)


def _slow(run: RankRun) -> RankError | None:
    """The budget ran out while every rank made progress, none of them out of step."""
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
    text = f"the {run.plan.world_size} ranks were not done after {run.waited_s:.1f} s, "
    text += f"all the time that the stage had for them: {places}"
    return RankError(text)


def _absent(run: RankRun) -> StageFault | None:
    """The rendezvous did not complete: who came, who did not."""
    if all(record.joined for record in run.records):
        return None
    came = [r for r in run.records if any(m["what"] == RENDEZVOUS for m in r.marks)]
    absent = [record for record in run.records if record not in came]
    states = "; ".join(f"rank {r.rank} {_state(r)}" for r in absent)
    places = _met(run, "at")
    if not states and len(places) > 1:
        states = "they looked for each other in different places, " + "; ".join(
            f"{rank_words.name(ranks)} at {place}" for place, ranks in places.items()
        )
    if not states:
        late = rank_words.name([r.rank for r in run.records if not r.joined])
        states = f"all came, and {late} could not connect to the others"
    text = f"{len(came)} of {run.plan.world_size} ranks came to the rendezvous within "
    text += f"{run.waited_s:.1f} s: {states}"
    return _fault(
        run,
        "comm.rendezvous",
        text,
        _of_peers(came) + _stacks(absent),
        joined=len(came),
        missing_ranks=[record.rank for record in absent],
    )


def _stuck(run: RankRun) -> StageFault:
    """Every rank joined, but a collective did not complete: who was waited for."""
    suspects = _suspects(run)
    waiting = [record for record in run.records if record not in suspects]
    furthest = max(waiting or run.records, key=_distance)
    place = furthest.operation
    late_ranks = [record.rank for record in suspects]
    if waiting and suspects:
        message = f"{rank_words.name([r.rank for r in waiting])} waited in {place} for "
        message += f"{rank_words.name(late_ranks)}: " + "; ".join(
            f"rank {r.rank} {_state(r)}, last in {r.operation}" for r in suspects
        )
    else:
        message = f"all {run.plan.world_size} ranks were in {place}, which did not end "
        message += f"within {run.waited_s:.1f} s"
    records = run.plan.flight_records()
    silent = [rank for rank in range(run.plan.world_size) if rank not in records]
    missing = flight_records.find_missing(records, silent)
    recorded = () if missing is None else (("flight recorder", None, missing.text()),)
    return _fault(
        run,
        "comm.collective-timeout",
        message,
        recorded + _of_peers(waiting) + _stacks(suspects),
        operation=place,
        late_ranks=late_ranks,
        flight_recorder=missing and asdict(missing),
    )


def _suspects(run: RankRun) -> list[RankRecord]:
    """Stopped ranks, else those behind, else silent, else missed by others."""
    if stopped := [record for record in run.records if record.is_stopped]:
        return stopped
    furthest = max(record.entered for record in run.records)
    if behind := [record for record in run.records if record.entered < furthest]:
        return behind
    silent = [r for r in run.records if r.raised is None and r.code is None]
    if silent and len(silent) < len(run.records):
        return silent
    missed = {
        int(rank)
        for _, text in texts(run)
        for found in ABSENT.finditer(text)
        for rank in found["ranks"].split(",")
    }
    return [record for record in run.records if record.rank in missed]


# -- words --------------------------------------------------------------------------


def _distance(record: RankRecord) -> tuple[int, bool]:
    return record.entered, record.joined


def _state(record: RankRecord) -> str:
    if record.pid is None:
        return "was never started"
    state = "did not arrive"
    if record.is_stopped:
        state = "is stopped (SIGSTOP)"
    elif record.code is not None:
        state = f"ended with {exit_name(record.code)}"
    return f"(pid {record.pid}) {state}"


def _of_peers(records: list[RankRecord]) -> Evidence:
    """What the first two of them say about another rank."""
    return tuple(line for one in records[:2] for line in evidence(one, OF_A_PEER))


def _stacks(records: list[RankRecord]) -> Evidence:
    return tuple(line for one in records[:2] for line in stack(one))


def _fault(
    run: RankRun, cause: str, text: str, lines: Evidence = (), **more: Any
) -> StageFault:
    """The fault, with what is known about every rank among its facts."""
    dumps = [run.plan.file("flight", rank) for rank in range(run.plan.world_size)]
    facts = {
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
        "flight_records": [str(path) for path in dumps if path.exists()],
    }
    return StageFault(cause, text, facts | more, lines)
