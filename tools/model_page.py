"""Make the page of models from what runs of them found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gkd.stage_specs import LAYOUTS

NOTE = "<!-- Made by python tools/pages.py from model-runs.json; do not edit. -->"
RUNS = "model-runs.json"
INTRO = """
Tiny, random models of the text architectures that vLLM and transformers share, run
through vllm, weight_sync and training_step: `make models`, or `make models MODEL=qwen3`
for one. **Nats** is the largest difference between the log-probabilities of vLLM and of
transformers for one token. A name with a hyphen is a family with other options (rotary
scaling, windows, heads, biases) or with a checkpoint kept in another way (16 bits,
shards, a pickle, an `auto_map`); most of those were run colocated by the stages' own
functions in one process, without pytest. A model that fails is sorted below: a failure
is vLLM's, transformers' or the model's where the reason is known, else it is open.
"""


def page(recorded: Mapping[str, Any]) -> str:
    """The page; ``recorded`` is what ``docs/model-runs.json`` holds."""
    lines = ["# Models that were run", "", NOTE, INTRO]
    lines += [f"Run on {recorded['machine']}, {recorded['date']}.", ""]
    lines += [*(_count(layout, recorded["models"]) for layout in LAYOUTS), ""]
    lines += ["| model | " + " | ".join(LAYOUTS) + " | nats |"]
    lines += ["| --- " * (len(LAYOUTS) + 2) + "|"]
    failures = []
    for name, runs in sorted(recorded["models"].items()):
        cells = [_cell(runs.get(layout)) for layout in LAYOUTS]
        known = [run["difference_nats"] for run in runs.values()]
        nats = [value for value in known if value is not None]
        worst = f"{max(nats):.1g}" if nats else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {worst} |")
        for layout, run in runs.items():
            if run["failed"]:
                reason = f"{run['whose']}: {run['why']}" if run["whose"] else "open"
                failures.append(f"- **{name}**, {layout}, {run['failed']}: {reason}")
    if failures:
        lines += ["", "## What failed", "", *sorted(failures)]
    return "\n".join([*lines, ""])


def _count(layout: str, models: Mapping[str, Any]) -> str:
    """How many of ``models`` ran in ``layout``, and how."""
    ran = [runs[layout] for runs in models.values() if layout in runs]
    passed = sum(run["failed"] is None for run in ran)
    return (
        f"- {layout}: {passed} passed, {len(ran) - passed} failed, "
        f"{len(models) - len(ran)} not run"
    )


def _cell(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "not run"
    return "passed" if run["failed"] is None else f"{run['failed']} failed"
