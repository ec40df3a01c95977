"""The page of what ``gkd watch`` said of real jobs (watched/cases.toml)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

RUNS = "watch-standstills.json"
_TEXT = """\
# What `gkd watch` says of real jobs

<!-- Made from watch-standstills.json by python tools/pages.py; do not edit. -->

`make watched` starts real jobs on a CPU under `gkd watch` and breaks most of them: a
TRL distillation (`trl`), four ranks by torchrun with DDP and dataloader workers
(`ranks`), a Ray pipeline of a trainer, a rollout with vLLM and a teacher (`ray`), and
a client of a teacher's server (`http`). What is right was written down, in
`watched/cases.toml`, before there was a watcher: the verdict, the phase, who is named
and who must not be. The limits were `--look-after=5 --stuck-after=10`; the defaults
are longer, so that a verdict comes later.

One label was mended after the first judgement, which counts as wrong: a job whose
engine core is killed was expected to raise, and stands for ever without the watcher as
well (`ray-generate-core-killed`; vLLM 0.32 tells a waiting client nothing).

"""
_LEFT = """\
## What could not be tried without GPUs

- Kernels of NCCL that spin: GPUs at 100 % with a rank elsewhere. Here gloo's ranks wait
  in a system call (a stand-in for NVML that says 100 % is in the tests).
- A GPU that fell off the bus, or throttles. (One GPU at work and stuck: see watch.md.)
- The flight recorder and `ncclras` of real NCCL jobs; gloo's recorder is read in tests.
- vLLM's capture of CUDA graphs, whose silence is long and sound.
- Weight transfer by CUDA IPC or NCCL from a trainer to an engine.
- Several machines: the nodes of Ray in the tests are namespaces of one.
"""


def page(runs: Mapping[str, Any]) -> str:
    """The page, from what watched/keep_verdicts.py kept."""
    return _TEXT + "\n".join(_lines(runs)) + "\n\n" + _LEFT


def _lines(runs: Mapping[str, Any]) -> Iterator[str]:
    tried = {name: c for name, c in runs["cases"].items() if not c["skipped"]}
    first, now = runs["first"], tried.values()
    yield f"Measured on {runs['machine']}. First is each case's first judgement; after"
    yield "it the watcher was mended with what it had got wrong, and some judged again."
    yield ""
    yield "| Right | First | Now |"
    yield "| --- | --- | --- |"
    for words, what in (
        ("verdict", "verdict"),
        ("phase, name and end, too", ""),
    ):
        yield f"| {words} | {_share(first.values(), what)} | {_share(now, what)} |"
    yield ""
    sound = {name: c for name, c in tried.items() if c["expected"] == ["finished"]}
    yield "## Jobs that stand still, or die"
    yield ""
    yield "Seconds are from the standstill to the verdict; a bold one is wrong."
    yield ""
    yield "| Case | Where | How | First said | Says | Names | Seconds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, case in tried.items():
        if name not in sound:
            seconds = "" if case["seconds"] is None else f"{case['seconds']:.0f}"
            yield (
                f"| {name} | {case['where']} | {case['how']} | "
                f"{_said(first[name])} | {_said(case)} | "
                f"{_cell(case['who'])} | {seconds} |"
            )
    yield ""
    yield "## Jobs that are sound"
    yield ""
    yield "None of these may be called stuck or dead while it runs."
    yield ""
    yield "| Case | How | First said | Says |"
    yield "| --- | --- | --- | --- |"
    for name, case in sound.items():
        yield f"| {name} | {case['how']} | {_said(first[name])} | {_said(case)} |"
    skipped = {name: c["skipped"] for name, c in runs["cases"].items() if c["skipped"]}
    if skipped:
        yield ""
        yield "Not tried there:"
        yield from (f"- {name}: {reason}" for name, reason in skipped.items())


def _share(cases: Iterable[Mapping[str, Any]], what: str = "") -> str:
    found = [what in case["wrong"] if what else bool(case["wrong"]) for case in cases]
    return f"{found.count(False)} of {len(found)}"


def _said(case: Mapping[str, Any]) -> str:
    word = case["verdict"] or "nothing"
    if "verdict" in case["wrong"]:
        return f"**{word}**"
    return f"{word}, wrong {' and '.join(case['wrong'])}" if case["wrong"] else word


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
