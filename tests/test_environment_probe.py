"""Real child processes import packages made here, and end as they may."""

from __future__ import annotations

import os
import signal
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import until

from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.probe import Outcome, Probe, busy_share
from pytest_gkd.workload.environment.probe_judge import judge_imports, judge_ray

MakeProbe = Callable[..., Probe]


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProbe:
    """Start an import of packages given as name=source."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def start(**packages: str | None) -> Probe:
        for name, source in packages.items():
            if source is not None:  # else it lies there
                (folder / f"{name}.py").write_text(source)
        return Probe("import_packages", [list(packages)], tmp_path)

    return start


def ended(probe: Probe) -> Outcome:
    until(lambda: not probe.running())
    return probe.finish()


def the_finding(outcome: Outcome) -> StageFault:
    (found,) = judge_imports(outcome)
    assert isinstance(found, StageFault)
    return found


def test_packages_that_import_are_no_finding(importing: MakeProbe) -> None:
    outcome = ended(importing(good="__version__ = '1.2'"))
    assert judge_imports(outcome) == []
    assert outcome.found("version") == "1.2"


def test_a_child_has_the_search_path_of_this_process(importing: MakeProbe) -> None:
    source = "import sys; __version__ = sys.path[0]"
    assert ended(importing(where=source)).found("version") == sys.path[0]


def test_what_a_package_prints_does_not_disturb_the_events(
    importing: MakeProbe,
) -> None:
    outcome = ended(importing(loud="print('{\"failed\": 1}', flush=True)"))
    assert judge_imports(outcome) == []
    assert outcome.tail[-1][2] == '{"failed": 1}'


def test_a_crash_names_the_package_and_the_signal(importing: MakeProbe) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    outcome = ended(importing(good="", crashes=crash, after=""))
    fault = the_finding(outcome)
    assert fault.cause == "env.package-conflict"
    assert fault.message == "import crashes ended the process with SIGSEGV."
    assert fault.facts["package"] == "crashes"


def test_a_crash_keeps_the_python_stack(importing: MakeProbe) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    outcome = ended(importing(crashes=crash))
    evidence = [line for _, _, line in outcome.tail]
    assert evidence[0] == "Fatal Python error: Aborted"
    assert any("crashes.py" in line for line in evidence)


def test_a_package_that_exits_is_not_taken_for_success(importing: MakeProbe) -> None:
    outcome = ended(importing(leaves="import os; os._exit(0)"))
    fault = the_finding(outcome)
    assert fault.message == "import leaves ended the process with exit status 0."


def test_an_import_error_is_passed_on_and_the_next_package_is_tried(
    importing: MakeProbe,
) -> None:
    error = "raise ImportError('lib.so: undefined symbol: _ZN3c10')"
    outcome = ended(importing(broken=error, good="__version__ = '3'"))
    fault = the_finding(outcome)
    assert fault.cause == "env.package-conflict"
    assert "undefined symbol: _ZN3c10" in fault.message
    assert outcome.found("version") == "3"


def test_a_variable_that_an_import_refuses_is_told_with_all_of_the_text(
    importing: MakeProbe,
) -> None:
    error = "raise ValueError('\\nInvalid log settings: x, must be a comma\\nlist')"
    fault = the_finding(ended(importing(broken=error)))
    assert fault.cause == "env.variable-invalid"
    assert fault.message.endswith(
        "failed: ValueError: Invalid log settings: x, must be a comma list"
    )


def test_one_error_that_several_packages_meet_is_one_finding(
    importing: MakeProbe,
) -> None:
    error = "raise RuntimeError('same')"
    assert len(judge_imports(ended(importing(first=error, second=error)))) == 1


def test_a_package_that_is_not_there_is_missing(importing: MakeProbe) -> None:
    fault = the_finding(ended(importing(needs="import no_such_package_here")))
    assert fault.cause == "env.package-missing"
    assert "no_such_package_here" in fault.message


def test_a_module_that_moved_is_a_conflict(importing: MakeProbe) -> None:
    fault = the_finding(ended(importing(needs="import json.no_such_module")))
    assert fault.cause == "env.package-conflict"


VLLM = {
    "__init__.py": "",
    "platforms.py": """
class current_platform:
    device_name = "cpu"
    def import_kernels(): pass
