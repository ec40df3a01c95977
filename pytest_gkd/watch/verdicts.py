"""What two looks at a job prove: at work, slow, stuck, or held by somebody.

Pure: looks come in, a verdict comes out. A clock alone proves nothing. A job is stuck
only if between two close looks nothing of it moved: no output to speak of, no CPU time
but that of processes that spin in a collective, no disk, no GPU at work for anybody who
is not in a collective, and every stack as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import log_phases
from pytest_gkd.diagnosis.stack_dump import Thread
from pytest_gkd.processes.stall import BUSY_CPU, IDLE_CPU, IDLE_IO_BYTES_PER_S
from pytest_gkd.watch import own_frames, rank_sets, ray_places, stack_phases, waiting
from pytest_gkd.watch.samples import (
    AT_WORK,
    HELD,
    SLOW,
    STUCK,
    JobSample,
    ProcessSample,
    Progress,
    Usual,
    Verdict,
)

# What a job says while it stands: a heartbeat's line now and then, a warning again.
CHATTER_BYTES_PER_S = 100.0
# The machine's traffic counts for a job that is connected elsewhere. SSH and monitoring
# stay below it.
NETWORK_BYTES_PER_S = 256 * 1024
# Who stands in recv() is woken only by data; close looks wake it, too, some times.
RECEIVES_PER_S = 1.0
# Who waits for another machine may wait as long as the guides allow a teacher.
REMOTE_S = 600.0
# No step for so many times its usual time, while the CPU burns.
BUSY_STEPS = 10.0
BUSY_LEAST_S = 120.0
SLOW_TIMES = 3.0
SLOW_LEAST_S = 30.0
# Ranks that are in one place for so many usual steps, while the others wait for them.
SPIN_STEPS = 20.0
SPIN_LEAST_S = 20.0
# A jump of the clock that counts a machine's sleep, beyond the one that does not.
SLEPT_S = 5.0

# Kinds of ``waiting`` in which a process may spin, and uses a core or a GPU for it.
_REMOTE = ("http", "socket", "ray")
_SPINS = ("collective", "store", "gpu", "broadcast")
_DEBUGGER = re.compile(r"(?:^|/)(?:pdb|bdb|ipdb/\w+|pudb/\w+|debugpy/\S+)\.py$")
# What keeps heartbeats, and what only serves the others.
BESIDE = ("ray-system", "helper", "launcher")
# Whose end ends the job. A data loader's workers come and go.
_PARTS = ("rank", "engine", "engine-worker", "ray-actor", "teacher")
LAST_S = 60.0
MOST_SAID = 200
# In which one rank may compute for long, while the others wait for it.
_ALONE = ("checkpoint", *log_phases.STARTS)


@dataclass(frozen=True)
class Change:
    """What one process did between two looks, ``window_s`` seconds apart."""

    then: ProcessSample
    now: ProcessSample
    window_s: float

    @property
    def cpu(self) -> float:
        """Of one core."""
        return max(0.0, self.now.cpu_s - self.then.cpu_s) / self.window_s

    @property
    def burns(self) -> bool:
        """Whether it computes all the time, or would on a less crowded machine."""
        return self.cpu >= BUSY_CPU or self.then.state == self.now.state == "R"

    @property
    def io_bytes_per_s(self) -> float:
        return (
            max(0, (self.now.io_bytes or 0) - (self.then.io_bytes or 0)) / self.window_s
        )

    @property
    def moved(self) -> tuple[str, str] | None:
        """Where it was and where it is, if its stacks differ."""
        before, after = _by_name(self.then.threads), _by_name(self.now.threads)
        for name in before.keys() & after.keys():
            old, new = before[name], after[name]
            counts = new.is_main or "active" in (old.state, new.state)
            if counts and old.frames != new.frames:
                return _leaf(old), _leaf(new)
        return None

    @property
    def same_function(self) -> bool:
        """Whether its main thread is in the same function, at whichever line."""
        before, after = main_thread(self.then), main_thread(self.now)
        if before is None or after is None:
            return False
        pairs = zip(before.frames, after.frames, strict=False)
        same = [(a.file, a.function) == (b.file, b.function) for a, b in pairs]
        return same.count(True) >= min(len(before.frames), len(after.frames)) - 1

    @property
    def turns_in_place(self) -> bool:
        """Whether its main thread is in the same function, called from the same lines.

        A function that it calls there may have come or gone.
        """
        before, after = main_thread(self.then), main_thread(self.now)
        if before is None or after is None:
            return False
        short, long = sorted((before.frames, after.frames), key=len)
        if not short or len(long) - len(short) > 1:
            return False
        last, other = short[-1], long[len(short) - 1]
        return short[:-1] == long[: len(short) - 1] and (
            (last.file, last.function) == (other.file, other.function)
        )


def main_thread(process: ProcessSample) -> Thread | None:
    """A process's main thread, where its stacks were taken."""
    return next((one for one in process.threads if one.is_main), None)


