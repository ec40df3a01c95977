"""Judges how a child that imported packages or started Ray ended."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gkd.diagnosis import shadowed_imports
from pytest_gkd.diagnosis.shadowed_imports import Shadow
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.probe import TAIL_LINES, Outcome

# On a machine this busy, a start that has not returned may just be waiting its turn.
STARVED = 0.85

TEXT_LIMIT = 400

# What an OS error means, wherever it occurs.
ERRNO_CAUSES: dict[int, str] = {
    errno.ENOSPC: "env.disk-full",
    errno.EDQUOT: "env.disk-full",
    errno.EMFILE: "env.too-many-files",
    errno.ENFILE: "env.too-many-files",
    errno.EFBIG: "env.file-size-limit",
    errno.EACCES: "env.permission",
    errno.EPERM: "env.permission",
    errno.ENOMEM: "env.host-oom",
}


def import_cause(event: Mapping[str, Any], module: str) -> str:
    """The cause of an import that raised (an event with ``failed``).

    A module that does not exist at all is missing; a missing part of an installed
    package was moved between releases, as with any other import failure.
    """
    text = str(event.get("text", ""))
    if cause := ERRNO_CAUSES.get(event.get("errno", 0)):
        return cause
    if event.get("error") == "MemoryError":
        return "env.host-oom"
    if "Invalid log settings" in text:  # of TORCH_LOGS (torch/_logging/_internal.py)
        return "env.variable-invalid"
    if "libcuda.so" in text:
        return "env.driver-too-old"
    gone = event.get("error") == "ModuleNotFoundError"
    missing = gone and "." not in str(event.get("missing") or module)
    return "env.package-missing" if missing else "env.package-conflict"


def judge_imports(outcome: Outcome) -> list[StageFault | Note]:
    """What the import child found.

    Packages are imported from the bottom up, so of several failures with the same text
    only the first is kept: the others import the one that failed.
    """
    findings: list[StageFault | Note] = []
    seen: set[str] = set()
    for event in outcome.events:
        if event.get("without"):
            findings.append(_extension(event))
        elif "failed" in event and event["text"] not in seen:
            seen.add(event["text"])
            findings.append(_failed_import(event))
        findings += [
            StageFault("env.package-conflict", f"vLLM's kernels do not load: {text}")
            for text in event.get("kernels", ())
        ]
    end = _how_it_ended(outcome)
    return [*findings, end] if end else findings


def judge_shadows(found: Iterable[Shadow]) -> list[StageFault | Note]:
    """The user's files that hide packages or standard-library modules.

    One that cannot be what it hides is a fault. A checkout, or a hidden
    standard-library module that perhaps nothing imports, is a note unless an import has
    hit it (see judge_imports).
    """
    return [
        _hidden(shadow)
        if shadow.is_certain
        else Note("env.module-shadowed", f"{shadow}")
        for shadow in found
    ]


def _hidden(shadow: Shadow) -> StageFault:
    facts = {"package": shadow.name, "file": str(shadow.file)}
    return StageFault("env.module-shadowed", f"{shadow}.", facts)


def _failed_import(event: Mapping[str, Any]) -> StageFault:
    what = str(event["failed"])
    module = _module(what)
    trace = str(event.get("trace", ""))
    shadow = shadowed_imports.met(f"{event['text']}\n{trace}")
    if shadow is not None:
        return _hidden(shadow)
    lines = _own_lines(trace)
    said = " ".join(str(event["text"]).split())[:TEXT_LIMIT]
    text = f"{what} failed: {event['error']}: {said}"
    return StageFault(
        import_cause(event, module),
        text,
        {"package": module, "error": event["error"]},
        tuple((what, None, line) for line in lines[-TAIL_LINES:]),
    )


def _extension(event: Mapping[str, Any]) -> Note:
    """An extension of vLLM that does not load, and that vLLM does without."""
    said = " ".join(str(event["text"]).split())[:TEXT_LIMIT]
    text = f"{event['failed']} failed: {event['error']}: {said}; vLLM goes on without "
    text += f"it ({', '.join(event['without'])})."
    return Note("vllm.extension", text)


def _own_lines(trace: str) -> list[str]:
    """A traceback without the frames of the import system and of this package."""
    frames = re.split(r"(?m)^(?=  File |\S)", trace)
    ours = ("<frozen importlib", "importlib/__init__.py", "environment/children.py")
    lines = [
        line.strip()
        for frame in frames
        if not any(name in frame.partition("\n")[0] for name in ours)
        for line in frame.splitlines()
    ]
    return [line for line in lines if line.strip("^~ ")]


def _where(outcome: Outcome) -> str:
    """The two innermost frames of the stack that the child dumped, if it did."""
    frame = re.compile(r'File "(?:.*/)?([^/"]+/[^/"]+)", line (\d+) in (.+)')
    found = [frame.search(line) for _, _, line in outcome.tail]
    places = [f"{m[3]} ({m[1]}:{m[2]})" for m in found if m]
    return ", called from ".join(places[:2])


def _how_it_ended(outcome: Outcome) -> StageFault | None:
    """A crash or a hang, as a finding.

    An import that only waits is stuck, whatever it waits for. One that is still working
    may just be slow: it gets no cause here. Either way its location is named.
    """
    what = outcome.phase
    facts = {"doing": what, "exit_code": outcome.exit_code}
    if outcome.exit_code is None:
        text = f"{what} had not returned when its time was up, {outcome.wall_s:.1f} s "
        text += f"after the process began; it used {outcome.cpu_s:.1f} s of processor "
        text += f"time, on a machine {outcome.machine_busy:.0%} busy."
        if outcome.waits and what.startswith("import "):
            text = f"{what} does not return: after {outcome.wall_s:.1f} s it uses no "
            text += f"processor and waits in {_where(outcome) or 'an unknown place'}."
            facts["package"] = _module(what)
            return StageFault("env.import-stuck", text, facts, outcome.tail)
        if slow := _slowest(outcome):
            text += f" Before that: {slow}."
        return StageFault(None, text, facts, outcome.tail)
    if outcome.complete:
        return None
    facts["package"] = _module(what)
    cause, how = "env.package-conflict", f"exit status {outcome.exit_code}"
    if outcome.exit_code < 0:
        how = facts["signal"] = signal.Signals(-outcome.exit_code).name
        if how == "SIGKILL":
            cause = "env.host-oom"
    text = f"{what} ended the process with {how}."
    return StageFault(cause, text, facts, outcome.tail)


def _module(what: str) -> str:
    """``torch`` of ``import torch.cuda``."""
    return what.removeprefix("import ").partition(".")[0]


def _slowest(outcome: Outcome) -> str:
    return ", ".join(
        f"{event['done']} {event['seconds']:.1f} s"
        for event in outcome.events
        if "done" in event
    )


def judge_ray(outcome: Outcome) -> list[StageFault]:
    """What the Ray child found."""
    for event in outcome.events:
        if "failed" in event:
            if event["failed"] == "import ray":
                return [_failed_import(event)]
            what = f"{event['failed']} failed: {event['error']}: {event['text']}"
            cause = ERRNO_CAUSES.get(event.get("errno", 0), "ray.worker-start")
            return [StageFault(cause, what, {}, outcome.tail)]
    if outcome.left:
        text = f"ray.shutdown() left processes behind: {', '.join(outcome.left)}."
        return [StageFault(None, text, {"left": list(outcome.left)})]
    end = _how_it_ended(outcome)
    if end is None or outcome.doing in ("", "import ray"):
        return [end] if end else []
    if outcome.exit_code is None and outcome.machine_busy >= STARVED:
        return [end]
    end.cause = "ray.worker-start"
    return [end]
