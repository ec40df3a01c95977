"""A machine whose processes cannot reach each other is told so, and how to mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_plugin import Run
from test_tree import root_only

from pytest_gkd.workload import loopback

NO_NETWORK = ("unshare", "--net")
DOWN = "the loopback interface (lo) is down"


def test_where_it_is_up_nothing_is_found() -> None:
    assert loopback.problem() == ""
    loopback.require()


@root_only
@pytest.mark.parametrize("up", [False, True])
def test_the_command_that_is_named_mends_it(up: bool) -> None:
    code = "from pytest_gkd.workload import loopback; print(loopback.problem())"
    before = f"{loopback.UP} && " if up else ""
    done = subprocess.run(
        [*NO_NETWORK, "sh", "-c", f'{before}"$0" -c "{code}"', sys.executable],
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.strip()
    assert said == "" if up else said.startswith(DOWN)
    assert up or said.endswith(loopback.UP)


@root_only
def test_the_stages_that_need_it_name_it(tmp_path: Path) -> None:
    names = "--gkd-stages=environment,nccl"
    run = Run(tmp_path, names, before=NO_NETWORK)
    assert run.outcomes() == {"environment": "failed", "nccl": "failed"}
    for name in ("environment", "nccl"):
        assert run.stage(name)["diagnosis"]["cause"] == loopback.CAUSE
        assert run.stage(name)["message"].startswith(DOWN)
