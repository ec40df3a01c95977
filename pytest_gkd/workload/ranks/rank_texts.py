"""Finds the lines in the ranks' own texts that prove what went wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from pytest_gkd import rank_words
from pytest_gkd.stage_api import Evidence
from pytest_gkd.workload.ranks.rank_records import RankRecord, RankRun

# Unambiguous texts of torch 2.13, gloo and NCCL (the second one since 2.30).
DUPLICATE_GPU = re.compile(
    r"(?:Duplicate GPU detected|Multiple Ranks are using the same GPU).*"
)
MISMATCH = re.compile(
    r"Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes"
    r"|Is there a distributed collective mismatch"
)
PORT_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
INTERFACE = re.compile(
    r"(?:ifa != nullptr\. )?Unable to find address for: ?(?P<name>\S+)|ifa != nullptr"
    r"|no socket interface found|Name or service not known"
    r"|Temporary failure in name resolution"
)
# Texts that only say that another rank is gone, late or silent.
OF_A_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|Timed out waiting|failed to pass monitoredBarrier"
    r"|reached monitoredBarrier, but received errors|wait timeout after"
    r"|client socket has timed out|clients joined|failed to recv|connection was closed"
    r"|remote process exit|communicator was aborted"
    r"|Watchdog caught collective operation timeout"
)
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout.*")
FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=\d+, OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\], TensorDtypes=(?P<dtype>\w+))?"
)
ABSENT = re.compile(r"Ranks (?P<ranks>[\d, ]+) failed to pass monitoredBarrier")
FRAME = re.compile(r'  File "(.*)", line (\d+) in (\S+)')

NEVER = float("inf")


def texts(run: RankRun) -> Iterator[tuple[RankRecord, str]]:
    """The text of every failed rank (exception and log), the first to fail first."""
    failed = [r for r in run.records if r.raised is not None or r.code not in (0, None)]
    for record in sorted(failed, key=lambda r: min(raised_at(r), r.ended_at or NEVER)):
        said = [] if record.raised is None else [str(record.raised["error"])]
        yield record, "\n".join([*said, *(text for _, text in record.log_tail)])


def raised_at(record: RankRecord) -> float:
    """When the rank reported its failure, on the marks' clock; else infinity."""
    return float(record.raised["t"]) if record.raised is not None else NEVER


def evidence(record: RankRecord, pattern: re.Pattern[str]) -> Evidence:
    """The line of the rank's log that matches, else its exception."""
    for number, text in record.log_tail:
        if pattern.search(text):
            return ((str(record.log), number, text.strip()[:400]),)
    if record.raised is not None:
        said = " ".join(str(record.raised["error"]).split())
        return ((str(record.log), None, said[:400]),)
    return ()


def last_words(record: RankRecord) -> Evidence:
    """The end of the rank's log, three lines at most."""
    return tuple((str(record.log), n, text[:400]) for n, text in record.log_tail[-3:])


def stack(record: RankRecord) -> Evidence:
    """The innermost two frames of the main thread, which faulthandler dumps last."""
    starts = [at for at, (_, text) in enumerate(record.log_tail) if "hread 0x" in text]
    frames = [
        (str(record.log), number, text.strip())
        for number, text in record.log_tail[starts[-1] if starts else 0 :]
        if starts and FRAME.match(text)
    ]
    return tuple(frames[:2])


def _describe_gpu(_: RankRun, record: RankRecord, found: re.Match[str]) -> str:
    return f"rank {record.rank}: {found[0]}; expected one GPU for each rank"


def _describe_port(_: RankRun, record: RankRecord, __: re.Match[str]) -> str:
    return (
        f"rank {record.rank}: a port is taken by another program, in "
        f"{record.operation}; expected a free port"
    )


def _describe_interface(_: RankRun, record: RankRecord, found: re.Match[str]) -> str:
    name = found["name"]
    what = f"network interface {name!r}" if name else "a network address"
    return (
        f"rank {record.rank}: {what} was not found on this machine, in "
        f"{record.operation}; expected one that exists"
    )


def _describe_mismatch(run: RankRun, record: RankRecord, _: re.Match[str]) -> str:
    """Which rank called what, from torch's fingerprints; ``record`` failed first."""
    calls: dict[int, str] = {}
    for _rank, text in texts(run):
        for found in FINGERPRINT.finditer(text):
            tensor = f" of {found['dtype']}[{found['shape']}]" if found["dtype"] else ""
            calls[int(found["rank"])] = found["op"] + tensor
    if len(set(calls.values())) < 2:
        return (
            f"rank {record.rank} ended in {record.operation}: a peer sent another "
            "number of bytes than it waited for; expected one shape on all ranks"
        )
    votes = Counter(calls.values())
    # With two ranks neither is in the minority; both are named either way.
    odd = min(sorted(calls, reverse=True), key=lambda rank: votes[calls[rank]])
    others = {rank: call for rank, call in calls.items() if call != calls[odd]}
    first = min(others)
    same = [rank for rank, call in sorted(others.items()) if call == others[first]]
    return (
        f"rank {odd} called {calls[odd]} while {rank_words.name(same)} called "
        f"{others[first]}; expected one collective of one shape and type on all ranks"
    )


TOLD: tuple[
    tuple[str, re.Pattern[str], Callable[[RankRun, RankRecord, re.Match[str]], str]],
    ...,
] = (
    ("comm.duplicate-gpu", DUPLICATE_GPU, _describe_gpu),
    ("comm.mismatch", MISMATCH, _describe_mismatch),
    ("comm.port-in-use", PORT_IN_USE, _describe_port),
    ("comm.interface", INTERFACE, _describe_interface),
)
