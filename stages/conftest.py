"""Fixtures that the stages share: their inputs, and the job under test."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_gkd import fault_specs
from pytest_gkd.run.worker import CONTEXT
from pytest_gkd.stage_api import StageContext

if TYPE_CHECKING:
    from pytest_gkd.workload.inject.site import Site
    from pytest_gkd.workload.layouts.estimate import Estimate
    from pytest_gkd.workload.layouts.layout import Job
    from pytest_gkd.workload.models.inputs import Inputs


class JobKeeper:
    """Keeps one job for all stages of the session, replacing it after a failure."""

    def __init__(self, gkd: StageContext) -> None:
        self.job: Job | None = None
        self._gkd = gkd
        self._estimate: Estimate | None = None

    def open(self, inputs: Inputs) -> Job:
        """The existing job if it is intact, else a new one."""
        from pytest_gkd.workload.layouts import estimate, layout, shrunk

        inputs = shrunk.inputs_of(self._gkd, inputs)
        if self.job is not None and self.job.broken:
            self.end("ending the engine of the failed stage")
        if self.job is None:
            self.job = layout.open_job(self._gkd.settings, self._gkd, inputs)
        if self._estimate is None:  # based on the memory free before the first job
            self._estimate = estimate.Estimate(self.job.config, inputs)
        self._estimate.check(self._gkd)
        return self.job

    def end(self, step: str) -> None:
        """End the job there is, as the step that is reported."""
        if self.job is not None:
            self._gkd.step(step)
            self.job.close(for_another=True)
            self.job = None


KEEPER = pytest.StashKey[JobKeeper]()
SITE: pytest.StashKey[Site] = pytest.StashKey()


@pytest.fixture(scope="session")
def inputs(gkd: StageContext) -> Inputs:
    """Student, teacher and train files: the user's, or generated ones."""
    from pytest_gkd.workload.models import inputs

    return inputs.resolve(gkd.settings, gkd.run_dir)


@pytest.fixture(scope="session")
def _job_keeper(
    gkd: StageContext, request: pytest.FixtureRequest
) -> Iterator[JobKeeper]:
    keeper = JobKeeper(gkd)
    request.session.stash[KEEPER] = keeper
    yield keeper
    if keeper.job is not None:
        keeper.job.close()


@pytest.fixture
def job(_job_keeper: JobKeeper, inputs: Inputs) -> Job:
    """Trainer, teacher and rollout engine; each is created on first use."""
    return _job_keeper.open(inputs)


@pytest.fixture
def free_machine(gkd: StageContext, request: pytest.FixtureRequest) -> None:
    """The engine of the stages before is ended, with all it holds of the GPUs."""
    keeper = request.session.stash.get(KEEPER, None)
    if keeper is not None:
        keeper.end("ending the engine of the stages before")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Before any fixture of the stage, as the fault may be in their inputs.
    gkd = item.config.stash.get(CONTEXT, None)
    if gkd is None or not gkd.settings.inject:
        return
    fault = fault_specs.find(gkd.settings.inject)
    if fault.stage != gkd.stage:
        return
    from pytest_gkd.workload.inject.site import Site

    site = item.stash[SITE] = Site(gkd, fault)
    site.inject()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    finally:
        site = item.stash.get(SITE, None)
        if site is not None:
            site.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    keeper = item.session.stash.get(KEEPER, None)
    if report.failed and keeper is not None and keeper.job is not None:
        # After a failed push it may hold either the old or the new weights.
        keeper.job.broken = True
    return report
