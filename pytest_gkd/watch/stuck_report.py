"""What is kept and told of a standstill: stacks, who waits for whom, and suspects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import logs
from pytest_gkd.diagnosis.stack_dump import Frame
from pytest_gkd.diagnosis.suspects import Suspicion, suspects
from pytest_gkd.files import make_way, write_json, write_private
from pytest_gkd.processes import procfs
from pytest_gkd.report import page_file, standstill_page
from pytest_gkd.report.record import PAGE
from pytest_gkd.watch import (
    evidence,
    gpu_words,
    job_lacks,
    stack_phases,
    stack_tree,
    verdicts,
    waits,
)
from pytest_gkd.watch.samples import (
    JobSample,
    ProcessSample,
    Progress,
    Verdict,
    local_pid,
)

DIAGNOSE_LIMIT_S = 60.0
EVIDENCE_LIMIT_S = 24.0
SHOWN = 2  # suspects
ACTOR_DIED = "ray.actor-died"
MOST_WAITS = 4
MOST_NAMED = 8


@dataclass
class Report:
    """A standstill, as it is told; ``directory`` is None where none can be written.

    ``does`` says of each process of the sample what it does.
    """

    directory: Path | None
    verdict: Verdict
    phase: str
    suspicion: Suspicion
    waits: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    tree: stack_tree.Tree | None = None
    does: tuple[str, ...] = ()
    causes: list[dict[str, Any]] = field(default_factory=list)
    problems: tuple[str, ...] = ()

    def text(self) -> str:
        """The report in at most a dozen lines."""
        verdict = self.verdict
        since = verdicts.span(verdict.since_s)
        sure = "" if verdict.confidence == "certain" else " (likely)"
        found = [f"{verdict.word} for {since} in {self.phase or 'unknown'}{sure}"]
        found += [f"  saw   {one}" for one in verdict.why]
        found += [f"  wait  {one}" for one in self.waits[:MOST_WAITS]]
        found += [f"  also  {one}" for one in self.evidence]
        if self.causes:
            top = self.causes[0]
            found.append(f"  cause {top['title']} [{top['cause']}]")
            found.append(f"  more  gkd explain {top['cause']}")
        # Of no phase the guesses are general, and what was seen tells more.
        general = self.phase == "unknown" and self.waits
        for number, one in enumerate(
            () if general else self.suspicion.suspects[:SHOWN], 1
        ):
            sure = "" if one.seen else "perhaps "
            found.append(f"  {number}.    {sure}{one.observation} [{one.cause}]")
            if one.command:
                found.append(f"        {one.where}: {one.command}")
        found += [f"  note  {one}" for one in self.problems]
        if self.directory is not None:
            found.append(f"  all   {self.directory}")
        return "\n".join(found)

    def to_json(self) -> dict[str, Any]:
        """As it stands in report.json."""
        return {
            "schema": 1,
            "verdict": self.verdict.word,
            "since_s": round(self.verdict.since_s, 1),
            "confidence": self.verdict.confidence,
            "phase": self.phase,
            "why": list(self.verdict.why),
            "odd_pids": [local_pid(pid) for pid in self.verdict.odd],
            "waits": list(self.waits),
            "evidence": list(self.evidence),
            "causes": self.causes,
            **self.suspicion.to_json(),
            "problems": list(self.problems),
        }


def make(
    directory: Path,
    verdict: Verdict,
    sample: JobSample,
    progress: Progress,
    text: bytes,
    log: Path | None,
    rules: tuple[str, ...] = (),
    ended: Sequence[ProcessSample] = (),
    *,
    natively: Callable[[JobSample, Path], JobSample],
) -> Report:
    """Judge a standstill and write it down below ``directory``.

    ``sample`` is the look that proved it, ``text`` the job's first and last output,
    ``log`` the file that holds all of it, ``ended`` are parts of the job that have
    ended before it; ``natively`` is ``sampling.Sampler.natively``.
    """
    sample = natively(sample, directory.absolute() / "stacks")
    asked = evidence.collect(
        sample.processes, directory / "evidence", EVIDENCE_LIMIT_S, sample.nodes
    )
    known = replace(asked.known, ended=ended)
    picture = waits.picture(sample.processes, known)
    pids = verdict.odd or picture.odd
    odd = [one for one in sample.processes if one.pid in pids]
    whom = odd or _trainers(sample)[:1]
    phase = progress.phase or "unknown"
    if verdict.phase and verdict.phase != progress.phase:
        phase = verdict.phase  # what proved the standstill tells it
    elif not progress.marked:
        standing = [one.pid for one in whom]
        phase = stack_phases.of(sample.processes, picture, standing, phase, known)
    files = _held_files(sample, known)
    who = ", ".join([*(one.label for one in whom[:MOST_NAMED]), *files])
    lost = [one.name for one in sample.nodes if one.is_lost]
    why = verdict.why
    if lost and not odd:
        who = f"{', '.join(lost)}, which Ray has lost"
        # It may be known only since this look was proof enough.
        why += tuple(one for one in sample.unanswered if one not in " ".join(why))
    elif picture.absent and not odd:
        who = picture.absent
    facts = {"step": progress.step, "steps": progress.total}
    told = {name: value for name, value in facts.items() if value is not None}
    if whom:
        told["pid"] = whom[0].local_pid
    # What cannot be looked into disproves nothing.
    frames = [] if sample.remote or sample.unseen else _frames(sample)
    lacks = job_lacks.known(sample, whom, known, " ".join(asked.said))
    suspicion = suspects(phase, text, logs.frameworks_in(text), told, frames, lacks)
    if odd:  # who is waited for is a process
        alive = tuple(one for one in suspicion.suspects if one.cause != ACTOR_DIED)
        suspicion = replace(suspicion, suspects=alive)
    causes = diagnosed(log, rules)["causes"]
    report = Report(
        directory,
        replace(
            verdict,
            phase=phase,
            odd=tuple(one.pid for one in odd),
            who=who,
            why=why,
        ),
        phase,
        suspicion,
        waits=picture.lines or waits.places(whom, known),
        evidence=(*_gpus(sample), *asked.said),
        tree=stack_tree.build(sample.processes),
        does=waits.places(sample.processes, known),
        causes=causes,
        problems=(*sample.unseen, *asked.problems),
    )
    try:
        _keep(directory, report, sample)
    except OSError as error:
        report.directory = None
        report.problems += (f"{directory}: {error.strerror}; nothing was kept",)
    return report


def _gpus(sample: JobSample) -> tuple[str, ...]:
    return (f"GPUs: {gpu_words.by_node(sample.gpus)}",) if sample.gpus else ()


def _held_files(sample: JobSample, known: waits.Known) -> list[str]:
    """The file systems that processes wait for inside the kernel, each once."""
    found: dict[str, None] = {}
    for one in sample.processes:
        call = known.calls.get((one.pid, one.pid))
        if one.state == "D" and call is not None and call.target.startswith("/"):
            place = one.node or procfs.mounted_at(one.pid, call.target)
            found[f"file system {place}"] = None
    return list(found)


def _frames(sample: JobSample) -> list[Frame]:
    threads = [thread for one in sample.processes for thread in one.threads]
    return [frame for thread in threads for frame in thread.frames]


def _trainers(sample: JobSample) -> list[ProcessSample]:
    kinds = ("rank", "ray-actor", "ray-driver", "process")
    return [one for one in sample.processes if one.role.kind in kinds]


def diagnosed(log: Path | None, rules: tuple[str, ...]) -> dict[str, Any]:
    """What ``gkd diagnose`` says of a log, by a process of its own; see there.

    ``causes`` is always there, and empty where it says nothing.
    """
    nothing: dict[str, Any] = {"causes": []}
    if log is None:
        return nothing
    command = [sys.executable, "-m", "pytest_gkd", "diagnose", "--format=json"]
    command += [f"--rules={one}" for one in rules]
    try:
        done = subprocess.run(
            [*command, str(log)],
            check=False,
            capture_output=True,
            timeout=DIAGNOSE_LIMIT_S,
        )
        found: dict[str, Any] = json.loads(done.stdout or "{}")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return nothing  # the log is kept, and can be asked again
    return nothing | found


def cause_lines(found: Mapping[str, Any], log: Path | None) -> str:
    """What ``diagnosed`` says of a log, as lines that follow a verdict."""
    text = ""
    for one in found["causes"][:1]:
        text += f"\n  cause {one['title']} [{one['cause']}]"
        for line in one["evidence"][:2]:
            text += f"\n  saw   {line['file']}:{line['line']}  {line['text']}"
        for advice in one["advice"][:2]:
            text += f"\n  fix   {advice}"
    for line in found.get("telling", ())[:2]:  # of what no rule knows
        text += f"\n  saw   {line['text']}"
    if log is not None:
        text += f"\n  more  gkd diagnose {log}"
    return text


def _keep(directory: Path, report: Report, sample: JobSample) -> None:
    place = directory.absolute()
    make_way(place / "report.json")
    table = "\n".join(_row(one) for one in sample.processes)
    write_private(place / "processes.txt", sanitize.text(table) + "\n")
    write_private(place / "report.txt", sanitize.text(report.text()) + "\n")
    if report.tree is not None:
        write_private(place / "tree.txt", sanitize.text(report.tree.text()) + "\n")
        write_json(place / "tree.json", sanitize.data(report.tree.to_json()))
    processes = [
        {
            "pid": one.pid,
            "ppid": one.ppid,
            "state": one.state,
            "cpu_s": round(one.cpu_s, 2),
            "rss_bytes": one.rss_bytes,
            "kind": one.role.kind,
            "does": does,
            "command": one.command,
        }
        for one, does in zip(sample.processes, report.does, strict=True)
    ]
    told = sanitize.data({**report.to_json(), "processes": processes})
    write_json(place / "report.json", told)
    try:
        page_file.write(standstill_page.html(told, place), place / PAGE)
    except OSError:
        raise  # as of every file that is kept
    except Exception as error:  # the verdict does not depend on its page
        why = sanitize.line(f"{type(error).__name__}: {error}")
        report.problems += (f"{PAGE} could not be made: {why}",)


def _row(one: ProcessSample) -> str:
    thread = verdicts.main_thread(one)
    leaf = str(thread.frames[-1]) if thread and thread.frames else one.problem[:60]
    return (
        f"{one.local_pid:>8} {local_pid(one.ppid):>8} {one.state} {one.cpu_s:>10.2f} s "
        f"{one.rss_bytes / 2**20:>9.0f} MiB {one.role.kind:13} "
        f"{one.role.name[:40]:40} {leaf}  {one.command}"
        + (f"  on {one.node}" if one.node else "")
    )
