"""What a run goes on after is survived; what ended it is not."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest

from pytest_gkd.diagnosis import catalogue, log_end, log_file, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"
START = "12:00:01 INFO Building the student from its folder\n"
CAUGHT = f"""\
Traceback (most recent call last):
  File "/home/a/train.py", line 77, in one_step
    loss.backward()
{OOM}
"""
UNKNOWN = """\
  File "/home/a/train.py", line 7, in <module>
    main()
moon.Eclipse: no light
"""
START_OF_ALL = "Traceback (most recent call last):\n"
UNCAUGHT = CAUGHT.replace("in one_step", "in <module>")


def judged(text: str) -> LogReport:
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    return logs.judge([log], CATALOGUE)


def steps(first: int, last: int) -> str:
    every = range(first, last + 1)
    return "".join(f"12:00:0{n % 10} INFO Step {n} | Loss 0.03{n:02d}\n" for n in every)


def own_steps(first: int, last: int) -> str:
    """As a program prints them that no reader of metrics knows."""
    return "".join(
        f"[{n}] sampling\n[{n}] kl = 0.03{n:02d}, secs = 0.2\n"
        for n in range(first, last + 1)
    )


def survived(report: LogReport) -> list[str]:
    assert report.verdict in {"running", "healthy"}
    return [cause for cause, _ in report.survived]


@pytest.mark.parametrize("made", [steps, own_steps])
def test_an_error_after_which_several_steps_are_made_was_survived(
    made: Callable[[int, int], str],
) -> None:
    text = START + made(1, 4) + "12:00:05 WARNING a batch is lost\n" + CAUGHT
    assert survived(judged(text + made(5, 7))) == ["cuda.oom"]
    assert survived(judged(text + made(5, 6))) == ["cuda.oom"]
    assert survived(judged(text + made(5, 5))) == ["cuda.oom"]
    assert judged(text).causes[0].cause == "cuda.oom"
    for trouble in ("12:00:07 ERROR the teacher is gone\n", "失败\n"):
        assert judged(text + made(5, 6) + trouble).causes
    assert judged(text + made(5, 6) + "Killed\n").causes


@pytest.mark.parametrize("made", [steps, own_steps])
@pytest.mark.parametrize(
    "says",
    [
        *("score failed (attempt 1 of 3)", "step 5 failed and is skipped"),
        *("asking again", "essai 1 sur 3", "tentativa 1 de 3", "lot 7 ignoré"),
        *("la fila 7 fue omitida", "nouvel essai", "se reintenta", "lote pulado"),
    ],
)
def test_of_what_is_tried_again_one_step_more_is_enough(
    says: str, made: Callable[[int, int], str]
) -> None:
    text = f"{START}{made(1, 4)}12:00:05 WARNING {says}\n{CAUGHT}"
    assert survived(judged(text + made(6, 6))) == ["cuda.oom"]
    assert judged(text).causes[0].cause == "cuda.oom"
    # Though one step more says little where more is told that is wrong.
    told = made(6, 6) + "errors so far: 1\n"
    assert survived(judged(text + told)) == ["cuda.oom"]
    assert judged(text.replace(says, "a batch is lost") + told).causes


def test_steps_out_of_a_buffer_do_not_outlive_what_ended_the_program() -> None:
    text = START + UNCAUGHT + steps(1, 6)
    assert judged(text).causes[0].cause == "cuda.oom"


def test_a_program_that_is_begun_again_and_makes_steps_has_survived() -> None:
    text = START + steps(1, 4) + UNCAUGHT + "bash: starting again\n"
    again = START.replace("12:00:01", "12:07:44") + steps(4, 7)
    assert survived(judged(text + again)) == ["cuda.oom"]
    assert judged(text + again.replace(steps(4, 7), "")).causes[0].cause == "cuda.oom"


def test_a_program_that_was_killed_and_begun_again_has_survived() -> None:
    killed = "bash: line 1: 20103 Killed                  python train.py\n"
    text = START + steps(1, 4) + killed
    assert judged(text).causes[0].cause == "env.killed"
    assert survived(judged(text + START + steps(5, 8))) == ["env.killed"]


def test_ranks_that_a_launcher_begins_again_with_another_number_have_survived() -> None:
    begun = '{{"t": 179594{0}43.6, "rank": 0, "attempt": {0}, "event": "begun"}}\n'
    text = begun.format(0) + steps(1, 4) + UNCAUGHT
    assert judged(text).causes[0].cause == "cuda.oom"
    assert survived(judged(text + begun.format(1) + steps(4, 7))) == ["cuda.oom"]


def test_a_step_without_finite_loss_that_is_skipped_was_survived() -> None:
    skipped = "12:00:05 INFO step 5 failed and is skipped: loss is not finite: nan\n"
    raised = CAUGHT.replace(OOM, "ValueError: loss is not finite: nan")
    text = START + steps(1, 4) + skipped + raised
    assert survived(judged(text + steps(6, 8))) == ["train.nan"]
    assert judged(text).causes[0].cause == "train.nan"


def test_what_was_raised_in_an_attempt_that_is_not_the_last_has_not_ended_it() -> None:
    tried = "12:00:05 WARNING save failed (attempt {} of 2): OSError(28, '{}')\n"
    full = "No space left on device"
    raised = CAUGHT.replace(OOM, f"OSError: [Errno 28] {full}")
    text = START + steps(1, 4) + tried.format(1, full) + raised
    assert judged(text + "12:00:06 INFO saved in 0.5 s\n").verdict == "running"
    text += tried.format(2, full) + raised
    assert judged(text).causes[0].cause == "env.disk-full"
    uncaught = raised.replace("in one_step", "in <module>")
    text = START + steps(1, 4) + tried.format(1, full) + uncaught
    assert judged(text).causes[0].cause == "env.disk-full"
    assert judged(text + "12:00:06 INFO saved the list\n").causes


def test_steps_of_other_ranks_do_not_outlive_a_rank_that_made_its_own() -> None:
    def of(rank: int, last: int) -> str:
        return steps(1, last).replace("12:00", f"[rank{rank}]: 12:00")

    text = of(0, 4) + of(1, 4) + "".join(f"[rank1]: {x}\n" for x in CAUGHT.splitlines())
    more = steps(5, 9).replace("12:00", "[rank0]: 12:00")
    assert judged(text + more).causes[0].cause == "cuda.oom"


def test_numbers_that_count_no_steps_outlive_nothing() -> None:
    tries = "".join(f"request [{n}] was sent\n" for n in (3, 9, 27, 81))
    text = START + "12:00:05 ERROR no memory\n" + CAUGHT
    assert judged(text + tries).causes[0].cause == "cuda.oom"


def test_the_last_attempt_counts_and_what_an_earlier_one_says_does_not() -> None:
    said = "WARNING teacher: attempt {0} of 3 failed: Expecting value: line 1\n"
    tried = "".join(map(said.format, (1, 2, 3)))
    report = judged(START + tried + CAUGHT[:34] + UNKNOWN)
    assert [one.cause for one in report.causes] == ["teacher.protocol"]
    twice = tried[: 2 * tried.index("\n") + 2]
    assert judged(START + twice + CAUGHT[:34] + UNKNOWN).causes == ()


def test_a_program_that_says_that_it_tries_again_has_not_failed() -> None:
    text = START + "".join(
        f"12:00:0{n} INFO waiting for the teacher at http://10.0.0.9: <urlopen error "
        f"[Errno 111] Connection refused> (attempt {n})\n"
        for n in range(1, 7)
    )
    assert judged(text).verdict == "running"
    late = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    report = logs.judge([late], CATALOGUE, now="13:00:00")
    assert report.verdict == "hung"
    assert [one.cause for one in report.causes] == ["teacher.unreachable"]
    assert judged(text + CAUGHT[:34] + UNKNOWN).verdict == "failed"


def test_a_ray_job_that_waits_for_a_place_is_hung_and_says_why() -> None:
    text = START + (
        "(autoscaler +7s) Error: No available node types can fulfill resource request "
        "{'CPU': 8.0}. Add suitable node types to this cluster to resolve this issue.\n"
    )
    report = judged(text)
    assert (report.verdict, report.phase) == ("hung", "actor-init")
    assert [one.cause for one in report.causes] == ["ray.no-resources"]
    assert "ray.no-resources" in render.log_text(report)
    assert judged(text + CAUGHT[:34] + UNKNOWN).verdict == "failed"


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ("skipping a row: No filter named 'upper_case'.\n", "tokenizer.chat-template"),
        ("WARNING a row is lost: KeyError: 'prompt'\n", "data.schema"),
        ("WARNING a GPU is lost: NCCL WARN Call to connect failed\n", "data.empty"),
    ],
)
def test_what_was_swallowed_comes_before_what_it_brought_about(
    rows: str, cause: str
) -> None:
    report = judged(START + 3 * rows + "dataset len: 0\n" + CAUGHT[:34] + UNKNOWN)
    assert report.causes[0].cause == cause


def test_an_exception_of_an_answers_code_is_not_the_programs() -> None:
    answer = """\
INFO answer ended with status 1:
Traceback (most recent call last):
  File "<string>", line 1, in <module>
