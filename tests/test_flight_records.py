"""torch's flight records are read without running them, and compared by group."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest

from pytest_gkd import files
from pytest_gkd.diagnosis import flight_records


def _entry(number: int, group: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "pg_id": 0,
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "time_created_ns": number,
        **more,
    }


def _record(*entries: dict[str, Any], **groups: list[int]) -> dict[str, Any]:
    told = {name.lstrip("g"): {"ranks": json.dumps(r)} for name, r in groups.items()}
    return {"version": "2.10", "pg_config": told, "entries": list(entries)}


def test_the_rank_that_is_behind_is_named() -> None:
    records = {0: _record(_entry(4)), 1: _record(_entry(3)), 2: _record(_entry(4))}
    missing = flight_records.find_missing(records, [3])
    assert missing is not None
    assert (missing.sequence, missing.entered_by) == (4, [0, 2])
    assert missing.behind == {"1": 3}
    assert missing.without_record == [3]


def test_a_rank_outside_of_a_group_is_not_waited_for_in_it() -> None:
    tensor_parallel = _entry(9, "7", time_created_ns=50)
    pair = _record(_entry(4), tensor_parallel, g0=[0, 1, 2, 3], g7=[0, 1])
    late = _record(_entry(4), {**tensor_parallel, "collective_seq_id": 8})
    others = _record(_entry(4), g0=[0, 1, 2, 3])
    records = {0: pair, 1: late, 2: others, 3: others}
    missing = flight_records.find_missing(records, [])
    assert missing is not None
    assert missing.group == "7"
    assert missing.behind == {"1": 8}


def test_a_group_that_ranks_number_differently_is_one() -> None:
    records = {
        0: _record(_entry(4, "12", pg_id=1)),
        1: _record(_entry(4, "12", pg_id=2)),
    }
    assert flight_records.find_missing(records, []) is None


@pytest.mark.parametrize("name", ["_dump_fr_trace", "_dump_fr_trace_json"])
def test_what_torch_writes_is_read(name: str) -> None:
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.all_reduce(torch.ones(2, 3))
        raw = getattr(c10d, name)()
    finally:
        dist.destroy_process_group()
    assert raw[:1] in (b"{", b"\x80")
    (entry,) = flight_records.read(raw)["entries"][-1:]
    assert entry["profiling_name"] == "gloo:all_reduce"


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_nothing_of_a_pickle_is_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flight_records.RecordError, match=r"posix\.mkdir"):
        flight_records.read(pickle.dumps({"entries": [_Evil()]}))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "raw", [b"", b"x", b"[1]", b'{"entries": 3}', b"\x80\x04", b"{", b"N."]
)
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises(flight_records.RecordError):
        flight_records.read(raw)


def test_entries_that_lack_something_are_passed_over() -> None:
    broken = [3, {}, {"pg_id": 0, "collective_seq_id": "x"}, _entry(1)]
    raw = json.dumps({"entries": broken}).encode()
    assert len(flight_records.read(raw)["entries"]) == 1


def _bomb() -> Any:
    """Thirty lists, each ten times the next: no memory holds it written out."""
    found: list[Any] = [1]
    for _ in range(30):
        found = [found] * 10
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"input_sizes": _bomb()},
        {"input_sizes": [["2"]]},
        {"input_dtypes": [3]},
        {"process_group": 7},
        {"process_group": [["0"]]},
        {"process_group": {"0": "default_pg"}},
        {"profiling_name": _bomb()},
        {"recorder": 3},
        {"collective_seq_id": -1},
        {"collective_seq_id": 10**5000},
    ],
    ids=lambda more: next(iter(more)),
)
def test_an_entry_that_torch_would_not_write_is_passed_over(
    more: dict[str, Any],
) -> None:
    raw = pickle.dumps({"entries": [_entry(1), {**_entry(2), **more}]})
    record = flight_records.read(raw)
    assert [one["collective_seq_id"] for one in record["entries"]] == [1]


def test_what_is_passed_on_of_a_record_is_short_whatever_it_holds() -> None:
    hostile: dict[Any, Any] = {"me": _bomb(), ("a", 1): 2}
    hostile["0"] = {"ranks": "[" * 100_000, "more": hostile}
    names = ("0" * 10**6, "default_pg")
    entry = _entry(1, more=_bomb(), process_group=names, frames=_bomb())
    long = _entry(2, input_sizes=[[2] * 64] * 10**5, input_dtypes=["F" * 10**6] * 10**5)
    record = {"entries": [entry, long] * 5000, "pg_config": hostile}
    text = flight_records.shortened(flight_records.read(pickle.dumps(record)))
    assert len(text) < 1e8
    read = flight_records.read(text.encode())
    assert len(read["entries"]) == flight_records.MOST_ENTRIES
    missing = flight_records.find_missing({0: read}, [1])
    assert missing is not None
    assert missing.text()


@pytest.mark.parametrize("limit", [1 << 12, 1 << 18])
def test_what_a_person_reads_of_a_record_keeps_to_its_room(limit: int) -> None:
    hostile: dict[Any, Any] = {"me": _bomb(), ("a", 1): 2, "long": "x" * 10**6}
    hostile |= {"whole": hostile, "big": 10**5000, "many": [0] * 10**6}
    entries = [_entry(n, frames=_bomb(), more=hostile) for n in range(300)]
    raw = pickle.dumps({"version": _bomb(), "pg_config": hostile, "entries": entries})
    text = files.json_text(flight_records.readable(flight_records.read(raw), limit))
    assert len(text) < 3 * limit
    assert json.loads(text)["entries"][-1]["collective_seq_id"] == 299


def test_a_person_reads_the_last_entries_and_the_stacks_of_the_very_last() -> None:
    frames = [{"name": "step", "filename": "train.py", "line": 7}]
    record = _record(*(_entry(n, frames=frames) for n in range(300)), g0=[0, 1])
    read = flight_records.readable(record, 1 << 20)
    assert [one["collective_seq_id"] for one in read["entries"]] == [*range(100, 300)]
    stacks = [one["collective_seq_id"] for one in read["entries"] if "frames" in one]
    assert stacks == [*range(295, 300)]
    assert read["entries"][-1]["frames"] == frames
    assert (read["version"], read["pg_config"]) == ("2.10", record["pg_config"])


@pytest.mark.parametrize("groups", [[], 3, {"0": 3}, {"0": {"ranks": "[1"}}, {"0": {}}])
def test_ranks_of_groups_that_cannot_be_read_are_unknown(groups: Any) -> None:
    raw = json.dumps({"entries": [_entry(1)], "pg_config": groups}).encode()
    missing = flight_records.find_missing({0: flight_records.read(raw)}, [3])
    assert missing is not None
    assert missing.without_record == [3]


def _torchcomms(number: int, group: str, operation: str, **more: Any) -> dict[str, Any]:
    """As torchcomms 0.3 writes it: it numbers in one row, and knows no p2p."""
    found = _entry(number, group, retired=True, is_p2p=False, **more)
    named = {"process_group": [group, "gloo"], "profiling_name": f"gloo:{operation}"}
    return {**found, **named}


def _counted(*entries: dict[str, Any], **groups: list[int]) -> flight_records.Record:
    raw = json.dumps(_record(*entries, **groups)).encode()
    assert flight_records.is_torchcomms(flight_records.read(raw))
    return flight_records.counted(flight_records.read(raw))


def test_torchcomms_collectives_are_numbered_in_each_group() -> None:
    """Rank 2 is no member of the pair, and so behind in the numbers of all groups."""
    groups = {"g0": [0, 1, 2], "gpair": [0, 1]}
    barrier: dict[str, Any] = {"input_sizes": [], "input_dtypes": []}
    whole = (
        _torchcomms(0, "0", "split", **barrier),
        _torchcomms(1, "0", "all_reduce"),
        _torchcomms(2, "pair", "all_reduce"),
        _torchcomms(3, "pair", "send"),
        _torchcomms(4, "0", "all_reduce"),
        _torchcomms(5, "0", "barrier", **barrier),
    )
    absent = (
        _torchcomms(0, "0", "all_reduce"),
        _torchcomms(1, "0", "all_reduce"),
        _torchcomms(2, "0", "split", **barrier),
        _torchcomms(3, "0", "split", **barrier),
    )
    first, second = _counted(*whole, **groups), _counted(*absent, **groups)
    missing = flight_records.find_missing({0: first, 1: first, 2: second}, [])
    assert missing is not None
    assert missing.text() == (
        "collective 3, gloo:barrier of no tensor: entered by ranks 0-1; rank 2 had "
        "entered 2"
    )
    assert flight_records.find_missing({0: first, 1: first}, [2]) is not None
    both = _counted(*whole, g0=[0, 1], gpair=[0, 1])
    assert flight_records.find_missing({0: both, 1: both}, []) is None


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    """As the tensor-parallel groups that a user splits off by one name."""
    done = _counted(_torchcomms(0, "tp", "all_reduce"), gtp=[0, 1])
    entries = [_torchcomms(number, "tp", "all_reduce") for number in range(2)]
    waits = _counted(*entries, gtp=[2, 3])
    absent = _counted(entries[0], gtp=[2, 3])
    records = {0: done, 1: done, 2: waits, 3: absent}
    missing = flight_records.find_missing(records, [])
    assert missing is not None
    assert (missing.entered_by, missing.behind) == ([2], {"3": 1})


def test_a_record_that_lacks_the_first_operation_is_not_compared() -> None:
    found = _counted(_torchcomms(1, "0", "all_reduce"))
    assert found["is_cut"]
    assert found["entries"] == []


def test_torchs_own_record_is_not_taken_for_torchcomms() -> None:
    for record in (_record(), _record(_entry(1)), _record({"pg_id": 3, **_entry(2)})):
        read = flight_records.read(json.dumps(record).encode())
        assert not flight_records.is_torchcomms(read)