def waits_for_peers(process: ProcessSample) -> bool:
    """Whether it is in a call in which it waits for other ranks or for its GPU."""
    found = [waiting.of(thread) for thread in process.threads]
    own = found[0] if process.threads and process.threads[0].is_main else None
    if own is not None and own.kind in _SPINS:
        return True
    return any(one is not None and one.kind == "collective" for one in found)


def _waits_for_gpu(process: ProcessSample) -> bool:
    thread = main_thread(process)
    found = waiting.of(thread) if thread else None
    return found is not None and found.kind == "gpu"


def held(now: JobSample) -> Verdict | None:
    """The verdict where a person or a reader holds the job, by one look."""
    silent_s = now.at - now.output_at
    for one in now.processes:
        if one.state == "t" or (one.state == "T" and one.tracer):
            return Verdict(
                HELD, silent_s, (f"{one.label} is stopped by a debugger{_by(one)}",)
            )
        thread = main_thread(one)
        frames = thread.frames if thread else ()
        at = next((n for n, f in enumerate(frames) if _DEBUGGER.search(f.file)), None)
        if at is not None:
            place = f", at {frames[at - 1]}" if at else ""
            why = f"{one.label} is in a debugger ({frames[at].file}){place}"
            return Verdict(HELD, silent_s, (why,))
        if one.reads_terminal:
            why = f"{one.label} waits for what is typed at the terminal{_own(thread)}"
            return Verdict(HELD, silent_s, (why,))
    if now.blocked_s > 5.0:
        return Verdict(
            HELD,
            now.blocked_s,
            (
                "whoever reads the job's output (a pipe, a stopped terminal) has not "
                f"read for {span(now.blocked_s)}; the job waits to write",
            ),
        )
    return None


def compare(
    first: JobSample, second: JobSample, progress: Progress, usual: Usual
) -> Verdict:
    """The verdict over two close looks at one job."""
    if found := held(second):
        return found
    window_s = max(second.at - first.at, 1e-3)
    silent_s = second.at - max(second.output_at, progress.step_at)
    changes = _changes(first, second, window_s)
    working = [one for one in changes if one.now.role.kind not in BESIDE]
    peers = [one for one in working if waits_for_peers(one.now)]
    waiting_for_peers = [one for one in peers if waits_for_peers(one.then)]
    others = [one for one in working if one not in waiting_for_peers]
    words = second.output_bytes - first.output_bytes
    if words > CHATTER_BYTES_PER_S * window_s:
        return _going(progress, second, usual, f"its output grew by {words} bytes")
    if found := _unplaced(working, first, second, progress, silent_s):
        return found
    if busy := [one for one in others if one.cpu >= IDLE_CPU]:
        busy.sort(key=lambda one: -one.cpu)
        if found := _livelock(busy, working, second, progress):
            return found
        return _busy(busy, second, progress, usual)
    if moved := [one for one in working if one.moved]:
        was, is_now = moved[0].moved or ("", "")
        why = f"{moved[0].now.label} went from {was} to {is_now}"
        return _going(progress, second, usual, why)
    if writing := [one for one in others if one.io_bytes_per_s > IDLE_IO_BYTES_PER_S]:
        one = max(writing, key=lambda one: one.io_bytes_per_s)
        rate = one.io_bytes_per_s / 1e6
        why = f"{one.now.label} reads and writes {rate:.1f} MB/s"
        return _going(progress, second, usual, why)
    for one in others:
        woken = (one.now.woken - one.then.woken) / window_s
        if one.then.receives and one.now.receives and woken > RECEIVES_PER_S:
            why = f"{one.now.label} receives data, {woken:.0f} times a second"
            return _going(progress, second, usual, why)
    known = {one.pid for one in first.processes}
    new = {o.pid for o in second.processes if o.node in first.seen} - known
    if new:
        return _going(progress, second, usual, f"it started {len(new)} processes")
    network = (second.network_bytes - first.network_bytes) / window_s
    if second.remote and network > NETWORK_BYTES_PER_S:
        why = f"the machine moves {network / 1e6:.1f} MB/s over the network"
        return _going(progress, second, usual, why)
    apart = bool(waiting_for_peers) or _stand_apart(working)
    if second.gpus_at_work and not apart and silent_s < REMOTE_S:
        return _going(progress, second, usual, second.gpus_at_work)
    elsewhere = bool(second.remote) and _waits_elsewhere(working)
    unanswered = set(first.unanswered) & set(second.unanswered)
    hidden = _hidden_nodes(first, second)
    if (elsewhere or hidden) and silent_s < REMOTE_S and not unanswered:
        why = f"it waits, connected to another machine ({', '.join(second.remote[:3])})"
        if hidden:
            why = f"nothing moves on the machines that are seen; {'; '.join(hidden)}"
        return Verdict(SLOW, silent_s, (why,), "likely", progress.phase)
    return _stuck(working, others, first, second, progress, silent_s)