ModuleNotFoundError: No module named 'numpyy'
"""
    assert judged(START + answer + UNCAUGHT).causes[0].cause == "cuda.oom"
    assert [
        c.cause for c in judged(START + answer + CAUGHT[:34] + UNKNOWN).causes
    ] == []
    assert judged(START + answer).causes[0].cause == "env.package-missing"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("pipeline complete", "healthy"),
        ("INFO driver: training finished after 8 steps", "healthy"),
        ("job ended with status 0", "healthy"),
        ("all stages done in 3.9 s", "healthy"),
        ("job ended with status 1", "failed"),
        ("waiting until the pipeline is complete and merged", "failed"),
    ],
)
def test_a_programs_own_closing_words_end_it(last: str, verdict: str) -> None:
    worker = "(raylet) A worker died or was killed while executing a task by an error\n"
    assert judged(START + worker + f"scored 32\n{last}\n").verdict == verdict


@pytest.mark.parametrize(
    ("step", "last", "verdict"),
    [
        ("step 100/100 loss 0.02", "Saved to out/final", "healthy"),
        (
            "step 100/100 (epoch 3/3) loss 0.02",
            "[12:03:01] model written to /out",
            "healthy",
        ),
        ("step 20/20 | 3 of 64 cut off, loss 0.02", "Saved to out/final", "healthy"),
        ("Epoch 3/3 loss 0.02", "Pushed the model to https://hub/x/y.", "healthy"),
        # Steps are left, or nobody says how many there are: the next one may hang.
        ("step 100/200 loss 0.02", "Saved to out/step-100", "running"),
        ("epoch 3/3 step 5/100 loss 0.02", "Saved to out/step-5", "running"),
        ("step 100 loss 0.02", "Saved to out/final", "running"),
        ("step 1/1 loss 0.02", "Saved to out/final", "running"),
        # All are done, and what comes after them is not.
        ("step 100/100 loss 0.02", "Saving to out/final", "running"),
        ("step 100/100 loss 0.02", "Saved to out/final\nmerging shards", "running"),
        ("step 100/100 loss 0.02", "nothing has been saved so far", "running"),
    ],
)
def test_a_run_that_has_no_step_left_ends_with_what_it_saved(
    step: str, last: str, verdict: str
) -> None:
    begun = "".join(f"step {n} loss 2.0\n" for n in range(1, 5))
    assert judged(START + begun + f"{step}\n{last}\n").verdict == verdict


def test_closing_words_after_what_ended_the_program_are_none() -> None:
    report = judged(START + UNCAUGHT + "pipeline complete\n")
    assert report.causes[0].cause == "cuda.oom"


def test_overflows_at_the_smallest_loss_scale_fail_a_run_that_goes_on() -> None:
    said = "[INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
    text = START + steps(1, 3) + f"{said}1, reducing to 1\n" * 4
    assert judged(text).causes[0].cause == "train.nan"
    assert judged(text.replace("1, reducing to 1", "4, reducing to 2")).causes == ()


@pytest.mark.parametrize(
    ("end", "cause"),
    [("_queue.Empty", "env.too-many-files"), ("moon.Eclipse: no light", "")],
)
def test_who_waited_in_vain_did_so_for_what_had_failed_before(
    end: str, cause: str
) -> None:
    feeder = CAUGHT.replace(OOM, "OSError: [Errno 24] Too many open files")
    waiter = START_OF_ALL + UNKNOWN.replace("moon.Eclipse: no light", end)
    report = judged(START + steps(1, 2) + feeder + steps(3, 7) + waiter)
    assert [one.cause for one in report.causes] == [cause] * bool(cause)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("Saving the model to out/final", "running"),
        ("Saving the model to out/final\nmetrics: loss 2.0", "healthy"),
        ("local_global_step_folder: out/ckpt/global_step_4", "running"),
        ("The model is saved to out/final", "healthy"),
        ("Saved the model to out/final", "healthy"),
        ("Training finished, saving the model to out/final", "healthy"),
        ("", "healthy"),
    ],
)
def test_a_save_that_is_only_begun_after_the_last_step_is_no_good_end(
    last: str, verdict: str
) -> None:
    end = "12:00:09 INFO {'train_runtime': 9.0, 'train_loss': 2.0}\n"
    text = START + steps(1, 4) + end + last + "\n"
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE, now="13:00:00").verdict == verdict


def test_a_full_bar_before_the_steps_is_no_end_of_them() -> None:
    bar = "100%|##########| 2811/2811 [00:03<00:00, 893.88it/s]\n"
    assert judged(START + bar + steps(1, 4)).verdict == "running"
    assert judged(START + steps(1, 4) + bar).verdict == "healthy"


def test_a_bar_that_is_not_full_follows_the_end_of_an_epoch() -> None:
    epoch = "Epoch 0: 100%|##########| 12/12 [00:09<00:00,  1.23it/s, train_loss=1.8]\n"
    bar = "Validation DataLoader 0:  {}%|#####| {}/50 [00:41<00:00,  2.40it/s]\n"
    assert log_end.over((epoch + bar.format(100, 50)).encode())
    assert not log_end.over((epoch + bar.format(98, 49)).encode())


def test_an_installation_that_ended_well_is_no_end_of_the_program() -> None:
    """Though what torchrun says of its ranks follows their exceptions."""
    summary = UNCAUGHT.replace(
        OOM, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    )
    failed = "Traceback (most recent call last):\n" + UNKNOWN + summary
    end = "=" * 60 + "\ntrain.py FAILED\n" + "  exitcode  : 1 (pid: 7)\n" * 9
    text = "Successfully installed flash-attn-2.4.2\n" + failed + end
    assert judged(text).verdict in {"unknown", "failed"}


def test_an_engine_that_was_asked_in_vain_is_not_at_rest() -> None:
    ready = b"INFO 04-29 15:10:22 [core.py:159] init engine (profile) took 33.41 s\n"
    asked = b"INFO 04-29 15:10:41 [async_llm.py:228] Added request 3.\n"
    answered = b'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    idle = b"INFO 04-29 15:10:51 [loggers.py:116] Engine 000: Running: 0 reqs\n"
    batch = b"Running batch:   0% Completed | 0/120 [00:00<?, ?req/s]\n"
    for rest in (b"", asked + answered, asked + idle, batch + b"Running batch: 100%\n"):
        assert log_end.at_rest(ready + rest)
    for wait in (asked, batch, asked + answered + asked):
        assert not log_end.at_rest(ready + wait)


def test_an_engine_that_keeps_requests_and_makes_no_tokens_is_stuck() -> None:
    line = "INFO 11-06 09:10:{} [loggers.py:208] Engine 001: Avg prompt throughput: "
    line += "{} tokens/s, Avg generation throughput: {} tokens/s, Running: 9 reqs\n"
    works = line.format(11, 120.1, 311.2)
    idle = "".join(line.format(at, "0.0", "0.0") for at in (21, 31, 41))
    assert log_end.stuck((works + idle).encode())
    assert not log_end.stuck((works + idle + works).encode())


@pytest.mark.parametrize(("made", "verdict"), [(0, "running"), (4, "hung")])
def test_a_trainer_is_no_server_at_rest_though_its_engine_is_ready(
    made: int, verdict: str
) -> None:
    ready = (
        "12:00:02 INFO [core.py:171] init engine (profile, create kv cache) took 9 s\n"
    )
    text = ready + "".join(
        f"{{'loss': 0.0{n}, 'epoch': 0.{n}}}\n12:00:0{n + 3} INFO reset the cache\n"
        for n in range(1, made + 1)
    )
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE, now="13:30:00").verdict == verdict


def verdict_at(now: str, text: str) -> str:
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    return logs.judge([log], CATALOGUE, now=now).verdict


RAISED = CAUGHT.replace(OOM, "OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    "after",
    [
        "",
        "Killed\n",
        "12:00:09 ERROR giving up\n",
        "12:00:09 ERROR job failed after all attempts\n",
        "(raylet) A worker died or was killed while executing a task\n",
    ],
)
def test_an_attempt_that_nothing_good_follows_was_the_last(after: str) -> None:
    tried = "12:00:05 WARNING save failed (attempt 1 of 2)\n" + RAISED
    text = START + steps(1, 4) + tried
    assert judged(text + after).verdict == "failed"
    saved = "12:00:09 INFO saved\n"
    assert judged(text + saved).verdict == "running"
    assert not after or judged(text + saved + after).verdict == "failed"


def test_who_waited_before_an_error_does_not_wait_after_it() -> None:
    text = START + "12:00:05 INFO waiting for the engine\n" + CAUGHT
    assert judged(text + "12:00:06 INFO engine: done with its clean-up\n").causes


@pytest.mark.parametrize(
    "line",
    [
        "GPU 0 memory {} of 80 GB used",
        "rank 0: model loaded on cuda:{}",
        "rollout {}: 64 answers came",
    ],
)
def test_a_line_that_recurs_with_other_numbers_begins_no_program(line: str) -> None:
    text = START + line.format(3) + "\n" + steps(1, 4) + UNCAUGHT
    report = judged(text + line.format(4) + "\n" + steps(5, 8))
    assert [one.cause for one in report.causes] == ["cuda.oom"]


def test_skipped_steps_without_a_finite_loss_are_no_recovery_if_later_have_none() -> (
    None
):
    text = START + "".join(f"step {n} loss {1 / n:.2f}\n" for n in range(1, 5))
    text += "step 5 skipped: loss is not finite: nan\n"
    bad = "".join(f"step {n} loss nan\n" for n in range(6, 10))
    assert judged(text + bad).causes[0].cause == "train.nan"
    own = "".join(f"[{n}] loss nan, secs 0.{n}\n" for n in range(6, 10))
    assert judged(START + "[5] skipped: loss is not finite: nan\n" + own).causes
    good = "".join(f"step {n} loss {1 / n:.2f}\n" for n in range(6, 10))
    assert survived(judged(text + good)) == ["train.nan"]


@pytest.mark.parametrize(
    "before",
    [
        "Successfully installed flash-attn-2.4.2",
        "tokenizer saved successfully",
        "Evaluating epoch 1: 100%|##########| 5/5 [00:01<00:00, 5.0it/s]",
    ],
)
def test_a_save_between_steps_may_hang(before: str) -> None:
    begun = "".join(f"12:00:0{n} step {n}/100 loss 2.0\n" for n in range(1, 9))
    save = "12:00:09 Saving checkpoint to out/8\n"
    assert verdict_at("16:00:00", f"{before}\n{begun}{save}") == "hung"


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("Epoch 1/3", "step {n}/8 loss 2.0"),
        ("", "ep 1/3 step {n}/8 loss 2.0"),
        ("", "e1 step {n}/8 loss 2.0"),
        ("", "update 5 step {n}/8 loss 2.0"),
        ("Stage 1/2: SFT", "step {n}/8 loss 2.0"),
        ("step 8/8 loss 2.1", "step {n}/8 loss 2.0"),
        ("step 20/20 loss 2.1", "step {n}/80 loss 2.0"),
    ],
)
def test_the_last_step_of_a_round_is_not_the_last_of_all(
    before: str, line: str
) -> None:
    made = "".join(f"12:00:0{n} {line.format(n=n)}\n" for n in range(1, 9))
    assert verdict_at("16:00:00", f"{before}\n{made}") == "hung"


def test_what_follows_the_last_step_may_hang() -> None:
    made = "".join(f"12:00:0{n} step {n}/8 loss 2.0\n" for n in range(1, 9))
    assert verdict_at("16:00:00", made) == "running"
    assert verdict_at("16:00:00", made + "12:00:09 stage 2 begins\n") == "hung"


@pytest.mark.parametrize(
    "model", ["unsloth/Qwen2.5-7B", "/data/slime/ckpt", "nvidia/Megatron-GPT"]
)
def test_an_idle_server_rests_whatever_its_model_is_called(model: str) -> None:
    text = (
        f"12:00:01 INFO Starting vLLM API server, model {model}\n"
        "12:00:02 INFO Application startup complete.\n"
        "12:00:03 INFO Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
        "0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs\n"
    )
    assert verdict_at("16:00:00", text) == "running"


@pytest.mark.parametrize(
    "form",
    [
        "[ {0}/400] total 1.{1}474 = sft 0.8{1}3 + kd 0.4491",
        "   {0}  19:2{0}  0.1{1}4  0.287  +0.00{1}13     16    38.9",
        "upd 00{0}  R 0.3{1}9  H 0.764  KL 0.0072",
        "u00{0} pg 0.3{1}9 ent 0.764",
        "E2 B0{0} nll 1.0{1}",
        "{{'t': '2026-03-25 12:04:2{0}', 'gkd': 0.6{1}70, 'number': {0}}}",
    ],
)
def test_rows_that_count_and_measure_show_that_a_run_goes_on(form: str) -> None:
    rows = [form.format(n, (n * n) % 7) + "\n" for n in range(1, 10)]
    text = START + "".join(rows[:4]) + CAUGHT
    assert survived(judged(text + "".join(rows[4:]))) == ["cuda.oom"]
    assert judged(text).causes[0].cause == "cuda.oom"


@pytest.mark.parametrize(
    "form",
    [
        "waiting for the teacher, {0} s, load 0.{1}",
        "attempt {0} took 0.{1} s",
        "heartbeat {0}, load 0.{1}",
        "[monitor] {0}0 s, memory 2{1}.1 GB",
        "gpu{0} has 2.{1} GB",
    ],
)
def test_rows_of_waits_and_attempts_are_none_of_work(form: str) -> None:
    rows = [form.format(n, (n * n) % 7) + "\n" for n in range(1, 10)]
    text = START + "".join(rows[:4]) + CAUGHT + "".join(rows[4:])
    assert judged(text).causes[0].cause == "cuda.oom"


BEFORE = {
    "ts": "Nov 29 10:04:01 ",
    "date": "[2026-11-29 10:04:01] ",
    "slashes": "2026/11/29 10:04:01 ",
    "docker": "2026-11-29T10:04:01.123456789Z ",
    "cri": "2026-11-29T10:04:01.123456789Z stderr F ",
    "iso": "2026-11-29T10:04:01 ",
    "clock": "10:04:01 ",
    "journald": "Nov 29 10:04:01 node-3 train.sh[4711]: ",
    "kubectl": "[pod/trainer-0/main] ",
    "timed kubectl": "[pod/trainer-0/main] 2026-11-29T10:04:01.123456789Z ",
    "bar": "",
}


@pytest.mark.parametrize("before", BEFORE)
def test_an_unknown_failure_is_seen_behind_what_is_put_before_every_line(
    before: str,
) -> None:
    bar = " 12%|#  | 3/24 [00:05<00:41,  5.9s/it, loss=0.1]" if before == "bar" else ""
    lines = (START + steps(1, 4) + bar + START_OF_ALL + UNKNOWN).splitlines()
    text = "".join(f"{BEFORE[before]}{line}\n" for line in lines)
    assert judged(text).verdict == "unknown"
    ended = [*lines[:5], "Training finished", *lines[5:]]
    text = "".join(f"{BEFORE[before]}{line}\n" for line in ended)
    assert judged(text.replace("Eclipse:", "MoonError:")).verdict == "unknown"


@pytest.mark.parametrize(
    "stopped",
    [
        "Timeout (0:15:00)!\nThread 0x1 (most recent call first):\n",
        "Process 1 got signal: 15\n",
    ],
)
def test_rows_after_a_stop_show_that_it_was_none(stopped: str) -> None:
    rows = [f"upd 00{n}  R 0.{(n * n) % 7}9  KL 0.0072\n" for n in range(1, 10)]
    text = START + "".join(rows[:4]) + stopped
    assert judged(text).verdict in {"hung", "interrupted"}
    text += "".join(rows[4:])
    assert judged(text).verdict == "running"
    assert judged(text + UNCAUGHT).causes[0].cause == "cuda.oom"


def test_a_loss_that_is_no_number_counts_however_long_the_log_goes_on() -> None:
    nan = "12:00:05 WARNING loss is nan in this batch\n"
    text = START + steps(1, 4) + nan + "a batch was read\n" * 400_000
    assert [one.cause for one in judged(text).causes] == ["train.nan"]


@pytest.mark.parametrize(
    "tool", ["tool bash", "sandbox 3", "py-sandbox", "interpreter"]
)
def test_what_a_tool_that_the_model_called_prints_is_not_the_programs(
    tool: str,
) -> None:
    text = START + steps(1, 4) + f"12:00:05 [{tool}] {OOM}\n[{tool}] exit code 137\n"
    assert judged(text).verdict == "running"
    raised = f"[{tool}] case 2: exit code 1, {UNCAUGHT}"
    assert judged(text + raised).verdict == "running"
    assert judged(text + steps(5, 8) + raised + steps(9, 12)).verdict == "running"
    failed = judged(
        text + UNCAUGHT.replace(OOM, "OSError: [Errno 28] No space left on device")
    )
    assert failed.causes[0].cause == "env.disk-full"
    assert judged(text.replace(f"[{tool}]", "[train]")).causes[0].cause == "cuda.oom"


def test_what_a_destructor_raises_ends_no_program() -> None:
    text = START + steps(1, 4)
    ignored = "Exception ignored in: <function Plugin.__del__ at 0x7fed5dd0e680>\n"
    assert judged(text + ignored + UNCAUGHT).verdict == "running"
    assert judged(text + UNCAUGHT).causes[0].cause == "cuda.oom"
    failed = judged(text + ignored + UNCAUGHT.replace(OOM, "OSError: 3") + UNCAUGHT)
    assert failed.causes[0].cause == "cuda.oom"


def test_of_what_was_survived_before_one_step_more_is_enough() -> None:
    text = START + steps(1, 4) + CAUGHT + steps(5, 8) + CAUGHT
    assert judged(text).causes[0].cause == "cuda.oom"
    assert survived(judged(text + steps(9, 9))) == ["cuda.oom"]
    assert judged(text + steps(9, 9) + UNCAUGHT).causes[0].cause == "cuda.oom"


def test_a_program_that_says_next_that_it_goes_on_without_has_not_failed() -> None:
    missing = UNCAUGHT.replace(OOM, "ModuleNotFoundError: No module named 'apex'")
    text = START + steps(1, 4) + missing + "12:00:06 INFO falling back to torch's\n"
    assert judged(text).causes[0].cause == "env.package-missing"
    saved = "12:00:09 INFO the model is written\n"
    assert judged(text + saved).verdict == "running"
    assert judged(text + saved + "Killed\n").causes
    assert judged(START + missing + "12:00:06 INFO 3 layers\n" + saved).causes


def test_a_request_that_a_server_refused_has_not_ended_it() -> None:
    begin = "ERROR 11-27 07:18:02 [serving_chat.py:240] "
    raised = CAUGHT.replace(
        OOM, "ValueError: This model's maximum context length is 8192 tokens. However"
    )
    asked = 'INFO:     10.1.1.7:41029 - "POST /v1/chat/completions HTTP/1.1" {}\n'
    text = "".join(begin + line + "\n" for line in raised.splitlines())
    refused = text + asked.format("400 Bad Request")
    assert judged(refused + asked.format("200 OK")).verdict == "running"
    assert judged(refused).causes[0].cause == "data.too-long"
    failed = refused + asked.format("200 OK") + START_OF_ALL + UNKNOWN
    assert judged(failed).causes[0].cause == "data.too-long"
    slow = "Health check failed. Server couldn't get a response from detokenizer for\n"
    slow += asked.format("503 Service Unavailable")
    assert judged(START + slow + asked.format("200 OK")).verdict == "running"
    assert judged(START + slow).causes[0].cause == "vllm.engine-died"


def test_an_engine_that_ends_with_its_run_has_not_failed_it() -> None:
    died = (
        "(pid=7) ERROR 11-26 22:52:40 [core_client.py:562] Engine core proc "
        "EngineCore_0 died unexpectedly, shutting down client.\n"
    )
    text = START + steps(1, 4) + died
    assert judged(text).causes[0].cause == "vllm.engine-died"
    assert judged(text + "Job 'raysubmit_kq81' succeeded\n").verdict == "healthy"
    assert judged(text + "INFO:     Finished server process [7]\n").causes


def test_who_waited_for_workers_that_then_go_on_is_not_stuck() -> None:
    ready = "12:00:02 INFO torch.compile takes 135.55 s in total\n"
    waits = 2 * "12:00:04 INFO No available shared memory broadcast block found in 60\n"
    assert verdict_at("12:00:05", ready + waits) == "hung"
    assert verdict_at("12:00:05", waits + ready) == "running"


def test_a_port_that_went_down_is_waited_for() -> None:
    port = (
        "n3:7:7 [0] net_ib.cc:247 NCCL WARN NET/IB : mlx5_1:1 Got async event : port "
    )
    report = judged(START + steps(1, 4) + port + "error\n")
    assert (report.verdict, report.causes[0].cause) == ("hung", "comm.ib")
    assert judged(START + steps(1, 4) + port + "active\n").verdict == "running"
    assert judged(START + port + "error\n" + steps(1, 4)).verdict == "running"


def test_what_ray_tries_again_fails_no_job_whose_last_line_says_what_it_saved() -> None:
    killed = "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    text = START + "12:00:02 INFO 40 tables, 812 rows each\n" + killed
    assert judged(text).causes[0].cause == "ray.memory-monitor"
    assert not judged(text + "wrote 412 files to s3://c/tok/v4\n").causes
    assert judged(text + "wrote 412 files to s3://c/tok/v4\n" + killed).causes
    assert judged(text + CAUGHT + "wrote 412 files to s3://c/tok/v4\n").causes


@pytest.mark.parametrize(
    "end",
    [
        "`Trainer.fit` stopped: `max_epochs=1` reached.",
        "Max number of steps has been reached, stopping training early",
    ],
)
def test_a_trainer_that_has_made_its_most_steps_has_ended(end: str) -> None:
    text = START + steps(1, 4) + end + "\n"
    assert verdict_at("16:00:00", text) == "healthy"
    assert verdict_at("16:00:00", text.replace(end, "")) == "hung"


def test_a_program_may_go_on_after_lightnings_trainer() -> None:
    end = "`Trainer.fit` stopped: `max_steps=4` reached.\n"
    stage = "16:00:07 INFO stage 2: still sampling\n"
    assert verdict_at("20:00:00", START + steps(1, 4) + end + stage) != "healthy"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("[launcher] all helpers ended", "failed"),
        ("", "failed"),
        ("[trainer] step 5/5 loss 0.1\n[trainer] exited with code 0", "healthy"),
    ],
)
def test_a_helper_that_ends_well_does_not_end_a_job_that_failed(
    last: str, verdict: str
) -> None:
    raised = UNCAUGHT.replace(OOM, "OSError: [Errno 122] Disk quota exceeded")
    own = "".join(f"[trainer] {line}\n" for line in raised.splitlines())
    text = START + steps(1, 4) + own + "[trainer] exited with code 1\n"
    text += f"[launcher] rollout exited with code 0\n{last}\n"
    assert judged(text).verdict == verdict


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ("trainer exited with code -11", "unknown"),
        ("trainer exited with code 1", "unknown"),
        ("teacher exited with code -15", "running"),
        ("", "running"),
        ("job exited with code 0", "healthy"),
    ],
)
def test_a_helper_that_is_done_ends_no_job(after: str, verdict: str) -> None:
    text = START + steps(1, 9) + "evaluator (pid 402) exited with code 0\n"
    assert judged(f"{text}[launcher] {after}\n").verdict == verdict


def test_the_last_word_of_a_program_is_as_weak_as_when_it_was_survived() -> None:
    judge = "12:00:05 ERROR judge: httpx.ReadTimeout: timed out, reward 0 for 4\n"
    text = START + steps(1, 4) + judge + steps(5, 9) + judge
    assert judged(text).verdict == "running"
    assert verdict_at("16:00:00", text) == "hung"
    assert judged(text + START_OF_ALL + UNKNOWN).verdict == "failed"
    assert judged(START + steps(1, 9) + judge).verdict == "failed"
    killed = "(raylet) A worker died or was killed while executing a task by an error\n"
    assert judged(START + steps(1, 4) + killed + steps(5, 9) + killed).causes


def test_a_line_that_says_what_is_done_instead_is_no_failure() -> None:
    text = START + steps(1, 4) + f"step 4: {OOM}, evaluated on CPU instead\n"
    assert judged(text + "accuracy 0.63\n").verdict == "running"
    assert judged(text).causes[0].cause == "cuda.oom"
    assert judged(text + START_OF_ALL + UNKNOWN).causes[0].cause == "cuda.oom"
    assert judged(text.replace("instead", "") + "accuracy 0.63\n").causes


def test_exceptions_in_a_row_are_no_options() -> None:
    said = "worker-0 | [rank5]: torch.AcceleratorError: CUDA error: uncorrectable ECC\n"
    text = START + steps(1, 4) + 3 * said.replace("ECC", "ECC error encountered")
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    assert [hit.line for hit in log.hits] == [6, 7, 8]


def test_a_tool_or_a_server_that_works_on_ends_no_job() -> None:
    tool = "[sandbox 2] case 4: exit code 0\n"
    assert verdict_at("16:00:00", START + steps(1, 4) + tool) == "hung"
    ready = "12:00:01 INFO:     Application startup complete.\n"
    answer = 'INFO:     10.0.0.1:5210 - "POST /run_code HTTP/1.1" 200 OK\n'
    assert (
        judged(ready + "process 41 exited with code 0\n" + answer).verdict == "running"
    )


def test_a_last_line_that_says_it_stops_for_an_error_is_a_failure() -> None:
    said = "12:00:09 {} teacher: no row has log-probs, stopping\n"
    text = START + steps(1, 9)
    assert judged(text + said.format("ERROR")).verdict == "unknown"
    assert judged(text + said.format("INFO")).verdict == "running"
    assert judged(text + said.format("ERROR") + steps(10, 12)).verdict == "running"


def test_what_the_next_line_tries_again_has_not_failed() -> None:
    error = (
        "Error while downloading from https://cdn-lfs-us-1.hf.co/a: HTTPSConnectionPool"
        "(host='cdn-lfs-us-1.hf.co', port=443): Read timed out.\n"
    )
    text = START + error + "Trying to resume download...\n"
    assert judged(text + "model-00007:  38%\n").verdict != "failed"
    for end in ("", "Killed\n", "giving up\n", START_OF_ALL + UNKNOWN):
        assert judged(text + end).verdict == "failed", end
    assert judged(START + error + "model-00007:  38%\n").verdict == "failed"


def test_a_sync_that_is_tried_again_is_waited_for() -> None:
    error = "12:00:09 [sync] update_weights timed out after 120 s, retrying ({}/3)\n"
    text = START + steps(1, 9) + error
    assert verdict_at("16:00:00", text.format(1)) == "hung"
    assert verdict_at("16:00:00", text.format(3)) == "failed"


def test_what_the_next_line_does_with_less_needs_one_step_more() -> None:
    text = START + steps(1, 4) + f"12:00:05 chunk of 8192: {OOM}\n"
    halved = "12:00:05 INFO chunk halved to 4096 tokens\n"
    assert survived(judged(text + halved + steps(5, 5))) == ["cuda.oom"]
    assert judged(text + halved).causes[0].cause == "cuda.oom"


@pytest.mark.parametrize(("now", "verdict"), [("11:30", "running"), ("13:00", "hung")])
def test_slow_steps_may_be_silent_for_hours_but_not_for_twenty_of_them(
    now: str, verdict: str
) -> None:
    made = "".join(
        f"{n // 2:02}:{n % 2 * 3}0:00 INFO Step {n} | Loss 0.03\n" for n in range(1, 21)
    )
    assert verdict_at(now, made) == verdict


SERVED = 'INFO:     10.0.3.1:40211 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
ANSWERED = 'INFO:     10.0.3.1:40212 - "GET /health HTTP/1.1" 200 OK\n'
REFUSED = 'INFO:     10.0.3.1:40213 - "GET /metrics HTTP/1.1" 404 Not Found\n'
DIED = (
    "ERROR 11-28 10:20:05 [core.py:710] Engine core proc EngineCore_0 died "
    "unexpectedly, shutting down client.\n"
)
FATAL = f"ERROR [core.py:710] EngineCore encountered a fatal error.\nERROR {OOM}\n"
ASSERTS = "CUDA error: device-side assert triggered\n"
HALF = (
    "ERROR engine: ValueError: Bfloat16 is only supported on GPUs with compute "
    "capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5. You can "
    "use float16 instead by explicitly setting the `dtype` flag in CLI.\n"
)
MADE = START + steps(1, 6)


@pytest.mark.parametrize(
    "text",
    [
        MADE + UNCAUGHT + 3 * SERVED,
        MADE + UNCAUGHT + REFUSED + ANSWERED,
        MADE + UNCAUGHT + REFUSED.replace("GET", "POST") + SERVED,
        MADE + "ERROR " + ASSERTS + steps(7, 12) + "ERROR " + ASSERTS,
        FATAL + 3 * SERVED,
        MADE
        + UNCAUGHT
        + "run.sh: the trainer failed; skipping the merge\nrun.sh: done\n",
        MADE + DIED + "watchdog.sh completed with status 0\n",
        MADE + "ERROR " + ASSERTS + steps(7, 12) + "ERROR " + ASSERTS + "leaving\n",
        START + HALF + "12:00:09 INFO trainer: shut down\n",
        MADE + f"ERROR {OOM}; warmup skipped\nmain: bye\n",
        MADE
        + f"[rank3] {OOM}\n12:00:07 INFO reducing metrics of 8 ranks\n"
        + steps(7, 7),
        MADE + "(W pid=4) Exception ignored in: <function f>\n" + UNCAUGHT,
        MADE + "[tool-server] OSError: [Errno 98] Address already in use\n",
        MADE + "(raylet) A worker died or was killed while executing a task by an "
        "unexpected system error.\n12:00:07 INFO checkpoint saved to /ckpt/last\n",
        MADE
        + UNCAUGHT.replace(OOM, "RuntimeError: no")
        + "Please use fp16 instead\nsaved\n",
    ],
)
def test_what_did_end_a_run_is_not_cleared_by_what_stands_after_it(text: str) -> None:
    assert judged(text).verdict in {"failed", "unknown"}


@pytest.mark.parametrize(
    "end",
    [
        "mpirun noticed that process rank 0 exited on signal 6 (Aborted).",
        "[n1:04411] Signal: Aborted (6)",
        "Aborted!",
        "ERROR no rows are left, stopping",
    ],
)
def test_words_of_an_abort_end_a_run(end: str) -> None:
    assert judged(MADE + end + "\n").verdict in {"failed", "unknown"}


@pytest.mark.parametrize(
    "text",
    [
        MADE + "INFO Request cmpl-7: ERROR proxy lost, giving up\n" + steps(7, 7),
        MADE + "stderr: Traceback (most recent call last):\n" + steps(7, 7),
        "".join(f"[10:{n}]: upd {n} R 0.3{n}\n" for n in range(10, 40)),
    ],
)
def test_what_another_says_of_its_end_is_not_the_runs(text: str) -> None:
    assert judged(text).verdict == "running"


def test_a_job_that_is_called_as_a_helper_ends_well() -> None:
    for job in (
        "job teacher-kd finished with status 0",
        "rl-engine-v2 completed with status: 0",
    ):
        assert judged(MADE + job + "\n").verdict == "healthy"
    anew = "[launcher] worker 7: exited with code 137, restarted\n"
    ended = "[launcher] worker 0: exited with code 0\n"
    assert judged(MADE + anew + ended).verdict == "healthy"


@pytest.mark.parametrize(
    "last",
    [
        "INFO 11-28 10:26:01 [async_llm.py:221] Received request cmpl-8: prompt: 'x'\n",
        "INFO 11-28 10:26:01 [loggers.py:208] Engine 000: Avg prompt throughput: 0.0 "
        "tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs\n",
    ],
)
def test_who_is_asked_while_it_waits_stands_still_all_the_same(last: str) -> None:
    waits = "INFO No available shared memory broadcast block found in 60 seconds.\n"
    assert judged(MADE + 6 * waits + last).verdict == "hung"
    assert judged(MADE + 6 * waits + steps(7, 9)).verdict == "running"


def test_what_waits_and_raises_does_not_wait_any_more() -> None:
    raised = (
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and "
        "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but"
    )
    lines = ("Scheduler hit an exception: " + CAUGHT.replace(OOM, raised)).splitlines()
    text = "".join(f"0: {line}\n" for line in lines)
    assert judged(START + text).verdict == "failed"


def test_many_that_exit_are_read_in_time() -> None:
    text = MADE + "".join(
        f"pool: process {n} exited with code 0\n" for n in range(20_000)
    )
    started = time.process_time()
    judged(text)
    assert time.process_time() - started < 20  # it took minutes


ASKS = "wandb: Paste an API key from your profile and hit enter: \n"
TYPED = "wandb: Currently logged in as: jo (team) to https://api.wandb.ai\n"


def test_a_prompt_is_a_cause_only_while_nobody_has_answered_it() -> None:
    report = judged(START + ASKS)
    assert [one.cause for one in report.causes] == ["env.hub-auth"]
    assert report.verdict == "hung"
    told = {line[:8].strip() for line in render.log_text(report).splitlines()}
    assert "fix" in told
    assert not {"waits", "check"} & told
    assert judged(START + ASKS + TYPED + START_OF_ALL + UNKNOWN).causes == ()


def test_items_that_are_done_one_after_another_show_that_a_run_goes_on() -> None:
    def items(first: int, last: int) -> str:
        every = range(first, last + 1)
        return "".join(f"task {n} of 40: {'ok' if n % 3 else 'no'}\n" for n in every)

    text = START + items(1, 4) + CAUGHT
    assert survived(judged(text + items(6, 9))) == ["cuda.oom"]
    assert judged(text).causes[0].cause == "cuda.oom"
    tries = "".join(f"attempt {n} of 40 was made\n" for n in range(1, 9))
    assert judged(START + CAUGHT + tries).causes[0].cause == "cuda.oom"
    # Of items that are counted anew, or of as many others, none goes on.
    again = "".join(f"task {n} of 40: ok\n" for n in (3, 1, 2, 1, 3))
    assert judged(text + again).causes[0].cause == "cuda.oom"


def test_rows_with_a_gap_behind_them_show_that_a_run_went_on() -> None:
    def made(first: int, last: int) -> str:
        every = range(first, last + 1)
        return "".join(
            f"it {n:05d} | kd 0.1{n % 7}{n % 10} | 2.{n % 3} s\n" for n in every
        )

    text = START + made(1, 5) + CAUGHT
    assert survived(judged(text + made(6, 9) + "...\n" + made(99, 100))) == ["cuda.oom"]
    assert judged(text + "...\n").causes


RESTARTS = (
    "I1127 07:18:05 311 torch/distributed/elastic/agent/server/api.py:900] [default] "
    "Worker group FAILED. 2/3 attempts left; will restart worker group\n"
)


def test_what_a_launcher_begins_anew_was_survived() -> None:
    text = START + steps(1, 4) + UNCAUGHT + RESTARTS
    assert judged(text).causes[0].cause == "cuda.oom"
    assert judged(text + "rendezvous timed out, leaving\n").causes
    meets = "12:00:09 INFO loading shard 1\n"
    assert survived(judged(text + meets)) == ["cuda.oom"]
    assert verdict_at("16:00:00", text + meets) == "hung"
    assert judged(text + meets + UNCAUGHT).causes[0].cause == "cuda.oom"


def test_who_resumes_after_its_steps_was_begun_again() -> None:
    resumes = "12:00:07 INFO resumed from step 4 (/ckpt/4)\n"
    text = START + steps(1, 4) + UNCAUGHT + resumes
    assert survived(judged(text + steps(5, 8))) == ["cuda.oom"]
    # Out of a buffer: it was begun with that.
    assert judged(START + UNCAUGHT + resumes + steps(5, 8)).causes


def test_what_is_asked_of_a_cluster_is_there_once_it_has_grown() -> None:
    waits = (
        "(autoscaler +7s) Error: No available node types can fulfill resource request "
        "{'CPU': 8.0}. Add suitable node types to this cluster to resolve this issue.\n"
    )
    grown = "(autoscaler +52s) Resized to 17 GPUs.\n"
    assert verdict_at("12:00:02", START + waits + grown) == "running"
    assert verdict_at("12:00:02", START + grown + waits) == "hung"


def test_programs_of_answers_end_none_though_one_is_the_last_word() -> None:
    def item(n: int, raised: str) -> str:
        return f"eval {n}/164: fail\n{START_OF_ALL}{raised}\n"

    written = '  File "/tmp/tmpk3v1/solution.py", line 4, in <module>\nIndexError: no'
    broken = '  File "<string>", line 4\n    def f(x)\n            ^\nSyntaxError: x'
    text = START + "".join(f"eval {n}/164: pass\n" for n in range(1, 5))
    for last in (written, broken):
        several = text + item(5, written) + item(6, last) + "eval 7/164: pass\n"
        assert judged(several + item(8, last)).verdict == "running"
    assert judged(text + item(5, written)).verdict == "unknown"
    own = written.replace("/tmp/tmpk3v1/solution.py", "/home/a/train.py")
    assert judged(text + item(5, written) + item(6, own)).verdict == "unknown"


@pytest.mark.parametrize("tool", ["interpreter", "sandbox"])
def test_the_programs_own_error_after_a_tools_is_its_own(tool: str) -> None:
    of_tool = CAUGHT.replace(OOM, "ValueError: no").replace(
        "/home/a/train.py", "<stdin>"
    )
    marked = "".join(f"[{tool}] {line}\n" for line in of_tool.splitlines())
    text = START + steps(1, 4) + marked
    assert judged(text).verdict == "running"
    assert judged(text + CAUGHT).causes[0].cause == "cuda.oom"
    # Also one that comes without a traceback of its own.
    assert judged(text + OOM + "\n").causes[0].cause == "cuda.oom"
    assert judged(f"{text}[{tool}] {OOM}\n").verdict == "running"


def test_what_is_written_in_part_is_no_good_end() -> None:
    killed = "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    text = START + "12:00:02 INFO 40 tables, 812 rows each\n" + killed
    assert not judged(text + "results written to out/part.json\n").causes
    causes = judged(text + "partial results written to out/part.json\n").causes
    assert causes[0].cause == "ray.memory-monitor"


@pytest.mark.parametrize("told", ["code -11, started anew", "code 137, restarted"])
def test_a_worker_that_is_started_anew_fails_no_run_that_makes_a_step(
    told: str,
) -> None:
    text = START + steps(1, 4) + f"12:00:05 worker 7 (pid 81): exited with {told}\n"
    assert judged(text + steps(5, 5)).verdict == "running"
    ended = text.replace("started anew", "").replace("restarted", "")
    assert judged(ended).verdict in {"failed", "unknown"}


def test_one_of_many_may_stop_for_an_error() -> None:
    said = "12:00:09 ERROR {}: the page does not load, stopping\n"
    others = "12:00:00 INFO env 2 is made\n12:00:00 INFO sandbox-1 is made\n"
    for part in ("env 7", "sandbox-3", "episode 881"):
        assert judged(others + MADE + said.format(part)).verdict == "running"
    # Of an environment that may be the only one nothing is left.
    assert judged(MADE + said.format("env 0")).verdict == "unknown"
    gave_up = said.format("env 0").replace("stopping", "giving up")
    assert judged(MADE + gave_up + "bye\n").verdict == "unknown"
    assert judged(MADE + said.format("trainer")).verdict == "unknown"


def test_a_bar_that_is_drawn_once_more_is_no_work_after_the_end() -> None:
    def bar(n: int) -> str:
        return f" {n}%|####      | {n}/100 [00:{n}<01:00,  1.00s/it, loss=0.{n}]\n"

    bars = "".join(map(bar, range(30, 41)))
    for end in ("training finished after 40 steps", "run complete"):
        assert judged(f"{START}{bars}{end}\n{bar(40)}").verdict == "healthy"
        assert judged(f"{START}{bars}{end}\n{bar(41)}").verdict == "running"
    assert judged(f"{START}{bars}evaluation done\n{bar(40)}").verdict == "running"


def test_an_end_before_the_last_step_that_names_an_exception_is_a_failure() -> None:
    text = START + "".join(f"step {n}/40 loss 0.{n}\n" for n in range(1, 13))
    named = "[fit] exception in the loop: RuntimeError: sizes do not match\n"
    end = "wandb: Find logs at: wandb/run-1/logs\n"
    assert judged(text + named + end).verdict == "unknown"
    assert judged(text + end).verdict == "healthy"
    assert judged(text + "step 40/40 loss 0.1\n" + named + end).verdict == "healthy"
    assert judged(text + named.replace("[fit]", "skipped: ") + end).verdict == "healthy"


@pytest.mark.parametrize(
    "last",
    [
        "teacher refused (ConnectionError(111)), no more retries\nstopped at 12\n",
        "12:00:09 [Launcher] ERROR: giving up, stopping all\n[Launcher] 0 ended\n",
        '{"event": "run_end", "status": "error", "secs": 4}\n',
        '{"event": "job_finished", "exit_code": 1}\n',
    ],
)
def test_who_gives_up_at_the_end_has_failed(last: str) -> None:
    assert judged(MADE + last).verdict == "unknown"
    assert judged(MADE + last + steps(7, 9)).verdict == "running"


@pytest.mark.parametrize(
    "last",
    [
        "judge failed for one answer, giving up on it and going on\n",
        "12:00:09 ERROR: giving up on sample 31\n",
        '{"event": "run_end", "status": "ok", "exit_code": 0}\n',
        '{"event": "tool_call", "exit_code": 1}\n',
    ],
)
def test_who_gives_up_a_part_has_not_failed(last: str) -> None:
    assert judged(MADE + last).verdict in {"running", "healthy"}


def test_what_an_actor_ran_for_the_model_may_exit() -> None:
    ran = "(Agent pid=88) container exited with code 1 (tests failed)\n"
    assert (
        judged(MADE + ran + "(Agent pid=89) container started\n").verdict == "running"
    )
    assert (
        judged(MADE + ran.replace("container", "trainer") + START).verdict == "unknown"
    )


def test_a_part_that_fails_after_the_training_fails_no_job_that_says_it_is_done() -> (
    None
):
    end = "12:00:09 INFO {'train_runtime': 9.0, 'train_loss': 2.0}\n"
    failed = "eval: code failed: OSError: [Errno 28] No space left on device\n"
    text = START + steps(1, 4) + end + failed
    assert judged(text + "eval: 3 of 4\nall done\n").verdict == "healthy"
    assert judged(text + "eval: 3 of 4\n").causes[0].cause == "env.disk-full"


def test_a_task_whose_exception_nobody_took_needs_one_step_more() -> None:
    said = "Task exception was never retrieved\nfuture: <Task finished name='T-1'>\n"
    raised = START_OF_ALL + UNKNOWN.replace("<module>", "_worker_loop")
    text = START + steps(1, 4) + said + raised
    assert judged(text + steps(5, 5)).verdict == "running"
    assert judged(text).verdict == "unknown"


def test_what_ended_no_program_before_ends_none_as_the_last_word() -> None:
    reset = "[env 12] step failed, resetting: Traceback (most recent call last):\n"
    own = UNKNOWN.replace("moon.Eclipse", "RuntimeError")
    raised = reset + own.replace("<module>", "step")
    text = START + steps(1, 4) + raised + steps(5, 8)
    assert judged(text + raised).verdict == "running"
    assert judged(text + raised.replace("no light", "no sun")).verdict == "unknown"
    assert judged(text + reset + own).verdict == "unknown"


def test_a_server_of_programs_that_exit_has_not_failed() -> None:
    def ran(*codes: int) -> str:
        return "".join(
            f"running {n}.py\nprocess {n} exited with code {code}\n{SERVED}"
            for n, code in enumerate(codes, 40)
        )

    ready = "12:00:01 INFO:     Application startup complete.\n"
    assert judged(ready + ran(0, 1, 0, -11, 1, 0, 1)).verdict == "running"
    # Of processes that end together, or for good, one that failed is no program of
    # another's.
    ended = "".join(f"process {n} exited with code {n % 2}\n" for n in range(8))
    assert judged(START + steps(1, 9) + ended + "12:00:11 INFO the end\n").verdict == (
        "unknown"
    )


@pytest.mark.parametrize(
    "last",
    [
        "12:00:09 INFO train: all steps done, total 2 h 11 min (1 restart)",
        "12:00:09 SUCCESS RL trainer finished!",
        "12:00:09 INFO train: finished, best loss 0.731",
        "[12:00:09] distillation over, student saved: student.safetensors",
        "12:00:09 INFO train: schedule complete",
        "12:00:09 INFO train: exiting cleanly (code 0)",
        "[12:00:09] trained 9 iterations, 2 skipped; bye",
        "[12:00:09] finished 9 iterations",
        "12:00:09 INFO main: ended normally",
        '{"event": "run_end", "status": "ok"}',
        "+ exit 0",
        "[12:00:09] 训练完成，模型已保存到 /out/student",
    ],
)
def test_an_end_in_a_programs_own_words_is_one(last: str) -> None:
    assert verdict_at("16:00:00", f"{MADE}{last}\n") == "healthy"


@pytest.mark.parametrize(
    "last",
    [
        "12:00:09 INFO train: trainer done, saving the model",
        "12:00:09 INFO train: finished, now the evaluation",
        "12:00:09 INFO trainer done, step 9 next",
        "12:00:09 INFO run 3 finished, 4 of 9",
        "12:00:09 INFO loader: finished 400 rows",
        "12:00:09 INFO the training is not done",
        "12:00:09 - INFO - skyrl.train.trainer: Finished: 'policy_train', cost: 0.01s",
        "[12:00:09] 训练开始",
    ],
)
def test_what_is_yet_to_come_after_an_end_may_hang(last: str) -> None:
    assert verdict_at("16:00:00", f"{MADE}{last}\n") == "hung"


def test_a_run_without_a_step_left_ends_with_a_file_that_it_names() -> None:
    made = "".join(f"batch {n} of 9: loss 2.0{n}\n" for n in range(1, 10))
    for last in ("wrote /out/final", "student saved: student.safetensors (2 GiB)"):
        assert verdict_at("16:00:00", f"{START}{made}{last}\n") == "healthy"
        cut = made.replace("of 9", "of 90")
        assert verdict_at("16:00:00", f"{START}{cut}{last}\n") == "hung"


def test_an_evaluation_that_names_exceptions_has_ended() -> None:
    text = START + "Processed prompts:  1%|  | 10/40 [00:03<06:31,  3.34it/s]\n"
    text += "item 17: sympy failed: SyntaxError: invalid syntax\naccuracy 0.9\n"
    text += "Warning: destroy_process_group() was not called before program exit\n"
    assert judged(text).verdict == "healthy"


def test_a_service_beside_the_trainer_may_die_if_that_makes_a_step() -> None:
    def made(first: int, last: int) -> str:
        rows = steps(first, last).splitlines(keepends=True)
        return "".join(f"trainer-1  | {row}" for row in rows)

    died = "{0}   | Segmentation fault (core dumped)\n{0} exited with code 139\n"
    text = START + made(1, 4)
    assert judged(text + died.format("reward-1") + made(5, 5)).verdict == "running"
    assert judged(text + died.format("reward-1")).verdict == "unknown"
    assert judged(text + died.format("trainer-2") + made(5, 5)).verdict == "unknown"


def test_an_error_after_which_a_program_says_how_long_it_sleeps_ends_none() -> None:
    error = "openai.ApiError: Error code: 429 - tokens per minute\n"
    sleeps = "12:00:06 judge: limited, sleeping 7.3 s\n"
    assert judged(MADE + error + sleeps).verdict == "running"
    assert verdict_at("16:00:00", MADE + error + sleeps) == "hung"
    assert judged(MADE + error + sleeps + error).verdict == "unknown"


def test_what_pip_warns_of_ends_no_program_that_then_begins() -> None:
    warns = "ERROR: pip's dependency resolver does not currently take into account all"
    told = f"{warns} the packages.\nvllm 0.9 requires torch==2.7.0, but you have torch "
    told += "2.8.0 which is incompatible.\nSuccessfully installed torch-2.8.0\n"
    assert verdict_at("12:00:02", told + START) == "running"
    assert verdict_at("16:00:00", told + START) == "hung"
    assert judged(told).verdict == "healthy"
    assert judged(told + START + UNCAUGHT).causes[0].cause == "cuda.oom"


def items(first: int, last: int, said: str = "item {} of 40: done") -> str:
    return "".join(f"{said.format(n)}\n" for n in range(first, last + 1))


RAISED_IN_ACTOR = "".join(
    f"(Trainer pid=7) {line}\n" for line in CAUGHT.splitlines(keepends=False)
)
INSTALLED = "Collecting mailer\nSuccessfully installed mailer-1.0\nmail sent\n"


@pytest.mark.parametrize(
    "text",
    [
        # What others go on with, who are named as well.
        START + RAISED_IN_ACTOR + items(1, 9, "(Eval pid=9) item {} of 40"),
        START + RAISED_IN_ACTOR + items(1, 9, "[evaluator] item {} of 40"),
        # Items that fail themselves, each of the same.
        START + items(1, 9, f"item {{}} of 9: {OOM}") + "0 of 9 are judged\n",
        # What is installed only after it.
        MADE + UNCAUGHT + INSTALLED,
        MADE + UNCAUGHT.replace(OOM, "moon.Eclipse: no light") + INSTALLED,
    ],
)
def test_what_others_do_after_an_error_does_not_clear_it(text: str) -> None:
    assert judged(text).verdict in {"failed", "unknown"}


def test_a_driver_may_go_on_with_other_items_than_its_actors() -> None:
    text = START + items(1, 4) + RAISED_IN_ACTOR + items(6, 9)
    assert survived(judged(text)) == ["cuda.oom"]


@pytest.mark.parametrize(
    "error",
    [
        "12:00:08 ERROR train: no batch fits, so there is nothing to train",
        "train: failed with RuntimeError: no batch fits",
    ],
)
def test_who_takes_leave_after_an_error_has_not_ended_well(error: str) -> None:
    leave = "12:00:09 INFO trainer finished!\n"
    assert judged(f"{MADE}{error}\n{leave}").verdict != "healthy"
    assert judged(f"{MADE}{error}\n{steps(7, 9)}{leave}").verdict == "healthy"


@pytest.mark.parametrize("end", ["run finished", "bye", "all done", ""])
def test_a_program_that_says_that_its_training_failed_has_failed(end: str) -> None:
    for said in ("training failed: no batch fits", "12:00:08 INFO main: run aborted"):
        assert judged(f"{MADE}{said}\n{end}\n").verdict == "unknown"
        assert judged(f"{MADE}{said}\n{steps(7, 9)}{end}\n").verdict != "unknown"
    again = "training failed: no worker\nattempting to start the workers"
    assert judged(f"{MADE}{again}\n").verdict == "running"
    earlier = "the last run failed for lack of memory"
    assert judged(f"{MADE}{earlier}\n{end}\n").verdict in {"running", "healthy"}


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ("[launcher] job ended, status 1", "unknown"),
        ("[launcher] rank 3 left with status 1\n[launcher] rank 0 stopped", "unknown"),
        ("[launcher] job ended, status 0", "healthy"),
        ("12:00:09 INFO train: completed all 6 steps in 12 min", "healthy"),
    ],
)
def test_a_status_may_be_told_in_other_words(told: str, verdict: str) -> None:
    assert judged(f"{MADE}{told}\n").verdict == verdict


def test_what_is_used_for_what_is_not_there_lets_a_run_go_on() -> None:
    warns = "n4:311:400 [0] NCCL WARN NET/IB : No usable device, using sockets\n"
    assert judged(START + warns + steps(1, 2)).verdict == "running"
    assert judged(START + warns.replace(", using sockets", "")).causes


@pytest.mark.parametrize(
    "ignored",
    [
        "Exception ignored in: <function Z.__del__ at 0x7f>\nAttributeError: x\n",
        "Exception ignored in: <function Z.__del__ at 0x7f>\n"
        "Traceback (most recent call last):\n"
        '  File "/job/z.py", line 3, in __del__\n    self.f.close()\n'
        "AttributeError: 'Z' object has no attribute 'f'\n",
    ],
)
def test_an_error_after_one_of_a_destructor_has_ended_the_run(ignored: str) -> None:
    fatal = (
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 88, in <module>\n    main()\n'
        "ValueError: ledger out of balance\n"
    )
    assert judged(steps(1, 9) + ignored).verdict == "running"
    assert judged(steps(1, 9) + ignored + fatal).verdict == "unknown"


def test_a_traceback_in_a_line_of_json_has_ended_the_run() -> None:
    told = "".join(
        f'{{"ts": "2026-11-29T10:00:0{n}", "msg": "step {n} loss 0.5"}}\n'
        for n in range(9)
    )
    error = (
        '{"ts": "2026-11-29T10:01:00", "level": "error", "msg": "stops", "exc_info": '
        '"Traceback (most recent call last):\\n  File \\"a.py\\", line 8, in f\\n'
        'ValueError: dark"}\n'
    )
    assert judged(told).verdict == "running"
    assert judged(told + error).verdict == "unknown"


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        (
            '{"event": "run_end", "state": "crashed", "reason": "worker lost"}',
            "unknown",
        ),
        ('{"error": "worker 3 lost", "event": "run_end"}', "unknown"),
        ('{"event": "train_end", "success": false}', "unknown"),
        ('{"event": "run_end", "status": "failure"}', "unknown"),
        ('{"event": "run_failed", "step": 6}', "unknown"),
        ('{"level": "info", "event": "run_end", "exit_code": 1}', "unknown"),
        ('{"event": "run_end", "status": "preempted"}', "running"),
        ('{"event": "eval", "kind": "run_finished", "acc": 0.4}', "running"),
        ('{"event": "train_end", "error": null}', "healthy"),
        ('{"event": "job_finished", "failed": 0, "exit_code": 0}', "healthy"),
    ],
)
def test_of_a_record_of_the_end_the_values_count(record: str, verdict: str) -> None:
    assert judged(f"{MADE}{record}\n").verdict == verdict


def test_a_warning_of_json_may_hold_a_traceback() -> None:
    made = "".join(f'{{"event": "step", "step": {n}, "loss": 0.5}}\n' for n in range(9))
    told = (
        '{{"level": "{}", "event": "tool", "exc_info": "Traceback (most recent..."}}\n'
    )
    assert judged(made + told.format("warning")).verdict == "running"
    assert judged(made + told.format("error")).verdict == "unknown"


def test_a_trainer_that_ends_after_programs_with_a_status_is_none_of_them() -> None:
    ran = "".join(
        f"sandbox: runs\nsandbox: process {n} exited with code {n % 2}\nsandbox: next\n"
        for n in range(20, 30)
    )
    own = "sandbox: process 31 exited with code 1\n"
    for last in ("", "launcher: bye\n"):
        text = START + ran + steps(1, 9)
        assert judged(text + own + "sandbox: next\n").verdict == "running"
        for who in ("launcher: trainer ", ""):
            ended = own.replace("sandbox: ", who)
            assert judged(text + ended + last).verdict == "unknown"


@pytest.mark.parametrize(
    "last",
    [
        "12:00:09 INFO reward: unit test of sample 3 returned with code 1, reward 0",
        "12:00:09 INFO reward: program of answer 17 stopped with status 1",
        "12:00:09 WARNING eval: eval job failed for step 20",
        "12:00:09 WARNING sweep: trial run failed, replaced by node 4",
        "12:00:09 INFO bench: job crashed on 0 of 8 nodes",
        "12:00:09 INFO monitor: no job failed in the past hour",
        "12:00:09 INFO alerts: will mail when the run failed",
    ],
)
def test_what_is_told_of_another_is_no_failure_of_the_run(last: str) -> None:
    assert judged(f"{MADE}{last}\n").verdict == "running"


@pytest.mark.parametrize("error", [OOM, "moon.Eclipse: no light"])
@pytest.mark.parametrize(
    "said", ["", "the run can be resumed from step 4", "resumed from /ckpt/1"]
)
def test_steps_out_of_a_buffer_begin_no_program_again(error: str, said: str) -> None:
    text = START + steps(1, 4) + UNCAUGHT.replace(OOM, error) + said + "\n"
    assert judged(text + steps(5, 8)).verdict in {"failed", "unknown"}
    again = judged(text.replace(said, "resumed from /ckpt/1") + steps(2, 8))
    assert said == "" or again.verdict == "running"


@pytest.mark.parametrize("last", ["run over", "warm-up schedule finished", "job done"])
def test_who_counts_further_has_not_ended(last: str) -> None:
    def made(of: int) -> str:
        return "".join(f"step {n}/{of} loss 2.{n}\n" for n in range(1, 10))

    assert judged(f"{START}{made(9)}{last}\n").verdict == "healthy"
    assert judged(f"{START}{made(90)}{last}\n").verdict == "running"
    early = "early stopping: no progress\n"
    assert judged(f"{START}{made(90)}{early}{last}\n").verdict == "healthy"


def test_a_launchers_second_failure_is_not_begun_anew() -> None:
    failed = UNCAUGHT.replace(OOM, "moon.Eclipse: no light")
    text = START + steps(1, 4) + failed + RESTARTS + steps(3, 6)
    assert judged(text).verdict == "running"
    assert judged(text + failed + steps(7, 9)).verdict == "unknown"


def test_what_is_complained_of_though_it_was_survived_before_has_ended_the_run() -> (
    None
):
    raised = CAUGHT.replace(OOM, "moon.Eclipse: no light")
    text = START + steps(1, 4) + raised + steps(5, 9) + raised
    assert judged(text).verdict == "running"
    assert judged(text + "ERROR: a second bad batch, the loop is left\n").verdict == (
        "unknown"
    )


def test_what_cannot_be_recovered_is_not_gone_on_without() -> None:
    raised = CAUGHT.replace(OOM, "moon.Eclipse: no light")
    end = "12:00:09 INFO results are complete\n"
    for said in ("INFO it recovered by itself", "INFO worker is recovering"):
        assert judged(f"{MADE}{raised}{said}\n{end}").verdict in {"healthy", "running"}
    for said in ("ERROR the state is not recovered", "INFO cannot be recovered"):
        assert judged(f"{MADE}{raised}{said}\n{end}").verdict == "unknown"


def test_who_sleeps_before_its_end_tries_nothing_again() -> None:
    error = "12:00:05 ERROR trainer: no weights for the teacher: FATAL\n"
    sleeps = "12:00:06 INFO sleeping 60 s so that the logs are collected\n"
    assert judged(MADE + error + sleeps).verdict == "unknown"
    tries = sleeps.replace("so that the logs are collected", "before the next try")
    assert judged(MADE + error + tries).verdict == "running"


def test_what_stands_behind_a_margin_is_quoted() -> None:
    quoted = "".join(f"    | {line}\n" for line in UNCAUGHT.splitlines())
    quoted += "    | bash: line 1: 2211 Killed    python -m pytest\n"
    text = steps(1, 4) + "answer 3 printed:\n" + quoted
    assert judged(text + steps(5, 6)).verdict == "running"
    assert judged(text + "evaluation complete\n").verdict == "healthy"
    for whole in (UNCAUGHT, quoted.replace("    | ", "trainer-1  | ")):
        report = judged(steps(1, 4) + whole)
        assert report.causes[0].cause == "cuda.oom"


def test_the_margin_of_an_exception_group_is_no_quotation() -> None:
    group = "  + Exception Group Traceback (most recent call last):\n"
    group += '  |   File "/home/a/train.py", line 3, in <module>\n  |     main()\n'
    group += "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
    group += "  +-+---------------- 1 ----------------\n"
    group += "".join(f"    | {line}\n" for line in UNCAUGHT.splitlines())
    report = judged(steps(1, 4) + group + "    +------------------------------------\n")
    assert report.causes[0].cause == "cuda.oom"


@pytest.mark.parametrize(
    "form",
    [
        "{0} % of the corpus, loss 1.{1}",
        "0.{0} B / 2.0 B tokens",
        "games {0},536, elo {1}",
        "Runde {0}, KL 0,{1}02",
        "第 {0} 轮, 损失 0.{1}2",
        "{0}0,000 rollouts used, reward 0.{1}",
    ],
)
def test_a_number_that_grows_in_lines_of_one_kind_shows_work(form: str) -> None:
    rows = [form.format(n, (n * n) % 7) + "\n" for n in range(1, 9)]
    text = START + "".join(rows[:4]) + CAUGHT
    assert survived(judged(text + rows[4])) == ["cuda.oom"]
    assert judged(text).causes
    ended = START + "".join(rows[:4]) + UNCAUGHT
    assert judged(ended + "".join(rows[4:])).causes  # out of a buffer
    shell = "+ python other.py\n"
    assert judged(text + shell + rows[4]).causes  # of another program
    waits = [f"waiting, {n}0 %\n" for n in range(1, 9)]
    assert judged(START + "".join(waits[:4]) + CAUGHT + "".join(waits[4:])).causes


def test_a_helpers_error_lets_a_trainer_go_on_but_not_a_trainers_a_helper() -> None:
    made = [f"step {n}0 of 400, ce 1.{n}\n" for n in range(1, 9)]
    raised = CAUGHT.splitlines(keepends=True)
    for dies, goes_on, verdict in (
        ("env-7", "trainer-0", "running"),
        ("trainer-0", "env-7", "failed"),
        ("trainer-1", "trainer-0", "failed"),
    ):
        own = "".join(f"{dies}  | {line}" for line in raised)
        others = [f"{goes_on}  | {line}" for line in made]
        text = START + "".join(others[:4]) + own + "".join(others[4:6])
        assert judged(text).verdict == verdict


@pytest.mark.parametrize(
    "said",
    ["all done, bye\n", "finished\n+ exit 0\n", "saved to /o/m\n$ echo $?\n0\n"],
)
def test_what_is_printed_at_an_exit_fails_no_run(said: str) -> None:
    noise = "[rank1]:[W1129 10:00:01.1 TCPStore.cpp:106] [c10d] sendBytes failed on "
    noise += "SocketImpl(fd=3, addr=[localhost]:4, remote=[localhost]:5): Broken pipe\n"
    first, _, rest = said.partition("\n")
    text = START + steps(1, 4) + f"run {first}\n"
    assert judged(text + noise + rest).verdict in {"healthy", "running"}
    assert judged(START + steps(1, 4) + noise).causes
    assert judged(text + noise + "$ echo $?\n1\n").causes


def test_a_script_that_says_ok_does_not_clear_a_run_with_steps_left() -> None:
    bar = "  2%|2         | 22/934 [05:30<3:48:01, 15.00s/it]\n"
    done = "+ rc=0\ntraining finished OK rc=0\n"
    for end in (UNCAUGHT, "x.sh: line 7: 88 Aborted (core dumped) python t.py\n"):
        assert judged(START + bar + end + done).verdict in {"failed", "unknown"}
    assert judged(START + bar.replace("22/", "934/") + done).verdict == "healthy"


@pytest.mark.parametrize(
    "quoted",
    [
        "the grader said:\n```\n{}```\n",
        "transcript:\n    $ python a.py\n{}",
        "  x [9 lines of output]\n{}  [end of output]\n",
    ],
)
def test_what_a_fence_a_transcript_or_pip_holds_is_quoted(quoted: str) -> None:
    indent = "" if "```" in quoted else "    "
    held = "".join(f"{indent}{line}\n" for line in UNCAUGHT.splitlines())
    text = START + steps(1, 4) + quoted.format(held)
    assert judged(text + steps(5, 5)).verdict == "running"
    assert judged(START + steps(1, 4) + held + steps(5, 5)).causes


@pytest.mark.parametrize(
    "text",
    [
        # Two files side by side; another program after the training.
        f"==> err <==\n{UNCAUGHT}\n==> out <==\n" + steps(1, 4),
        "+ python t.py\n" + steps(1, 4) + UNCAUGHT + "+ python p.py\n" + steps(1, 4),
        # An open fence of an answer, and a whole log in one or behind a margin.
        steps(1, 4) + "answer:\n```python\ndef f(\n" + CAUGHT + "answer:\n```python\n",
        "```\n" + steps(1, 4) + CAUGHT + "```\n",
        "".join(f"| {line}\n" for line in (steps(1, 4) + CAUGHT).splitlines()),
        # What is stored, used or waited for is no training.
        steps(1, 4)
        + CAUGHT
        + "".join(f"emergency checkpoint, shard {n}/3\n" for n in (1, 2, 3)),
        steps(1, 4) + CAUGHT + "".join(f"host memory: {n}0.4 GB\n" for n in (4, 5, 6)),
        steps(1, 4) + CAUGHT + "".join(f"no batch, {n}.5 % used\n" for n in (4, 5, 6)),
        # One step out of a buffer after what no process survives.
        steps(1, 4) + "slurmstepd: error: Detected 1 oom_kill event\n" + steps(5, 5),
        # Others than the trainer go on.
        "".join(f"[trainer-0] step {n} of 9, loss 1.{n}\n" for n in range(1, 5))
        + "".join(f"[trainer-0] {line}\n" for line in CAUGHT.splitlines())
        + "".join(f"[env-1] game {n}0 of 90, reward 1.{n}\n" for n in range(1, 5)),
    ],
    ids=range(10),
)
def test_what_others_and_later_lines_say_does_not_clear_a_failure(text: str) -> None:
    assert judged(START + text).verdict in {"failed", "unknown"}


@pytest.mark.parametrize("last", ["evaluation done", "epoch 2 done"])
def test_the_end_of_a_part_before_an_engine_died_is_no_end(last: str) -> None:
    died = "ERROR 11-29 10:21:00 [core_client.py:562] Engine core proc EngineCore_DP0 "
    died += "died unexpectedly, shutting down client.\n"
    text = START + steps(1, 4) + f"12:00:09 INFO {last}\n"
    assert judged(text + died).causes[0].cause == "vllm.engine-died"


@pytest.mark.parametrize(
    "last",
    [
        "训练非正常退出",
        "训练提前终止：显存不足\n任务结束",
        "保存に失敗\n処理が終了しました",
    ],
)
def test_an_end_that_is_none_in_another_language_ends_nothing_well(last: str) -> None:
    assert judged(START + steps(1, 4) + last + "\n").verdict != "healthy"
    assert judged(START + steps(1, 4) + "训练完成\n").verdict == "healthy"


def test_many_ranks_and_caught_exceptions_take_no_long_time() -> None:
    ranks = "".join(
        f"[rank{rank}] 12:00:00 INFO Step {n} | Loss 0.03{n:02d}\n"
        for n in range(1, 30)
        for rank in range(128)
    )
    caught = "".join(
        CAUGHT + f"12:00:01 INFO batch {n} is left out\n" for n in range(400)
    )
    for text in (CAUGHT + ranks, START + steps(1, 4) + caught):
        started = time.process_time()
        judged(text)
        assert time.process_time() - started < 20


@pytest.mark.parametrize("program", ["/opt/t/bin/gpustat", "/usr/lib/sitecustomize.py"])
def test_the_error_of_a_program_beside_the_run_ends_no_run(program: str) -> None:
    raised = UNKNOWN.replace("/home/a/train.py", program)
    text = START + steps(1, 2) + START_OF_ALL + raised + steps(3, 5)
    assert judged(text).verdict == "running"
    assert judged(text.replace(program, "/home/a/train.py")).verdict == "unknown"


def test_who_shows_stacks_after_the_end_stands() -> None:
    text = START + steps(1, 4) + "training finished\n"
    stack = (
        '$ py-spy dump -p 7\nThread 0x7f3a (active): "MainThread"\n    wait (a.py:3)\n'
    )
    assert judged(text).verdict == "healthy"
    assert judged(text + stack).verdict == "hung"


def test_an_exit_in_json_has_a_code() -> None:
    steps_of = "".join(
        f'{{"ev": "step", "n": {n}, "loss": 1.{n}}}\n' for n in range(1, 5)
    )
    for code, verdict in ((1, "unknown"), (0, "running")):
        end = f'{{"lvl": "info", "ev": "exit", "code": {code}}}\n'
        assert judged(steps_of + end).verdict == verdict


def test_a_nan_that_another_metric_of_its_kind_outlives_is_none() -> None:
    tested = "[guard] NON-FINITE LOSS: nan (grad_norm=nan)\n"
    row = "{{'loss': 1.{0}, 'grad_norm': 0.{0}, 'epoch': 0.{0}}}\n"
    rows = "".join(row.format(n) for n in range(1, 6))
    assert survived(judged(START + tested + rows)) in (["train.nan"], [])
    lost = "".join(f"{{'loss': nan, 'epoch': 0.{n}}}\n" for n in range(6, 9))
    assert judged(START + tested + rows + lost).causes[0].cause == "train.nan"


def test_an_option_is_refused_after_the_usage() -> None:
    usage = "start.sh: launching t.py\nusage: t.py [-h]\n           [--a A]\n"
    refused = "t.py: error: unrecognized arguments: --b\n"
    assert judged(usage + refused).causes[0].cause == "config.unknown-option"


def test_an_error_that_a_model_was_given_to_read_is_none() -> None:
    given = "  入力「Bus error (core dumped)」 予測「Killed」\n"
    assert judged(START + steps(1, 4) + given).causes == ()
    assert judged(START + steps(1, 4) + "Bus error (core dumped)\n").causes


@pytest.mark.parametrize(
    "text",
    [
        # No quotation holds steps, most of a log, or a hundred lines.
        steps(1, 4) + "```\n" + steps(5, 6) + CAUGHT + "```\n",
        "```\n" + CAUGHT + "```\n",
        steps(1, 4) + "```\n" + "one line of it\n" * 120 + CAUGHT + "```\n",
        # A part of the training's own words, twice in a log of two files.
        f"==> errors.log <==\n{UNCAUGHT}==> output.log <==\n{steps(1, 2)}"
        f"==> errors.log <==\n==> output.log <==\n{steps(3, 5)}",
    ],
    ids=range(4),
)
def test_what_only_looks_quoted_or_begun_again_is_neither(text: str) -> None:
    assert judged(text).verdict in {"failed", "unknown"}


@pytest.mark.parametrize(
    "form",
    [
        "host memory: {0}0.4 GB",
        "Loading shards: {0}0%|##   | {0}0/100 [00:0{0}<00:09, 1.2it/s]",
        "packets lost so far: {0}",
    ],
)
def test_lines_that_grow_of_something_else_show_no_work(form: str) -> None:
    rows = [form.format(n) + "\n" for n in range(1, 9)]
    text = START + "".join(rows[:4]) + CAUGHT + "".join(rows[4:])
    assert judged(text).causes[0].cause == "cuda.oom"


def test_what_is_stored_is_no_work() -> None:
    stored = "".join(f"uploading what epoch {n} has left\n" for n in range(1, 5))
    assert judged(START + steps(1, 4) + CAUGHT + stored).causes[0].cause == "cuda.oom"


def test_what_stands_in_richs_frame_is_no_quotation() -> None:
    frame = (
        "╭───── Traceback (most recent call last) ─────╮\n│ /app/train.py:7 in main\n"
    )
    frame += f"│ {OOM}\n╰─────────╯\n"
    assert judged(START + steps(1, 4) + frame).causes[0].cause == "cuda.oom"


def test_an_item_that_is_begun_once_more_counts_once() -> None:
    items = [f"[{n}/9] {name}\n" for n, name in enumerate(("ab", "cd", "ef", "gh"), 1)]
    after = "".join(line for item in items for line in (item, item))
    assert survived(judged(START + items[0] + CAUGHT + after)) == ["cuda.oom"]


@pytest.mark.parametrize(
    ("dies", "goes_on", "signs", "verdict"),
    [
        ("env-7", "trainer-0", 1, "failed"),
        ("env-7", "trainer-0", 2, "running"),
        ("env-7", "env-8", 2, "failed"),
        ("env-trainer-7", "other-0", 2, "failed"),
    ],
)
def test_who_goes_on_has_to_be_another_and_to_show_it(
    dies: str, goes_on: str, signs: int, verdict: str
) -> None:
    made = [f"{goes_on}  | step {n}0 of 400, ce 1.{n}\n" for n in range(1, 9)]
    own = "".join(f"{dies}  | {line}\n" for line in CAUGHT.splitlines())
    text = START + "".join(made[:4]) + own + "".join(made[4 : 4 + signs])
    assert judged(text).verdict == verdict


def test_a_script_may_go_on_after_a_program_that_did_not_train() -> None:
    warm = "+ python warm.py\n" + START_OF_ALL + UNKNOWN
    train = "+ accelerate launch t.py\n" + steps(1, 4)
    assert judged(warm + train).verdict == "running"
    assert judged("+ python t.py\n" + steps(1, 4) + warm + train).verdict == "unknown"


def test_ppos_metrics_are_steps() -> None:
    """As TRL's PPOTrainer logs them."""
    rows = "".join(
        f"{{'eps': 7, 'objective/kl': {n}.21, 'objective/entropy': 49.8}}\n"
        for n in range(4)
    )
    bench = "+ ./all_reduce_perf -g 2\n./all_reduce_perf: error while loading shared"
    bench += " libraries: libcudart.so.11.0: cannot open shared object file\n"
    text = f"{bench}+ python warm.py\n{UNKNOWN}+ accelerate launch ppo.py\n{rows}"
    assert judged(bench).causes[0].cause == "env.package-conflict"
    assert survived(judged(text)) == ["env.package-conflict"]


