"""Whether jobs break where their labels say: ``python watched/alone.py [NAME ...]``.

Runs them without the watcher; where one stands still, py-spy shows each process.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jobs

SILENT_S, LOOK_AFTER_S = 8.0, 6.0


def run(case: jobs.Case) -> str:
    """Run a case; what happened, in words."""
    with jobs.Job(case, watched=False) as job:
        begun = time.time()
        try:
            job.act(case.get("acts", []))
            if {"finished", "dead"} & set(jobs.words(case)):
                status = job.finish()
                print(job.text()[-1500:])
                return f"ended with {status} after {time.time() - begun:.0f} s"
            return _stands(case, job)
        except TimeoutError as error:
            print(job.text()[-3000:])
            return f"WRONG: {error}"


def _stands(case: jobs.Case, job: jobs.Job) -> str:
    if jobs.breaks(case):
        job.wait((job.folder / "held").is_file, jobs.START_S, "held")
    elif job.acted_at is None:
        job.fall_silent(SILENT_S)
    time.sleep(LOOK_AFTER_S)
    before = len(job.text())
    shown = dict(job.stacks())
    for one, text in shown.items():
        with contextlib.suppress(psutil.Error):
            title = " ".join(one.cmdline())[:100]
            print(f"== {one.pid} {one.status()} {title}\n{text[:2500]}")
    if not job.stands(shown):
        return "WRONG: {} is not in {}".format(*case["stands"])
    print(job.text()[-800:])
    if job.process.poll() is not None:
        return f"WRONG: it ended with {job.process.poll()}"
    grew = " (it prints)" if len(job.text()) > before else ""
    if "release" not in case:
        return f"stands{grew}"
    job.act(case["release"])
    status = job.finish()
    print(job.text()[-300:])
    return f"stands{grew}, released, ended with {status}"


def main() -> None:
    """Run the named cases, or all."""
    for case in jobs.cases():
        if case["name"] in (sys.argv[1:] or [case["name"]]):
            print(f"######## {case['name']}", flush=True)
            print(f"#### {case['name']}: {jobs.lacks(case) or run(case)}", flush=True)


if __name__ == "__main__":
    main()
