"""The first error of a failure that no rule knows, and where it was raised."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, first_error, log_file, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.report import render

CATALOGUE = catalogue.load()
PACKAGES = "/opt/env/lib/python3.11/site-packages"


def raised(error: str, *places: str) -> str:
    """A traceback; each place is ``file:function:code``."""
    lines = ["Traceback (most recent call last):"]
    for place in places:
        file, function, code = place.split(":", 2)
        lines += [f'  File "{file}", line 20, in {function}', f"    {code}"]
    return "\n".join([*lines, error, ""])


MOON = raised(
    "MoonError: no moon tonight",
    "/job/run.py:main:trainer.fit()",
    f"{PACKAGES}/verl/trainer/ppo/ray_trainer.py:fit:tide(batch)",
    f"{PACKAGES}/numpy/lib/tides.py:tide:raise MoonError('no moon tonight')",
)
STAR = raised("StarError: no light", "/job/up.py:fetch:store.get(name)")
SEEN = raised(
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [x]:4",
    "/job/other.py:wait:dist.barrier()",
)


def log_of(*texts: str) -> log_file.Log:
    return log_file.read(io.BytesIO("".join(texts).encode()), "x.log", 0, CATALOGUE)


def judged(*texts: str) -> LogReport:
    return logs.judge([log_of(*texts)], CATALOGUE)


def test_an_unknown_failure_is_told_with_the_places_of_its_error() -> None:
    report = judged("starts\n", MOON)
    assert report.verdict == "unknown"
    error, *places = report.telling
    assert (error.line, error.text) == (9, "MoonError: no moon tonight")
    assert [one.text for one in places] == [
        "numpy/lib/tides.py:20 in tide: raise MoonError('no moon tonight')",
        "verl/trainer/ppo/ray_trainer.py:20 in fit: tide(batch)",
        "/job/run.py:20 in main: trainer.fit()",
    ]


def test_a_place_is_told_once() -> None:
    report = judged(raised("MoonError: dark", "/job/run.py:main:rise()"))
    assert [one.text for one in report.telling] == [
        "MoonError: dark",
        "/job/run.py:20 in main: rise()",
    ]


def test_errors_of_others_follow_the_first() -> None:
    other = raised("CometError: a tail", "/job/run.py:main:fly()")
    echo = "ERROR: ray::run() MoonError: no moon tonight\n"
    gone = raised("GoneError: worker 3 died", "/job/run.py:main:wait()")
    told = judged(MOON, "\n", other, "\n", other, MOON, "\n", gone, echo).telling
    assert told[0].text == "MoonError: no moon tonight"
    assert [one.text for one in told[4:]] == ["CometError: a tail"]


@pytest.mark.parametrize("texts", [(MOON, "\n", SEEN), (SEEN, "\n", MOON)])
def test_what_a_peer_sees_is_not_the_first_error(texts: tuple[str, ...]) -> None:
    found = [
        (one.raised.type, one.is_origin) for one in first_error.of([log_of(*texts)])
    ]
    assert found == [("MoonError", True), ("RuntimeError", False)]


def test_without_another_what_a_peer_sees_is_told() -> None:
    late = raised("TimeoutError", "/job/loop.py:rollout:await env.step(action)")
    report = judged(late)
    assert report.verdict == "unknown"
    assert [one.text for one in report.telling] == [
        "TimeoutError",
        "/job/loop.py:20 in rollout: await env.step(action)",
    ]


def test_of_a_chain_the_first_that_is_no_echo_is_told() -> None:
    cause = "\nThe above exception was the direct cause of the following exception:\n\n"
    again = raised("SunError: too bright", "/job/run.py:main:rise()")
    (found,) = first_error.of([log_of(SEEN, cause, MOON, cause, again)])
    assert found.raised.type == "MoonError"


@pytest.mark.parametrize(
    "handled",
    [
        f"{STAR}WARNING fetch failed, retrying in 5 s (attempt 1 of 3)\nfetched\n",
        f"{STAR}WARNING callback failed, continuing without it\nstep 1\n",
        f"Exception ignored in: <function Star.__del__ at 0x7f>\n{STAR}",
        f'{STAR}INFO: 10.0.0.7:1 - "POST /v1/completions HTTP/1.1" 400 Bad Request\n',
        f"upload failed, will retry\n{STAR}uploaded\n",
    ],
)
def test_what_the_program_let_go_comes_last(handled: str) -> None:
    found = first_error.of([log_of(handled, "one more line\n", MOON)])
    assert [one.raised.type for one in found] == ["MoonError", "StarError"]
    assert not any("StarError" in one.text for one in judged(handled, MOON).telling)


def test_a_number_is_nothing_that_is_used_instead() -> None:
    (found,) = first_error.of([log_of(STAR, "pool exhausted, using 78 of 79 slots\n")])
    assert not found.let_go
    (found,) = first_error.of([log_of(STAR, "no pool, using the disk\n")])
    assert found.let_go


@pytest.mark.parametrize(
    "message",
    [
        "the factory lost table 3",
        "shard 7 is empty",
        "no rank in the matrix",
        "engineers",
    ],
)
def test_words_that_only_look_like_those_of_a_peer_are_its_own(message: str) -> None:
    (found,) = first_error.of([log_of(raised(f"TableError: {message}", "/a.py:f:g()"))])
    assert found.is_first


def test_of_several_logs_the_first_in_time_is_told() -> None:
    late = log_of(f"2026-11-29 10:04:00 ERROR stops\n{MOON}")
    early = log_file.read(
        io.BytesIO(f"2026-11-29 10:00:00 ERROR stops\n{STAR}".encode()),
        *("early.log", 1, CATALOGUE),
    )
    found = first_error.of([late, early])
    assert [one.raised.type for one in found] == ["StarError", "MoonError"]
    assert logs.judge([late, early], CATALOGUE).telling[0].source == "early.log"


def test_places_are_of_the_file_that_holds_the_error(tmp_path: Path) -> None:
    (tmp_path / "run.log.1").write_text(f"starts\n{MOON}")
    (tmp_path / "run.log").write_text("the rest\n")
    report = logs.examine([tmp_path / "run.log", tmp_path / "run.log.1"], CATALOGUE)
    assert {one.source for one in report.telling} == {str(tmp_path / "run.log.1")}


def test_a_heading_is_told_with_the_line_below_it() -> None:
    report = judged(raised("TableError: 3 problems:\n  - a is not b", "/a.py:f:g()"))
    assert report.telling[0].text == "TableError: 3 problems: - a is not b"


def test_errors_of_ranks_that_differ_in_a_number_are_one() -> None:
    rank = (raised(f"TableError: row {n} is wide", "/a.py:f:g()") for n in range(4))
    assert len(first_error.of([log_of("\n".join(rank))])) == 1
    two = (raised(f"{kind}Error", "/a.py:f:g()") for kind in ("Table", "Chair"))
    assert len(judged("\n".join(two)).telling) == 3


def test_the_end_of_a_long_path_is_told() -> None:
    report = judged(raised("TableError: wide", f"/{'deep/' * 40}fold.py:close:g()"))
    place = report.telling[1].text
    assert place.startswith("…")
    assert place.endswith("/fold.py:20 in close: g()")


def test_lines_without_a_traceback_have_their_numbers() -> None:
    told = judged("starts\nTableError: all columns vanished\n").telling[0]
    assert (told.line, told.text) == (2, "TableError: all columns vanished")


def test_an_actor_did_not_die_of_what_its_driver_raised() -> None:
    died = "ray.exceptions.ActorDiedError: The actor died unexpectedly before\n"
    driver = judged(MOON, "\n", died)
    assert "MoonError" not in driver.causes[0].evidence[0].text
    worker = "".join(f"(Worker pid=7) {line}\n" for line in MOON.splitlines())
    assert "MoonError" in judged(worker, died).causes[0].evidence[0].text


def test_that_an_actor_ended_is_no_guess_where_its_error_is_known() -> None:
    task = "ray.exceptions.RayTaskError(MoonError): ray::TaskRunner.run() (pid=7)\n"
    error = raised("RowError: no column prompt", "/job/data.py:rows:row['prompt']")
    report = judged(error, "\n", task)
    assert report.verdict == "unknown"
    assert report.nearest[0] == "data.schema"
    assert "ray.actor-died" not in report.nearest


def test_an_error_that_the_run_outlived_is_not_the_first() -> None:
    steps = "".join(f"step:{n} - loss:0.{n} - time:1.0\n" for n in range(1, 9))
    last = raised("CometError: a tail", "/job/run.py:main:fly()")
    (found,) = first_error.of([log_of(MOON, steps, last)])
    assert found.raised.type == "CometError"


def test_the_error_behind_a_dead_engine_is_shown_first() -> None:
    died = "(APIServer pid=1) ERROR EngineCore encountered an issue. See stack trace\n"
    core = "".join(f"(EngineCore_DP0 pid=7) {line}\n" for line in MOON.splitlines())
    sun = raised("SunError: set", "/job/run.py:main:rise()")  # of who asked for it
    (engine,) = judged(sun, "\n", core, died).causes
    assert (engine.cause, engine.confidence) == ("vllm.engine-died", "likely")
    assert (
        engine.evidence[0].text == "(EngineCore_DP0 pid=7) MoonError: no moon tonight"
    )
    assert engine.evidence[-1].text == died.strip()
    assert [one.line for one in engine.evidence] == [13, None, None, 14]
    lost = raised("StarError: lost", f"{PACKAGES}/vllm/up.py:fetch:assert store.up")
    core = "".join(f"(EngineCore_DP0 pid=7) {line}\n" for line in lost.splitlines())
    (engine,) = judged(core).causes
    assert [one.line for one in engine.evidence if one.line == 4] == [4]
    gone = raised("GoneError: worker 3 died", "/job/run.py:main:wait()")
    (alone,) = judged(gone, "\n", died).causes
    assert (alone.confidence, alone.evidence[0].text) == ("certain", died.strip())


def test_what_resembles_the_error_behind_a_dead_engine_is_told_as_a_guess() -> None:
    error = raised("ValueError: no memory of the GPU is left for KV", "/vllm/a.py:f:g")
    died = "EngineCore encountered an issue. See stack trace\n"
    report = judged(error, died)
    assert "vllm.kv-cache" in report.nearest
    assert not {one.cause for one in report.causes} & {*report.nearest}
    assert "vllm.kv-cache" in render.log_text(report)


def test_a_line_that_was_not_kept_has_no_number() -> None:
    far = "a line\n" * (log_file.EDGE // 7 + 99)
    log = log_of(far, MOON, far)
    (found,) = first_error.of([log])
    assert next(found.lines()).line is None
    assert log_of(far, MOON).place_at(0) == ("x.log", 1)


def test_places_stand_below_the_line_that_they_belong_to() -> None:
    text = render.log_text(judged("starts\n", MOON)).splitlines()
    assert text[1] == "  x.log:9  MoonError: no moon tonight"
    assert text[4] == "    /job/run.py:20 in main: trainer.fit()"
    core = "".join(f"(EngineCore_DP0 pid=7) {line}\n" for line in MOON.splitlines())
    died = "(APIServer pid=1) ERROR EngineCore encountered an issue. See stack trace\n"
    saw = " ".join(render.log_text(judged(core, died)).split())
    assert saw.count("x.log") == 2  # one for the error, with its places, and the end


def test_what_an_error_says_is_escaped() -> None:
    hostile = raised("MoonError: \x1b]0;x\x07::error::y\u202e", "/job/a\x1b.py:f:g\x07")
    for line in judged(hostile).telling:
        assert line.text.isprintable()
        assert "::error::" not in line.text