def test_a_line_whose_next_says_that_it_is_tried_again_may_go_well() -> None:
    full = "join 2: sort: write failed: /tmp/s1: No space left on device\n"
    again = "join 2: rc 2, retry 1 of 3\n"
    last = again.replace("1 of 3", "3 of 3")
    assert judged(START + full + again + "join 2: ok 9 M lines\n").causes == ()
    for end in (again, last + "join 3: ok 9 M lines\n", again + "join 2 died\n"):
        assert judged(START + full + end).causes[0].cause == "env.disk-full"


def test_ranks_that_come_after_one_that_failed_show_no_work() -> None:
    said = [f"INFO rank {n}: optimizer shard written\n" for n in (0, 2, 3)]
    full = "ERROR rank 1: [Errno 28] No space left on device: '/ckpt/1.pt'\n"
    text = START + steps(1, 4) + said[0] + full + "".join(said[1:])
    assert judged(text).causes[0].cause == "env.disk-full"


@pytest.mark.parametrize("rate", ["0.0 tok/s", "0 tokens/s"])
def test_a_rate_of_nothing_is_no_work(rate: str) -> None:
    beats = "".join(f"heartbeat uptime {n} rollout {rate}\n" for n in (91, 151, 211))
    text = START + steps(1, 4) + CAUGHT + beats
    assert judged(text).causes[0].cause == "cuda.oom"
    works = text.replace("0.0 tok/s", "9.1 tok/s").replace("0 tokens/s", "9 tokens/s")
    assert judged(works).causes == ()