def _hidden_nodes(first: JobSample, second: JobSample) -> list[str]:
    """Which nodes were not seen in both looks, and why, a sentence each.

    What is not seen may be at work. One that is lost is no longer there to be.
    """
    return [
        f"{one.name} is not seen ({one.problem or 'nor was it a look ago'})"
        for one in second.nodes
        if not one.is_lost and not (one.name in first.seen and one.name in second.seen)
    ]


def _going(progress: Progress, now: JobSample, usual: Usual, why: str) -> Verdict:
    return pace(progress, now.at, usual, why) or Verdict(
        AT_WORK, now.at - now.output_at, (why,), phase=progress.phase
    )


def pace(progress: Progress, now: float, usual: Usual, why: str = "") -> Verdict | None:
    """Slow, and in what: the step against the last ones, a phase against other runs."""
    also = (why,) if why else ()
    if progress.step_at and progress.step_s:
        spent = now - progress.step_at
        if spent > max(SLOW_LEAST_S, SLOW_TIMES * progress.step_s):
            times = spent / progress.step_s
            text = (
                f"no step for {span(spent)}, {times:.0f} times the usual "
                f"{span(progress.step_s)}"
            )
            said, phase = _said_since(progress)
            return Verdict(SLOW, spent, (text, *said, *also), "likely", phase)
        return None
    known = usual.phases.get(progress.phase)
    spent = now - progress.phase_at
    if progress.phase and known and spent > max(SLOW_LEAST_S, SLOW_TIMES * known):
        text = f"{span(spent)} in {progress.phase}; in earlier runs {span(known)}"
        return Verdict(SLOW, spent, (text, *also), "likely", progress.phase)
    return None


def _said_since(progress: Progress) -> tuple[tuple[str, ...], str]:
    """What the job says instead of a step, such as that it tries again; and the phase
    that it speaks of."""
    if progress.marked or progress.said_at < progress.step_at + 1.0:
        return (), progress.phase
    line = sanitize.line(progress.last_line)[:MOST_SAID]
    phase = log_phases.of_line(progress.last_line.encode("utf-8", "replace"))
    return ((f"it says: {line}",) if line else ()), phase or progress.phase


def _busy(
    busy: list[Change], now: JobSample, progress: Progress, usual: Usual
) -> Verdict:
    """CPU is burnt: work, or a loop that never ends."""
    one = busy[0]
    spent = now.at - max(progress.step_at, progress.phase_at, 0.0)
    expected = progress.step_s or usual.phases.get(progress.phase) or 0.0
    limit = max(BUSY_LEAST_S, BUSY_STEPS * expected)
    same = [one for one in busy if one.burns and one.same_function]
    text = f"{one.now.label} uses {100 * one.cpu:.0f} % of a core"
    if same and expected and spent > limit and now.at - now.output_at > BUSY_LEAST_S:
        there = same[0]
        thread = main_thread(there.now)
        place = f", always in {_leaf(thread)}" if thread else ""
        of_what = "step" if progress.step_s else progress.phase
        why = (
            f"busy, no {of_what} for {spent / expected:.0f} times its usual time: "
            f"{there.now.label} uses {100 * there.cpu:.0f} % of a core{place}"
        )
        odd = (there.now.pid,)
        return Verdict(SLOW, spent, (why,), "likely", progress.phase, odd)
    return _going(progress, now, usual, text)


