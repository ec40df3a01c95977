"""The numbers that a run prints: read in every form, judged over time."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.diagnosis.metrics import findings, series, statistics
from pytest_gkd.diagnosis.metrics.lines import Reading, read
from pytest_gkd.diagnosis.metrics.roles import role
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
MEGATRON = (
    " [2026-11-21 10:00:00] iteration       10/     100 | consumed samples: 1280 "
    "| elapsed time per iteration (ms): 1234.5 | lm loss: 2.345678E+00 | grad norm: 1 |"
)
PRIME_RL = (
    "10:00:01 SUCCESS Step 12 |   3.21s | Loss 0.1234 | Grad. Norm 0.5 | LR 1.00e-06 "
    "| Throughput 1234 tokens/s | MFU 12.5% | Peak Mem. 12.0 GiB"
)
VLLM = (
    "INFO 11-21 10:00:00 [loggers.py:116] Engine 000: Avg prompt throughput: 12.3 "
    "tokens/s, Avg generation throughput: 45.6 tokens/s, Running: 3 reqs, Waiting: 7 "
    "reqs, GPU KV cache usage: 1.5%, Prefix cache hit rate: 0.0%"
)
DEEPSPEED = (
    "[2026-11-21 10:00:00,123] [INFO] [timer.py:264:stop] epoch=0/micro_step=10/"
    "global_step=5, CurrSamplesPerSec=4.1, MemAllocated=1.25GB"
)


@pytest.mark.parametrize(
    ("line", "step", "total", "values"),
    [
        (
            "\x1b[36m(TaskRunner pid=12)\x1b[0m step:12 - actor/loss:0.5 - "
            "perf/mfu/actor:np.float64(0.31) - perf/max_memory_allocated_gb:1.5",
            *(12, None),
            {
                "actor/loss": 0.5,
                "perf/mfu/actor": 0.31,
                "perf/max_memory_allocated_gb": 1.5 * 2**30,
            },
        ),
        ("{'loss': 0.5, 'grad_norm': 1.2}", *(None, None), {"grad_norm": 1.2}),
        ("{'loss': '0.5', 'learning_rate': '1e-06'}", *(None, None), {"loss": 0.5}),
        ('{"step": 3, "loss": 0.25, "lr": 1e-5}', *(3, None), {"lr": 1e-5}),
        ("step 12: {'train/loss': 0.31}", *(12, None), {"train/loss": 0.31}),
        (
            "{'loss': 0.1, 'memory(GiB)': 2.0, 'global_step/max_steps': '3/10'}",
            *(3, 10),
            {"memory(GiB)": 2.0 * 2**30},
        ),
        (
            MEGATRON,
            *(10, 100),
            {"lm loss": 2.345678, "elapsed time per iteration (ms)": 1.2345},
        ),
        (
            PRIME_RL,
            *(12, None),
            {"step_time": 3.21, "Peak Mem": 12 * 2**30, "MFU": 0.125, "LR": 1e-6},
        ),
        (VLLM, *(None, None), {"Waiting": 7.0, "GPU KV cache usage": 0.015}),
        (DEEPSPEED, *(5, None), {"MemAllocated": 1.25 * 2**30}),
        ("steps: 10 loss: 1.25 iter time (s): 0.5", *(10, None), {"loss": 1.25}),
        ("  • Total step time: 12.5s", *(None, None), {"Total step time": 12.5}),
        ("======== Step 3/100 ========", *(3, 100), {}),
        ("│ actor/loss/avg │  1.5e-01 │", *(None, None), {"actor/loss/avg": 0.15}),
        (
            " 37%|███▋   | 37/100 [01:23<02:21,  2.25s/it, loss=0.5]",
            *(37, 100),
            {"s/it": 2.25, "loss": 0.5},
        ),
        ("Training:  1%| | 1/64 [00:02<02:21, 4.00it/s]", *(1, 64), {"s/it": 0.25}),
        (" 3%| | 3/100 [00:12<06:30, 1.2.3s/it]", *(None, None), {}),
        ("step:7 - actor/lr:0.000 - actor/loss:0.5", *(7, None), {"actor/loss": 0.5}),
        ("Loading shards: 100%|██| 4/4 [00:02<00:00, 2.00it/s]", *(None, None), {}),
        ("Loading: 100% Completed | 4/4 [00:02<00:00, 2.00it/s]", *(None, None), {}),
        ("loss at 10:00:00 was not logged", *(None, None), {}),
        ("passo 3  kd=1.58 gnorm=0.9", *(3, None), {"kd": 1.58, "gnorm": 0.9}),
        ("Schritt 3/40: loss=0.5", *(3, 40), {"loss": 0.5}),
        ("étape 3, loss 0.5", *(3, None), {"loss": 0.5}),
        ("步 3 loss=0.5", *(3, None), {"loss": 0.5}),
        ("ステップ: 3 loss=0.5", *(3, None), {"loss": 0.5}),
    ],
)  # fmt: skip
def test_a_line_is_read_in_each_form(
    line: str, step: int | None, total: int | None, values: dict[str, float]
) -> None:
    found = read(line.encode())
    assert (found.step, found.total) == (step, total)
    assert values.items() <= found.values.items()
    assert values or not found.values


def test_what_is_no_number_is_read_as_such() -> None:
    found = read(b"step:3 - actor/loss:nan - actor/grad_norm:inf")
    assert math.isnan(found.values["actor/loss"])
    assert found.values["actor/grad_norm"] == math.inf


@pytest.mark.parametrize(
    "line",
    [b"a.b/" * 8000, b"| a" * 9000, b"loss: " * 5000, b"1,111," * 5000, b"a (b" * 8000],
)
def test_a_hostile_line_has_no_numbers(line: bytes) -> None:
    assert read(line) == Reading({})


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("actor/grad_norm", "gradient norm"),
        ("Grad. Norm", "gradient norm"),
        ("eval_loss", "validation loss"),
        ("eval_runtime", "other"),
        ("timing/reward", "part of the step"),
        ("train/loss", "loss"),
        ("actor/pg_loss", "policy loss"),
        ("response_length/clip_ratio", "truncated"),
        ("mean_reward", "reward"),
        ("min_reward", "other"),
        ("train/max_score", "other"),
        ("generate/avg_num_tokens", "response length"),
        ("train/lr-pg_0", "learning rate"),
        ("timing/step_total", "step time"),
        ("timeperf/rollout", "part of the step"),
        ("ppo_actor/kl_rewards/avg", "other"),
        ("critic/vf_loss", "value loss"),
        ("logps/chosen", "likelihood of the chosen"),
        ("rewards/accuracies", "preference accuracy"),
        ("response_length/mean", "response length"),
        ("completions/mean_length", "response length"),
        ("training/rollout_probs_diff_mean", "disagreement"),
        ("training/rollout_actor_probs_pearson_corr", "agreement"),
        ("critic/rewards/mean", "reward"),
        ("reward_std", "spread"),
        ("timing_s/step", "step time"),
        ("timing_s/gen", "part of the step"),
        ("perf/max_memory_allocated_gb", "memory"),
    ],
)
def test_a_metric_is_known_by_its_name(name: str, measures: str) -> None:
    assert role(name) == measures


def collected(*lines: str) -> series.Collector:
    collector = series.Collector()
    for number, line in enumerate(lines, 1):
        collector.take(line.encode(), number, 100 * number)
    return collector


def only(collector: series.Collector, name: str) -> series.Series:
    (found,) = (one for one in collector.series() if one.name == name)
    return found


def test_a_line_without_a_step_has_that_of_the_bar() -> None:
    bar = " 10%| | {}/100 [00:10<01:30, 1.0s/it]"
    found = collected(bar.format(10), "{'loss': 1.0}", bar.format(20), "{'loss': 2.0}")
    assert only(found, "loss").steps == [10, 20]
    assert (found.last_step, found.total, found.pace_s) == (20, 100, 1.0)


def test_a_bar_of_fewer_steps_is_not_that_of_the_run() -> None:
    bars = "| 5/100 [00:10<01:30, 1.0s/it]", "| 4/4 [00:01<00:00, 4.0it/s]"
    assert collected(*bars).last_step == 5


def test_lines_without_any_step_are_counted() -> None:
    assert only(collected("{'loss': 1.0}", "{'loss': 2.0}"), "loss").steps == [1, 2]


def test_a_run_that_starts_again_replaces_the_steps_that_it_repeats() -> None:
    lines = [f"step:{step} - loss:{step}.5" for step in (1, 2, 3, 4, 3, 4)]
    found = only(collected(*lines), "loss")
    assert found.steps == [1, 2, 3, 4]
    assert [line for line, _ in found.places] == [1, 2, 5, 6]


def test_a_bar_that_begins_anew_in_each_epoch_goes_on() -> None:
    bar = "Epoch {}:  50%|▊| {}/20 [03:53<00:41, 13.76s/it, train_loss={}]"
    found = collected(*(bar.format(n // 20, n % 20, n / 8) for n in range(1, 60)))
    assert only(found, "train_loss").steps == list(range(1, 60))


def test_processes_have_series_of_their_own() -> None:
    found = collected("(A pid=1) step:1 - loss:1.0", "(A pid=2) step:1 - loss:2.0")
    losses = (one.values for one in found.series() if one.name == "loss")
    assert sorted(losses) == [[1.0], [2.0]]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MOST_NAMES", 10)
    monkeypatch.setattr(series, "MOST_POINTS", 16)
    found = collected(*(f"step:{n} - loss:{n}.5 - m{n}:1.0" for n in range(1, 100)))
    assert len(found.series()) == 10
    loss = only(found, "loss")
    assert len(loss) <= 16
    assert (loss.steps[0], loss.steps[-1]) == (1, 99)


def test_statistics_are_those_of_their_definitions() -> None:
    assert statistics.deviation([1, 2, 3, 4, 100]) == pytest.approx(1.4826)
    assert statistics.slope([0, 1, 2, 3], [0, 2, 4, 90]) == pytest.approx(2.0, abs=30)
    assert statistics.slope([0, 2, 4, 6], [1, 2, 3, 4]) == 0.5
    assert statistics.trend(list(range(10))) == pytest.approx(45 / math.sqrt(125))
    assert statistics.trend([3, 3, 3, 3]) == 0
    place, chance = statistics.change([1.0] * 10 + [2.0] * 10)
    assert place == 10
    assert chance == pytest.approx(2 * 19 / math.comb(20, 10))
    place, chance = statistics.change([1.0] * 10 + [2.0] * 9 + [1.0])
    assert place == 10
    assert chance == pytest.approx(2 * math.exp(-6 * 90**2 / (20**3 + 20**2)))


def judged(value: Callable[[int], float], name: str, steps: int = 100) -> list[str]:
    lines = [f"step:{n} - {name}:{value(n):.9f}" for n in range(1, steps + 1)]
    return [one.cause for one in findings.find(collected(*lines).series())]


GPU = "perf/max_memory_allocated_gb"


def noise(spread: float) -> float:
    return random.gauss(0, spread)


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    random.seed(7)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("loss", lambda n: 1 + abs(noise(0.05)) + max(0, n - 60) / 9, "train.diverged"),
        ("loss", lambda n: 1 + noise(0.05) + 4 * (n > 20) - n / 90, "train.diverged"),
        ("loss", lambda n: math.nan if n > 60 else 1.0, "train.nan"),
        ("actor/grad_norm", lambda n: 0.0 if n > 40 else 1.0, "train.no-grad"),
        ("actor/grad_norm", lambda n: 1.2 ** max(0, n - 50), "train.diverged"),
        ("actor/entropy", lambda n: 0.8 * 0.94**n, "train.diverged"),
        ("actor/entropy", lambda n: 0.8 + 0.05 * n, "train.diverged"),
        (
            "training/rollout_probs_diff_mean",
            lambda n: 0.005 + 0.001 * n + noise(1e-4),
            "sync.not-applied",
        ),
        (
            "training/rollout_actor_probs_pearson_corr",
            lambda n: 0.999 - 0.003 * n,
            "sync.not-applied",
        ),
        (
            "perf/max_memory_allocated_gb",
            lambda n: 30 + 0.3 * n + noise(0.1),
            "train.memory-leak",
        ),
        ("timing_s/step", lambda n: (10 if n < 50 else 25) + noise(0.5), "train.slow"),
        ("critic/rewards/mean", lambda n: 0.25, "train.diverged"),
        ("response_length/clip_ratio", lambda n: min(1, 0.01 * n), "train.diverged"),
        ("response_length/mean", lambda n: 300 * 0.95**n + 1, "train.diverged"),
        ("eval_loss", lambda n: 2 - n / 50 if n < 50 else n / 50, "train.diverged"),
        ("critic/rewards/mean", lambda n: 0.8 - 0.004 * n, "train.diverged"),
        ("actor/lr", lambda n: 1e-6 if n < 60 else 0.0, "train.no-grad"),
        ("loss_scale", lambda n: max(1.0, 2048 / 2 ** max(0, n - 40)), "train.nan"),
        ("Waiting", lambda n: 4.0 * n, "vllm.kv-cache"),
        ("response_length/clip_ratio", lambda n: 1.0, "tokenizer.eos-token"),
        ("max_vio/mean", lambda n: 0.2 + 0.01 * n + noise(0.01), "train.moe"),
    ],
)  # fmt: skip
def test_numbers_that_go_wrong_name_a_cause(
    name: str, value: Callable[[int], float], cause: str
) -> None:
    assert judged(value, name) == [cause]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", lambda n: 2 * 0.98**n + 0.3 + abs(noise(0.05))),
        ("loss", lambda n: 9.0 if n == 50 else 1 + abs(noise(0.1))),  # an outlier
        ("loss", lambda n: 1 + abs(noise(0.1)) + (3 if 40 < n < 60 else 0)),  # recovers
        ("loss", lambda n: math.nan if n == 50 else 1.0),  # a step that was skipped
        ("actor/grad_norm", lambda n: 1 + abs(noise(0.5))),
        ("actor/entropy", lambda n: 0.8 - 0.004 * n + noise(0.02)),
        ("training/rollout_probs_diff_mean", lambda n: 0.005 + abs(noise(0.002))),
        ("perf/max_memory_allocated_gb", lambda n: min(30 + n * 0.5, 35) + noise(0.01)),
        ("timing_s/step", lambda n: 60 if n == 1 else 10 + noise(0.5)),  # compilation
        ("timing_s/step", lambda n: 40 if n % 20 == 0 else 10 + noise(0.5)),  # saving
        ("critic/rewards/mean", lambda n: min(1.0, 0.1 + 0.01 * n + noise(0.03))),
        ("response_length/mean", lambda n: 300 + noise(40)),
        ("eval_runtime", lambda n: 1 + n),
        ("actor/lr", lambda n: 1e-6 * (1 - n / 100)),  # 0 at the very end
        ("loss_scale", lambda n: 2048 if n < 5 else 512),
        ("Waiting", lambda n: 9 * (n % 7)),
    ],
)  # fmt: skip
def test_numbers_that_only_look_bad_name_none(
    name: str, value: Callable[[int], float]
) -> None:
    assert judged(value, name) == []


def test_steps_that_become_slower_after_a_slow_start_are_told() -> None:
    def seconds(n: int) -> float:
        return 18 - n / 3 if n < 20 else 11.5 + (n - 20) / 3.7

    assert judged(seconds, "timing_s/step", 70) == ["train.slow"]


# Some ten values each, as of a run that logs every fifth step.
FEW = [
    ("timing_s/step", "train.slow", [17, 12, 14, 17, 12, 12, 12, 45, 44, 43, 40, 42]),
    (
        *("critic/score/mean", "train.diverged"),
        [0.54, 0.53, 0.58, 0.62, 0.65, 0.69, 0.72, 0.6, *[0.5] * 7],
    ),
    ("response_length/clip_ratio", "train.diverged", [0, 0, 0.1, *[1] * 5]),
    (
        *("training/rollout_probs_diff_mean", "sync.not-applied"),
        [0.003, 0.002, 0.002, 0.29, 0.31, 0.22, 0.18],
    ),
    (
        *("training/rollout_actor_probs_pearson_corr", "sync.not-applied"),
        [1, 1, 1, 0.3, 0.26, 0.57, 0.54, 0.6],
    ),
    ("response_length/mean", "tokenizer.eos-token", [1024] * 6),
    ("sampling/sampling_logp_difference/mean", "vllm.wrong-output", [9.8, 9.9, 9.8]),
    ("train/loss", "train.nan", [6.1, 6.0, math.nan, math.nan]),
]


@pytest.mark.parametrize(("name", "cause", "values"), FEW)
def test_a_large_change_needs_few_values(
    name: str, cause: str, values: list[float]
) -> None:
    assert judged(lambda n: values[n - 1], name, len(values)) == [cause]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timing_s/step", [17, 12, 14, 17, 12, 12, 12, 16, 17, 16, 15, 16]),
        ("timing_s/step", [60, 12, 14, 17, 12, 12, 12, 45, 14, 12]),
        ("critic/score/mean", [0, 0, 0.1, *[0] * 6]),
        ("critic/score/mean", [0] * 9),
        ("response_length/clip_ratio", [0, 0, 0.1, 0, 0, 1, 1, 1]),
        ("training/rollout_probs_diff_mean", [0.003, 0.002, 0.002, *[0.02] * 4]),
        ("training/rollout_actor_probs_pearson_corr", [1, 1, 1, *[0.93] * 5]),
        ("sampling/sampling_logp_difference/mean", [9.8, 9.9]),
        ("sampling/sampling_logp_difference/mean", [0.8, 0.9, 0.8, 0.9]),
        ("train/loss", [6.1, 6.0, 5.9, math.nan]),
        ("train/grad_norm", [6.1, 6.0, math.nan, math.nan]),
        ("response_length/mean", [8] * 20),
        ("response_length/mean", [264.25] * 20),
    ],
)
def test_few_values_that_differ_as_usual_name_none(
    name: str, values: list[float]
) -> None:
    assert judged(lambda n: values[n - 1], name, len(values)) == []


def test_a_value_between_that_is_well_does_not_move_the_beginning() -> None:
    lines = (f"step:{n} - grad_norm:{float(n <= 40 or n == 90)}" for n in range(1, 101))
    (found,) = findings.find(collected(*lines).series())
    assert (found.cause, found.step) == ("train.no-grad", 41)


def test_memory_that_grows_ever_more_slowly_is_no_leak() -> None:
    assert judged(lambda n: 30 + 0.5 * min(n, 50) + 0.1 * max(0, n - 50), GPU) == []
    assert judged(lambda n: 30 + 0.3 * n, GPU) == ["train.memory-leak"]


def test_a_part_of_the_step_that_takes_or_grows_too_much_is_named() -> None:
    def told(ref: Callable[[int], float], gen: float = 12.0) -> list[str]:
        lines = [
            f"step:{n} - timing_s/step:{gen + 8 + ref(n) + noise(0.3)} - "
            f"timing_s/gen:{gen + noise(0.2)} - timing_s/ref:{ref(n)}"
            for n in range(1, 60)
        ]
        return [one.metric for one in findings.find(collected(*lines).series())]

    assert told(lambda n: 2.0) == []
    assert told(lambda n: 40.0) == ["timing_s/ref"]
    assert told(lambda n: 4 + 0.2 * n) == ["timing_s/ref"]
    assert told(lambda n: 2.0, gen=300.0) == ["timing_s/gen"]


def report(*lines: str) -> LogReport:
    text = "\n".join(lines).encode() + b"\n"
    log = log_file.read(io.BytesIO(text), "a.log", 0, CATALOGUE)
    return logs.judge([log], CATALOGUE)


DRIFT = [
    f"step:{n} - training/rollout_probs_diff_mean:{0.002 * n}" for n in range(1, 60)
]


def test_a_run_whose_numbers_go_wrong_has_failed_though_it_ended_well() -> None:
    found = report(*DRIFT, "Final validation metrics: {}")
    assert found.verdict == "failed"
    (cause,) = found.causes
    assert cause.cause == "sync.not-applied"
    assert cause.title.startswith(
        "training/rollout_probs_diff_mean: the rollout drifts"
    )
    (proof,) = cause.evidence
    assert (proof.line, proof.text) == (
        7,
        "step 7: training/rollout_probs_diff_mean is 0.014",
    )


def test_an_error_that_ended_the_run_comes_before_its_numbers() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3"
    found = report(*DRIFT, error)
    assert [one.cause for one in found.causes] == ["cuda.oom", "sync.not-applied"]


def test_lines_at_the_end_are_read_after_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "MOST_LINES", 20)
    flood = [f"step:{n} - loss:1.0 - n:{n}" for n in range(1, 3000)]
    text = "\n".join([*flood, "step:3000 - loss:nan"]).encode()
    log = log_file.read(io.BytesIO(text), "a.log", 0, CATALOGUE)
    assert log.metrics.last_step == 3000


def test_a_step_that_only_its_metrics_tell_is_one() -> None:
    steps = [f'{{"step": {n}, "grad_norm": 1.5, "entropy": 0.5}}' for n in range(9)]
    found = report("Loading weights: 100%|██| 2/2", *steps)
    assert (found.verdict, found.phase) == ("running", "training-step")


def test_metrics_are_drawn_and_carried_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"step:{n} - loss:{n}.5 - \x1b[31mkl:nan - epoch:1" for n in range(1, 9)]
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines))
    command.main(["diagnose", str(path), "--plot"])
    drawn = capsys.readouterr().out.splitlines()
    assert "  ▁▂▃▄▅▆▇█  loss  1.5 to 8.5, 8.5 at step 8" in drawn
    assert "  ????????  kl  never a number, nan at step 8" in drawn
    command.main(["diagnose", str(path), "--format=json"])
    told = {one["metric"]: one for one in json.loads(capsys.readouterr().out)["series"]}
    assert told["loss"]["steps"] == list(range(1, 9))
    assert told["kl"]["values"] == [None] * 8
    assert told["kl"]["not_finite"][7] == {"step": 8, "value": "nan"}


def test_a_log_without_metrics_draws_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text("hello\n")
    command.main(["diagnose", str(path), "--plot"])
    assert "no metrics of several steps were found" in capsys.readouterr().out


def causes(*lines: str) -> list[str]:
    return [one.cause for one in findings.find(collected(*lines).series())]


@pytest.mark.parametrize("value", ["0", "-0", "nan", "inf", "1e308", "-1e308"])
def test_no_value_is_too_odd_to_be_judged(value: str) -> None:
    names = "timing_s/step", "timing_s/gen", "actor/entropy", "Waiting", "loss_scale"
    line = " - ".join(f"{name}:{value}" for name in names)
    found = report(*(f"step:{n} - {line}" for n in range(40)))
    json.dumps(found.to_json(), allow_nan=False)
    assert "train.slow" not in [one.cause for one in found.causes]


def test_a_rate_that_verl_rounded_to_0_is_none() -> None:
    assert causes(*(f"step:{n} - actor/lr:0.000" for n in range(40))) == []
    assert causes(*(f"step:{n} - actor/lr:0.0" for n in range(40))) != []


def grpo(loss: Callable[[int], float]) -> list[str]:
    return causes(
        *(
            f"{{'loss': {loss(n):.4f}, 'rewards/format_reward/mean': "
            f"{min(1.0, n / 40)}, 'rewards/length_reward/mean': {-n / 100}, "
            f"'reward': {n / 70 + noise(0.02)}}}"
            for n in range(1, 100)
        )
    )


def test_the_loss_of_grpo_rises_with_kl_and_a_format_is_soon_right() -> None:
    assert grpo(lambda n: 0.0002 * n) == []
    assert grpo(lambda n: 0.05 * n) == ["train.diverged"]


def bars(first: int, last: int, total: int, pace: float) -> list[str]:
    return [
        f" 1%| | {n}/{total} [01:00<11:22:33, {pace + noise(0.01):.2f}s/it]"
        for n in range(first, last + 1)
    ]


@pytest.mark.parametrize("total", [20, 2000])
def test_the_bar_of_an_evaluation_is_not_that_of_the_run(total: int) -> None:
    lines = bars(1, 5, 500, 5.0)
    for start in range(5, 100, 10):
        lines += [*bars(start + 1, start + 10, 500, 5.0), "{'loss': 1.0}"]
        lines += [*bars(1, 20, total, 0.1), "{'eval_loss': 1.0}"]
    found = collected(*lines)
    assert (found.last_step, found.total) == (105, 500)
    assert only(found, "s/it").steps == list(range(1, 106))
    assert causes(*lines) == []


def test_a_bar_that_begins_at_a_checkpoint_tells_no_pace_at_first() -> None:
    done, taken = 501.0, 5.0
    lines = []
    for step in range(501, 600):  # tqdm's moving average
        lines.append(f" 9%| | {step}/1000 [09:00<1:00, {taken / done:.3f}s/it]")
        done, taken = 0.7 * done + 0.3, 0.7 * taken + 0.3 * (5 + noise(0.05))
    assert causes(*lines) == []


def test_a_bar_at_the_end_of_a_flood_is_read_where_it_was_drawn_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "MOST_LINES", 20)
    text = "\r".join(bars(1, 3000, 4000, 5.0)).encode()
    log = log_file.read(io.BytesIO(text), "a.log", 0, CATALOGUE)
    assert log.metrics.last_step == 3000


def test_what_a_bar_leaves_to_do_is_no_time_of_the_day() -> None:
    found = report(*bars(1, 30, 500, 5.0), "{'loss': 1.0}")
    assert found.progress
    assert found.progress.until == ""
    assert "since" not in render.log_text(found).partition("stuck")[0]
    found = report("10:41:07 start", *bars(1, 30, 500, 5.0), "{'loss': 1.0}")
    assert found.progress
    assert found.progress.until == "10:41:07"


def test_without_pace_and_time_a_run_at_work_is_told_what_is_long() -> None:
    text = render.log_text(report(*["{'loss': 1.0}"] * 9))
    assert "if nothing was added for long it is stuck" in " ".join(text.split())


def test_a_step_beyond_the_total_has_another_total() -> None:
    found = report("Step 1/3: loss", *(f"step:{n} - actor/loss:1.0" for n in range(9)))
    assert found.progress
    assert (found.progress.step, found.progress.total) == (8, None)


def test_a_value_that_no_step_is_told_of_is_counted() -> None:
    (one,) = findings.find(collected(*["{'loss': nan}"] * 9).series())
    assert one.text == "loss: is nan from here on; no number before (logged value 1)"


def test_a_size_in_bytes_is_shown_in_gibibytes() -> None:
    lines = [f"step:{n} - perf/max_memory_allocated_gb:{n + 30}" for n in range(90)]
    (one,) = findings.find(collected(*lines).series())
    assert "grows by 1 GiB a step, from 30 GiB to 119 GiB" in one.text


@pytest.mark.parametrize("values", [("-1e308", "1e308"), ("0", "5e-324")])
def test_any_value_is_drawn(values: tuple[str, str]) -> None:
    lines = [f"step:{n} - loss:{values[n % 2]}" for n in range(8)]
    shown = tuple(collected(*lines).shown())
    drawn = render.plot(LogReport("running", "unknown", series=shown))
    assert drawn.split()[0] in {"▁█▁█▁█▁█", "▁▁▁▁▁▁▁▁"}


def test_evidence_names_no_step_that_the_log_does_not_tell() -> None:
    found = report(*(f"{{'loss': {1 + n}.0}}" for n in range(30)))
    assert found.causes[0].evidence[0].text.startswith("logged value ")


def test_what_grows_with_the_responses_is_their_work() -> None:
    def told(length: Callable[[int], float]) -> list[str]:
        return causes(
            *(
                f"step:{n} - response_length/mean:{length(n) + noise(9)} - "
                f"perf/max_memory_allocated_gb:{40 + n * 0.2 + noise(0.1)} - "
                f"timing_s/gen:{10 + n + noise(1)} - timing_s/step:{40 + n + noise(1)}"
                for n in range(1, 100)
            )
        )

    assert told(lambda n: 200 + 30 * n) == []
    assert sorted(told(lambda n: 500)) == ["train.memory-leak", "train.slow"]


def test_a_task_that_is_solved_has_a_constant_reward() -> None:
    rises = [f"step:{n} - critic/score/mean:{min(1.0, n / 20)}" for n in range(60)]
    assert causes(*rises) == []
    falls = [f"step:{n} - critic/score/mean:{max(0.0, 1 - n / 20)}" for n in range(60)]
    assert causes(*falls) == ["train.diverged"]


def test_a_reward_that_drops_at_once_drops_there() -> None:
    lines = [
        f"step:{n} - critic/score/mean:{(0.8 if n < 50 else 0.3) + noise(0.02)}"
        for n in range(100)
    ]
    (one,) = findings.find(collected(*lines).series())
    assert 46 <= one.step <= 50


def test_rewards_less_their_mean_and_those_of_distillation_are_0() -> None:
    def told(raw: Callable[[int], float], more: str = "") -> list[str]:
        return causes(
            *(
                f"rollout {n}: {{'rollout/rewards': 0.0, 'rollout/raw_reward': {raw(n)}"
                f"{more}}}"
                for n in range(1, 40)
            )
        )

    assert told(lambda n: 0.3 + noise(0.02)) == []
    assert told(lambda n: 0.0) == ["train.diverged"]
    assert told(lambda n: 0.0, ", 'rollout/opd_reverse_kl': 0.2") == []


def test_what_the_slowest_answer_took_is_no_part_of_the_step() -> None:
    slow = "timing_s/agent_loop/slowest/generate_sequences:90"
    assert causes(*(f"step:{n} - timing_s/step:100 - {slow}" for n in range(20))) == []
    teacher = "timing_s/teacher:60"  # which is the larger model
    assert (
        causes(*(f"step:{n} - timing_s/step:90 - {teacher}" for n in range(20))) == []
    )


@pytest.mark.parametrize(
    ("nan", "verdict"), [({50}, "running"), (range(50, 99), "failed")]
)
def test_a_step_without_numbers_after_which_training_goes_on_is_survived(
    nan: Container[int], verdict: str
) -> None:
    steps = (
        f"step:{n} - actor/pg_loss:0.1 - actor/grad_norm:{'nan' if n in nan else 1.5}"
        for n in range(1, 99)
    )
    found = report(*steps)
    assert found.verdict == verdict
    told = found.survived if verdict == "running" else found.causes
    assert "train.nan" in str(told)


def test_what_a_start_from_a_checkpoint_has_mended_is_no_cause() -> None:
    def steps(pid: int, first: int, value: str) -> list[str]:
        return [
            f"(TaskRunner pid={pid}) step:{n} - actor/pg_loss:{value}"
            for n in range(first, first + 20)
        ]

    assert report(*steps(1, 1, "nan"), *steps(2, 9, "0.1")).verdict == "running"
    assert report(*steps(1, 1, "0.1"), *steps(2, 9, "nan")).verdict == "failed"


def test_seconds_are_written_as_such() -> None:
    steps = [f"step:{n} - loss:1 - timing_s/step:3600" for n in range(9)]
    assert "3600 s a step" in render.log_text(report(*steps))


@pytest.mark.parametrize("name", ["loss", "critic/rewards/mean"])
def test_a_long_series_is_judged_by_some_of_its_windows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = statistics.median

    def median(values: Sequence[float]) -> float:
        sizes.append(len(values))
        return whole(values)

    monkeypatch.setattr(statistics, "median", median)
    assert judged(lambda n: 1 + abs(noise(0.1)), name, steps=9000) == []
    assert sum(sizes) < 500 * 9000 / 8