def test_llama_cpps_look_for_a_gpu_is_no_certain_end() -> None:
    """It goes on with the CPU: ggml/src/ggml-cuda/ggml-cuda.cu."""
    lacks = "failed to initialize CUDA: no CUDA-capable device is detected\n"
    told = [judged(START + who + lacks).causes[0] for who in ("ggml_cuda_init: ", "")]
    assert [(one.cause, one.confidence) for one in told] == [
        ("env.no-gpu", "likely"),
        ("env.no-gpu", "certain"),
    ]


@pytest.mark.parametrize("last", ["All done\n", "{'train_runtime': 3.0}\n"])
@pytest.mark.parametrize("how", ["Killed    ", "Segmentation fault   "])
def test_what_a_shell_saw_die_did_not_finish(how: str, last: str) -> None:
    died = f"job.sh: line 3: 4711 {how} python train.py\n"
    assert judged(START + steps(1, 4) + died + last).causes
    assert judged(START + died + steps(1, 4) + last).verdict == "healthy"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("训练异常，程序已退出", "unknown"),
        ("12:00:09 ERROR 训练失败: 没有空间", "unknown"),
        ("12:00:09 ERROR 训练过程中发生错误，训练终止", "unknown"),
        ("12:00:09 ERROR 学習に失敗しました", "unknown"),
        ("FEHLER Das Training wurde vorzeitig abgebrochen", "unknown"),
        ("训练任务失败，重试", "running"),
        ("评测: 程序失败 0 个, 通过 64 个", "running"),
        ("训练失败率 0.0%", "running"),
        ("检查点已保存，训练中断可从此处恢复", "running"),
        ("INFO 学習が中断された場合は --resume で再開できます", "running"),
        ("gespeichert; falls das Training abgebrochen wird, hier weiter", "running"),
    ],
)
def test_a_failure_is_one_in_other_languages(words: str, verdict: str) -> None:
    assert judged(START + steps(1, 4) + words + "\n").verdict == verdict


