"""gkd bundle: what is in the archive, what is not and why, and that nothing hangs."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import planted
import psutil
import pytest
import report_schema

from pytest_gkd.bundle import archive, collectors, gathering, log_extracts, summary
from pytest_gkd.bundle.anonymity import Anonymity
from pytest_gkd.bundle.gathering import Collector, Missing, Part

GKD = Path(sys.executable).with_name("gkd")
Found = Iterator[Part | Missing]


def bundle(
    directory: Path, *arguments: str | Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """``gkd bundle`` in a directory, with nothing of this machine's Ray."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.run(
        [GKD, "bundle", "--output=b.tar.gz", *map(str, arguments)],
        cwd=directory,
        env=bare | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def unpacked(file: Path) -> dict[str, str]:
    with tarfile.open(file) as tar:
        return {
            one.name: held.read().decode()
            for one in tar.getmembers()
            if (held := tar.extractfile(one)) is not None
        }


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def a_report(directory: Path, stacks: str = "") -> None:
    (directory / "stacks/vllm").mkdir(parents=True)
    (directory / "stacks/vllm/12.txt").write_text(stacks)
    stage = {
        "name": "vllm",
        "outcome": "failed",
        "duration_s": 3.25,
        "message": "no answer",
        "diagnosis": {"cause": "vllm.engine-died"},
    }
    report = {"started": "2026-11-25T10:11:12", "stages": [stage], "settings": {}}
    report["injected"] = {"fault": "vllm:engine-killed", "how": "it is killed"}
    (directory / "report.json").write_text(json.dumps(report))


def test_one_archive_holds_what_a_helper_asks_for_and_no_planted_secret(
    tmp_path: Path,
) -> None:
    secrets = [one for one in planted.secrets() if not one.is_held_out]
    by = {
        carrier: "\n".join(one.text for one in secrets if one.carrier == carrier)
        for carrier in ("log", "stack", "configuration", "environment")
    }
    (tmp_path / "train.log").write_text(
        f"step 1\n{by['log']}\nRuntimeError: boom\n" + "step 2\n" * 60_000
    )
    (tmp_path / "run.sh").write_text(by["configuration"])
    (tmp_path / "variables.env").write_text(by["environment"])
    a_report(tmp_path / "report", by["stack"])
    told = bundle(
        tmp_path,
        "--report=report",
        *("train.log", "run.sh", "variables.env"),
        WANDB_API_KEY="plainly-named-4711",
        HF_HOME="/data/plainly-named-4711/hf",
    )
    assert told.returncode == 0, told.stderr
    files = unpacked(tmp_path / "b.tar.gz")
    everything = "\n".join([*files, *files.values(), told.stdout, told.stderr])
    kinds = {one.kind for one in secrets if one.survivors(everything)}
    assert not kinds
    assert "plainly-named-4711" not in everything
    assert "this fault was injected: vllm&#58;engine-killed" in files["SUMMARY.md"]
    assert "WANDB_API_KEY=***" in files["environment.txt"]
    assert {
        *("SUMMARY.md", "redacted.txt", "missing.txt", "report/report.json"),
        *("report/stacks/vllm/12.txt", "logs/01-train.log/start.txt"),
        *("logs/01-train.log/end.txt", "logs/02-run.sh", "logs/03-variables.env"),
        *("diagnosis.txt", "diagnosis.json", "system.txt", "environment.txt"),
        *("gpu.txt", "processes.txt", "network.txt"),
    } <= set(files)
    assert "RuntimeError: boom" in files["logs/01-train.log/start.txt"]
    assert re.search(r"logs/02-run\.sh:\d+: ", files["redacted.txt"])
    assert told.stdout.strip() == files["SUMMARY.md"].strip()
    assert "| vllm | failed | 3.2 s | no answer vllm.engine-died |" in told.stdout


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "b.tar.gz"
    output.write_text("the user's own")
    told = bundle(tmp_path)
    assert told.returncode == 2
    assert "b.tar.gz: exists, and nothing is overwritten" in told.stderr
    assert output.read_text() == "the user's own"
    output.unlink()
    output.symlink_to(tmp_path / "nowhere")
    with pytest.raises(archive.OutputError, match="exists"):
        archive.write(output, {"a": "b"})
    assert names(tmp_path) == ["b.tar.gz"]  # no temporary file is left