def _livelock(
    busy: list[Change],
    working: list[Change],
    now: JobSample,
    progress: Progress,
) -> Verdict | None:
    """Some ranks turn in one place, for many usual steps, and the others wait for them.

    Who saves or loads may compute alone for as long as that takes.
    """
    spent = now.at - progress.step_at
    # Of a collective in backward no frame of Python's tells: who waits there is idle.
    waiting_ranks = [
        one
        for one in working
        if one.now.role.kind == "rank" and one not in busy and one.moved is None
    ]
    if not progress.step_s or not waiting_ranks:
        return None
    if spent < max(SPIN_LEAST_S, SPIN_STEPS * progress.step_s):
        return None
    honest = any(
        one.now.role.kind != "rank"
        or one.io_bytes_per_s > IDLE_IO_BYTES_PER_S
        or not one.turns_in_place
        or stack_phases.of_process(one.now, progress.phase) in _ALONE
        for one in busy
    )
    if honest:
        return None
    times = f"{span(spent)}, {spent / progress.step_s:.0f} times the usual"
    why = [
        f"{one.now.label} uses {100 * one.cpu:.0f} % of a core, always in "
        f"{_leaf(main_thread(one.now))}, and no step is made for {times}"
        for one in busy
    ]
    waiters = rank_sets.name([one.now for one in waiting_ranks])
    verb = "waits" if len(waiting_ranks) == 1 else "wait"
    why.append(f"{waiters} {verb} meanwhile")
    odd = tuple(one.now.pid for one in busy)
    return Verdict(STUCK, spent, tuple(why), "likely", progress.phase, odd)


def _unplaced(
    working: list[Change],
    first: JobSample,
    second: JobSample,
    progress: Progress,
    silent_s: float,
) -> Verdict | None:
    """What a program waits for has no place in Ray; what idles there proves nothing."""
    lacking = [one for one in second.unplaced if one in first.unplaced]
    if not lacking or any(one.moved for one in working):
        return None
    why = [f"Ray cannot place {one}" for one in lacking]
    why.append("the program waits in ray.get, and none of its actors is at work")
    phase = ray_places.phase_of(lacking)
    return Verdict(STUCK, silent_s, tuple(why), "likely", phase)


def _stand_apart(working: list[Change]) -> bool:
    """Whether some ranks are in another function than the others, whatever that is."""
    places = set()
    for one in working:
        thread = main_thread(one.now)
        if one.now.role.kind == "rank" and thread is not None:
            frames = own_frames.own(thread)
            places.add(str(frames[-1].function) if frames else "")
    return len(places) > 1


def _waits_elsewhere(working: list[Change]) -> bool:
    """Whether who may do the work is on another machine: a server, or other ranks.

    A connection alone does not say it: trackers of experiments keep one open.
    """
    ranks = [one.now for one in working if one.now.role.kind == "rank"]
    if max((one.role.world_size or 0 for one in ranks), default=0) > len(ranks):
        return all(waits_for_peers(one) for one in ranks)
    threads = filter(None, (main_thread(one.now) for one in working))
    return any(
        found is not None and found.kind in _REMOTE
        for found in map(waiting.of, threads)
    )