def test_kills_that_a_control_group_counts_end_no_run_that_ended_well() -> None:
    counts = "memory.events: max 8 oom 1 oom_kill 1 oom_group_kill 0\n"
    assert judged(START + steps(1, 4) + counts).causes[0].cause == "env.host-oom"
    assert judged(START + "low 0\noom_kill 1\n").causes[0].cause == "env.host-oom"
    done = START + steps(1, 4) + "Training completed\n" + counts
    assert judged(done).verdict == "healthy"


def test_kubectls_prefix_hides_no_kill() -> None:
    killed = "/entry.sh: line 3:    71 Killed   python t.py\n"
    for at in ("", "2025-06-11T09:00:32.123456789Z "):
        text = START + "[pod/trainer-0/main] " + at + killed
        assert judged(text).causes[0].cause == "env.killed"


def test_what_will_be_retried_and_was_written_is_survived() -> None:
    told = "{}\nthe shard was written\n"
    assert judged(START + CAUGHT + told.format("will be retried")).causes == ()
    assert judged(START + CAUGHT + told.format("is the end")).causes


def test_a_socket_that_closed_before_the_work_was_done_is_no_cause() -> None:
    closed = "[W523 21:36:39.2 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl("
    closed += "fd=56, addr=[localhost]:41234): failed to recv, got 0 bytes\n"
    work = "Processed prompts: 100%|####| 64/64 [00:11<00:00,  5.71it/s]\n"
    wrote = "wrote 64 answers to out/answers.jsonl\n"
    assert judged(closed + work + wrote).causes == ()
    assert judged(closed + "INFO loading\n").causes[0].cause == "comm.peer-died"


