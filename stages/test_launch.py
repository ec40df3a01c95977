"""Stage launch: the job's own command, watched until its first training step."""

from __future__ import annotations

import pytest

from pytest_gkd.stage_api import StageContext


@pytest.mark.gkd_stage("launch")
@pytest.mark.usefixtures("free_machine")
def test_launch(gkd: StageContext) -> None:
    """A training step is done, or the command ends well by itself."""
    from pytest_gkd.workload import launched

    launched.run(gkd)
