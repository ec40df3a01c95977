"""A rule may ask about an exception's class and frames, and for a line beside."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from pytest_gkd.diagnosis import catalogue, log_file, logs
from pytest_gkd.diagnosis.catalogue import Rule, Signature
from pytest_gkd.diagnosis.diagnose import diagnose
from pytest_gkd.diagnosis.evidence import StageEvidence, TextSource
from pytest_gkd.diagnosis.scan import Hit

TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/verl/workers/fsdp_workers.py", line 9, in update_actor
    self.load(batch)
  File "/opt/vllm/v1/core/kv_cache_utils.py", line 7, in Pool.check
    raise mylib.errors.PoolError("no room for 7 blocks")
mylib.errors.PoolError: no room for 7 blocks
"""
CHAINED = f"""{TRACEBACK}
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/opt/train.py", line 3, in main
    run()
RuntimeError: the step failed
"""


def rule(**asks: Any) -> Rule:
    signature = catalogue.made(Signature, asks)
    return Rule(
        "own.rule", "a thing broke", "cause", "It broke.", signatures=(signature,)
    )


def hits(log: str, /, **asks: Any) -> list[Hit]:
    read = log_file.read(
        io.BytesIO(log.encode()), "x.log", 0, {"own.rule": rule(**asks)}
    )
    return read.hits


@pytest.mark.parametrize(
    ("asks", "found"),
    [
        ({"raised": ["PoolError"]}, True),
        ({"raised": ["errors.PoolError"]}, True),
        ({"raised": ["mylib.errors.PoolError"]}, True),
        ({"raised": ["other.PoolError"]}, False),
        ({"raised": ["olError"]}, False),
        ({"raised": ["PoolError"], "pattern": r"no room for (?P<blocks>\d+)"}, True),
        ({"raised": ["PoolError"], "pattern": r"room for a"}, False),
        ({"innermost": ["vllm/v1/core/kv_cache_utils.py"]}, True),
        ({"innermost": ["vllm/v1/"]}, True),
        ({"innermost": ["kv_cache_utils.py:check"]}, True),
        ({"innermost": ["kv_cache_utils.py:other"]}, False),
        ({"innermost": ["check"], "raised": ["PoolError"]}, True),
        ({"innermost": ["fsdp_workers.py"]}, False),
        ({"innermost": ["update_actor"]}, False),
        ({"innermost": ["che_utils.py"]}, False),
        ({"raised": ["PoolError"], "named": "update_act"}, True),
        ({"raised": ["PoolError"], "named": "workers.py:update"}, True),
        ({"raised": ["PoolError"], "named": "reward|judge"}, False),
        # The innermost line of the job's own, which an engine's is not.
        ({"raised": ["PoolError"], "code": r"self\.load\("}, True),
        ({"raised": ["PoolError"], "code": r"no room for \d"}, False),
        ({"through": ["update_actor"]}, True),
        ({"through": ["verl/workers/"]}, True),
        ({"through": ["generate_sequences", "update_actor"]}, True),
        ({"through": ["generate_sequences"]}, False),
        ({"text": ["no room for"], "through": ["update_actor"]}, True),
        ({"text": ["no room for"], "through": ["generate_sequences"]}, False),
        ({"text": ["no room for"], "raised": ["ValueError"]}, False),
        (
            {
                "raised": ["PoolError"],
                "innermost": ["vllm/"],
                "through": ["update_actor"],
            },
            True,
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "(WorkerDict pid=7) "])
def test_an_exception_is_what_a_rule_asks_for(
    asks: dict[str, Any], found: bool, prefix: str
) -> None:
    text = "".join(prefix + line for line in TRACEBACK.splitlines(keepends=True))
    assert bool(hits(text, **asks)) is found


def test_the_same_words_outside_of_an_exception_do_not_count() -> None:
    for line in ("PoolError: it is", "log: no room for 7 blocks, update_actor"):
        assert hits(line, raised=["PoolError"]) == []
        assert hits(line, text=["no room for"], through=["update_actor"]) == []


def test_a_rule_may_say_what_the_exception_says() -> None:
    (hit,) = hits(TRACEBACK, raised=["PoolError"])
    assert hit.line == 6
    assert hit.facts == {
        "raised": "PoolError",
        "message": "no room for 7 blocks",
        "file": "/opt/vllm/v1/core/kv_cache_utils.py",
        "function": "Pool.check",
    }


def test_on_the_way_are_the_functions_of_the_whole_chain() -> None:
    last = {"raised": ["RuntimeError"]}
    assert hits(CHAINED, **last, through=["update_actor"])
    assert hits(CHAINED, **last, innermost=["update_actor"]) == []


def test_a_message_of_pythons_own_counts_in_some_phases_only() -> None:
    asks = {"text": ["no room for"]}
    assert hits(TRACEBACK, **asks, phases=["training-step"])
    assert hits(TRACEBACK, **asks, phases=["config", "unknown"]) == []
    elsewhere = TRACEBACK.replace("update_actor", "helper")
    assert hits(elsewhere, **asks, phases=["config", "unknown"])
    assert hits(elsewhere, **asks, phases=["config"]) == []
    assert hits("PoolError: no room for 7 blocks", **asks, phases=["data", "unknown"])


def raised_in(*files: str) -> str:
    lines = (f'  File "{file}", line 3, in run\n    go()\n' for file in files)
    return f"Traceback (most recent call last):\n{''.join(lines)}ValueError: no room\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (raised_in("/job/a.py", "/env/lib/python3.11/site-packages/b/c.py"), True),
        (raised_in("/job/a.py", "/cache/transformers_modules/m/modeling.py"), True),
        (raised_in("/job/a.py", "/src/verl/verl/workers/b.py"), True),
        (raised_in("/env/lib/python3.11/site-packages/b/c.py", "/job/a.py"), False),
        (raised_in("/job/a.py", "/usr/lib/python3.11/json/decoder.py"), False),
        (
            raised_in(
                "/job/a.py",
                "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
            ),
            False,
        ),
        ("ValueError: no room\n", True),
    ],
)
def test_a_rule_may_ask_for_an_exception_of_a_library(text: str, found: bool) -> None:
    assert bool(hits(text, text=["no room"], in_library=True)) is found
    assert hits(text, text=["no room"])