def test_a_server_that_was_asked_to_end_says_so_first() -> None:
    asked = "INFO 03-04 14:12:31 [launcher.py:110] Shutting down FastAPI HTTP server.\n"
    died = "ERROR 03-04 14:12:31 [core_client.py:636] Engine core proc EngineCore died"
    died += " unexpectedly, shutting down client.\nINFO:     Shutting down\n"
    served = 'INFO: 127.0.0.1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    assert judged(served + asked + died).causes == ()
    assert judged(served + died).causes[0].cause == "vllm.engine-died"


@pytest.mark.parametrize(
    ("told", "verdict"),
    [("Successfully completed.", "healthy"), ("Exited with exit code 1.", "unknown")],
)
def test_lsfs_report_of_a_job_is_no_signal(told: str, verdict: str) -> None:
    report = "Started at Tue Nov  4 09:12:18 2025\nTerminated at Tue Nov  4 11:49:52"
    report += f" 2025\n\n{told}\n\nResource usage summary:\n\n    Run time : 9 s\n"
    assert judged(START + own_steps(1, 4) + report).verdict == verdict


def test_bashs_word_for_a_signal_is_one() -> None:
    told = "run.sh: line 3:    71 Terminated              python t.py\n"
    assert judged(START + steps(1, 4) + told).ended_by == "SIGTERM"
    assert judged(START + steps(1, 4) + "Terminated\r\n").ended_by == "SIGTERM"


