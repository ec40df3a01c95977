"""A stage's failure becomes one cause: the root, with its proof and its advice."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_gkd.diagnosis import catalogue
from pytest_gkd.diagnosis.diagnose import (
    Diagnosis,
    advice,
    diagnose,
    telling_lines,
)
from pytest_gkd.diagnosis.evidence import StageEvidence, TextSource
from pytest_gkd.stage_api import StageFault

CATALOGUE = catalogue.load()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 3"
EAGAIN = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
WATCHDOG = (
    "[rank1]:[E1121 10:10:00.000000000 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600060 milliseconds"
)


def failed(
    *texts: tuple[str, str],
    cause: str | None = None,
    message: str = "",
    facts: Mapping[str, object] | None = None,
    stage: str = "nccl",
) -> StageEvidence:
    sources = tuple(TextSource(name, text) for name, text in texts)
    fault = StageFault(cause, message, facts)
    return StageEvidence(stage, "failed", fault, message, texts=sources)


def found_in(evidence: StageEvidence) -> Diagnosis:
    found = diagnose(evidence, CATALOGUE)
    assert found is not None
    return found


def test_the_rank_out_of_memory_explains_the_watchdogs_of_the_others() -> None:
    found = found_in(failed(("rank0.log", WATCHDOG), ("rank3.log", OOM)))
    assert found.cause == "cuda.oom"
    assert found.evidence[0].source == "rank3.log"


def test_the_cause_that_the_stage_names_stands() -> None:
    found = found_in(
        failed(cause="data.schema", message="no column 'prompt' in a.jsonl")
    )
    assert found.cause == "data.schema"
    assert found.confidence == "certain"
    assert found.title == "no column 'prompt' in a.jsonl"


def test_a_deeper_cause_in_the_output_replaces_the_one_the_stage_named() -> None:
    found = found_in(
        failed(("rank1.log", OOM), cause="comm.peer-died", message="rank 1 is gone")
    )
    assert found.cause == "cuda.oom"
    assert found.also == ("comm.peer-died",)


def test_an_unrelated_line_does_not_replace_what_the_stage_named() -> None:
    found = found_in(
        failed(("out", "OSError: [Errno 24] Too many open files"), cause="data.empty")
    )
    assert found.cause == "data.empty"


def test_nothing_known_is_no_diagnosis() -> None:
    assert diagnose(failed(("out", "ValueError: the moon is full")), CATALOGUE) is None


@pytest.mark.parametrize(
    ("frame", "error", "cause"),
    [
        ("fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", EAGAIN, None),
        ("self.pid = _fork_exec(", EAGAIN, "env.too-many-files"),
        ("self.pid = os.fork()", EAGAIN, "env.too-many-files"),
        (
            "self.pid = os.fork()",
            "OSError: [Errno 12] Cannot allocate memory",
            "env.host-oom",
        ),
    ],
)
def test_a_lock_that_is_held_is_no_limit_though_a_fork_fails_with_the_same_error(
    frame: str, error: str, cause: str | None
) -> None:
    head = 'Traceback (most recent call last):\n  File "job.py", line 7, in start\n'
    found = diagnose(failed(("out", f"{head}    {frame}\n{error}")), CATALOGUE)
    assert (found and found.cause) == cause


def test_a_warning_is_no_cause() -> None:
    text = "WARNING 11-21 10:00:00 retry after CUDA out of memory in the cache"
    assert diagnose(failed(("out", text)), CATALOGUE) is None


def test_a_worker_ended_by_sigkill_is_not_said_to_have_run_out_of_memory() -> None:
    evidence = StageEvidence("vllm", "crashed", exit_signal="SIGKILL")
    found = found_in(evidence)
    assert found.cause == "env.killed"
    assert found.confidence == "likely"


def test_a_stage_stuck_in_the_rendezvous_is_named_by_its_stack() -> None:
    stack = "    init_process_group (torch/distributed/distributed_c10d.py:1700)"
    evidence = StageEvidence("x", "timeout", texts=(TextSource("stacks/1.txt", stack),))
    found = found_in(evidence)
    assert found.cause == "comm.rendezvous"


@pytest.mark.parametrize(
    ("stage", "doing", "cause"),
    [
        ("data", "reading rows", "data.loader-stall"),
        ("weight_sync", "pushing weights", "sync.stuck"),
    ],
)
def test_a_stage_out_of_time_is_known_by_what_it_was_doing(
    stage: str, doing: str, cause: str
) -> None:
    assert found_in(StageEvidence(stage, "timeout", doing=doing)).cause == cause


def test_a_data_stage_that_was_at_work_when_its_time_was_up_is_not_stalled() -> None:
    loading = "    _prepare_split (datasets/builder.py:957)"
    texts = (TextSource("stacks/7.txt", loading),)
    slow = StageEvidence("data", "timeout", texts=texts, alive=True)
    assert diagnose(slow, CATALOGUE) is None


def test_a_stage_that_stands_in_an_import_is_stuck_there() -> None:
    stack = "    _find_and_load (<frozen importlib._bootstrap>:1176)"
    texts = (TextSource("stacks/7.txt", stack),)
    found = found_in(StageEvidence("data", "timeout", texts=texts))
    assert found.cause == "env.import-stuck"
    slow = StageEvidence("data", "timeout", texts=texts, alive=True)
    assert diagnose(slow, CATALOGUE) is None


def test_a_stages_advice_names_no_knob_of_a_trainer() -> None:
    found = found_in(failed(("out", OOM)))
    assert not any("actor_rollout_ref" in line for line in found.advice)


def test_advice_holds_the_facts_of_the_stage() -> None:
    found = found_in(
        failed(cause="data.file-missing", message="gone", facts={"path": "/data/a"})
    )
    assert found.advice[0].endswith("ls -l /data/a")


def test_a_fix_with_the_facts_takes_the_place_of_the_same_without_them() -> None:
    cause = "vllm.gpu-memory-utilization"
    known = {"place": "GPU 0", "share": "0.05"}
    option = "--gkd-gpu-memory-utilization="
    for facts, value in ((known, "0.05"), ({}, "SHARE")):
        found = found_in(failed(cause=cause, message="no room", facts=facts))
        named = [fix for fix in found.advice if option in fix]
        assert len(named) == 1
        assert f"{option}{value}" in named[0]


def test_a_fix_that_asks_for_facts_comes_first_with_them_and_not_at_all_without() -> (
    None
):
    named = {"path": "/data/a", "line": 7}
    with_line = found_in(failed(cause="data.corrupt", facts=named))
    without = found_in(failed(cause="data.corrupt"))
    assert with_line.advice[0].endswith("sed -n '7p' /data/a")
    assert not any("sed" in line for line in without.advice)


def test_no_stage_is_told_to_run_itself() -> None:
    def said(stage: str) -> bool:
        found = found_in(failed(cause="data.empty", stage=stage))
        return any("--gkd-stages=data" in line for line in found.advice)

    assert said("training_step")
    assert not said("data")


def test_colours_and_ray_prefixes_do_not_hide_a_line() -> None:
    text = f"\x1b[36m(WorkerDict pid=12)\x1b[0m {OOM} [repeated 7x across cluster]"
    found = found_in(failed(("out", text)))
    assert found.title == "GPU 3 could not give 2.32 GiB more memory"
    assert "\x1b" not in found.evidence[0].text


def test_the_report_form_is_the_documented_one() -> None:
    found = found_in(failed(("out", OOM)))
    told = found.to_json()
    names = ["cause", "confidence", "evidence", "advice", "also"]  # the contract
    assert sorted(told) == sorted([*names, "title", "why", "explain"])
    assert told["evidence"][0].keys() == {"source", "line", "text"}


def test_the_most_telling_line_is_the_last_exception() -> None:
    text = "starting\nKeyError: 'a'\nmore\nValueError: the moon is full\nbye"
    lines = telling_lines([TextSource("out", text)], 2)
    assert [line.text for line in lines] == [
        "ValueError: the moon is full",
        "KeyError: 'a'",
    ]
    assert lines[0].line == 4


def test_a_deeper_cause_replaces_the_death_of_a_process_and_leads_the_advice() -> None:
    said = "the trainer actor died"
    found = found_in(failed(("output", OOM), cause="ray.actor-died", message=said))
    assert found.cause == "cuda.oom"
    facts = {"died_actor": "trainer"}
    alone = found_in(failed(cause="ray.actor-died", message=said, facts=facts))
    assert alone.cause == "ray.actor-died"
    assert alone.advice[0].startswith("Read the last lines of the trainer actor")


@pytest.mark.parametrize(
    ("cause", "trainer", "told", "not_told"),
    [
        (
            "vllm.gpu-memory-utilization",
            "verl",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "--gpu-memory-utilization",
        ),
        ("vllm.tp-divisibility", "trl", "vllm_tensor_parallel_size=2", "--tensor"),
        ("vllm.tp-divisibility", "verl", "tensor_model_parallel_size=2", "--tensor"),
        ("vllm.compile-capture", "verl", "rollout.enforce_eager=True", "--enforce"),
        ("vllm.kv-cache", "trl", "vllm_max_model_length=8192", "--gpu-memory"),
    ],
)
def test_a_trainers_log_is_told_its_own_key_in_place_of_the_engines_option(
    cause: str, trainer: str, told: str, not_told: str
) -> None:
    def lines(*frameworks: str) -> tuple[str, ...]:
        return advice(CATALOGUE[cause], frameworks, of_stage=False)

    assert told in lines(trainer, "vllm")[0]
    assert not_told not in "".join(lines(trainer, "vllm"))
    assert not_told in lines("vllm")[0]


def test_a_log_of_sglang_alone_is_told_its_options_and_not_vllms() -> None:
    def lines(*frameworks: str) -> str:
        rule = CATALOGUE["vllm.kv-cache"]
        return "\n".join(advice(rule, frameworks, of_stage=False))

    assert "--mem-fraction-static" in lines("sglang")
    assert "--gpu-memory-utilization" not in lines("sglang")
    assert "--mem-fraction-static" not in lines("vllm")
    assert "--gpu-memory-utilization" in lines("vllm")
