"""The files of several ranks: one verdict, and which rank stands still."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, logs
from pytest_gkd.diagnosis.log_report import LogReport

CATALOGUE = catalogue.load()
START = datetime.datetime(2026, 11, 21, 10, 0)
DONE = "INFO Training completed\n"


def at(seconds: float) -> str:
    return f"{START + datetime.timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S},000"


def steps(last: int, *, first: int = 1, timed: bool = True, ahead_s: int = 0) -> str:
    """A rank's lines, one every ten seconds."""
    return "".join(
        (f"{at(10 * n + ahead_s)} " if timed else "")
        + f"INFO [trainer.py:7] step {n}/100 loss 0.4\n"
        for n in range(first, last + 1)
    )


def judged(tmp_path: Path, files: dict[str, str], now: str = "") -> LogReport:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return logs.examine([tmp_path / name for name in files], CATALOGUE, now=now)


def silent(report: LogReport) -> list[str]:
    return [one.name for one in report.processes if one.silent]


@pytest.mark.parametrize("timed", [True, False])
def test_one_rank_has_finished_and_another_stands_in_training(
    tmp_path: Path, timed: bool
) -> None:
    files = {
        "rank0.log": steps(100, timed=timed) + DONE,
        "rank1.log": steps(57, timed=timed),
    }
    report = judged(tmp_path, files)
    assert report.verdict == "hung"
    assert silent(report) == ["rank 1"]
    (one,) = (one for one in report.processes if one.silent)
    assert (one.rank, one.step, one.line) == (1, 57, 57)
    assert one.file == str(tmp_path / "rank1.log")
    assert (one.until, one.silent_s) == (("10:09:30", 430.0) if timed else ("", None))
    assert report.to_json()["missing_ranks"] == [1]
    assert report.last is not None
    assert report.last.source == str(tmp_path / "rank1.log")


@pytest.mark.parametrize(
    "other",
    [
        steps(100),  # made the last step, without closing words
        steps(99),
        "Loading weights: 100%|##########| 26/26\n",  # says nothing of training
        "Loading checkpoint shards:  50%|#####     | 1/2\n" * 3,
        "UserWarning: the moon is full\n" * 9,
    ],
)
def test_a_rank_that_says_no_more_does_not_spoil_the_end(
    tmp_path: Path, other: str
) -> None:
    files = {"rank0.log": steps(100) + DONE, "rank1.log": other}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("healthy", [])


def test_a_rank_that_is_only_just_behind_the_end_runs(tmp_path: Path) -> None:
    files = {"rank0.log": steps(100) + DONE, "rank1.log": steps(95)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])
    assert judged(tmp_path, files, now="10:40").verdict == "hung"


def test_a_rank_that_ends_in_a_traceback_has_failed_whatever_others_say(
    tmp_path: Path,
) -> None:
    crash = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
    crash += "ValueError: the moon is full\n"
    files = {"rank0.log": steps(100) + DONE, "rank1.log": steps(57) + crash}
    report = judged(tmp_path, files)
    assert report.verdict == "unknown"
    assert report.telling[0].text == "ValueError: the moon is full"
    survived = {"rank0.log": steps(100) + DONE, "rank1.log": crash + steps(100)}
    assert judged(tmp_path, survived).verdict == "healthy"


def test_a_server_beside_a_trainer_that_ended_does_not_count(tmp_path: Path) -> None:
    server = "INFO:     Application startup complete.\n"
    idle = "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 "
    server += (idle + "tokens/s, Running: 1 reqs\n") * 4
    files = {"trainer.log": steps(100) + DONE, "teacher.log": server}
    assert judged(tmp_path, files).verdict == "healthy"