OWN = """\
Traceback (most recent call last):
  File "/job/rewards.py", line 9, in score
    CODE
ValueError: no room
"""


@pytest.mark.parametrize(
    ("code", "own"),
    [
        ('raise ValueError("no room")', True),
        ('assert rooms, "no room"', True),
        ("raised = take(rooms)", False),
    ],
)
@pytest.mark.parametrize("confidence", ["certain", "likely"])
def test_a_text_that_own_code_raised_is_a_guess(
    code: str, own: bool, confidence: str
) -> None:
    asks = {"text": ["no room"], "confidence": confidence}
    log = OWN.replace("CODE", code)
    (hit,) = hits(log, **asks)
    assert hit.signature.confidence == ("guess" if own else confidence)
    for more in ({"raised": ["ValueError"]}, {"own_words": True}):
        (hit,) = hits(log, **asks, **more)
        assert hit.signature.confidence == confidence
    assert bool(hits(log, **asks, library_message=True)) is not own


@pytest.mark.parametrize(
    "message", ["worker 3: pool.PoolError: no room", "worker 3:\nPoolError: no room"]
)
def test_another_exception_that_own_code_quotes_is_as_sure(message: str) -> None:
    log = OWN.replace("CODE", "raise ValueError(said)").replace("no room", message)
    (hit,) = hits(log, text=["no room"])
    assert hit.signature.confidence == "certain"
    assert hits(log, text=["no room"], library_message=True)


@pytest.mark.parametrize(
    "file", ["/opt/site-packages/x/y.py", "python/ray/_raylet.pyx", "/opt/trl/z.py"]
)
def test_a_text_that_a_library_raised_is_as_sure_as_its_rule_says(file: str) -> None:
    inner = f'  File "{file}", line 3, in take\n    raise ValueError("no room")\n'
    log = OWN.replace("    CODE\n", f"    take()\n{inner}")
    (hit,) = hits(log, text=["no room"], library_message=True)
    assert hit.signature.confidence == "certain"


def test_a_line_that_only_stands_beside_is_no_hit_even_alone() -> None:
    assert hits("HTTP 503\n", text=["giving up"], beside=["HTTP 503"]) == []


def test_a_broad_rules_frame_loses_to_the_message_of_the_same_exception() -> None:
    at = 'File "/opt/vllm/v1/core/kv_cache_utils.py", line 7, in check'
    frame = rule(text=["kv_cache_utils.py"], tier="fallback", example=at)
    message = catalogue.made(Signature, {"text": ["no room for"]})
    both = replace(frame, signatures=(*frame.signatures, message))
    for text, lines in ((TRACEBACK, [6]), (TRACEBACK.replace("no room", "all"), [4])):
        read = log_file.read(io.BytesIO(text.encode()), "x.log", 0, {both.id: both})
        assert [hit.line for hit in read.hits] == lines


