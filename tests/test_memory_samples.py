"""The memory in use is sampled over a run: few samples, its peak among them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_plugin import Run

from pytest_gkd.processes import memory_samples
from pytest_gkd.processes.gpus import Card, Reader
from pytest_gkd.processes.memory_samples import MOST, MemorySamples


@dataclass
class Driver(Reader):
    """One that answers, once it may, that GPU 3 has 30 of its 80 bytes in use."""

    may_answer: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def cards(self) -> tuple[Card, ...]:
        self.asked += 1
        self.may_answer.wait(60)
        return (Card(3, "GPU-3", total_bytes=80, free_bytes=50),)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.may_answer.set()


def test_the_host_is_sampled_from_the_runs_start_and_not_more_often_than_due() -> None:
    samples = MemorySamples(10.0, with_gpus=False)
    for now in (10.5, 10.6, 11.0, 11.1):
        samples.on_tick(now)
    (host,) = samples.series
    assert (host["of"], host["at_s"]) == ("host", [0.5, 1.0])
    assert all(0 < used < host["total_bytes"] for used in host["used_bytes"])


def test_of_a_long_run_a_few_samples_stay_and_the_peak_is_one() -> None:
    samples = MemorySamples(0.0, with_gpus=False)
    for now in range(100 * MOST):
        samples.add("host", 100, 99 if now == 4321 else now % 7, float(now))
    (host,) = samples.series
    assert MOST / 2 <= len(host["at_s"]) == len(host["used_bytes"]) <= MOST
    assert host["at_s"] == sorted(host["at_s"])
    assert host["at_s"][host["used_bytes"].index(99)] == 4321


def test_samples_become_rarer_as_a_run_goes_on() -> None:
    samples = MemorySamples(0.0, with_gpus=False)
    for tick in range(40 * MOST):
        samples.on_tick(tick * memory_samples.EVERY_S)
    (host,) = samples.series
    assert len(host["at_s"]) <= MOST
    later = host["at_s"][-1] - host["at_s"][-2]
    assert later >= 32 * memory_samples.EVERY_S


def test_a_gpu_is_told_with_the_time_at_which_it_was_asked(driver: Driver) -> None:
    samples = MemorySamples(0.0, with_gpus=True, reader=driver)
    driver.may_answer.set()
    samples.on_tick(1.0)
    assert samples.asked is not None
    samples.asked.result(60)
    samples.on_tick(2.0)
    gpu = samples.series[1]
    assert gpu == {"of": 3, "total_bytes": 80, "at_s": [1.0], "used_bytes": [30]}


def test_a_driver_that_does_not_answer_is_asked_once_and_stops_nothing(
    driver: Driver,
) -> None:
    samples = MemorySamples(0.0, with_gpus=True, reader=driver)
    for now in (1.0, 2.0, 3.0):
        samples.on_tick(now)
    assert driver.asked == 1
    assert len(samples.series[0]["at_s"]) == 3


def test_a_driver_that_once_answered_with_an_error_is_asked_again(
    driver: Driver,
) -> None:
    samples = MemorySamples(0.0, with_gpus=True, reader=driver)
    samples.asked = Future()
    samples.asked.set_exception(OSError("NVML_ERROR_GPU_IS_LOST"))
    with pytest.raises(OSError, match="GPU_IS_LOST"):
        samples.on_tick(1.0)
    driver.may_answer.set()
    samples.on_tick(2.0)
    samples.on_tick(3.0)
    assert len(samples.series[0]["at_s"]) == 3
    assert driver.asked > 0


def test_an_error_of_a_driver_is_told_as_one_and_the_guardian_is_watched_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text("""
from pytest_gkd.processes.memory_samples import MemorySamples

def lost(self, now):
    raise OSError("NVML_ERROR_GPU_IS_LOST")

MemorySamples.on_tick = lost
""")
    (tmp_path / "test_probe.py").write_text("""
import time
import pytest

@pytest.mark.gkd_stage("brief")
def test_brief(gkd):
    time.sleep(1)
""")
    run = Run(tmp_path, "--gkd-stages=brief", "test_probe.py")
    assert run.outcomes() == {"brief": "passed"}
    (note,) = [one for one in run.report["notes"] if "GPU_IS_LOST" in one]
    told = "the memory in use could not be sampled: OSError: NVML_ERROR_GPU_IS_LOST"
    assert note == told


def test_without_gpus_no_driver_is_asked(driver: Driver) -> None:
    MemorySamples(0.0, with_gpus=False, reader=driver).on_tick(1.0)
    assert driver.asked == 0
