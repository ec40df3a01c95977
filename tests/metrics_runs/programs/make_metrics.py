"""Trains the runs of labels.toml again and writes their logs.

    python tests/metrics_runs/programs/make_metrics.py [NAME...] [--numbers DIR]

Needs torch. A run's name decides on its folder. ``--numbers DIR`` keeps what was
measured, and prints from it where it is there already.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import metric_formats
import metric_trainers
import torch
from metric_engine import Engine
from metric_loops import SEEDS, TAUGHT, Plan, Run
from metric_models import pretrained
from metric_pages import Page, Style

HERE = Path(__file__).resolve().parents[1]
sys.path.append(str(HERE.parent))
from make_runs import folder_of  # noqa: E402

PACKED = 60_000  # bytes; a longer log is kept as .gz
FORMATS = {
    one.__name__.replace("_", "-"): one
    for one in (*metric_trainers.FORMATS, *metric_formats.FORMATS)
}


def plan_of(run: dict[str, Any]) -> Plan:
    """The plan of one of labels.toml; a fault sets in at ``first_step``."""
    given = dict(run.get("plan", {}))
    if "fault" in given:
        given["at"] = run["first_step"]
    digest = hashlib.sha256(run["name"].encode()).digest()
    seed = int.from_bytes(digest[1:3], "big")
    return Plan(**{"seed": seed, **given})


def make(run: dict[str, Any], numbers: Path | None) -> None:
    """Train it, or read what was measured before, and write its log."""
    plan, style = plan_of(run), Style(**run.get("style", {}))
    kept = numbers and numbers / (run["name"] + ".json")
    if kept and kept.exists():
        records = json.loads(kept.read_text("utf-8"))
    else:
        trained = Engine(plan) if run["format"] == "vllm" else Run(plan)
        records = list(trained.records())
        if kept:
            kept.write_text(json.dumps(records), "utf-8")
    page = Page(plan, style, records)
    FORMATS[run["format"]](page)
    data = page.text().encode()
    folder = HERE / folder_of(run["name"])
    folder.mkdir(exist_ok=True)
    for old in folder.glob(run["name"] + ".log*"):
        old.unlink()
    path = folder / (run["name"] + ".log")
    if len(data) > PACKED:
        path = path.with_suffix(".log.gz")
        data = gzip.compress(data, 9, mtime=0)
    path.write_bytes(data)


def main() -> None:
    """Make those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    runs = tomllib.loads((HERE / "labels.toml").read_text("utf-8"))["run"]
    if asked.names:
        runs = [one for one in runs if one["name"] in asked.names]
    # Each run has a process of its own, so that none sees another's memory; what all
    # start from is trained once, before them.
    torch.set_num_threads(1)
    for run in runs:
        plan = plan_of(run)
        if run["format"] != "vllm" and not (
            asked.numbers and (asked.numbers / (run["name"] + ".json")).exists()
        ):
            pretrained(plan.seed % SEEDS, plan.moe >= 0, plan.pretrain)
            pretrained(plan.seed % SEEDS + 100, False, TAUGHT)
    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    with context.Pool(asked.jobs, maxtasksperchild=1) as pool:
        made = pool.starmap(make, [(run, asked.numbers) for run in runs], chunksize=1)
    print(f"{len(made)} logs in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
