"""Holds a job under ``gkd watch`` against the label of its case."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import jobs

# Of a job that runs; that a person or the machine holds it may be told in some cases.
FALSE = {"stuck", "dead", "held"}


@dataclass
class Judged:
    """What a case showed; ``problems`` is empty where all was as its label says."""

    told: jobs.Told | None = None
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


def judge(case: jobs.Case) -> Judged:
    """Run a case under the watcher."""
    found = Judged()
    runs = _runs_on if "finished" in jobs.words(case) else _stops
    with jobs.Job(case, watched=True) as job:
        try:
            job.act(case.get("acts", []))
            found.problems += runs(case, job, found)
        except TimeoutError as error:
            found.problems.append(str(error))
        if found.problems:
            printed = f"it printed: {job.text()[-3000:]}"
            found.problems.append(f"{printed}\nits processes: {job.listed()}")
    return found


def _runs_on(case: jobs.Case, job: jobs.Job, found: Judged) -> Iterator[str]:
    status = job.finish()
    false = FALSE - ({"held"} if case.get("held") else set())
    for told in job.told():
        if told.word in false:
            found.told = found.told or told
            yield f"a false word: {told.word}: {told.text}"
    if status:
        yield f"it ended with {status}"
    yield from _changed(case, job)


def _stops(case: jobs.Case, job: jobs.Job, found: Judged) -> Iterator[str]:
    if jobs.breaks(case):
        job.wait((job.folder / "held").is_file, jobs.START_S, "the break")
    alive = set(job.processes())
    right = jobs.words(case)
    dies = right == ["dead"]
    if dies and job.finish() == 0:
        yield "status 0 of a job that failed"

    def verdicts() -> list[jobs.Told]:
        return [one for one in job.told() if one.word in {*FALSE, *right}]

    start_s = 0 if jobs.breaks(case) or job.acted_at else jobs.START_S
    job.wait(verdicts, start_s + jobs.VERDICT_S, "a verdict")
    found.told = told = verdicts()[0]
    found.seconds = round(told.at - job.stood_since(told.at), 1)
    yield from _wrong(case, told, found.seconds)
    if dies:
        return
    if not job.stands(dict(job.stacks())):
        yield "the label is wrong: {} is not in {}".format(*case["stands"])
    time.sleep(3)
    gone = alive - set(job.processes())
    if gone and not jobs.breaks(case):
        yield f"{len(gone)} processes of the job are gone"
    if job.process.poll() is not None:
        yield f"it ended with {job.process.poll()}"
    elif "release" in case:
        job.act(case["release"])
        if status := job.finish():
            yield f"it ended with {status} after it was released"
        yield from _changed(case, job)


def _wrong(case: jobs.Case, told: jobs.Told, seconds: float) -> Iterator[str]:
    """Where a verdict is not the label."""
    if told.word not in jobs.words(case):
        yield f"{told.word}, expected {' or '.join(jobs.words(case))}: {told.text}"
    if seconds < 0:
        yield f"told {-seconds} s before it stood still"
    phases = [case["where"], *case.get("phases", ())]
    if told.phase not in phases:
        yield f"phase {told.phase!r}, expected {' or '.join(phases)}"
    for name in case["names"]:
        if not re.search(name, f"{told.who}\n{told.text}", re.IGNORECASE):
            yield f"{name!r} is not named: {told.who!r}, {told.text}"
    for name in case.get("never", ()):
        if re.search(name, told.who, re.IGNORECASE):
            yield f"{name!r} is named: {told.who!r}"


def _changed(case: jobs.Case, job: jobs.Job) -> Iterator[str]:
    """Whether the output is not that of the unbroken job without the watcher."""
    if case.get("same_output"):
        with jobs.Job(jobs.unbroken(case), watched=False) as other:
            assert other.finish() == 0, other.text()
            if job.out.read_bytes() != other.out.read_bytes():
                yield "the output is not what it is without the watcher"