def test_a_file_that_appears_meanwhile_is_not_overwritten_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    archive.write(tmp_path / "new", {"a": "b"})
    assert unpacked(tmp_path / "new") == {"a": "b"}
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(archive.OutputError, match="exists"):
        archive.write(tmp_path / "taken", {"a": "b"})
    assert (tmp_path / "taken").read_text() == "mine"


def test_the_archive_is_private_and_the_same_for_the_same_texts(tmp_path: Path) -> None:
    for name in ("one", "two"):
        archive.write(tmp_path / name, {"a.txt": "text", "b/c.txt": "\udc80 more"})
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert names(tmp_path) == ["one", "two"]


def test_an_output_in_no_directory_is_refused_before_anything_is_gathered(
    tmp_path: Path,
) -> None:
    with pytest.raises(archive.OutputError, match="there is no directory"):
        archive.refuse_existing(tmp_path / "none/b.tar.gz")


# -- logs --------------------------------------------------------------------------


def extracted(
    path: Path, limit: int = 4 << 20, seconds: float = 20
) -> tuple[dict[str, str], list[str]]:
    parts, missing = {}, []
    for one in log_extracts.extract(path, "x", limit, seconds):
        if isinstance(one, Part):
            parts[one.file] = one.text
        else:
            missing.append(one.why)
    return parts, missing


def test_what_is_no_text_file_is_named_and_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF" + bytes(range(256)) * 40)
    packed = bytearray(gzip.compress(os.urandom(9000).hex().encode()))
    packed[5000] ^= 0xFF
    (tmp_path / "broken.gz").write_bytes(packed)
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        found = {
            name: extracted(tmp_path / name)[1]
            for name in ("pipe", "empty", "binary", "sock", "none", "loop")
        }
    assert found == {
        "pipe": ["is a pipe; only files are read"],
        "empty": ["is empty"],
        "binary": ["contains binary data, not the text of a log"],
        "sock": ["is a socket; only files are read"],
        "none": ["No such file or directory"],
        "loop": ["Too many levels of symbolic links"],
    }
    assert extracted(Path("/dev/zero"))[1] == ["is a device; only files are read"]
    (why,) = extracted(tmp_path / "broken.gz")[1]
    assert "damaged gzip data" in why


