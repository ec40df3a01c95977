"""Whole logs: the root of each, the phase of those that stop, peace for the healthy."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import accuracy
import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import catalogue, log_file, log_phases, logs
from pytest_gkd.diagnosis.log_report import LogReport
from pytest_gkd.report import render
from pytest_gkd.workload.inject.data import without_rights_of_root

CATALOGUE = catalogue.load()
LOGS = Path(__file__).with_name("logs")
ALL = sorted(LOGS.glob("*/*.log"))
OOM = (
    b"[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. "
    b"GPU 3 has a total capacity of 79.15 GiB\n"
)
FILLER = b"INFO step is fine, all ranks are well, nothing to be seen here\n" * 20_000


def judged(text: bytes, name: str = "a.log") -> LogReport:
    return logs.judge([log_file.read(io.BytesIO(text), name, 0, CATALOGUE)], CATALOGUE)


@pytest.mark.parametrize("path", ALL, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_log_gets_its_verdict(path: Path) -> None:
    expected = path.parent.name
    now = accuracy.later(path) if expected.startswith("hung.") else ""
    report = logs.examine([path], CATALOGUE, now=now)
    if expected in {"healthy", "running", "interrupted"}:
        assert report.verdict == expected
    elif expected.startswith("hung."):
        assert (report.verdict, report.phase) == ("hung", expected[5:])
        assert report.waits_for
    else:
        waits = (
            expected == "ray.no-resources" and path.stem != "total_gpus"
        ) or path.stem == "register"  # Ray starts other workers
        assert report.verdict == ("hung" if waits else "failed")
        assert report.causes[0].cause == expected
        assert report.causes[0].advice


def test_the_first_in_time_across_files_is_the_root(tmp_path: Path) -> None:
    late = tmp_path / "rank0.log"
    early = tmp_path / "rank1.log"
    late.write_text("2026-11-21 10:00:09,000 OSError: [Errno 24] Too many open files\n")
    early.write_text(
        "2026-11-21 10:00:03,000 OSError: [Errno 28] No space left on device\n"
    )
    report = logs.examine([late, early], CATALOGUE)
    assert report.causes[0].cause == "env.disk-full"
    assert report.causes[0].evidence[0].source == str(early)


def test_consequences_name_their_file_and_line(tmp_path: Path) -> None:
    wait = tmp_path / "rank0.log"
    wait.write_text(
        "start\n[Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran\n"
    )
    oom = tmp_path / "rank3.log"
    oom.write_bytes(OOM)
    (root,) = logs.examine([wait, oom], CATALOGUE).to_json()["causes"]
    assert root["cause"] == "cuda.oom"
    assert {"cause": "comm.collective-timeout", "file": str(wait), "line": 2} in root[
        "consequences"
    ]


def test_watchdogs_in_different_operations_are_a_mismatch() -> None:
    line = (
        "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType={1}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran\n"
    )
    text = line.format(0, "ALLREDUCE") + line.format(1, "BROADCAST")
    assert judged(text.encode()).causes[0].cause == "comm.mismatch"


def test_a_large_log_says_the_same_as_a_small_one() -> None:
    small, large = judged(OOM), judged(FILLER + OOM + FILLER)
    assert large.causes[0].cause == small.causes[0].cause == "cuda.oom"
    assert large.causes[0].evidence[0].line == 20_001
    assert large.causes[0].evidence[0].text == small.causes[0].evidence[0].text


def test_a_large_file_says_the_same_as_a_stream(tmp_path: Path) -> None:
    text = FILLER + b"batch size must be seen\n" * 30_000 + OOM + FILLER
    path = tmp_path / "large.log"
    path.write_bytes(text)
    (of_file,) = logs.examine([path], CATALOGUE).causes
    assert of_file.cause == "cuda.oom"
    assert of_file.evidence[0].line == 50_001
    assert of_file.evidence[0].text == judged(text).causes[0].evidence[0].text


def test_a_stream_without_line_ends_says_the_same() -> None:
    assert judged(OOM.replace(b"\n", b"\r") * 9).causes[0].cause == "cuda.oom"


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd here")
def test_zstd_is_read() -> None:
    packed = subprocess.run(
        ["zstd", "-c"], input=FILLER + OOM, capture_output=True, check=True
    )
    assert judged(packed.stdout).causes[0].cause == "cuda.oom"


def test_utf16_as_powershell_writes_it_is_read() -> None:
    assert judged(OOM.decode().encode("utf-16")).causes[0].cause == "cuda.oom"


def test_a_line_of_10_mb_nul_bytes_and_broken_utf8_are_read() -> None:
    text = b"x" * 10_000_000 + OOM + b"\x00\xff\xfe broken\n" + OOM
    assert judged(text).causes[0].cause == "cuda.oom"


def test_a_progress_bars_carriage_returns_end_lines() -> None:
    report = judged(b"Loading:  50%|#\rLoading: 100%|##\r" + OOM)
    assert report.causes[0].evidence[0].text.startswith("[rank3]: torch.Out")


def test_an_unknown_failure_shows_its_exception() -> None:
    report = judged(
        b"start\nTraceback (most recent call last):\n"
        b'  File "a.py", line 3, in main\nValueError: the moon is full\n'
    )
    assert report.verdict == "unknown"
    assert report.telling[0].text == "ValueError: the moon is full"


def test_a_log_of_nothing_known_is_unknown() -> None:
    assert judged(b"hello\nworld\n").verdict == "unknown"


def test_an_error_after_the_end_of_the_run_counts() -> None:
    text = b"{'train_runtime': 12.0}\nOSError: [Errno 28] No space left on device\n"
    assert judged(text).causes[0].cause == "env.disk-full"


def test_noise_of_the_shutdown_after_the_end_does_not_count() -> None:
    text = (
        b"{'train_runtime': 12.0}\nException ignored in: <function x>\n"
        b"vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    assert judged(text).verdict == "healthy"


STEP = b"{'loss': 0.4, 'grad_norm': 1.2, 'epoch': 0.1, 'filler': '%s'}\n" % (
    b"x" * 1500
)


def test_a_failure_that_the_run_outlived_is_none() -> None:
    assert judged(OOM + STEP * 4 + b"{'train_runtime': 9}\n").verdict == "healthy"
    assert judged(OOM + STEP * 4).verdict == "running"
    ((cause, line),) = judged(OOM + STEP * 4).survived
    assert (cause, line.line) == ("cuda.oom", 1)


def test_metrics_of_nan_count_though_the_run_goes_on() -> None:
    text = b"{'loss': nan, 'grad_norm': nan}\n" * 9 + b"{'train_runtime': 9}\n"
    assert judged(text).causes[0].cause == "train.nan"


def test_an_installation_that_ended_is_not_the_end_of_the_run() -> None:
    text = b"Successfully installed vllm-0.32.0\nInitializing a V1 LLM engine (v0.32)\n"
    report = judged(text)
    assert (report.verdict, report.phase) == ("hung", "rollout-init")


def test_wandbs_summary_after_a_traceback_is_no_health() -> None:
    text = (
        b"Traceback (most recent call last):\nValueError: the moon is full\n"
        b"wandb: Find logs at: ./wandb/run-1/logs\n"
    )
    assert judged(text).verdict == "unknown"


def test_a_server_that_answered_and_then_died_has_failed() -> None:
    text = (
        b"INFO:     Application startup complete.\n"
        b'INFO: 127.0.0.1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        b"vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    assert judged(text).causes[0].cause == "vllm.engine-died"


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(range(256)) * 9])
def test_an_empty_or_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(
        log_file.LogError, match=r"x\.log: (is empty|contains binary data)"
    ):
        logs.examine([path], CATALOGUE)


def test_a_hole_of_zeros_within_a_log_is_passed_over(tmp_path: Path) -> None:
    """As a crash of the machine, or a rotation by copying, leaves it."""
    path = tmp_path / "x.log"
    path.write_bytes(b"12:00:01 step 1\n" + bytes(8000) + b"\n" + OOM)
    assert logs.examine([path], CATALOGUE).causes[0].cause == "cuda.oom"
    for start in (b"SQLite format 3\0\n", b"\x93NUMPY\n", b"folder/x.log"):
        path.write_bytes(start + bytes(8000) + OOM)
        with pytest.raises(log_file.LogError, match="contains binary data"):
            logs.examine([path], CATALOGUE)


def test_one_bad_file_does_not_lose_the_others(tmp_path: Path) -> None:
    good = tmp_path / "good.log"
    good.write_bytes(OOM)
    empty = tmp_path / "empty"
    empty.mkdir()
    report = logs.examine([tmp_path / "none.log", empty, good], CATALOGUE)
    assert report.causes[0].cause == "cuda.oom"
    assert [text.partition(": ")[2] for text in report.unreadable] == [
        "holds no log: no file ends in .log, .out or .err; name one",
        "no such file or directory",
    ]


def test_a_bad_file_among_good_ones_is_exit_2_and_the_good_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.log"
    good.write_bytes(OOM)
    bad = {"binary": b"\x7fELF" + bytes(range(256)) * 9, "empty": b""}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    names = [str(tmp_path / name) for name in ("none", *bad)]
    status, out, err = run("diagnose", *names, str(good), capsys=capsys)
    assert status == 2
    assert "[cuda.oom]" in out
    assert all(f"gkd: {name}: " in err for name in names)


def test_a_file_without_permission_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret.log"
    path.write_bytes(OOM)
    path.chmod(0)
    with without_rights_of_root():
        status, _, err = run("diagnose", str(path), capsys=capsys)
    assert status == 2
    assert "permission denied" in err


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(FILLER + OOM,))
    writer.start()
    (root,) = logs.examine([pipe], CATALOGUE).causes
    writer.join()
    assert root.cause == "cuda.oom"
    assert root.evidence[0].line == 20_001


def test_a_file_that_grows_while_it_is_read_is_judged_as_far_as_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "grows.log"
    path.write_bytes(FILLER + OOM)

    def grow(_: int) -> None:
        with path.open("ab") as stream:
            stream.write(FILLER[:64000])

    assert logs.examine([path], CATALOGUE, grow).causes[0].cause == "cuda.oom"


def test_a_terminal_is_told_how_far_the_reading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SLOW_BYTES", 1000)
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(FILLER + OOM))
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:  # noqa: PTH123 - an open descriptor, no path
        monkeypatch.setattr(sys, "stderr", terminal)
        assert command.main(["diagnose", str(path)]) == 1
        terminal.flush()
        shown = os.read(ours, 10_000)
    os.close(ours)
    assert b"\rread 1 MiB" in shown
    assert shown.endswith(b"\r\x1b[K")


def test_a_failure_at_the_end_is_seen_though_its_words_came_often_before() -> None:
    """Words that were looked at in vain for long are looked for again at the end."""
    signature = {"text": ["the teacher "], "pattern": "teacher broke", "example": "x"}
    data = {"title": "t", "tier": "cause", "why": "w", "signature": [signature]}
    own = {"my.own": catalogue.parse_rule(data, "my.own", "here")}
    for often in (1000, 30_000):
        text = b"the teacher and its student share a card\n" * often
        stream = io.BytesIO(text + b"the teacher broke\n")
        (root,) = logs.judge([log_file.read(stream, "a", 0, own)], own).causes
        assert root.evidence[0].line == often + 1


def test_a_failure_counts_though_the_run_outlived_the_same_one_often() -> None:
    text = (OOM + STEP * 4) * 9 + OOM
    assert judged(STEP * 4 + OOM).causes[0].cause == "cuda.oom"
    assert judged(text).causes[0].cause == "cuda.oom"


GAP = "{0} INFO [trainer.py:7] step {1} loss 0.4\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("'loss': 0.4\n" * 3 + "^CTraceback (most recent call last):\n", "interrupted"),
        ("".join(GAP.format(f"2026-11-21 10:0{n}:00", n) for n in range(5)), "running"),
        (
            "".join(GAP.format(f"2026-11-21 10:0{n}:00", n) for n in range(5))
            + "".join(
                f"2026-11-21 10:{n}:00 INFO [beat.py:3] the monitor is alive\n"
                for n in range(10, 60, 10)
            ),
            "hung",
        ),
        ("INFO:     Application startup complete.\n", "running"),
        (
            "INFO:     Application startup complete.\n"
            + "INFO [shm_broadcast.py:4] No available shared memory broadcast block "
            "found in 60 seconds.\n" * 3,
            "hung",
        ),
        ('Thread 71 (idle): "MainThread"\n    wait (threading.py:355)\n', "hung"),
        ("INFO [core.py:77] Initializing a V1 LLM engine (v0.32)\n", "hung"),
    ],
)
def test_a_log_that_stops_is_hung_where_something_proves_it(
    text: str, verdict: str
) -> None:
    assert judged(text.encode()).verdict == verdict


def test_a_live_file_that_no_longer_grows_is_hung(tmp_path: Path) -> None:
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 7200))
    path = tmp_path / "live.log"
    path.write_text(GAP.format(stamp, 1) + GAP.format(stamp, 2))
    os.utime(path, (now - 7200, now - 7200))
    assert logs.examine([path], CATALOGUE).verdict == "hung"
    os.utime(path, (now - 60, now - 60))
    assert logs.examine([path], CATALOGUE).verdict == "running"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = command.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_prints_the_documented_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(OOM)
    status, out, _ = run("diagnose", str(path), "--format", "json", capsys=capsys)
    told = json.loads(out)
    assert status == 1
    assert told["schema"] == 1
    assert told["verdict"] == "failed"
    assert told["causes"][0]["cause"] == "cuda.oom"
    assert told["causes"][0]["evidence"][0].keys() == {"file", "line", "text"}
    path.write_bytes(b"resource_pool_spec: {}\n")
    _, out, _ = run("diagnose", str(path), "--format", "json", capsys=capsys)
    hung = json.loads(out)
    assert (hung["verdict"], hung.keys()) == ("hung", told.keys())
    page = (Path(__file__).parent.parent / "docs" / "diagnose.md").read_text("utf-8")
    assert [key for key in told if f"`{key}`" not in page] == []


def test_a_run_at_work_says_how_far_it_is_and_what_it_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    steps = "".join(
        f"2026-11-21 10:0{n}:00 INFO [trainer.py:7] step {n}/900 loss 0.4 {'x' * 999}\n"
        for n in range(1, 6)
    )
    path.write_bytes(OOM + steps.encode())
    status, out, _ = run("diagnose", str(path), "--format=json", capsys=capsys)
    told = json.loads(out)
    assert (status, told["verdict"], told["causes"]) == (0, "running", [])
    assert told["progress"] == {
        "step": 5,
        "total": 900,
        "pace_s": 60.0,
        "until": "2026-11-21 10:05:00",
    }
    assert [one["cause"] for one in told["survived"]] == ["cuda.oom"]
    _, out, _ = run("diagnose", str(path), capsys=capsys)
    assert "(step 5 of 900, 60 s a step)" in out
    assert "since 2026-11-21 10:05:00" in " ".join(out.split())
    assert f"survived  cuda.oom: {path}:1" in out


@pytest.mark.parametrize(
    ("text", "status"),
    [("{'train_runtime': 1}", 0), ("resource_pool_spec: {}", 1), ("hello", 3)],
)
def test_the_exit_status_tells_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int
) -> None:
    path = tmp_path / "a.log"
    path.write_text(text + "\n")
    assert run("diagnose", str(path), capsys=capsys)[0] == status


def test_a_file_that_does_not_exist_is_exit_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = run("diagnose", "/nowhere/x.log", capsys=capsys)
    assert status == 2
    assert err == "gkd: /nowhere/x.log: no such file or directory\n"


def test_standard_input_is_read() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gkd", "diagnose", "-"],
        input=OOM,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"[cuda.oom]" in done.stdout


def test_every_cause_is_listed_and_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run("explain", "--list", capsys=capsys)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(CATALOGUE)
    for cause in CATALOGUE:
        status, out, _ = run("explain", cause, capsys=capsys)
        assert status == 0
        assert out.startswith(f"{cause}: ")


def test_a_misspelt_cause_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = run("explain", "cuda.oon", capsys=capsys)
    assert status == 2
    assert "did you mean 'cuda.oom'?" in err


def test_a_rule_file_of_the_users_own_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text('id = "my.cause"\ntitle = "t"\ntier = "cause"\nwhi = "y"\n')
    status, out, _ = run("rules", "check", str(own), capsys=capsys)
    assert status == 1
    assert "unknown key 'whi'" in out


def test_every_phase_says_what_it_waits_for() -> None:
    assert set(log_phases.PHASES) == set(log_phases.WAITS_FOR)
    assert all(log_phases.of_line(mark) for mark in (b"Saving checkpoint", b"teacher"))


def test_an_end_that_is_called_a_failure_is_no_success() -> None:
    text = b"step 1\nWorkerFailedError: Worker 'actor/0' failed with exit code 0\n"
    assert judged(text).verdict != "healthy"
    assert judged(b"step 1\nthe job ended with exit code 0\n").verdict == "healthy"


def test_a_server_without_requests_is_not_called_stuck() -> None:
    idle = (
        b"INFO 11-21 10:00:%d0 [loggers.py:116] Engine 000: Avg prompt throughput: 0.0 "
        b"tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs\n"
    )
    ready = b"INFO: Starting vLLM API server\nINFO: Application startup complete.\n"
    found = judged(ready + b"".join(idle % n for n in range(3)))
    assert (found.verdict, found.suspicion) == ("running", None)
    text = render.log_text(found)
    assert "the server is ready when the log ends" in text
    assert "stuck" not in text


PACKAGES = "/opt/env/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("file", "function", "code", "raised", "cause"),
    [
        (
            f"{PACKAGES}/safetensors/torch.py",
            *("_tobytes", "tensor = tensor.cpu()"),
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "cuda.illegal-access",
        ),
        (
            f"{PACKAGES}/ray/_private/parameter.py",
            *("update_pre_selected_port", "raise ValueError("),
            "ValueError: Ray component worker_ports is trying to use a port number 1002"
            " that is used by other components.",
            "comm.port-in-use",
        ),
        (
            "/job/train.py",
            *("step", "loss = kd_loss(s, t, rank=dist.get_rank(), temprature=2.0)"),
            "TypeError: kd_loss() got an unexpected keyword argument 'temprature'",
            "",
        ),
        (
            "/job/reward.py",
            *("find", "raise ModuleNotFoundError(domain)"),
            "ModuleNotFoundError: no reward module for domain geometry",
            "",
        ),
        (
            "/srv/peft/data.py",
            *("rows", "raise ValueError("),
            "ValueError: row 7 of train.jsonl is empty",
            "",
        ),
        (
            f"{PACKAGES}/verl/trainer/ppo/core_algos.py",
            *("agg_loss", "x = loss_mask[0]"),
            "TypeError: 'NoneType' object is not subscriptable",
            "",
        ),
        (
            f"{PACKAGES}/megatron/bridge/training/train.py",
            *("forward_step", "t = args.kd_tempreature"),
            "AttributeError: 'Namespace' object has no attribute 'kd_tempreature'",
            "config.missing-value",
        ),
    ],
)
def test_a_place_names_no_cause_that_the_message_does_not_bear(
    file: str, function: str, code: str, raised: str, cause: str
) -> None:
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{file}", line 12, in {function}\n    {code}\n{raised}\n'
    )
    named = [one.cause for one in judged(text.encode()).causes][:1]
    assert named == [cause][: bool(cause)]