def _stuck(
    working: list[Change],
    others: list[Change],
    first: JobSample,
    second: JobSample,
    progress: Progress,
    silent_s: float,
) -> Verdict:
    window_s = second.at - first.at
    cpu_s = sum(one.cpu for one in others) * window_s
    spin_s = sum(one.cpu for one in working) * window_s - cpu_s
    whose = "its process" if len(working) == 1 else f"{len(working)} processes"
    if not working:
        whose = "only shells and helpers are there, which"
    if far := {one.now.node for one in working if one.now.node}:
        whose += f" on this machine and {', '.join(sorted(far))}"
    on_gpu = all(_waits_for_gpu(one.now) for one in working if one not in others)
    spun = f" and {spin_s:.0f} s waiting for {'the GPU' if on_gpu else 'peers'}"
    used = f"{cpu_s:.2f} s of CPU{spun if spin_s > 1 else ''} in {span(window_s)}"
    seen = [one for one in working if one.then.threads and one.now.threads]
    stacks = "no stack is seen"
    if seen:
        which = "every stack" if len(seen) == len(working) else "every stack seen"
        stacks = f"{which} is as it was"
    why = [f"{whose} used {used}, and {stacks}"]
    odd: tuple[int, ...] = ()
    for one in second.processes:
        if one.state == "T":
            why.insert(
                0,
                f"{one.label} is stopped by a signal (SIGSTOP); "
                f"kill -CONT {one.local_pid} lets it go on"
                + (f", on {one.node}" if one.node else ""),
            )
            odd = (*odd, one.pid)
        elif one.state == "D":
            why.append(f"{one.label} waits inside the kernel ({one.wchan or 'disk'})")
    said: tuple[str, ...] = ()
    phase = progress.phase
    if second.output_bytes > first.output_bytes:  # as who tries again, now and then
        said, phase = _said_since(progress)
        why += said
    why += sorted({*first.unanswered} & {*second.unanswered})
    why += (hidden := _hidden_nodes(first, second))
    if second.gpus_at_work:
        why.append(f"{second.gpus_at_work}, as by work and by a kernel that never ends")
    if second.remote:
        why.append(f"it is connected to other machines: {', '.join(second.remote[:3])}")
    blind = not any(one.threads for one in second.processes)
    lost = any(one.is_lost for one in second.nodes)  # it may come back
    unsure = blind or said or hidden or lost or second.remote or second.gpus_at_work
    return Verdict(
        STUCK,
        silent_s,
        tuple(why),
        "likely" if unsure else "certain",
        phase,
        odd,
    )


def cpu_use(before: JobSample, after: JobSample) -> dict[int, float]:
    """The cores that each process of the job used between two samples, by pid.

    Of another node only where it has answered in between.
    """
    window_s = max(after.at - before.at, 1e-3)
    return {one.now.pid: one.cpu for one in _changes(before, after, window_s)}


def uses_cpu(used: Mapping[int, float], now: JobSample) -> bool:
    """Whether any process of the job but its helpers computes."""
    return any(
        used.get(one.pid, 0.0) >= IDLE_CPU and one.role.kind not in BESIDE
        for one in now.processes
    )


def gone(before: JobSample, after: JobSample) -> list[ProcessSample]:
    """The processes that a job cannot do without and that ended between two samples."""
    here = {(one.pid, one.start) for one in after.processes}
    return [
        one
        for one in before.processes
        if one.role.kind in _PARTS
        and one.node in after.seen
        and (one.pid, one.start) not in here
    ]


def first_to_end(ends: Iterable[tuple[float, ProcessSample]], ended_at: float) -> str:
    """Who ended before all others in the last moments of a job; empty if several did.

    ``ends`` are times and who ended then, in their order.
    """
    last = [(at, one) for at, one in ends if at > ended_at - LAST_S]
    firsts = [one for at, one in last if at == last[0][0]]
    return firsts[0].label if len(firsts) == 1 else ""


def slept_s(before: JobSample, after: JobSample) -> float:
    """For how long the machine slept between two samples; 0 where it did not."""
    gap = (after.boot - before.boot) - (after.at - before.at)
    return gap if gap > SLEPT_S else 0.0


def _changes(first: JobSample, second: JobSample, window_s: float) -> list[Change]:
    before = {(one.pid, one.start): one for one in first.processes}
    found = []
    for one in second.processes:
        old = before.get((one.pid, one.start))
        if old is not None and not one.node:
            found.append(Change(old, one, window_s))
        elif old is not None and one.at > old.at:  # another answer of its node
            found.append(Change(old, one, one.at - old.at))
    return found


def _by_name(threads: tuple[Thread, ...]) -> dict[tuple[str, int], Thread]:
    return {(one.name, one.number): one for one in threads}


def _leaf(thread: Thread | None) -> str:
    """The innermost frame, in words."""
    frames = [one for one in (thread.frames if thread else ()) if one.line]
    return str(frames[-1]) if frames else "no Python frame"


def _own(thread: Thread | None) -> str:
    return f", at {_leaf(thread)}" if thread else ""


def _by(one: ProcessSample) -> str:
    return f" (pid {one.tracer})" if one.tracer else ""


def span(seconds: float) -> str:
    """A time in words."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