def test_files_named_after_nodes_are_told_by_their_names(tmp_path: Path) -> None:
    files = {"gpu-a.log": steps(100) + DONE, "gpu-b.log": steps(57)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("hung", ["gpu-b.log"])
    assert report.to_json()["missing_ranks"] == []
    assert "gpu-b.log fell silent" in report.to_json()["missing"]


def test_of_four_ranks_one_is_silent_since_a_step(tmp_path: Path) -> None:
    files = {f"rank-{n}.log": steps(30 if n == 2 else 90) for n in range(4)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("hung", ["rank 2"])
    first = report.processes[0]
    assert (first.rank, first.step, first.until) == (2, 30, "10:05:00")
    assert (first.usual_s, first.silent_s) == (10.0, 600.0)
    assert report.suspicion is not None
    assert report.suspicion.missing_ranks == (2,)
    assert report.suspicion.last_sign.startswith("step 30 of 100 is done")


def test_who_fell_silent_first_is_named_first(tmp_path: Path) -> None:
    last = {0: 90, 1: 90, 2: 60, 3: 30, 4: 90}
    files = {f"rank-{n}.log": steps(until) for n, until in last.items()}
    report = judged(tmp_path, files)
    assert silent(report) == ["rank 3", "rank 2"]
    assert report.to_json()["missing"].startswith("rank 3 fell silent first: ")


def test_a_rank_that_is_a_few_steps_behind_is_not_silent(tmp_path: Path) -> None:
    files = {f"rank-{n}.log": steps(85 if n == 2 else 90) for n in range(4)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])


def test_when_all_fell_silent_together_nobody_was_first(tmp_path: Path) -> None:
    files = {f"rank-{n}.log": steps(90 - n % 2) for n in range(4)}
    report = judged(tmp_path, files, now="11:30")
    assert (report.verdict, silent(report)) == ("hung", [])


def test_ranks_that_never_say_what_the_first_says_are_not_silent(
    tmp_path: Path,
) -> None:
    quiet = "".join(f"{at(n)} loading layer {n}\n" for n in range(20))
    files = {"rank0.log": quiet + steps(90, first=3)}
    files |= {f"rank{n}.log": quiet for n in (1, 2, 3)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])


def test_torchruns_folders_are_ranks_and_two_files_are_one(tmp_path: Path) -> None:
    root = "none_x1/attempt_0"
    files = {f"{root}/{n}/stdout.log": steps(100) + DONE for n in (0, 1)}
    files |= {f"{root}/{n}/stderr.log": "UserWarning: moon\n" for n in (0, 1)}
    report = judged(tmp_path, files)
    assert report.verdict == "healthy"
    assert [one.name for one in report.processes] == ["rank 0", "rank 1"]
    files[f"{root}/1/stdout.log"] = steps(50)
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("hung", ["rank 1"])


def test_the_same_rank_of_two_nodes_is_told_by_its_path(tmp_path: Path) -> None:
    files = {f"n{n}/rank{r}.log": steps(90) for n in (0, 1) for r in (0, 1)}
    files["n1/rank0.log"] = steps(30)
    report = judged(tmp_path, files)
    assert silent(report) == ["n1/rank0.log"]
    assert report.to_json()["missing_ranks"] == []


def test_files_with_clocks_of_two_zones_are_compared_by_their_steps(
    tmp_path: Path,
) -> None:
    files = {"rank0.log": steps(90), "rank1.log": steps(90, ahead_s=-8 * 3600)}
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("running", [])
    files["rank1.log"] = steps(30, ahead_s=8 * 3600)
    report = judged(tmp_path, files)
    assert (report.verdict, silent(report)) == ("hung", ["rank 1"])
    assert report.processes[0].silent_s == 600


def test_what_came_first_is_told_across_zones(tmp_path: Path) -> None:
    full = "OSError: [Errno 28] No space left on device\n"
    many = "OSError: [Errno 24] Too many open files\n"
    early = steps(30) + f"{at(303)} {full}"
    late = steps(90, ahead_s=-8 * 3600) + f"{at(909 - 8 * 3600)} {many}"
    report = judged(tmp_path, {"rank0.log": early, "rank1.log": late})
    assert report.causes[0].cause == "env.disk-full"


def prefixed(form: str, last: dict[int, int], words: str = "step {} loss 0.4") -> str:
    return "".join(
        f"{form.format(rank)} {words.format(n)}\n"
        for n in range(1, max(last.values()) + 1)
        for rank, until in last.items()
        if n <= until
    )