""",
}


@pytest.mark.parametrize(
    ("source", "borne"),
    [
        (
            "import contextlib\nwith contextlib.suppress(ImportError): import vllm.x_C",
            1,
        ),
        ("try:\n    from vllm.x_C import f\nexcept (OSError, ImportError): pass", 1),
        ("try:\n    from . import x_C\nexcept Exception: pass", 1),
        ("def moe():\n    import vllm.x_C", 1),
        ("try:\n    pass\nexcept ImportError:\n    import vllm.x_C", 0),
        ("try:\n    import vllm.x_C\nexcept ModuleNotFoundError: pass", 0),
        ("import vllm.x_C", 0),
        ("import vllm.other  # x_C", 0),
        ("damaged(  # x_C", 0),
        ("x_C\0", 0),
    ],
)
def test_an_extension_that_vllm_does_without_is_a_note(
    importing: MakeProbe, tmp_path: Path, source: str, borne: int
) -> None:
    package = tmp_path / "packages/vllm"
    package.mkdir()
    for name, text in {**VLLM, "uses.py": source}.items():
        (package / name).write_text(text)
    (package / "x_C.abi3.so").write_text("of another build")
    (found,) = judge_imports(ended(importing(vllm=None)))
    assert isinstance(found, Note) == bool(borne)
    if isinstance(found, Note):
        assert "import vllm.x_C failed: ImportError: " in found.text
        assert found.text.endswith("vLLM goes on without it (uses.py).")
    else:
        assert found.cause == "env.package-conflict"
        assert found.message.startswith("import vllm.x_C failed: ImportError: ")


def test_an_import_that_only_waits_is_stuck_and_its_place_is_named(
    importing: MakeProbe,
) -> None:
    waits = "import os, time; os.write(1, b'in'); time.sleep(3600)"
    probe = importing(good="", hangs=waits)
    until(lambda: probe.output_path.read_bytes() == b"in")
    fault = the_finding(probe.finish(20))
    assert fault.cause == "env.import-stuck"
    assert fault.message.startswith("import hangs does not return")
    assert "hangs.py:1" in fault.message


def test_an_import_that_still_works_has_no_cause(importing: MakeProbe) -> None:
    probe = importing(good="", works="import os; os.write(1, b'in')\nwhile True: pass")
    until(lambda: probe.output_path.read_bytes() == b"in")
    fault = the_finding(probe.finish())
    assert fault.cause is None
    assert fault.message.startswith("import works had not returned")


def test_a_child_says_how_long_it_imports_while_it_gets_on(
    importing: MakeProbe,
) -> None:
    slow = {f"part{n}": "import time; time.sleep(0.6)" for n in range(3)}
    source = "".join(f"import {name}\n" for name in slow)
    outcome = ended(importing(whole=source, **slow))
    told = [event["importing"] for event in outcome.events if "importing" in event]
    assert told == sorted(told)
    assert told[-1] >= 1.7


def test_a_hang_that_keeps_the_interpreter_locked_shows_its_stack(
    importing: MakeProbe,
) -> None:
    hang = "import ctypes, os; os.write(1, b'in'); ctypes.PyDLL(None).sleep(3600)"
    probe = importing(locked=hang)
    until(lambda: probe.output_path.read_bytes() == b"in")
    evidence = [line for _, _, line in probe.finish(20).tail]
    assert any("locked.py" in line for line in evidence)


def alive(process: psutil.Process) -> bool:
    """A zombie waits for its new parent and does nothing any more."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_child_that_is_ended(importing: MakeProbe) -> None:
    grandchild = (
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '3600'], process_group=0)\n"
        "__import__('os').write(1, b'started')\n"
        "time.sleep(3600)"
    )
    probe = importing(parent=grandchild)
    until(lambda: b"started" in probe.output_path.read_bytes())
    members = probe.family()
    assert len(members) == 2
    probe.finish()
    assert not any(alive(member) for member in members)


def test_a_process_that_outlives_a_child_is_ended_and_named(
    importing: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gkd.workload.environment.probe.GRACE_S", 0.1)
    leaves = "import subprocess; subprocess.Popen(['sleep', '3600'])"
    probe = importing(leaves=leaves)
    outcome = ended(probe)
    assert outcome.left == ("sleep",)
    assert probe.family() == []


def test_a_full_disk_is_told_whoever_meets_it(importing: MakeProbe) -> None:
    error = "raise OSError(28, 'No space left on device')"
    fault = the_finding(ended(importing(writes=error)))
    assert fault.cause == "env.disk-full"


def test_a_child_killed_from_outside_points_to_memory(importing: MakeProbe) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    fault = the_finding(ended(importing(eats=killed)))
    assert fault.cause == "env.host-oom"
    assert fault.facts["exit_code"] == -signal.SIGKILL


def ray(
    *events: dict[str, object], exit_code: int | None = 0, busy: float = 0.1
) -> list[StageFault]:
    return judge_ray(Outcome(events, exit_code, 3.0, machine_busy=busy))


def test_a_ray_that_ran_its_task_is_no_finding() -> None:
    assert ray({"begin": "ray.init"}, {"done": "ray.init"}, {"end": True}) == []


def test_a_ray_that_raises_is_a_start_failure() -> None:
    failed: dict[str, object] = {
        "failed": "ray.init",
        "error": "RuntimeError",
        "text": "GCS did not answer",
        "errno": None,
    }
    (fault,) = ray({"begin": "ray.init"}, failed, {"end": True})
    assert fault.cause == "ray.worker-start"
    assert "GCS did not answer" in fault.message


def test_a_ray_that_hangs_is_a_start_failure() -> None:
    (fault,) = ray({"begin": "ray.init"}, exit_code=None)
    assert fault.cause == "ray.worker-start"
    assert fault.message.startswith("ray.init had not returned")


def test_a_ray_that_got_no_processor_is_not_called_broken() -> None:
    (fault,) = ray({"begin": "ray.init"}, exit_code=None, busy=0.98)
    assert fault.cause is None
    assert "on a machine 98% busy" in fault.message


def test_waiting_for_disk_does_not_make_a_machine_busy() -> None:
    times = namedtuple("times", "user system idle iowait")
    assert busy_share(times(1, 1, 5, 0), times(2, 1, 7, 1)) == pytest.approx(0.25)


def test_processes_that_ray_leaves_behind_are_named() -> None:
    events: tuple[dict[str, object], ...] = ({"end": True},)
    (fault,) = judge_ray(Outcome(events, 0, 3.0, left=("raylet",)))
    assert "raylet" in fault.message


def test_the_environment_of_a_ray_of_ours_keeps_what_the_user_set() -> None:
    from pytest_gkd.workload.environment.ray_cluster import own_environ

    own = own_environ({"RAY_AUTH_MODE": "disabled", "X": "1"})
    assert own.keys().isdisjoint({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "X"})
    assert own_environ({})["RAY_AUTH_MODE"] == "token"


def test_a_long_run_directory_gives_ray_a_short_one(tmp_path: Path) -> None:
    from pytest_gkd.workload.environment.ray_cluster import make_directory

    place = make_directory(tmp_path / ("x" * 80))
    try:
        assert len(os.fsencode(place)) <= 43
    finally:
        place.rmdir()