def test_a_bar_of_lightnings_training_is_a_step() -> None:
    bar = "Epoch 0:  %d%%|#   | %d/25000 [08:11<5:35:40,  1.02it/s, v_num=9, kd=0.5]\n"
    stop = "[rank: 1] Received SIGTERM: bypassing SIGTERM handler.\n"
    told = bar % (12, 3000) + bar % (16, 4000) + stop
    assert judged(told).ended_by == "SIGTERM"
    assert judged(told + bar % (18, 4500)).verdict == "running"


def test_who_waited_has_waited_once_a_step_is_made() -> None:
    said = "(raylet) [2025-10-05 23:03:40,110 E 1 1] (raylet) worker_pool.cc:586: Some "
    said += "workers of the worker process(9991) have not registered within the timeout"
    step = "=== Step 6{0}/500 ===\n▶ Training policy...\n  • Total step time: 8{0}.1s\n"
    assert judged(step.format(1) + said).causes[0].cause == "ray.worker-start"
    assert judged(step.format(1) + said + "\n" + step.format(2)).causes == ()


def test_compose_pads_the_names_of_processes() -> None:
    line = "teacher-kd  |  shard %03d/012  3,1%02d pairs/min\n"
    died = "teacher-kd  |  RuntimeError: DataLoader worker (pid 6) is killed by "
    died += "signal: Segmentation fault.\n"
    told = "".join(line % (n, n) for n in (0, 4)) + died
    assert judged(told).causes[0].cause == "data.worker-died"
    assert judged(told + "".join(line % (n, n) for n in (6, 9, 11))).causes == ()


def test_torchs_frames_in_cpp_are_of_an_exit() -> None:
    closed = """\
[W527 09:09:13.131 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=71, \
addr=[node04]:51172, remote=[node04]:40801): Connection reset by peer
Exception raised from recvBytes at /pytorch/torch/csrc/Utils.hpp:675 \
(most recent call first):
frame #0: c10::Error::Error(std::string) + 0x98 (0x7f1 in libc10.so)
"""
    for last in ("Final validation metrics: {'a': 1}\n", "Job finished after 9 s\n"):
        assert judged(steps(1, 4) + last + closed).verdict == "healthy"


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ("uploaded to lab/kd-out", "healthy"),
        ("pushed the weights to lab/kd-out", "healthy"),
        ("upload attempt 2 of 3 succeeded", "healthy"),
        ("giving up", "failed"),
    ],
)
def test_an_upload_after_the_end_is_tried_again(told: str, verdict: str) -> None:
    error = (
        "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: "
    )
    raised = CAUGHT.replace(OOM, error + "https://huggingface.co/api/models/lab/kd-out")
    tries = "upload attempt 1 of 3 failed, trying again in 60 s\n"
    end = "{'train_runtime': 7166.31}\n"
    assert judged(steps(1, 4) + end + raised + tries + told + "\n").verdict == verdict


