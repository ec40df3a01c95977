"""Run the broken and the sound programs of runs/labels.toml and keep what they print.

    python tests/make_runs.py --scratch DIR [--python BIN] NAME...

``BIN`` is the folder of an environment's commands that has torch, transformers, TRL,
accelerate, vLLM and Ray. Names of the machine, its user and its folders are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil

from pytest_gkd.workload.models import tiny

HERE = Path(__file__).resolve().with_name("runs")
LIMIT = 300_000
MARK = "GKD_RUN"


def folder_of(name: str) -> str:
    """``held_out`` or ``development``: the name's hash decides, not the content."""
    odd = hashlib.sha256(name.encode()).digest()[0] % 2
    return "held_out" if odd else "development"


def make(run: dict[str, Any], scratch: Path, commands: Path) -> str:
    """Run one of labels.toml until it ends or is ended, and write its log."""
    mark = f"{run['name']}.{os.getpid()}"
    work, env = prepare(run, scratch, commands, mark)
    log = work.with_suffix(".log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["bash", "-c", run["command"]],
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        how = attend(process, log, run, mark)
    end(mark)
    text = cleaned(log.read_bytes(), scratch, work, commands)
    assert len(text) <= LIMIT, f"{run['name']}: {len(text)} bytes"
    target = HERE / folder_of(run["name"]) / f"{run['name']}.log"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(text)
    shutil.rmtree(work, ignore_errors=True)
    return how


def prepare(
    run: dict[str, Any], scratch: Path, commands: Path, mark: str, *more: Path
) -> tuple[Path, dict[str, str]]:
    """The folder and environment of a run; ``more`` are folders of programs."""
    work = scratch / "job" / run["name"]
    shutil.rmtree(work, ignore_errors=True)
    for folder in (HERE / "programs", *more):
        shutil.copytree(folder, work, dirs_exist_ok=True)
    made = tiny.make(scratch)
    shutil.copytree(made.student, work / "student")
    shutil.copytree(made.teacher, work / "teacher")
    shutil.copy(made.train_file, work / "prompts.jsonl")
    # The student is not trained: that its answers end, a ninth of the tokens end them.
    ends = work / "student" / "generation_config.json"
    settings = json.loads(ends.read_text("utf-8"))
    settings["eos_token_id"] = [settings["eos_token_id"], *range(3, 490, 9)]
    ends.write_text(json.dumps(settings), "utf-8")
    for name, old, new in run.get("edit", ()):
        text = (work / name).read_text("utf-8")
        assert old in text, f"{run['name']}: {name} has no {old!r}"
        (work / name).write_text(text.replace(old, new), "utf-8")
    # Ray's socket paths must be short.
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("GKD_", "PYTEST"))},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HF_HOME": str(work / ".cache"),
        "RAY_TMPDIR": str(scratch / "r"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        MARK: mark,
        **run.get("env", {}),
    }
    if "before" in run:
        subprocess.run(["bash", "-c", run["before"]], cwd=work, env=env, check=True)
    return work, env


def attend(
    process: subprocess.Popen[bytes], log: Path, run: dict[str, Any], mark: str
) -> str:
    """Send the run's signals at their texts; ``all KILL`` ends it like a lost node.

    A text may be the name of a file that the run makes (``held``, of sitecustomize.py).
    """
    limit = time.monotonic() + run.get("limit", 280)
    for text, wait, name, who in run.get("signals", ()):
        while not (
            (log.with_suffix("") / text).is_file()
            or re.search(text.encode(), log.read_bytes())
        ):
            if process.poll() is not None or time.monotonic() > limit:
                return f"ended before {text!r}: {process.returncode}"
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
        for one in chosen(mark, who):
            one.send_signal(getattr(signal, f"SIG{name}"))
        if who == "all" and name == "KILL":
            return "ended by SIGKILL"
    try:
        process.wait(max(0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "reached its limit"
    return f"status {process.returncode}"


def chosen(mark: str, who: str) -> list[psutil.Process]:
    """The run's processes: all, those of a rank (``rank1``) or of a command line."""
    return [one for one, ranks in processes(mark) if who == ranks or suits(one, who)]


def suits(one: psutil.Process, who: str) -> bool:
    """Whether a process is meant by ``all`` or by a pattern of its command line."""
    with contextlib.suppress(psutil.Error):
        return who == "all" or bool(re.search(who, " ".join(one.cmdline())))
    return False


def processes(mark: str) -> list[tuple[psutil.Process, str]]:
    """The run's processes and their ranks, such as ``rank1``.

    A process that gives itself a title (vLLM, Ray) overwrites its environment; it is
    known by its session or by its parent.
    """
    ranks: dict[int, str] = {}
    others: list[psutil.Process] = []
    sessions: set[int] = set()
    psutil.process_iter.cache_clear()  # a pid may have become another process's
    found = list(psutil.process_iter())
    for one in found:
        with contextlib.suppress(psutil.Error, OSError):
            env = one.environ()
            if env.get(MARK) == mark:
                ranks[one.pid] = f"rank{env.get('RANK')}"
                sessions.add(os.getsid(one.pid))
            else:
                others.append(one)
    for _ in range(4):  # children of children of children
        for one in others:
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(one.pid) in sessions or one.ppid() in ranks:
                    ranks.setdefault(one.pid, "")
                    sessions.add(os.getsid(one.pid))
    return [(one, ranks[one.pid]) for one in found if one.pid in ranks]


def end(mark: str) -> None:
    """Kill what is left of the run, and nothing else."""
    for one in chosen(mark, "all"):
        with contextlib.suppress(psutil.Error):
            one.kill()


def cleaned(text: bytes, scratch: Path, work: Path, commands: Path) -> bytes:
    """The text with the machine's names replaced, the same way in every log."""
    show = "import sys; print(*filter(None, sys.path), sep='\\n')"
    found = subprocess.check_output([commands / "python", "-c", show], text=True)
    sites = [one for one in found.split("\n") if one.endswith("/site-packages")]
    swaps = [
        (str(work), "/home/user/job"),
        *((one, "/home/user/venv/lib/python3.11/site-packages") for one in sites),
        (str(commands), "/home/user/venv/bin"),
        (str(scratch / "r"), "/tmp/ray"),
        (str(scratch), "/home/user"),
        (sys.base_prefix, "/usr"),
        (f"{Path.home()}/", "/home/user/"),
    ]
    addresses = subprocess.check_output(["hostname", "-I"], text=True).split()
    swaps += [(one, f"10.0.0.{at}") for at, one in enumerate(addresses, 11)]
    for old, new in swaps:
        text = text.replace(old.encode(), new.encode())
    for host in (socket.getfqdn(), socket.gethostname()):
        word = rf"(?<![\w.-]){re.escape(host)}(?![\w-])".encode()
        text = re.sub(word, b"node1", text)
    left = [f"{getpass.getuser()}@", str(scratch.parent)]
    assert not [one for one in left if one.encode() in text], left
    return text


def main() -> None:
    """Make the logs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--python", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("names", nargs="+", metavar="NAME")
    asked = parser.parse_args()
    runs = tomllib.loads((HERE / "labels.toml").read_text("utf-8"))["run"]
    named = {run["name"]: run for run in runs}
    for name in asked.names:
        start = time.monotonic()
        how = make(named[name], asked.scratch.resolve(), asked.python.absolute())
        print(f"{name}: {how} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