@pytest.mark.parametrize(
    ("form", "name", "rank"),
    [
        ("[rank{}]:", "rank 2", 2),
        ("[default{}]:", "rank 2", 2),
        ("(WorkerDict pid=40{})", "WorkerDict pid=402", None),
        ("(TrainActor pid=40{}, ip=10.0.0.3)", "TrainActor pid=402, ip=10.0.0.3", None),
        ("\x1b[36m(WorkerDict pid=40{})\x1b[0m", "WorkerDict pid=402", None),
    ],
)
def test_of_the_processes_of_one_log_one_fell_silent(
    tmp_path: Path, form: str, name: str, rank: int | None
) -> None:
    text = prefixed(form, {0: 60, 1: 60, 2: 20, 3: 60})
    report = judged(tmp_path, {"a.log": text})
    assert (report.verdict, silent(report)) == ("hung", [name])
    (one,) = (one for one in report.processes if one.silent)
    assert (one.rank, one.line) == (rank, 19 * 4 + 3)


def test_a_process_that_stops_another_work_is_told_without_a_verdict(
    tmp_path: Path,
) -> None:
    text = prefixed("[rank{}]:", {0: 60, 1: 60, 2: 20}, "prompts answered: {}")
    report = judged(tmp_path, {"a.log": text + steps(90)})
    assert (report.verdict, silent(report)) == ("running", ["rank 2"])


@pytest.mark.parametrize(
    "text",
    [
        prefixed("(WorkerDict pid=40{})", {0: 60, 1: 59, 2: 60}),
        # Folded by Ray: who said it is not known.
        prefixed("(WorkerDict pid=40{})", {0: 60, 1: 20, 2: 20})
        + "(WorkerDict pid=400) step 61 loss 0.4 [repeated 3x across cluster]\n",
        prefixed("(WorkerDict pid=40{})", {0: 60}) + "(TaskRunner pid=9) up\n" * 3,
        # Bursts, as of a pipe that is filled: the last is not there yet.
        "".join(
            prefixed("[rank{}]:", {rank: 30})
            for rank in (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1)
        ),
    ],
)
def test_processes_that_are_not_silent(tmp_path: Path, text: str) -> None:
    assert silent(judged(tmp_path, {"a.log": text})) == []


NCCL = "node-a:{pid}:{pid} [{r}] NCCL INFO ncclCommInitRankConfig comm 0x5{r} rank {r} "
NCCL += "nranks 8 cudaDev {r} nvmlDev {r} busId 1{r}000 commId 0x9a - Init {what}\n"


def nccl(complete: int) -> str:
    text = "NCCL version 2.27.3+cuda12.9\n"
    text += "".join(NCCL.format(pid=70 + r, r=r, what="START") for r in range(8))
    done = [r for r in range(8) if r != 5][:complete] + [5] * (complete == 8)
    return text + "".join(NCCL.format(pid=70 + r, r=r, what="COMPLETE") for r in done)


def test_of_eight_ranks_one_does_not_join(tmp_path: Path) -> None:
    report = judged(tmp_path, {"a.log": nccl(7)})
    assert (report.verdict, report.phase) == ("hung", "actor-init")
    assert report.suspicion is not None
    assert report.suspicion.missing_ranks == (5,)
    assert report.suspicion.suspects
    files = {f"rank{r}.log": "" for r in range(8)}
    for line in nccl(7).splitlines(keepends=True)[1:]:
        files[f"rank{line.partition(' rank ')[2][0]}.log"] += line
    report = judged(tmp_path, files)
    assert (report.verdict, report.phase) == ("hung", "actor-init")
    assert report.suspicion is not None
    assert report.suspicion.missing_ranks == (5,)


def test_when_all_have_joined_nobody_is_missing(tmp_path: Path) -> None:
    report = judged(tmp_path, {"a.log": nccl(8)})
    assert (report.verdict, report.to_json()["missing_ranks"]) == ("unknown", [])
    # One rank's own log: what others did is not in it.
    own = [line for line in nccl(7).splitlines() if " rank 3 " in line]
    report = judged(tmp_path, {"b.log": "\n".join(own)})
    assert report.to_json()["missing_ranks"] == []


def test_the_last_that_said_it_does_not_accuse_the_one_before(tmp_path: Path) -> None:
    rounds = "[rank0] writing part {0}\n[rank1] writing part {0}\n"
    text = "".join(rounds.format(n) for n in range(3)) + "saving checkpoint\n"
    report = judged(tmp_path, {"a.log": text}, now="12:00")
    assert (report.verdict, silent(report)) == ("hung", [])
    report = judged(tmp_path, {"a.log": text + "[rank1] writing part 3\n"})
    assert (report.verdict, silent(report)) == ("hung", ["rank 0"])
