"""A traceback's functions tell in which phase it was raised."""

from __future__ import annotations

import io

import pytest

from pytest_gkd.diagnosis import catalogue, exceptions, frames, log_file, logs

CATALOGUE = catalogue.load()
START = "Traceback (most recent call last):"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3 has"


def frame(function: str, file: str = "a.py") -> str:
    return f'  File "/opt/{file}", line 7, in {function}\n    {function}()'


def phase_of(*lines: str) -> str:
    text = "\n".join(lines).encode()
    chains = exceptions.read(text)
    return frames.phase_of(exceptions.around(chains, text.rindex(b"Error")))


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        (["main", "fit", "update_actor", "forward"], "training-step"),
        (["fit", "training_step", "_generate_and_score_completions"], "generation"),
        (["fit", "save_checkpoint", "wait"], "checkpoint"),
        (["TRLTrainer.sync_weights"], "weight-sync"),
        (["main", "helper"], ""),
        (["main", "ask_teacher"], "teacher"),
        (["ask_teacher", "update_actor"], "training-step"),
        (["main", "push_the_weights"], "weight-sync"),
    ],
)
def test_the_innermost_known_function_tells(functions: list[str], phase: str) -> None:
    assert phase_of(START, *map(frame, functions), "ValueError: no") == phase


def test_a_traceback_in_a_box_tells_as_well() -> None:
    box = "│ /opt/verl/fsdp_workers.py:712 in update_actor        │"
    assert phase_of(START, box, "ValueError: no") == "training-step"


def test_the_first_of_chained_exceptions_tells() -> None:
    first = [START, frame("generate_sequences"), "KeyError: 'a'", ""]
    chain = "During handling of the above exception, another exception occurred:"
    second = ["", START, frame("update_actor"), "ValueError: no"]
    assert phase_of(*first, chain, *second) == "generation"
    assert phase_of(*first, "two hours later", *second) == "training-step"


def test_lines_of_another_process_are_passed_over() -> None:
    ours, theirs = "(WorkerDict pid=7) ", "(WorkerDict pid=8) "
    lines = [
        ours + START,
        theirs + START,
        *(ours + line for line in frame("update_actor").splitlines()),
        *(theirs + line for line in frame("save_checkpoint").splitlines()),
        theirs + "OSError: [Errno 28] No space left on device",
        ours + "ValueError: no",
    ]
    first = "\n".join(lines[:1] + lines[2:])
    at = first.encode().rindex(b"ValueError")
    chains = exceptions.read(first.encode())
    told = frames.phase_of(exceptions.around(chains, at, ours.strip()))
    assert told == "training-step"


def test_a_cause_that_is_met_in_one_phase_tells_it() -> None:
    text = (
        b"Started a local Ray instance\nrun.py: error: unrecognized arguments: --lr2\n"
    )
    log = log_file.read(io.BytesIO(text), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "config"


def test_the_frames_of_the_root_say_where_a_run_failed() -> None:
    text = ["Before init rollout model", START, frame("update_actor"), OOM]
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "training-step"
    text[2] = frame("init_model")  # verl's, which makes the rollout too
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "rollout-init"


def test_the_frames_of_an_unknown_failure_say_where_it_was() -> None:
    text = [
        "Before init rollout model",
        START,
        frame("update_actor"),
        "MoonError: x",
    ]
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    report = logs.judge([log], CATALOGUE)
    assert (report.verdict, report.phase) == ("unknown", "training-step")
