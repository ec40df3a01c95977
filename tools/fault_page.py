"""Make the page of faults from the faults and from a matrix run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gkd.fault_specs import FaultSpec
from pytest_gkd.stage_specs import BY_NAME

NOTE = "<!-- Made by python tools/pages.py from pytest_gkd/faults; do not edit. -->"
TIMES = "fault-times.json"
ORDER = (*BY_NAME, "any")
INTRO = """
A gate that cannot fail is worth nothing. Each of these faults can be put into a run, to
see that the stages find it:

```sh
pytest --gkd-stages --gkd-inject=nccl:rank-killed
pytest --gkd-stages --gkd-inject=any:native-hang@vllm   # "any" ones take a stage
```

The fault is committed for real, in the stage's own processes: the file is truncated,
the process is killed, the tensor is changed. Header, failure, JUnit and `report.json`
say that it was injected. `make matrix` runs every one and checks outcome, cause and
exit code, and that no process, shared memory or temporary directory is left.
"""
TABLE = """
**Found as** is the cause in the diagnosis, or what the stage ends as where the
catalogue rightly has none. **After** is the time in seconds from the fault's taking
effect to the verdict; for a timeout most of it is the budget that the matrix gives the
stage.
"""


def page(faults: Iterable[FaultSpec], recorded: Mapping[str, Any]) -> str:
    """The page; ``recorded`` is what ``docs/fault-times.json`` holds."""
    lines = ["# Faults that can be injected", "", NOTE, INTRO, TABLE]
    if recorded:
        lines += [f"Measured on {recorded['machine']}, {recorded['date']}.", ""]
    by_group: dict[str, list[FaultSpec]] = {}
    for fault in faults:
        by_group.setdefault(fault.group, []).append(fault)
    for group in sorted(by_group, key=ORDER.index):
        lines += [f"## {'any stage' if group == 'any' else group}", ""]
        lines += ["| fault | what is done | found as | after |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [*(_row(fault, recorded) for fault in by_group[group]), ""]
    return "\n".join(lines)


def _row(fault: FaultSpec, recorded: Mapping[str, Any]) -> str:
    links = [f"[{cause}](causes/{cause}.md)" for cause in fault.causes]
    found = " or ".join(links) or fault.outcome
    if fault.outcome == "timeout" and links:
        found += " (timeout)"
    entry = recorded.get("faults", {}).get(fault.name, {})
    after = entry.get("verdict_after_s")
    needs = f" (needs {', '.join(fault.needs)})" if fault.needs else ""
    if after is None:
        shown = "not run" if not entry else "-"
    else:
        shown = f"{after:.1f}" if after >= 0.05 else "< 0.1"
        if fault.outcome == "timeout" and fault.budget_s:
            shown += f" (budget {fault.budget_s:g})"
    return f"| `{fault.name}` | {fault.how}{needs} | {found} | {shown} |"
