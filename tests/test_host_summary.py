"""gkd env: what to paste into an issue, without secrets and without heavy imports."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fresh_python
import psutil
import pytest

from pytest_gkd.processes import cgroup, host_summary

HEAVY = ("torch", "vllm", "ray", "transformers", "datasets")


def test_it_says_what_is_asked_first_and_masks_secrets() -> None:
    done = fresh_python.run(
        "-m",
        "pytest_gkd",
        "env",
        environ={
            "NCCL_DEBUG": "INFO",
            "HF_TOKEN": "tk4711",
            "https_proxy": "http://me:tk4711@proxy:8080",
            "VLLM_X": "\x1b]0;owned\x07",
            "UNRELATED": "private",
        },
        check=True,
    )
    said = done.stdout
    assert f"CPython {platform.python_version()}" in said
    assert platform.release() in said
    assert f"package     pytest {metadata.version('pytest')}" in said
    assert (
        f"pytest-timeout {metadata.version('pytest-timeout')} (pytest plugin)" in said
    )
    assert f"{psutil.virtual_memory().total / (1 << 30):.1f} GiB" in said
    assert "/dev/shm" in said
    assert "gpu  " in said
    assert "variable    NCCL_DEBUG=INFO" in said
    assert "variable    HF_TOKEN=***" in said
    assert "variable    https_proxy=http://me:***@proxy:8080" in said
    assert "variable    VLLM_X=\n" in said
    assert "private" not in said
    assert "\x1b" not in said


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; from pytest_gkd.__main__ import main; main(['env']); "
        f"sys.exit(any(name in sys.modules for name in {HEAVY!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_limit_of_the_groups_above_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1073741824\n")
    (inner.parent / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(cgroup, "base", lambda: inner)
    assert list(host_summary.cgroup_limits()) == [
        f"cgroup      memory.max 1073741824 in {inner.parent}",
        f"cgroup      cpu.max 200000 100000 in {inner.parent}",
    ]
