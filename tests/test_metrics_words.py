"""Metrics of loggers that nobody listed: read by form, known by the words of a name."""

from __future__ import annotations

import io
import random

import pytest

from pytest_gkd.diagnosis import catalogue, log_file
from pytest_gkd.diagnosis.metrics import findings, series
from pytest_gkd.diagnosis.metrics.lines import MOST_OF_HEADER, Reading, Table, read
from pytest_gkd.diagnosis.metrics.roles import role

CATALOGUE = catalogue.load()
GIB = 2**30


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("iter 600: loss 3.1415, time 12.50ms", {"loss": 3.1415, "time": 0.0125}),
        ("Epoch: [0][ 12/240]\tLoss 2.5 (3.5)\tAcc@1  26.5 ( 19.5)", {"Acc@1": 26.5}),
        (
            "step 51/500 | loss 4.5 (+0.8z)| norm 0.75 (-0.1z)| 1424.5 ms | 36 tok/s",
            {"loss": 4.5, "norm": 0.75, "step_time": 1.4245, "tok/s": 36},
        ),
        ("step:  3  loss:  9.5  grad_norm:  0.5", {"loss": 9.5, "grad_norm": 0.5}),
        ("1|12|Loss: 2.5:  12%|#   | 12/100 [00:12<02:00,  1.5s/it]", {"Loss": 2.5}),
        (
            "Epoch 1 | iter 3 step 3 | loss train: 1.5, val: n/a | iter time: 1415 ms",
            {"loss train": 1.5, "iter time": 1.415},
        ),
        ("epoch 1, train loss: 2.0, val loss: 3.0", {"val loss": 3.0}),
        ("loss 3.1 lr 2e-05 tok/s 11.5k", {"lr": 2e-05, "tok/s": 11500}),
        ("step 12 loss 0.5", {"loss": 0.5}),
        ("step 3 OrderedDict([('loss', 0.5), ('lr', 1e-5)])", {"loss": 0.5}),
        (
            "5% done, avg loss 0.5, 300 tokens per second, 2.0 GB used",
            {"avg loss": 0.5, "tokens per second": 300, "memory used": 2 * GIB},
        ),
        (
            "Epoch 0/0 12/160 0:00:12 \N{BULLET} 0:01:03 0.66it/s train_loss: 2.5",
            {"train_loss": 2.5, "it/s": 0.66},
        ),
        ("[1/160] loss -> 1.5; grad -> 0.5", {"loss": 1.5, "grad": 0.5}),
        ("\N{BOX DRAWINGS HEAVY VERTICAL} kl \N{BOX DRAWINGS HEAVY VERTICAL} 0.5 "
         "\N{BOX DRAWINGS HEAVY VERTICAL}", {"kl": 0.5}),
        ('vllm:num_requests_waiting{model_name="a"} 7.0',
         {"vllm:num_requests_waiting": 7.0}),
        ("| N/A 45C P0 312W / 700W | 2048MiB / 81559MiB | 97% Default |",
         {"memory.used": 2 * GIB}),
        ("Peak Mem.: 31.5/80.0 GiB (39.4%)", {"Peak Mem.": 31.5 * GIB}),
        ("step=3 gpu_mem_mb=2048", {"gpu_mem_mb": 2 * GIB}),
        ("第16步 损失: 1.5 梯度范数：0.5", {"损失": 1.5, "梯度范数": 0.5}),
        (
            "Accepted: 5 tokens, Avg Draft acceptance rate: 71.0%",
            {"Avg Draft acceptance rate": 0.71},
        ),
    ],
)  # fmt: skip
def test_a_number_is_read_with_or_without_a_sign_before_it(
    line: str, values: dict[str, float]
) -> None:
    found = read(line.encode()).values
    assert values == pytest.approx({name: found.get(name) for name in values})


@pytest.mark.parametrize(
    "line",
    [
        "ERROR rewards.py:41 reward is nan for sample 3",
        "non-finite loss nan at step 3",
        "step 1: 12 judge timeouts (score 0)",
        "request 31 timed out (30s), set reward 0",
        "step 3 failed and is skipped: loss is not finite: nan",
        "validation loss at iteration 100",
        "  \N{BULLET} reward_calculation: 0.52s (1.1%)",
    ],
)
def test_a_sentence_has_no_metric(line: str) -> None:
    assert not {role(name) for name in read(line.encode()).values} - {"other"}


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        *(("grad", "gradient norm"), ("gnorm", "gradient norm"), ("rew", "reward")),
        *(("optim/total_grad_norm", "gradient norm"), ("params norm", "other")),
        *(("train/CrossEntropyLoss", "loss"), ("loss/train/total", "loss")),
        *(("policy_entropy", "entropy"), ("ent", "entropy"), ("损失", "loss")),
        *(("gpu_mem_mb", "memory"), ("gb_free", "free memory"), ("dt", "step time")),
        *(("step_ms", "step time"), ("train_speed(s/it)", "other")),
        *(("data_time", "part of the step"), ("perf/rollout_time", "part of the step")),
        *(("Train Steps/Sec", "throughput"), ("seconds_per_step", "step time")),
        *(("vllm:num_requests_waiting", "waiting requests"), ("train-logloss", "loss")),
        *(("wps", "throughput"), ("Tokens/s/device", "throughput")),
        *(("val loss", "validation loss"), ("val-core/gsm8k/acc", "validation score")),
        *(("rollout/mean_tokens", "response length"), ("total_tokens", "other")),
        *(("moe/dead_experts", "dead experts"), ("actor/pg_clipfrac", "clipped share")),
        *(("number of skipped iterations", "skipped steps"), ("loss_mask", "other")),
        *(("gpu_memory_utilization", "other"), ("entropy_coeff", "other")),
        ("rewards/rejected", "other"),
        *(("episodic_return", "reward"), ("Max. Off-Policy Level", "staleness")),
    ],
)  # fmt: skip
def test_a_metric_is_known_by_the_words_of_its_name(name: str, measures: str) -> None:
    assert role(name) == measures


