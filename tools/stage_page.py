"""Make the page of the stages; ``python tools/stage_page.py`` records their failures.

The failures are real runs with an injected fault, on a CPU, kept in
``docs/stage-failures.json``.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gkd.stage_specs import STAGES, Stage

NOTE = (
    "<!-- Made by python tools/pages.py from running.md's table, the stages and "
    "stage-failures.json; do not edit. -->"
)
RUNS = "stage-failures.json"
INTRO = """
What each stage proves, and what its failure looks like: the run of a real fault, put in
with `--gkd-inject` where the stage is not about your own job. All other faults that
were tried are in [faults.md](faults.md), the causes in [a page
each](causes/README.md).
"""
FAULTS = {
    "environment": "module-shadowed",
    "data": "missing-column",
    "tokenizer": "other-vocabulary",
    "vllm": "engine-killed",
    "nccl": "rank-killed",
    "weight_sync": "dropped-update",
    "training_step": "teacher-off-by-one",
}
OWN_JOB = {
    "config": "--gkd-config=run.sh",
    "launch": "--gkd-launch=python train.py",
}
FILES = {
    "run.sh": "python -m verl.trainer.main_ppo data.train_batch_size=6 \\\n"
    "  trainer.n_gpus_per_node=4 trainer.nnodes=1 actor_rollout_ref.rollout.nam=vllm\n",
    "train.py": "import os\n\nstep = os.environ['FIRST_STEP']\n",
}


def page(recorded: Mapping[str, Any], running: str) -> str:
    """The page; ``running`` holds the table of what each stage passes on."""
    lines = ["# The stages", "", NOTE, INTRO]
    lines += [f"Recorded on {recorded['machine']}, {recorded['date']}.", ""]
    for stage in STAGES:
        run = recorded["stages"][stage.name]
        found = re.search(rf"^\| {stage.name} \| (.+?) \| ", running, re.MULTILINE)
        assert found, f"running.md's table of the stages lacks {stage.name}"
        lines += [
            f"## {stage.name}: {stage.title}",
            "",
            f"Passes only when: {found[1]}.",
        ]
        lines += [f"{_terms(stage)}", "", "```", f"$ {run['command']}", run["text"]]
        lines += ["```", ""]
    return "\n".join(lines)


def _terms(stage: Stage) -> str:
    gpu = f" ({stage.gpu_budget_s:g} s on GPUs)" if stage.gpu_budget_s else ""
    needs = f"; it needs {', '.join(stage.needs)}" if stage.needs else ""
    return f"It has {stage.budget_s:g} s{gpu}, in the lane {stage.lane}{needs}."


def record() -> dict[str, Any]:
    """Run each stage's fault; what pytest showed of it."""
    made = {}
    for stage in STAGES:
        options = [f"--gkd-stages={stage.name}"]
        if stage.name in FAULTS:
            options.append(f"--gkd-inject={stage.name}:{FAULTS[stage.name]}")
        else:
            options.append(OWN_JOB[stage.name])
        made[stage.name] = {
            "command": shlex.join(["pytest", *options]),
            "text": _failure(stage.name, options),
        }
        print(f"{stage.name}:\n{made[stage.name]['text']}\n")
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"machine": "2 CPU cores, no GPU", "date": date, "stages": made}


def _failure(stage: str, options: list[str]) -> str:
    with tempfile.TemporaryDirectory() as place:
        for name, text in FILES.items():
            Path(place, name).write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--color=no", *options],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(
        rf"^stage {stage} .*?(?=^gkd: |^=====|^-----|^_____)",
        done.stdout,
        re.MULTILINE | re.DOTALL,
    )
    assert found, done.stdout + done.stderr
    return (
        found[0].replace(f"{place}/", "").replace(f"{sys.prefix}/", ".venv/").rstrip()
    )


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "docs" / RUNS
    target.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