@pytest.mark.parametrize(
    "asks",
    [
        {"innermost": ["vllm/v1/"]},
        {"text": ["kv_cache"], "example": '  File "kv_cache.py", line 7, in check'},
    ],
)
def test_a_place_tells_nothing_of_an_exception_that_is_a_fault_of_its_code(
    asks: dict[str, Any],
) -> None:
    assert hits(TRACEBACK, **asks)
    for fault in ("UnboundLocalError", "RayTaskError(NameError)", "RecursionError"):
        text = TRACEBACK.replace("mylib.errors.PoolError: ", f"{fault}: ")
        assert hits(text, **asks) == []
        assert hits(text, **asks, own_words=True)
        assert hits(text, **asks, raised=[fault.partition("(")[0]])


@pytest.mark.parametrize(
    ("between", "within", "found"), [(0, 3, True), (2, 3, True), (3, 3, False)]
)
def test_another_line_is_near_enough(between: int, within: int, found: bool) -> None:
    text = "HTTP 503\n" + "step\n" * between + "giving up\n"
    assert (
        bool(hits(text, text=["giving up"], beside=["HTTP 503"], within=within))
        is found
    )
    other = text.replace("HTTP", "(A pid=1) HTTP")
    assert hits(other, text=["giving up"], beside=["HTTP 503"], within=within) == []


def test_another_line_is_in_the_same_exceptions() -> None:
    asks = {"text": ["the step failed"], "beside": ["no room for"]}
    assert hits(CHAINED, **asks)
    apart = CHAINED.replace("The above exception was", "")
    assert hits(apart, **asks) == []


def test_a_process_is_named_by_its_prefix() -> None:
    log = "".join(f"(RewardWorker pid=7) {one}\n" for one in TRACEBACK.splitlines())
    assert hits(log, raised=["PoolError"], named="RewardWorker")
    assert hits(TRACEBACK, raised=["PoolError"], named="RewardWorker") == []


def test_words_that_do_not_count_do_not_hide_the_exception() -> None:
    text = "PoolError may happen\n" * 30 + TRACEBACK + "PoolError may happen\n" * 30
    assert [hit.line for hit in hits(text, raised=["PoolError"])] == [36]


def test_a_generic_error_of_a_library_that_nobody_lists_has_no_cause() -> None:
    text = """\
Traceback (most recent call last):
  File "/opt/site-packages/argument/parser.py", line 3, in validate_config
    moon.rise()
  File "/opt/site-packages/moon/phases.py", line 3, in rise
    raise ValueError("the moon must be full")
ValueError: the moon must be full
"""
    read = log_file.read(io.BytesIO(text.encode()), "x.log", 0, catalogue.load())
    assert logs.judge([read], catalogue.load()).verdict == "unknown"


def test_a_stage_is_judged_by_parts_as_well() -> None:
    one = rule(innermost=["kv_cache_utils.py"])
    evidence = StageEvidence(
        "vllm", "failed", texts=(TextSource("rank0.log", TRACEBACK),)
    )
    found = diagnose(evidence, {one.id: one})
    assert found is not None
    assert found.cause == "own.rule"
    other = rule(innermost=["fsdp_workers.py"])
    assert diagnose(evidence, {other.id: other}) is None


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"within": 3, "text": ["abcd"]}, "within needs beside"),
        ({"beside": ["abcd"], "stages": ["nccl"]}, "beside needs text"),
        (
            {"within": "3", "beside": ["abcd"], "text": ["abcd"]},
            "'3' is not a whole number",
        ),
        (
            {"within": -1, "beside": ["abcd"], "text": ["abcd"]},
            "-1 is not a whole number",
        ),
        ({"raised": ["E"]}, "text 'E' is too short"),
        ({"named": "abcd", "stages": ["nccl"]}, "named needs an exception"),
        ({"code": "abcd", "stages": ["nccl"]}, "code needs an exception"),
        ({"text": ["abcd"], "phases": ["moon"]}, "phases: 'moon' is not one of"),
        ({"innermots": ["abcd"], "text": ["abcd"]}, "did you mean 'innermost'?"),
    ],
)
def test_what_cannot_be_asked_is_told(table: dict[str, Any], wrong: str) -> None:
    data = {"title": "t", "tier": "cause", "why": "w", "signature": [table]}
    with pytest.raises(catalogue.RuleError, match=wrong.replace("?", r"\?")):
        catalogue.parse_rule(data, "own.rule", "x")
