"""What is certain in the numbers of a run fails it; what is debatable is a note."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.metrics import findings, judging, series, statistics
from pytest_gkd.diagnosis.metrics.capacity import Capacity, capacity
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
GIB = 2**30
GPU = "perf/max_memory_allocated_gb"
Values = Callable[[int], float]


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    random.seed(11)


def noise(spread: float) -> float:
    return random.gauss(0, spread)


def run(**metrics: Values) -> list[str]:
    """The lines of a run; ``__`` in a name stands for a slash."""
    return [
        f"step:{n} - "
        + " - ".join(
            f"{name.replace('__', '/')}:{value(n):.9f}"
            for name, value in metrics.items()
        )
        for n in range(1, 121)
    ]


def seen(
    lines: list[str], total: int = 0, known: Capacity | None = None
) -> list[judging.NumberFinding]:
    collector = series.Collector()
    for number, line in enumerate(lines, 1):
        collector.take(line.encode(), number, 100 * number)
    return findings.find(collector.current(), total, known)


def rises(n: int) -> float:
    return 0.2 + 0.005 * n + noise(0.02)


def falls(n: int) -> float:
    return 0.8 - 0.005 * n + noise(0.02)


def flat(n: int) -> float:
    return 0.4 + noise(0.03)


def collapsing(n: int) -> float:
    return 0.9 * 0.975**n + abs(noise(0.005))


def lowered(n: int) -> float:
    return 300 * 0.97**n + 20


CERTAIN: dict[str, dict[str, Values]] = {
    "loss worse than it began, the gradients with it": {
        "loss": lambda n: 2 - n / 60 if n < 60 else 1 + (n - 60) / 15,
        "grad_norm": lambda n: 1 + abs(noise(0.1)) + 0.1 * max(0, n - 60),
    },
    "loss leaps when the rate leaps": {
        "loss": lambda n: 1.6 + abs(noise(0.05)) + 2 * (n > 50),
        "grad_norm": lambda n: 1 + abs(noise(0.1)),
        "lr": lambda n: 1e-4 if n <= 50 else 8e-3,
    },
    "entropy collapses, the reward falls": {
        "actor__entropy": collapsing,
        "critic__rewards__mean": falls,
    },
    "entropy collapses, the reward stays": {
        "actor__entropy": collapsing,
        "critic__rewards__mean": flat,
    },
    "entropy runs away, the reward falls": {
        "actor__entropy": lambda n: 0.5 + 0.03 * n,
        "critic__rewards__mean": falls,
    },
    "the reward loses what was learned": {
        "critic__rewards__mean": lambda n: (
            (0.2 + n / 100 if n < 60 else 1.4 - n / 100) + noise(0.02)
        )
    },
    "answers shrink to nothing, the reward stays": {
        "response_length__mean": lowered,
        "critic__rewards__mean": flat,
    },
    "all answers are cut off though the reward rises": {
        "response_length__clip_ratio": lambda n: min(1.0, 0.02 * n),
        "critic__rewards__mean": rises,
    },
    "a step takes three times as long": {
        "timing_s__step": lambda n: (10 if n < 60 else 31) + noise(0.3)
    },
    "the queue grows while fewer are served": {
        "Waiting": lambda n: 4.0 * n,
        "Running": lambda n: max(4, 64 - n),
    },
    "gradients explode": {"actor__grad_norm": lambda n: 1.2 ** max(0, n - 50)},
    "validation worse than at its first": {
        "eval_loss": lambda n: 2 - n / 60 if n < 60 else 1 + (n - 60) / 50
    },
    "two experts do all the work": {
        "max_vio__mean": lambda n: 0.3 + 0.02 * n + noise(0.02)
    },
}
DEBATABLE: dict[str, tuple[str, dict[str, Values]]] = {
    "generation takes 88 % of a step": (
        "train.slow",
        {
            "timing_s__gen": lambda n: 88 + noise(1),
            "timing_s__update_actor": lambda n: 10 + noise(0.3),
            "timing_s__step": lambda n: 100 + noise(1),
        },
    ),
    "a reward that runs code takes 60 %": (
        "train.slow",
        {
            "timing_s__reward": lambda n: 60 + noise(1),
            "timing_s__step": lambda n: 100 + noise(1),
        },
    ),
    "a step takes 1.7 times as long": (
        "train.slow",
        {"timing_s__step": lambda n: (10 if n < 60 else 17) + noise(0.3)},
    ),
    "entropy at 0.15 of its start while the reward rises": (
        "train.diverged",
        {
            "actor__entropy": lambda n: 0.9 * 0.984**n + noise(0.005),
            "critic__rewards__mean": rises,
        },
    ),
    "entropy of a student falls to its teacher's, with the loss": (
        "train.diverged",
        {"loss": lambda n: 2 * 0.98**n + 0.1, "actor__entropy": collapsing},
    ),
    "harder data: the loss leaps and is learned again": (
        "train.diverged",
        {
            "loss": lambda n: (
                (1.5 - n / 100 if n < 60 else 2.3 - n / 150) + noise(0.02)
            ),
            "grad_norm": lambda n: 1 + abs(noise(0.1)),
            "lr": lambda n: 1e-5,
        },
    ),
    "harder data: the loss ends above its start, all else as before": (
        "train.diverged",
        {
            "loss": lambda n: 0.6 + 0.007 * n + noise(0.03),
            "grad_norm": lambda n: 1 + abs(noise(0.1)),
            "lr": lambda n: 1e-5,
        },
    ),
    "the loss rises with the reward": (
        "train.diverged",
        {
            "loss": lambda n: 0.5 + 0.02 * n + abs(noise(0.02)),
            "critic__rewards__mean": rises,
        },
    ),
    "gradients grow while the reward rises": (
        "train.diverged",
        {
            "actor__grad_norm": lambda n: 0.3 * 1.03**n,
            "critic__rewards__mean": rises,
        },
    ),
    "answers get shorter while the reward rises": (
        "train.diverged",
        {"response_length__mean": lowered, "critic__rewards__mean": rises},
    ),
    "more answers are cut off while the reward rises": (
        "train.diverged",
        {
            "response_length__clip_ratio": lambda n: min(0.7, 0.006 * n),
            "critic__rewards__mean": rises,
        },
    ),
    "validation turns up a little": (
        "train.diverged",
        {"eval_loss": lambda n: 2 - n / 60 if n < 60 else 1 + (n - 60) / 180},
    ),
    "more requests come than are served": (
        "vllm.kv-cache",
        {"Waiting": lambda n: 4.0 * n, "Running": lambda n: 64.0},
    ),
    "the experts' balance doubles": (
        "train.moe",
        {"max_vio__mean": lambda n: 0.3 + 0.004 * n + noise(0.01)},
    ),
    "harder prompts cost a third of what was learned": (
        "train.diverged",
        {
            "critic__rewards__mean": lambda n: (
                min(0.8, 0.2 + n / 100) - 0.004 * max(0, n - 70) + noise(0.01)
            )
        },
    ),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_what_is_certainly_broken_fails_the_run(name: str) -> None:
    told = seen(run(**CERTAIN[name]))
    assert told
    assert all(one.certain for one in told), told


@pytest.mark.parametrize("name", DEBATABLE)
def test_what_is_debatable_is_noted(name: str) -> None:
    cause, metrics = DEBATABLE[name]
    told = seen(run(**metrics))
    assert [(one.cause, one.certain) for one in told] == [(cause, False)], told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("training__rollout_probs_diff_mean", lambda n: 0.0005 + 7e-5 * n),
        ("training__rollout_probs_diff_mean", lambda n: 0.006 + 1e-4 * n),
        ("rollout_corr__k3_kl", lambda n: 1e-4 + 3e-5 * n),
        ("rollout_corr__k3_kl", lambda n: 1e-4 + 1e-4 * n),
        ("train__train_rollout_logprob_abs_diff", lambda n: 0.01 + 5e-4 * n),
        ("policy__rollout_train_logprobs_abs_diff_mean", lambda n: 0.03 + 5e-4 * n),
        ("token_mult_prob_error", lambda n: 1.005 + 3e-4 * n),
        ("Generation_KL_Error", lambda n: 1e-3 + 5e-5 * n),
        ("mismatch_kl", lambda n: 5e-4 + 4e-5 * n),
        ("training__rollout_actor_probs_pearson_corr", lambda n: 0.999 - 5e-4 * n),
        ("training__rollout_actor_probs_pearson_corr", lambda n: 0.995 - noise(0.01)),
    ],
)
def test_what_kernels_differ_by_is_no_lost_weight(name: str, value: Values) -> None:
    assert seen(run(**{name: value})) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("training__rollout_probs_diff_mean", lambda n: 0.003 + 0.001 * n),
        ("rollout_corr__k3_kl", lambda n: 1e-4 + 0.002 * n),
        ("train__train_rollout_logprob_abs_diff", lambda n: 0.01 + 0.006 * n),
        ("token_mult_prob_error", lambda n: 1.01 + 0.004 * n),
        ("mismatch_kl", lambda n: 5e-4 + 0.001 * n),
        ("vllm_kl", lambda n: -1e-4 - 0.002 * n),
        ("training__rollout_actor_probs_pearson_corr", lambda n: 0.999 - 0.003 * n),
    ],
)
def test_what_grows_beyond_numerics_is(name: str, value: Values) -> None:
    (one,) = seen(run(**{name: value}))
    assert (one.cause, one.certain) == ("sync.not-applied", True)


def test_engines_that_differ_from_the_first_step_on_are_noted() -> None:
    name = "training__rollout_probs_diff_mean"
    (one,) = seen(run(**{name: lambda n: 0.03 + noise(0.001)}))
    assert (one.cause, one.certain) == ("vllm.wrong-output", False)
    assert "precision" in one.text


@pytest.mark.parametrize(
    "name",
    [
        *("loss", "eval_loss", "actor__grad_norm", "actor__entropy", "max_vio__mean"),
        *("Waiting", "loss_scale", "timing_s__step", "response_length__mean"),
        *("rollout_corr__k3_kl", "critic__rewards__mean", "lm_loss", GPU),
        *("training__rollout_actor_probs_pearson_corr", "memory_rss"),
    ],
)
@pytest.mark.parametrize("first", [0.0, -0.0, 1e-12])
def test_a_metric_that_begins_at_0_does_not_grow_without_end(
    name: str, first: float
) -> None:
    """From nothing, or from next to it, to next to nothing."""

    def value(n: int) -> float:
        return first if n < 40 else 1e-6 * n

    assert seen(run(**{name: value})) == []


def test_a_queue_that_begins_empty_and_grows_is_one() -> None:
    (one,) = seen(run(Waiting=lambda n: max(0.0, 3.0 * (n - 30))))
    assert one.cause == "vllm.kv-cache"


CARDS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.1 GiB is free.": 79.15 * GIB,
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; "
    "22 GiB already allocated)": 23.69 * GIB,
    "ValueError: Free memory on device cuda:0 (30.98/79.25 GiB) on startup": 79.25
    * GIB,
    "the current vLLM instance can use total_gpu_memory (79.10GiB) x "
    "gpu_memory_utilization (0.90) = 71.19GiB": 79.10 * GIB,
    "| N/A   34C    P0   120W / 700W |  61234MiB / 81559MiB |     97%  Default |": 81559
    * 2**20,
}


@pytest.mark.parametrize("text", CARDS)
def test_a_log_tells_how_much_memory_a_card_has(text: str) -> None:
    found = capacity(text.encode())
    assert found.card == pytest.approx(CARDS[text])
    assert found.host is None


def test_ray_tells_how_much_the_host_has() -> None:
    text = b"Memory on the node (IP: 10.0.0.1) was 57.02GB / 60.00GB (0.950363)"
    assert capacity(text) == Capacity(None, 60.0 * GIB)


def memory(n: int) -> float:
    return 30 + 0.3 * n + noise(0.05)


def test_the_step_at_which_memory_is_full_has_an_interval() -> None:
    (one,) = seen(run(**{GPU: memory}), 2400, Capacity(80.0 * GIB))
    assert one.certain
    assert "the 80 GiB that there are are full at about step 16" in one.text
    step, between = one.text.split("about step ")[1].split(" (")[:2]
    soonest, latest = map(int, between.rstrip(")").split(" to "))
    assert 160 <= soonest <= int(step) <= latest <= 175
    assert soonest <= 167 <= latest  # 30 + 0.3 n = 80


def test_memory_that_fits_to_the_end_is_a_note() -> None:
    (one,) = seen(run(**{GPU: memory}), 150, Capacity(80.0 * GIB))
    assert not one.certain
    assert "at step 150 it still fits into the 80 GiB" in one.text


def test_without_a_capacity_the_growth_is_told_per_1000_steps() -> None:
    (one,) = seen(run(**{GPU: memory}), 2400)
    assert one.certain
    assert "300 GiB per 1,000 steps" in one.text
    (one,) = seen(run(perf__cpu_memory_used_gb=memory), 2400, Capacity(80.0 * GIB))
    assert "per 1,000 steps" in one.text  # which is not the card's


def test_the_interval_of_a_slope_holds_the_slope() -> None:
    steps = list(range(60))
    held = 0
    for _ in range(100):
        values = [0.5 * n + noise(3) for n in steps]
        low, high = statistics.slope_interval(steps, values)
        assert low <= statistics.slope(steps, values) <= high
        held += low <= 0.5 <= high
    assert 80 <= held <= 98
    assert statistics.slope_interval([1], [1]) == (0.0, 0.0)


NOTED = run(**DEBATABLE["generation takes 88 % of a step"][1])


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("Training Progress:   5%|▋| 120/2400 [02:20<39:40, 35.01s/it]", "running"),
        ("Final validation metrics: {}", "healthy"),
    ],
)
def test_notes_stand_under_a_sound_verdict_in_text_and_json(
    last: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join([*NOTED, last]))
    assert command.main(["diagnose", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(verdict)
    note = "  note  timing_s/gen: takes 88% of a step, 8"
    assert note in text
    assert text.count("[train.slow]") == 1
    assert command.main(["diagnose", str(path), "--format=json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (one,) = told["notes"]
    assert one.pop("text").startswith("timing_s/gen: takes 88% of a step")
    assert one == {
        "cause": "train.slow",
        "metric": "timing_s/gen",
        "step": 1,
        "file": str(path),
        "line": 1,
    }


def test_a_failed_run_tells_its_cause_and_no_notes() -> None:
    lines = [*NOTED, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2"]
    log = log_file.read(io.BytesIO("\n".join(lines).encode()), "a", 0, CATALOGUE)
    found = logs.judge([log], CATALOGUE)
    assert found.verdict == "failed"
    assert len(found.notes) == 1
    assert "note" not in render.log_text(found)