def test_one_step_after_an_error_may_be_the_first_of_all() -> None:
    step = "{'loss': 0.71, 'grad_norm': 1.02, 'epoch': 0.01}\n"
    assert judged(START + CAUGHT + "batch size: 4\n" + step).verdict == "running"
    assert judged(START + CAUGHT + "batch size: 4\n").causes[0].cause == "cuda.oom"
    assert judged(START + UNCAUGHT + "batch size: 4\n" + step).causes


@pytest.mark.parametrize("who", ["", "(TaskRunner pid=9) "])
def test_one_step_shows_that_a_program_that_began_anew_works(who: str) -> None:
    begun = "torch 2.9.0, 8 ranks, config kd.yaml\n"
    error = (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    )
    step = who + "step:{0} - actor/entropy:0.2{0} - actor/pg_loss:0.02{0}\n"
    told = begun + "".join(map(step.format, range(1, 5))) + UNCAUGHT.replace(OOM, error)
    assert judged(told + begun + step.format(5)).verdict == "running"
    for other in ("", begun, step.format(5)):
        assert judged(told + other).causes[0].cause == "cuda.illegal-access"


@pytest.mark.parametrize(
    ("told", "verdict"), [("3 passed in 1.20s", "healthy"), ("3 ran in 1.20s", "hung")]
)
def test_pytests_last_line_is_an_end(told: str, verdict: str) -> None:
    assert judged(START + told + "\n").verdict == verdict


def test_faulthandlers_stack_of_one_thread_is_one() -> None:
    one = 'Stack (most recent call first):\n  File "/t/a.py", line 3 in wait\n'
    assert log_end.stuck((START + steps(1, 4) + one).encode())


def test_skyrls_timer_tells_a_step_and_a_full_bar_within_it_no_end() -> None:
    timer = "2026-03-09 10:0{0}:0{1} | INFO | skyrl_train.utils.utils:{2} - {3}\n"
    bar = "Policy Train epoch [1/1]: 100%|##| 64/64 [00:45<00:00,  1.48it/s]\n"
    done = timer.format("{0}", 3, "__exit__:60", "Finished: 'step', time cost: 143.3s")
    step, begun = bar + done, timer.format(5, 1, "__enter__:52", "Started: 'generate'")
    told = "".join(step.format(n) for n in range(1, 5))
    assert judged(START + told + begun).verdict == "running"
    assert judged(START + told + bar + begun).verdict == "running"
    assert judged(START + told + CAUGHT + step.format(5)).verdict == "running"
    assert judged(START + told + CAUGHT + begun).causes
    whole = "Training Batches Processed: {0}%|##| {0}/100 [02:25<10:00, 1.45s/it]\n"
    assert judged(START + CAUGHT + whole.format(50)).verdict == "running"
    # It saves before it says so.
    assert judged(START + whole.format(100)).verdict == "running"
    assert judged(START + whole.format(100) + "Training done.\n").verdict == "healthy"


@pytest.mark.parametrize(
    ("file", "verdict"), [("/tmp/tmp8anrmv1m", "running"), ("/tmp/a.py", "failed")]
)
def test_an_answers_program_may_be_a_temporary_file(file: str, verdict: str) -> None:
    raised = START_OF_ALL + f'  File "{file}", line 9, in <module>\n' + "{}\n"
    told = "".join(
        raised.format(what) + steps(n, n)
        for n, what in enumerate(("MemoryError", "IndexError: no", "EOFError"), 1)
    )
    assert judged(START + steps(0, 0) + told + steps(4, 5)).verdict == verdict


@pytest.mark.parametrize(("code", "verdict"), [(0, "healthy"), (137, "failed")])
def test_who_is_ended_because_another_container_ended_has_not_failed(
    code: int, verdict: str
) -> None:
    ends = f"trainer-1 exited with code {code}\n"
    rest = "reward-1 exited with code 137\n"
    step = "trainer-1  | step:{0} - actor/loss:0.0{0}\n"
    told = "".join(map(step.format, range(1, 5))) + ends
    report = judged(told + "Aborting on container exit...\n" + rest)
    assert report.verdict == verdict
    if code:
        assert "trainer-1" in report.causes[0].evidence[0].text
    assert judged(told + rest).verdict == "failed"


def test_a_step_that_is_finished_is_no_end() -> None:
    done = "[INFO] [agentic_pipeline.py (402)] pipeline {}finished\n"
    for part in ("step 4 ", "iteration #4 ", "round 4 ", "batch 4 "):
        assert judged(START + steps(1, 4) + done.format(part)).verdict == "running"
    for whole in ("", "at step 4, "):
        assert judged(START + steps(1, 4) + done.format(whole)).verdict == "healthy"


@pytest.mark.parametrize(
    "words", ["done: 97 answers, 3 do not fit", "student saved in a/b. finished."]
)
def test_closing_words_count_where_only_an_exit_follows(words: str) -> None:
    stopped = """\
ERROR 11-14 04:46:12 utils.py:120] Worker VllmWorkerProcess pid 307 died, exit code: -15
INFO 11-14 04:46:12 utils.py:124] Killing local vLLM worker processes
"""
    assert judged(START + steps(1, 4) + words + "\n" + stopped).verdict == "healthy"
    crashed = stopped.replace("-15", "-11")
    assert judged(START + steps(1, 4) + words + "\n" + crashed).verdict == "failed"
    assert judged(START + steps(1, 4) + "step 5 begins\n" + stopped).verdict == "failed"


@pytest.mark.parametrize(
    "asks", ["echo $?", "echo ${PIPESTATUS[0]}", 'echo "$?"', "echo $rc"]
)
def test_a_shell_shows_a_status_in_several_ways(asks: str) -> None:
    noise = """\
[rank1]:[W1228 20:50:46.554922355 TCPStore.cpp:106] [c10d] sendBytes failed on \
SocketImpl(fd=61, addr=[localhost]:36114, remote=[localhost]:29500): Broken pipe
frame #3: c10d::ProcessGroupNCCL::heartbeatMonitor() + 0x30c
"""
    for saved in ("model written to /out/student", "saved in a/b. finished."):
        told = f"{steps(1, 4)}{saved}\n{noise}$ {asks}\n"
        assert judged(told + "0\n").verdict == "running"
        assert judged(told + "1\n").verdict == "failed"


@pytest.mark.parametrize(("state", "verdict"), [("COMPLETED", 0), ("FAILED", 1)])
def test_slurms_account_of_a_job_tells_its_end(state: str, verdict: int) -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=16.batch. Some of "
    killed += "the step tasks have been OOM Killed.\n"
    account = f"JobID           State ExitCode\n16     {state}   {verdict}:0\n"
    told = START + steps(1, 4) + killed + account
    assert judged(told).verdict == ("healthy", "failed")[verdict]
    # Of a task of an array another may tell nothing.
    for other in ("17_1", "17_2.batch", "18"):
        assert judged(told + f"{other}    FAILED   1:0\n").verdict == "failed"


@pytest.mark.parametrize(
    ("code", "verdict"),
    [("rc=0", "healthy"), ("exit=0", "healthy"), ("rc=1", "failed")],
)
def test_actors_that_are_killed_after_the_last_step_end_nothing(
    code: str, verdict: str
) -> None:
    killed = "ERROR worker.py:421 -- Unhandled error: The actor died unexpectedly "
    killed += "before finishing this task.\nThe actor is dead because it was killed by "
    told = START + steps(1, 4) + killed + f"`ray.kill`.\nrun finished, {code}\n"
    assert judged(told).verdict == verdict


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (f"gold=hang  pred=none  text='{OOM}'", "running"),
        (f'label=1 input="{OOM}"', "running"),
        (f"gold=hang  pred=none  text='no' {OOM}", "failed"),
        (f"text='{OOM}'", "failed"),
    ],
)
def test_a_text_beside_its_label_is_a_sample(line: str, verdict: str) -> None:
    assert judged(START + steps(1, 4) + line + "\n").verdict == verdict


@pytest.mark.parametrize("name", ["", "dataset_4_0 "])
def test_a_data_set_that_is_made_outlived_what_happened_to_its_makers(
    name: str,
) -> None:
    made = (
        f"INFO executor.py:279 -- ✔️  Dataset {name}execution finished in 20.71 seconds"
    )
    who = "(MapWorker(ReadRange->MapBatches(f)) pid=91, ip=10.0.0.4) "
    died = "ERROR [core.py:71] EngineCore encountered a fatal error.\n" + CAUGHT
    by_maker = "".join(who + line for line in died.splitlines(keepends=True))
    ignored = "Ignoring this exception with remaining max_errored_blocks=18.\n" + CAUGHT
    told = START + by_maker + ignored + made + "\nwritten 212 files\n"
    assert judged(told).causes == ()
    assert judged(told.replace("finished in", "failed after")).causes
    assert judged(told + CAUGHT).causes
    # It says the same where nobody reads any more: its reader failed.
    assert judged(told.replace(START, START + CAUGHT)).causes
    assert judged(told.replace("MapWorker(ReadRange->MapBatches(f))", "Trainer")).causes
    assert judged(told.replace("Ignoring", "Raising")).causes


@pytest.mark.parametrize(
    ("why", "verdict"),
    [
        (", because the objective function returned nan", "running"),
        (" with value nan", "running"),
        (" with parameters: {'lr': 1e-3}", "failed"),
    ],
)
def test_optuna_goes_on_after_a_trial_without_a_number(why: str, verdict: str) -> None:
    def trial(n: int, loss: str) -> str:
        return f"trial {n} lr {n}e-05\n  900/900 loss {loss} acc 0.6{n}20\n"

    told = START + "".join(trial(n, f"0.50{n}2") for n in range(4)) + trial(4, "nan")
    told += f"[W 2026-08-30 10:03:49,895] Trial 4 failed{why}.\n"
    told += trial(5, "0.5052") + "trials: 6  complete: 5  fail: 1\n"
    assert judged(told).verdict == verdict


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        *(("fin normale", True), ("Fin normal", True), ("normal beendet", True)),
        *(("fin anormale", False), ("abnormal beendet", False)),
        *(("pas de fin normale", False), ("nicht normal beendet", False)),
    ],
)
def test_a_normal_end_may_be_told_in_other_languages(words: str, ends: bool) -> None:
    report = judged(START + steps(1, 4) + CAUGHT + f"== {words}, 12 h 27\n")
    assert (report.verdict == "healthy", bool(report.causes)) == (ends, not ends)


def test_an_engine_may_end_with_its_part_of_a_run() -> None:
    died = (
        "ERROR [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, "
    )
    died += "shutting down client.\n"
    told = START + "Processed prompts: 100%|##| 9/9 [00:09<00:00, 1.00it/s]\n" + died
    assert judged(told + steps(1, 4)).verdict == "running"
    assert judged(told).causes
    # A trainer may make steps of what it had before.
    assert judged(START + steps(1, 2) + told + steps(3, 6)).causes


@pytest.mark.parametrize(
    ("stops", "verdict"),
    [
        *(("+ ray stop", "healthy"), ("$ ray stop --force", "healthy")),
        *(("Stopped all 9 Ray processes.", "healthy"), ("+ sleep 3", "failed")),
    ],
)
def test_what_ray_says_once_a_script_stopped_it_is_no_failure(
    stops: str, verdict: str
) -> None:
    done = "Job 'raysubmit_1tVf8HqWz9RmC3sE' succeeded\n"
    gone = (
        "[2026-01-30 07:14:09,220 E 771 771] gcs_rpc_client.h:179: Failed to connect "
    )
    gone += "to GCS at address 172.19.0.2:6379 within 5 seconds.\n"
    assert judged(f"{steps(1, 4)}{done}{stops}\n{gone}").verdict == verdict


def test_what_a_script_ran_after_the_training_and_did_without_is_survived() -> None:
    trained, killed = (
        "{'train_runtime': 6120.4, 'epoch': 1.0}\n",
        "+ lm_eval --tasks all\n",
    )
    killed += CAUGHT + "bench.sh: line 22: 55104 Killed    lm_eval --tasks all\n"
    last = "+ touch /ckpt/_SUCCESS\njob done, status=Succeeded\n"
    told = START + steps(1, 4) + trained + killed
    assert survived(judged(told + last)) == ["cuda.oom"]
    assert judged(told).causes[0].cause == "cuda.oom"
    assert judged(told + "+ touch /ckpt/_SUCCESS\n").causes
    assert judged(told + last.replace("Succeeded", "Failed")).causes
    assert judged(told + last.replace("\njob", "\ncannot touch it\njob")).causes
    assert judged(told.replace(trained, "") + last).causes
    # Of a script that installs first, it is the training that failed.
    pip = "Successfully installed trl-0.25\n+ python train.py\n"
    assert judged(START + pip + CAUGHT + last).causes
    assert judged(START + pip + steps(1, 4) + killed + last).causes
