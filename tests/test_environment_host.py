"""Room on the host is judged against what a job needs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pytest_gkd.processes import cgroup
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.host import (
    Disk,
    judge_compiler,
    judge_disk,
    judge_file_size,
    judge_files,
    judge_shm,
    read_compiler,
    read_disk,
    read_host,
    shadowing,
)
from pytest_gkd.workload.environment.memory import (
    GIB,
    MIB,
    Memory,
    judge_memory,
    read_memory,
)


def disk(free: int = 50 * GIB, inodes: int = 10**6, writable: bool = True) -> Disk:
    return Disk("report", "/data/run", 1, free, 100 * GIB, inodes, 10**7, writable)


def cause(items: list[StageFault | Note]) -> str | None:
    (item,) = items
    return item.cause if isinstance(item, StageFault) else item.id


def test_a_disk_with_room_is_not_mentioned() -> None:
    assert judge_disk(disk(), ours=True) == []


def test_a_full_disk_names_the_directory_and_what_is_left() -> None:
    (fault,) = judge_disk(disk(free=200 * MIB), ours=True)
    assert isinstance(fault, StageFault)
    assert fault.cause == "env.disk-full"
    assert "/data/run (report) has 200 MiB free of 100.0 GiB" in fault.message


def test_a_disk_without_inodes_is_full() -> None:
    assert cause(judge_disk(disk(inodes=12), ours=True)) == "env.disk-full"


def test_a_disk_that_does_not_count_inodes_is_not_full() -> None:
    uncounted = Disk("report", "/data", 1, 50 * GIB, 100 * GIB, 0, 0, True)
    assert judge_disk(uncounted, ours=True) == []


def test_a_directory_of_ours_must_be_writable_and_a_cache_need_not() -> None:
    assert cause(judge_disk(disk(writable=False), ours=True)) == "env.permission"
    assert cause(judge_disk(disk(writable=False), ours=False)) == "cache.read-only"


@pytest.mark.parametrize(
    ("total", "free", "gpus", "expected"),
    [
        (64 * MIB, 64 * MIB, 8, "env.shm-too-small"),
        (64 * MIB, 64 * MIB, 1, "shm.small"),
        (64 * MIB, 64 * MIB, 0, "shm.small"),
        (8 * GIB, 1 * MIB, 0, "env.shm-too-small"),
        (256 * MIB, 256 * MIB, 8, "shm.small"),
    ],
)
def test_shared_memory_of_a_bare_container_is_too_small_for_gpus(
    total: int, free: int, gpus: int, expected: str
) -> None:
    assert cause(judge_shm(total, free, gpus=gpus)) == expected


def test_a_gibibyte_of_shared_memory_is_enough() -> None:
    assert judge_shm(GIB, GIB, gpus=8) == []


def test_few_open_files_are_a_fault() -> None:
    assert cause(judge_files(256, 4096)) == "env.too-many-files"


def test_a_small_limit_on_the_size_of_a_file_is_a_fault() -> None:
    assert cause(judge_file_size(64 * MIB)) == "env.file-size-limit"
    assert cause(judge_file_size(4 * GIB)) == "file-size.limited"
    assert judge_file_size(resource.RLIM_INFINITY) == []


def test_a_soft_limit_that_ray_raises_by_itself_is_fine() -> None:
    assert judge_files(1024, 1_048_576) == []


def test_a_hard_limit_below_what_ray_recommends_is_a_note() -> None:
    assert cause(judge_files(1024, 4096)) == "files.low"


def test_little_memory_says_whose_limit_it_is() -> None:
    (note,) = judge_memory(Memory(64 * GIB, 2 * GIB, 8 * GIB))
    assert isinstance(note, Note)
    assert "limited to 8.0 GiB by the cgroup" in note.text


def test_a_missing_compiler_is_a_fault_only_with_a_gpu() -> None:
    header = Path("/")
    assert cause(judge_compiler(None, "PATH", header, gpus=1)) == "env.compiler"
    assert cause(judge_compiler(None, "PATH", header, gpus=0)) == "compiler.missing"


def test_a_missing_python_header_is_named() -> None:
    (fault,) = judge_compiler("/usr/bin/gcc", "PATH", Path("/no/Python.h"), gpus=1)
    assert isinstance(fault, StageFault)
    assert "/no/Python.h" in fault.message


def test_cc_is_taken_as_it_stands_even_when_it_does_not_exist() -> None:
    found = read_compiler({"CC": "no-such-compiler -O2", "PATH": "/usr/bin"})
    assert found == (None, "CC=no-such-compiler -O2")


def test_a_directory_that_does_not_exist_yet_is_judged_by_its_parent(
    tmp_path: Path,
) -> None:
    room = read_disk("report", tmp_path / "not" / "yet")
    parent = read_disk("parent", tmp_path)
    assert (room.device, room.total_bytes) == (parent.device, parent.total_bytes)
    assert room.path.endswith("not/yet")


def test_memory_is_read_from_the_kernel() -> None:
    memory = read_memory()
    assert 0 <= memory.available_bytes <= memory.total_bytes


def test_a_limit_of_a_group_above_counts_without_the_files_it_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "slice" / "job"
    group.mkdir(parents=True)
    for place, limit in ((group, "max"), (group.parent, str(256 * MIB))):
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{200 * MIB}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {50 * MIB}\n")
    monkeypatch.setattr(cgroup, "base", lambda: group)
    monkeypatch.setattr(cgroup, "first_version", lambda *_: None)
    memory = read_memory()
    assert memory.limit_bytes == 256 * MIB
    assert memory.available_bytes == 106 * MIB


def test_a_local_module_that_hides_an_installed_package_is_noted(
    tmp_path: Path,
) -> None:
    (tmp_path / "datasets.py").touch()
    (tmp_path / "torch").mkdir()  # a folder without __init__.py hides nothing
    (note,) = shadowing(tmp_path, ("torch", "datasets"))
    assert isinstance(note, Note)
    assert str(tmp_path / "datasets.py") in note.text


def test_this_host_gives_facts_with_units(tmp_path: Path) -> None:
    _, facts = read_host({"run": tmp_path}, {"HOME": str(tmp_path)}, gpus=0)
    assert {"disk", "shm_mib", "open_files", "memory", "compiler"} <= facts.keys()
