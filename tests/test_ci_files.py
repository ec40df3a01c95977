"""The files to copy into a CI: what they run exists, and does what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_plugin import Run

from pytest_gkd.options import WITH_FLAG
from pytest_gkd.report.record import DIRECTORY, HISTORY
from pytest_gkd.stage_specs import BY_NAME

ROOT = Path(__file__).parent.parent
HOOKS = ROOT / ".pre-commit-hooks.yaml"
GPU_GATE = ROOT / ".github/workflows/gpu-gate.yml"
FILES = sorted([HOOKS, GPU_GATE, *(ROOT / "docs/ci").iterdir()])
OPTIONS = {option.flag.partition("=")[0] for option in WITH_FLAG}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def commands(path: Path) -> Iterator[list[str]]:
    """The words of every pytest command in a file."""
    if path.suffix == ".sh":
        joined = path.read_text("utf-8").replace("\\\n", " ")
        texts = re.findall(r"exec (pytest .*)", joined)
        yield from map(shlex.split, texts)
        return
    waiting = [loaded(path)]
    while waiting:
        match waiting.pop():
            case dict() as table:
                waiting += table.values()
            case ["pytest", *rest]:
                yield ["pytest", *map(str, rest)]
            case list() as several:
                waiting += several
            case str() as text if text.startswith(("pytest ", "timeout ")):
                yield shlex.split(text.removeprefix("timeout 30m "))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_option_and_stage_that_is_named_exists(path: Path) -> None:
    found = list(commands(path))
    assert found
    for words in found:
        given = [word for word in words[1:] if word.startswith("--gkd")]
        assert any(word.startswith("--gkd-stages") for word in given)
        for word in given:
            flag, _, value = word.partition("=")
            assert flag in OPTIONS
            if flag == "--gkd-stages" and value and not value.startswith("$"):
                assert set(value.split(",")) <= BY_NAME.keys()
        ours = {"pytest", *given}
        others = [word for word in words if word not in ours]
        assert all(word.startswith("--junitxml=") for word in others)


def test_what_is_uploaded_is_what_is_written() -> None:
    gitlab = loaded(ROOT / "docs/ci/gitlab.yml")["gkd-gate"]["artifacts"]
    assert gitlab == {
        "when": "always",
        "expose_as": "gkd report",
        "paths": [".gkd/last/"],
        "reports": {"junit": "gkd.xml"},
    }
    for path in (GPU_GATE, ROOT / "docs/ci/github-cpu.yml"):
        (upload,) = (
            step
            for job in loaded(path)["jobs"].values()
            for step in job["steps"]
            if "upload-artifact" in step.get("uses", "")
        )
        assert upload["with"]["path"].split() == [".gkd/last", "gkd.xml"]
        assert upload["with"]["include-hidden-files"]  # .gkd is one
        assert upload["if"] == "always()"


def test_the_history_is_kept_from_job_to_job_and_read_after_the_stages() -> None:
    place = f"{Path(DIRECTORY).parent}/{HISTORY}"
    gitlab = loaded(ROOT / "docs/ci/gitlab.yml")["gkd-gate"]
    assert gitlab["cache"]["paths"] == [place]
    assert gitlab["script"][-1] == "gkd report"
    for path in (GPU_GATE, ROOT / "docs/ci/github-cpu.yml"):
        (job,) = loaded(path)["jobs"].values()
        steps = [step.get("uses", step.get("run", "")) for step in job["steps"]]
        cache = next(n for n, text in enumerate(steps) if "actions/cache" in text)
        stages = next(n for n, text in enumerate(steps) if text.startswith("pytest"))
        report = next(n for n, text in enumerate(steps) if text == "gkd report")
        assert cache < stages < report
        asked = job["steps"][cache]["with"]
        assert asked["path"] == place
        assert asked["key"].startswith(asked["restore-keys"])


def test_the_container_has_shared_memory_and_every_mount_a_volume() -> None:
    pod = loaded(ROOT / "docs/ci/kubernetes.yml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    paths = [word.partition("=")[2] for word in container["args"] if "=/" in word]
    assert paths
    assert all(any(path.startswith(f"{m}/") for m in mounts.values()) for path in paths)


@pytest.mark.needs("torch")
def test_a_hook_fails_for_a_train_file_that_is_not_there(tmp_path: Path) -> None:
    (hook,) = loaded(HOOKS)
    assert (hook["language"], hook["pass_filenames"]) == ("system", False)
    program, *words = shlex.split(hook["entry"])
    assert program == "pytest"
    fine = Run(tmp_path, *words)
    assert fine.code == 0, fine.text
    assert fine.outcomes() == {"data": "passed", "tokenizer": "passed"}
    wrong = Run(tmp_path, *words, "--gkd-train-files=nowhere.jsonl")
    assert wrong.code == 1
    assert wrong.shows("*nowhere.jsonl does not exist*")


@pytest.mark.needs("torch")
def test_each_node_of_slurm_has_a_report_of_its_own(tmp_path: Path) -> None:
    script = ROOT / "docs/ci/slurm.sh"
    directives = re.findall(r"^#SBATCH (.*)", script.read_text("utf-8"), re.M)
    assert "--signal=TERM@60" in directives  # to the steps, not to the script alone
    # No Slurm is here: two nodes, one after the other.
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(
        'while [ "${1#--}" != "$1" ]; do shift; done\n'
        'for node in one two; do SLURMD_NODENAME=$node "$@" || exit; done\n'
    )
    (tmp_path / "bin/pytest").symlink_to(Path(sys.executable).with_name("pytest"))
    srun.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "STAGES": "tokenizer"}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        ["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for node in ("one", "two"):
        assert (tmp_path / ".gkd" / node / "report.json").is_file()
        assert (tmp_path / f"gkd-{node}.xml").is_file()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("files", ["", "nowhere.jsonl"], ids=["sound", "broken"])
def test_the_page_of_a_build_gets_the_table_also_of_a_run_that_failed(
    tmp_path: Path, files: str
) -> None:
    (step,) = loaded(ROOT / "docs/ci/buildkite.yml")["steps"]
    assert [*step["artifact_paths"]] == [".gkd/last/**/*", "gkd.xml"]
    # No Buildkite is here: its agent runs the commands so, and has taken one $ of two.
    lines = "\n".join(step["commands"]).replace("$$", "$")
    lines = lines.replace("--gkd-stages", "--gkd-stages=data")
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("buildkite-agent", f"echo $* > {tmp_path}/asked; cat > {tmp_path}/page"),
        ("pip", "true"),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"STUDENT": "", "TEACHER": "", "TRAIN": files}
    env = {**os.environ, **step["env"], **given, "PATH": path}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_XDIST")}
    (tmp_path / "gkd.md").write_text("an earlier build's")
    done = subprocess.run(
        ["bash", "-e", "-c", lines],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if files else 0), done.stdout + done.stderr
    assert (tmp_path / "asked").read_text() == "annotate --context gkd\n"
    page = (tmp_path / "page").read_text()
    assert page.count("| data | failed" if files else "| data | passed") == 1
    assert "earlier" not in page
    assert (tmp_path / ".gkd/last/report.html").is_file()
    assert (tmp_path / "gkd.xml").is_file()
