"""Shapes of numbers that show a failure, each with one alike that a sound run shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from pytest_gkd.diagnosis.metrics import findings, judging, series

Values = Callable[[int], float]


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    random.seed(5)


def noise(spread: float) -> float:
    return random.gauss(0, spread)


def seen(steps: int = 120, **metrics: Values) -> list[judging.NumberFinding]:
    """What a run of so many steps shows; ``__`` in a name stands for a slash."""
    collector = series.Collector()
    for n in range(1, steps + 1):
        line = f"step:{n}" + "".join(
            f" - {name.replace('__', '/')}:{value(n):.9f}"
            for name, value in metrics.items()
        )
        collector.take(line.encode(), n, 100 * n)
    return findings.find(collector.current(), collector.total)


def verdicts(found: Sequence[judging.NumberFinding]) -> list[tuple[str, bool]]:
    return [(one.cause, one.certain) for one in found]


def learned(n: int) -> float:
    return 1.2 + 1.4 / (1 + n / 9) + noise(0.04)


def peaks(height: float, every: int, width: int = 3) -> Values:
    return lambda n: height if n % every < width and n > 12 else learned(n)


def once_more(level: float, at: int = 60) -> Values:
    return lambda n: learned(n) if n < at else level / 2.6 * learned(n - at)


SIX = [1.31, 1.62, 2.35, 3.9, 6.4, 9.8]
# As of harder data: gradients and the rate stay as they were.
STEADY: dict[str, Values] = {
    "grad_norm": lambda n: 1 + noise(0.1),
    "lr": lambda n: 1e-5,
}
SHAPES: dict[str, tuple[int, dict[str, Values]]] = {
    "six that rise": (6, {"loss": lambda n: SIX[n - 1]}),
    "six that rise less": (6, {"loss": lambda n: 1 + 0.2 * n}),
    "gradients of six": (6, {"grad_norm": lambda n: 3.0**n, "loss": lambda n: 1 / n}),
    "back at the start": (120, {"loss": once_more(2.6)}),
    "some harder data": (120, {"loss": once_more(2.28)}),
    "as by guessing": (60, {"loss": lambda n: 10.4 + noise(0.05)}),
    "from guessing": (60, {"loss": lambda n: 10.4 - n / 50 + noise(0.05)}),
    "peaks": (300, {"loss": peaks(8.0, 40)}),
    "peaks near 0": (
        300,
        {"loss": lambda n: 2 / n if n < 30 or n % 40 else 0.3},
    ),
    "three peaks": (300, {"loss": peaks(8.0, 90)}),
    "far up": (120, {**STEADY, "loss": lambda n: 4 + 5 / n + 5 * (n > 60)}),
    "up": (120, {**STEADY, "loss": lambda n: 4 + 5 / n + 2 * (n > 60)}),
    "divergence": (120, {"kl": lambda n: 0.01 * 1.07**n}),
    "some divergence": (120, {"kl": lambda n: 0.01 * n}),
    "clipped": (60, {"actor__pg_clipfrac": lambda n: 0.01 if n < 30 else 0.8}),
    "clipped some": (60, {"actor__pg_clipfrac": lambda n: 0.01 if n < 30 else 0.2}),
    "validation lost": (60, {"val__acc": lambda n: 0.4 if n < 30 else 0.01}),
    "validation noisy": (60, {"val__acc": lambda n: 0.4 + noise(0.1)}),
    "validation nan": (20, {"val_loss": lambda n: 1.0 if n < 10 else float("nan")}),
    "skipped": (60, {"skipped": lambda n: max(0, n - 20)}),
    "skipped some": (60, {"skipped": lambda n: n // 3}),
    "dead experts": (60, {"moe__dead_experts": lambda n: n // 3}),
    "live experts": (60, {"moe__dead_experts": lambda n: min(1, n % 3)}),
    "less free": (60, {"gpu_free_gb": lambda n: 49 - 0.75 * n}),
    "less free at first": (60, {"gpu_free_gb": lambda n: max(20, 49 - 2 * n)}),
    "drafts": (60, {"draft_acceptance_rate": lambda n: 0.7 * 0.95**n}),
    "more drafts": (60, {"draft_acceptance_rate": lambda n: 0.7 - n / 600}),
    "nan again": (90, {"loss": lambda n: learned(n) if n % 4 else float("nan")}),
    "nan once": (90, {"loss": lambda n: learned(n) if n % 40 else float("nan")}),
    "rate": (90, {"lr": lambda n: 1e-5 * 1.06**n}),
    "warm-up": (90, {"lr": lambda n: 1e-7 * n}),
    "older": (90, {"sample_staleness": lambda n: 1 + n // 3}),
    "old": (90, {"sample_staleness": lambda n: 4.0}),
    "tokens": (60, {"tok__s": lambda n: (900 if n < 20 else 150) + noise(9)}),
    "tokens for once": (60, {"tok__s": lambda n: 150 if 20 < n < 30 else 900.0}),
    "a leap": (60, {"reward": lambda n: n / 90 + noise(0.02) if n < 30 else 1.0}),
    "solved": (60, {"reward": lambda n: min(1.0, 0.3 + n / 40)}),
    "cut off": (60, {"len__truncated": lambda n: 0.97 + noise(0.01)}),
    "lengths of those cut off": (60, {"len__truncated": lambda n: 1022 + noise(1)}),
    "a small loss": (20, {"val_loss": lambda n: 0.1 / n if n < 12 else n / 1000}),
}  # fmt: skip
DIVERGES, LEAKS = "train.diverged", "train.memory-leak"


@pytest.mark.parametrize(
    ("shape", "cause", "certain"),
    [
        ("six that rise", DIVERGES, False),
        ("gradients of six", DIVERGES, False),
        ("back at the start", DIVERGES, False),
        ("as by guessing", DIVERGES, False),
        ("peaks", DIVERGES, False),
        ("far up", DIVERGES, True),
        ("up", DIVERGES, False),
        ("divergence", DIVERGES, False),
        ("clipped", DIVERGES, False),
        ("validation lost", DIVERGES, False),
        ("validation nan", "train.nan", True),
        ("skipped", "train.nan", True),
        ("dead experts", "train.moe", False),
        ("less free", LEAKS, False),
        ("drafts", "train.slow", False),
        ("nan again", "train.nan", False),
        ("rate", DIVERGES, False),
        ("older", "sync.not-applied", False),
        ("tokens", "train.slow", False),
        ("a leap", DIVERGES, False),
        ("a small loss", DIVERGES, False),
        ("cut off", "tokenizer.eos-token", True),
    ],
)
def test_a_shape_is_told(shape: str, cause: str, certain: bool) -> None:
    steps, metrics = SHAPES[shape]
    assert verdicts(seen(steps, **metrics)) == [(cause, certain)]


@pytest.mark.parametrize(
    "shape",
    [
        *("six that rise less", "some harder data", "from guessing", "three peaks"),
        *("peaks near 0", "nan once", "warm-up", "old", "tokens for once"),
        *("some divergence", "clipped some", "validation noisy", "skipped some"),
        *("live experts", "less free at first", "more drafts", "solved"),
        "lengths of those cut off",
    ],
)
def test_a_shape_of_a_sound_run_is_not(shape: str) -> None:
    steps, metrics = SHAPES[shape]
    assert seen(steps, **metrics) == []


def engine(n: int, tokens: float, running: int, waiting: int = 0) -> str:
    return (
        f"Engine 000: Avg prompt throughput: 9.1 tokens/s, Avg generation throughput: "
        f"{tokens:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs"
    )


def of_engine(line: Callable[[int], str]) -> list[tuple[str, bool]]:
    collector = series.Collector()
    for n in range(1, 101):
        collector.take(line(n).encode(), n, 100 * n)
    return verdicts(findings.find(collector.current()))


def test_an_engine_that_generates_ever_less_for_as_many_requests_is_noted() -> None:
    found = of_engine(lambda n: engine(n, 2400 * 0.97**n, 40 + n % 3))
    assert found == [("train.slow", False)]
    assert of_engine(lambda n: engine(n, 2400 * 0.97**n, 1 + int(40 * 0.97**n))) == []


def test_a_queue_that_grows_while_ever_less_is_generated_is_certain() -> None:
    found = of_engine(lambda n: engine(n, 2400 * 0.97**n, 40, 4 * n))
    assert ("vllm.kv-cache", True) in found
    found = of_engine(lambda n: engine(n, 2400 + n % 5, 40, 4 * n))
    assert found == [("vllm.kv-cache", False)]


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"loss": lambda n: 9 / (n + 3), "ot_loss": lambda n: 0.01 * 1.2**n}, DIVERGES),
        ({"reward": lambda n: n / 90, "format__reward": lambda n: 1.0}, ""),
        (
            {"grad_norm": lambda n: 1 + noise(0.1), "grad_norm__vision": lambda n: 0.0},
            "train.no-grad",
        ),
        ({"tower_mem_mb": lambda n: 900.0 + 90 * n}, LEAKS),
    ],
)
def test_of_a_part_or_by_the_words_of_a_name_nothing_is_certain(
    metrics: dict[str, Values], cause: str
) -> None:
    told = verdicts(seen(40, **metrics))
    assert told == ([(cause, False)] if cause else [])


@pytest.mark.parametrize(
    ("line", "certain"),
    [
        ("step {n} loss {x:.5f} time 2.04s", True),
        ("layer {n} mlp.down_proj: loss {x:.5f} time 2.04s", False),
        ("| {n} | mlp.down_proj | {x:.5f} | 256 | 2.1 |", False),
    ],
)
def test_layers_and_rows_that_count_no_steps_are_no_time(
    line: str, certain: bool
) -> None:
    collector = series.Collector()
    rows = ["| layer | module | loss | samples | time |"]
    rows += [line.format(n=n, x=0.02 * 1.25**n) for n in range(30)]
    for number, row in enumerate(rows, 1):
        collector.take(row.encode(), number, 100 * number)
    (found,) = findings.find(collector.current())
    assert (found.cause, found.certain) == (DIVERGES, certain)