def log_of(text: str) -> log_file.Log:
    return log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)


def told(text: str) -> list[str]:
    metrics = log_of(text).metrics
    return [one.cause for one in findings.find(metrics.current(), metrics.total)]


def loss(n: int) -> float:
    return 2 - n / 80 if n < 60 else 1.25 + (n - 60) / 10


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("step,loss,grad_norm", "{},{:.4f},0.5"),
        ("    step    loss   gnorm", "0  {:5d}  {:.4f}  0.512"),
        ("│ step │ loss │ lr │\n├──────┼──────┼────┤", "│ {} │ {:.4f} │ 1e-5 │"),
        ("Step\tTraining Loss\tValidation Loss", "{}\t{:.4f}\t1.5"),
        ("   step      loss     gnorm", "{:7d}  {:8.4f}     0.512"),
        ("Step\tTraining Loss\tcompletions / mean_length", "{}\t{:.4f}\t300.5"),
        ("| step | loss | lr |\n|-----:|:----:|---:|", "| {} | {:.4f} | 1e-5 |"),
    ],
)
def test_a_table_is_read_below_its_header(header: str, row: str) -> None:
    rows = "\n".join(row.format(n, loss(n)) for n in range(1, 120))
    text = f"{header}\n{rows}\ndone, all, 3\n"
    (found,) = (
        one for one in log_of(text).metrics.series() if role(one.name) == "loss"
    )
    assert found.steps == list(range(1, 120))
    assert found.places[0][0] == 2 + header.count("\n")
    assert told(text) == ["train.diverged"]


def test_a_table_goes_on_in_the_next_block() -> None:
    rows = "".join(f"{n},{loss(1):.4f},{'0' * 20}\n" for n in range(1, 2500))
    before = ("." * 99 + "\n") * 10_470  # a block is of a MiB
    found = log_of(f"{before}step,loss,grad\n{rows}").metrics.series()
    assert {len(one) for one in found} == {2499}


def test_a_table_that_is_printed_again_goes_on() -> None:
    table = (
        "+------------+---------+------+--------+\n"
        "| Trial name | status  | iter |   loss |\n"
        "|------------+---------+------+--------|\n"
        "| train_ab_0 | RUNNING | {:4d} | {:.4f} |\n"
        "+------------+---------+------+--------+\n"
    )
    assert told("".join(table.format(n, loss(n)) for n in range(1, 120))) == [
        "train.diverged"
    ]


def test_nvidia_smi_as_csv_is_read() -> None:
    head = (
        "timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB]"
    )
    rows = [
        f"2026/03/02 09:{n % 60:02d}:01.118, 0, 93 %, {31000 + 400 * n} MiB, 81559 MiB"
        for n in range(100)
    ]
    assert told("\n".join([head, *rows])) == ["train.memory-leak"]


@pytest.mark.parametrize(
    "line",
    [
        b"loss, reward",
        b"we log loss, reward, and nothing else: see below",
        b"step 1 | loss 2.5 | grad nan",
        b"loss," * MOST_OF_HEADER,
        b"a, b, c",
    ],
)
def test_what_is_no_header_begins_no_table(line: bytes) -> None:
    assert Table.of(line) is None


def test_a_row_of_words_or_of_other_width_is_none() -> None:
    table = Table.of(b"step,loss,grad")
    assert table is not None
    assert table.row(b"1,2.5,0.5") == Reading({"loss": 2.5, "grad": 0.5}, 1)
    assert table.row(b"1,2.5") is None
    assert table.row(b"one,two,0.5") is None


def test_a_clock_is_no_time_of_a_step() -> None:
    random.seed(3)
    passed = [10.0 * n + random.random() for n in range(1, 200)]
    lines = [f"step={n} loss=1.5 time={t:.2f}" for n, t in enumerate(passed, 1)]
    assert told("\n".join(lines)) == []
    assert log_of("\n".join(lines)).metrics.pace_s is None


def test_a_peak_in_mib_without_a_unit_is_told_in_gib() -> None:
    collector = series.Collector()
    for n in range(1, 160):
        line = f"Iter(train) [{n}/200] loss: 1.5 memory: {31000 + 250 * n + n % 3}"
        collector.take(line.encode(), n, 100 * n)
    (one,) = findings.find(collector.current())
    assert (one.cause, "from 30.5 GiB" in one.text) == ("train.memory-leak", True)