def test_a_report_is_read_without_following_links_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    report = tmp_path / "report"
    a_report(report, "Thread 1")
    (report / "output").mkdir()
    (report / "output/link.txt").symlink_to(tmp_path / "private.txt")
    (report / "folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(report / "output/pipe")
    found = [*collectors.report_parts(report, 1 << 20)]
    assert not any("mine" in one.text for one in found if isinstance(one, Part))
    assert sorted(one.why for one in found if isinstance(one, Missing)) == [
        f"is a link to {tmp_path}/private.txt, which is not followed",
        "is a link, which is not followed",
        "is a pipe; only files are read",
    ]


def test_a_long_log_gives_its_ends_and_every_error_region_with_its_line(
    tmp_path: Path,
) -> None:
    lines = [f"step {number} loss 0.5" for number in range(400_000)]
    lines[200_000] = "ValueError: in the middle"
    lines[300_000] = "NCCL WARN late"
    lines[-1] = "the very end"
    (tmp_path / "log").write_text("\n".join(lines))
    parts, missing = extracted(tmp_path / "log", limit=1 << 20)
    assert not missing
    assert sum(map(len, parts.values())) <= 1 << 20
    assert parts["x/start.txt"].startswith("step 0 ")
    assert parts["x/end.txt"].rstrip().endswith("the very end")
    errors = parts["x/errors.txt"]
    assert "--- from line 199986 ---\nstep 199985 " in errors
    assert "ValueError: in the middle\nstep 200001 " in errors
    assert "NCCL WARN late" in errors
    assert "step 250000 " not in errors


def test_of_a_log_full_of_errors_the_first_and_the_last_are_kept(
    tmp_path: Path,
) -> None:
    some = "".join(f"x{n} ok\n" * 80 + f"Error number {n}\n" for n in range(40_000))
    (tmp_path / "log").write_text(some)
    parts, _ = extracted(tmp_path / "log", limit=1 << 20)
    assert sum(map(len, parts.values())) <= 1.2 * (1 << 20)
    errors = parts["x/errors.txt"]
    assert "Error number 0\n" in errors
    assert "Error number 39999\n" in errors
    assert re.search(r"--- \d+ regions left out ---", errors)


def test_a_log_too_long_for_its_time_still_gives_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 1\n" * 2_000_000 + "the very end\n")
    parts, missing = extracted(tmp_path / "log", seconds=0)
    assert parts["x/end.txt"].endswith("the very end\n")
    assert missing == [f"errors were looked for in its first {1 << 20} bytes"]


def test_no_cut_leaves_half_a_secret_behind(tmp_path: Path) -> None:
    key = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7cF0xR3u"
    for before in range(3900, 4030, 7):
        line = "x" * (before // 2) + f" {key} " + "y" * 9000
        (tmp_path / "log").write_text(line)
        parts, _ = extracted(tmp_path / "log")
        shown = "".join(parts.values())
        assert key in shown or key[:12] not in shown


def test_a_log_that_grows_or_shrinks_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    whole = log_extracts.fill

    def meanwhile(change: int) -> None:
        path.write_text("step\n" * 100)

        def read(*given: object) -> Iterator[Missing]:
            yield from whole(*given)  # type: ignore[arg-type]
            os.truncate(path, 500 + change)

        monkeypatch.setattr(log_extracts, "fill", read)

    meanwhile(70)
    assert extracted(path)[1] == ["70 bytes were added while it was read"]
    meanwhile(-70)
    assert extracted(path)[1] == ["lost 70 bytes while it was read"]


def test_the_runs_before_are_told_with_what_changed_since(tmp_path: Path) -> None:
    settings = report_schema.EMPTY["settings"] | {"batch_size": 4}
    for name, started, outcome in (("last", "2", "failed"), ("runs/a", "1", "passed")):
        (tmp_path / name).mkdir(parents=True)
        told = {"name": "vllm", "outcome": outcome, "duration_s": 1.0}
        stages = [report_schema.STAGE | told]
        run = {"started": started, "stages": stages, "settings": settings}
        (tmp_path / name / "report.json").write_text(
            json.dumps(report_schema.EMPTY | run)
        )
    found = "".join(one[1] for one in collectors.tried_parts(tmp_path / "last"))
    assert "passed" in found
    assert f"1: vllm passed\n  {json.dumps(settings)}" in found
    assert not [*collectors.tried_parts(tmp_path / "none")]


# -- collectors --------------------------------------------------------------------


def says(text: str) -> Found:
    yield Part("a.txt", text)


def hangs() -> Found:
    yield Part("b.txt", f"{subprocess.Popen(['sleep', '1000']).pid}")
    while True:
        time.sleep(100)


def stops_itself() -> Found:
    yield Part("c.txt", "before")
    os.kill(os.getpid(), signal.SIGSTOP)


def dies() -> Found:
    yield Part("d.txt", "before")
    os.abort()


def raises() -> Found:
    yield Part("e.txt", "before")
    raise OSError(5, "Input/output error")


def floods() -> Found:
    while True:
        yield Part("f.txt", "x" * 5000)


def has(pid: str) -> bool:
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_hangs_dies_or_floods_costs_only_itself() -> None:
    works = (hangs, stops_itself, dies, raises, floods)
    wanted = [Collector(one.__name__, 2, 100_000, one) for one in works]
    wanted.append(Collector("says", 60, 100, lambda: says("hello")))
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    found = gathering.gather(wanted)
    (_, sleeper), late = found[0]
    assert late == Missing("hangs", "no answer within 2 s")
    until = time.monotonic() + 20
    while has(sleeper) and time.monotonic() < until:
        time.sleep(0.05)
    assert not has(sleeper)
    assert found[1:4] == [
        [Part("c.txt", "before"), Missing("stops_itself", "no answer within 2 s")],
        [Part("d.txt", "before"), Missing("dies", "its reader died (SIGABRT)")],
        [Part("e.txt", "before"), Missing("raises", "Input/output error")],
    ]
    assert found[4][-1] == Missing("f.txt", "the rest is left out: over 100000 bytes")
    assert sum(len(one.text) for one in found[4][:-1] if isinstance(one, Part)) == 10**5
    assert found[5] == [Part("a.txt", "hello")]
    after = {one.pid for one in psutil.Process().children(recursive=True)}
    assert after <= before


def test_more_collectors_than_run_at_once_all_get_their_turn() -> None:
    many = [
        Collector(str(number), 60, 100, lambda n=number: says(str(n)))  # type: ignore[misc]
        for number in range(3 * gathering.AT_ONCE)
    ]
    assert [one[0][1] for one in gathering.gather(many)] == [str(n) for n in range(48)]


@pytest.mark.parametrize(
    ("program", "work"), [("nvidia-smi", "gpu_parts"), ("ray", "ray_parts")]
)
def test_a_tool_that_never_answers_is_ended_and_named(
    program: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / program
    tool.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(collectors, "COMMAND_S", 0.5)
    wanted = [Collector(program, 60, 1 << 20, getattr(collectors, work))]
    (found,) = gathering.gather(wanted)
    assert (tmp_path / "asked").exists()
    whys = {one.why for one in found if isinstance(one, Missing)}
    assert whys == {"no answer within 0.5 s"}


def test_an_interrupted_bundle_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 1000\n")
    tool.chmod(0o755)
    made = subprocess.Popen(
        [GKD, "bundle", "--output=b.tar.gz"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, such as a CI's, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "pids").exists():
        assert made.poll() is None
        time.sleep(0.05)
    made.send_signal(signal.SIGINT)
    _, said = made.communicate(timeout=60)
    assert made.returncode == 130
    assert "interrupted, nothing was written" in said
    assert names(tmp_path) == ["nvidia-smi", "pids"]
    assert not any(map(has, (tmp_path / "pids").read_text().split()))


def test_what_was_named_and_cannot_be_had_is_told_by_the_exit_status(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.log").write_text("fine\n")
    told = bundle(tmp_path, "--report=none", "a.log", "b.log")
    assert told.returncode == 1
    missing = unpacked(tmp_path / "b.tar.gz")["missing.txt"]
    assert "none: does not exist: no report" in missing
    assert "b.log: No such file or directory\n" in missing
    assert "gkd: missing: b.log: No such file or directory" in told.stderr


def test_it_is_told_in_chinese_to_those_who_ask_and_json_stays_english(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.log").write_text(
        "step 1\nncclInternalError: Internal check failed.\n"
    )
    a_report(tmp_path / "report", "")
    told = bundle(tmp_path, "--report=report", "a.log", "b.log", LANGUAGE="zh")
    assert "gkd: 缺少：b.log: No such file or directory" in told.stderr
    assert "gkd: 缺少：nvidia-smi：没有安装" in told.stderr
    summary_text = told.stdout
    assert "<summary>未能取得的内容</summary>" in summary_text
    assert "| vllm | 失败 | 3.2 s | no answer vllm.engine-died |" in summary_text
    assert unpacked(tmp_path / "b.tar.gz")["SUMMARY.md"].strip() == summary_text.strip()
    (tmp_path / "b.tar.gz").unlink()
    told = bundle(tmp_path, "a.log", "--format=json", LANGUAGE="zh")
    assert json.loads(told.stdout)["summary"].isascii()


def test_the_stacks_of_a_live_process_are_taken_when_asked_for(tmp_path: Path) -> None:
    code = "import time\ndef waits_for_ever(): time.sleep(1000)\nwaits_for_ever()"
    with subprocess.Popen([sys.executable, "-c", code]) as job:
        try:
            time.sleep(1)
            found = [*collectors.stack_parts(job.pid)]
        finally:
            job.kill()
    assert found[0][0] == f"stacks/{job.pid}.txt"
    # Where ptrace is denied, it says so.
    assert re.search("waits_for_ever|no stacks|[Pp]ermission", found[0][1])


# -- what it looks like ------------------------------------------------------------


def test_text_of_a_log_cannot_end_the_summary_or_its_blocks() -> None:
    hostile = "</pre></details>\n```\n# Title <script>@everyone [x](http://y)"
    report = {"stages": [{"name": "a", "outcome": "failed", "message": hostile}]}
    files = {"report/report.json": json.dumps(report), "system.txt": hostile}
    text = summary.markdown(files, [Missing(hostile, hostile)])
    assert "<script>" not in text
    assert text.count("</pre>") == text.count("<pre>") == 3
    assert "@everyone" not in text
    assert "\n# Title" not in text


def test_a_summary_fits_into_an_issue() -> None:
    files = {f"{n}.txt": "x" for n in range(9000)}
    text = summary.markdown(files, [])
    assert len(text) < 65_536
    assert text.endswith("*The rest is in the bundle.*\n")


def test_names_become_the_same_words_in_every_text() -> None:
    texts = [
        "gpu-node-017:411:598 [0] NCCL INFO comm\nUSER=alice\n/home/alice/run/a.py",
        "peer gpu-node-017 at 10.1.2.3, 127.0.0.1, torch 2.13.0.1x; alice@corp.example",
    ]
    words = Anonymity(texts)
    shown = "\n".join(map(words.text, texts))
    for name in ("gpu-node-017", "alice", "10.1.2.3", "corp.example"):
        assert name not in shown
    host = re.findall(r"host-\d+", shown)
    assert len(host) == 2
    assert len(set(host)) == 1
    assert "127.0.0.1" in shown
    assert "/a.py" in shown


def test_flight_records_are_in_it_and_a_hostile_one_takes_no_memory(
    tmp_path: Path,
) -> None:
    entry = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 7,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "time_created_ns": 1,
    }
    stem = tmp_path / "records/rank_"
    stem.parent.mkdir()
    Path(f"{stem}0").write_bytes(pickle.dumps({"entries": [entry]}))
    # Eleven bytes that ask for 4 GiB: the place of a memo that no pickle reaches.
    Path(f"{stem}1").write_bytes(b"\x80\x02}r\x00\x00\x00\x10.")
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    theirs = tmp_path / "torchcomms_0"
    theirs.write_bytes(pickle.dumps({"entries": [{**entry, "collective_seq_id": 9}]}))
    places = {"TORCHCOMM_FR_DUMP_TEMP_FILE": f"{tmp_path}/torchcomms_"}
    places |= {"TORCH_FR_DUMP_TEMP_FILE": f"{stem}", "HOME": f"{tmp_path}"}
    told = bundle(tmp_path, **places)
    assert told.returncode == 0, told.stderr
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert used <= max(began, 1 << 20)  # KiB
    files = unpacked(tmp_path / "b.tar.gz")
    (read,) = json.loads(files["flight-records/rank_0.json"])["entries"]
    assert read["collective_seq_id"] == 7
    (read,) = json.loads(files["flight-records/torchcomms_0.json"])["entries"]
    assert read["collective_seq_id"] == 9
    assert f"{stem}1: neither JSON nor a pickle: MemoryError" in files["missing.txt"]


def test_an_anonymous_bundle_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "nodename-x7:1:2 [0] NCCL INFO a\n/home/bob.x/run.py failed at 10.9.8.7\n"
    )
    told = bundle(tmp_path, "--anonymous", "--format=json", "a.log")
    assert told.returncode == 0, told.stderr
    files = unpacked(tmp_path / "b.tar.gz")
    text = "\n".join([*files.values(), told.stdout])
    for name in ("nodename-x7", "bob.x", "10.9.8.7", socket.gethostname()):
        # A host "vm" is no part of another word, such as another process's "nvml.c".
        assert not re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", text), name
    assert json.loads(told.stdout)["files"] == [*files]


def test_all_texts_together_keep_to_the_limit(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(f"step {number} fine\n" * 200_000)
    told = bundle(tmp_path, "--limit=1", *sorted(tmp_path.glob("*.log")))
    assert told.returncode == 0, told.stderr
    files = unpacked(tmp_path / "b.tar.gz")
    own = ("SUMMARY.md", "redacted.txt", "missing.txt")
    total = sum(len(text) for name, text in files.items() if name not in own)
    assert 1 << 18 < total <= 1 << 20
