"""Storage that does not answer, as the kernel and the state of processes tell."""

from __future__ import annotations

import io

import pytest
from test_rank_files import CATALOGUE, DONE, at, steps

from pytest_gkd.diagnosis import log_file, logs, suspects
from pytest_gkd.diagnosis.log_report import LogReport

# Linux 6.8: kernel/hung_task.c, net/sunrpc/clnt.c; Lustre 2.15: ptlrpc/import.c.
TASK = "INFO: task python3:4711 blocked for more than 120 seconds."
NFS = "nfs: server nas1 not responding, still trying"
SOFT = "nfs: server 10.0.0.7 not responding, timed out"
LUSTRE = (
    "Lustre: work-OST0007-osc-ff8a: Connection to work-OST0007 (at 10.0.0.5@o2ib) was "
    "lost; in progress operations using this service will wait for recovery to complete"
)


def judged(text: str) -> LogReport:
    log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
    return logs.judge([log], CATALOGUE)


@pytest.mark.parametrize("line", [TASK, NFS, SOFT, LUSTRE])
@pytest.mark.parametrize(
    "form", ["[ 1234.567890] {}", "Nov 21 10:05:09 node3 kernel: {}", "{}"]
)
def test_the_kernel_tells_of_storage_that_does_not_answer(line: str, form: str) -> None:
    text = steps(30) + "Saving checkpoint to /mnt/nas/ckpt\n" + form.format(line) + "\n"
    report = judged(text)
    assert report.verdict == "failed"
    assert report.causes[0].cause == "env.storage-stalled"
    assert report.causes[0].advice


def test_storage_that_came_back_was_survived() -> None:
    text = steps(30) + f"{NFS}\nnfs: server nas1 OK\n" + steps(99, first=31)
    for end, verdict in (("", "running"), (DONE, "healthy")):
        report = judged(text + end)
        assert (report.verdict, report.causes) == (verdict, ())
        assert [cause for cause, _ in report.survived] == ["env.storage-stalled"]


def test_a_collective_that_timed_out_since_is_its_consequence() -> None:
    watchdog = (
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran"
    )
    report = judged(f"{steps(30)}{at(310)} {NFS}\n{at(910)} {watchdog}\n")
    assert report.causes[0].cause == "env.storage-stalled"


def test_a_rank_that_waits_for_storage_is_suspected_where_it_saves_or_reads() -> None:
    for phase in ("checkpoint", "data", "config"):
        signs = suspects.load().signs[phase]
        named = {name for sign in signs for name in sign.suspects}
        causes = {suspects.load().suspects[name].cause for name in named}
        assert "env.storage-stalled" in causes, phase
