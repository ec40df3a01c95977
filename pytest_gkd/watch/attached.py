"""Watches a job that runs already: a process with its tree, log files, or both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.watch import exits, scope, stuck_report, usual_times
from pytest_gkd.watch.arguments import Asked, WatchError
from pytest_gkd.watch.log_tail import Tail
from pytest_gkd.watch.samples import DEAD, FINISHED, Usual, Verdict
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope
from pytest_gkd.watch.screen import OwnScreen
from pytest_gkd.watch.watcher import TICK_S, Watch, new_directory

# How often the files that the job has opened are looked for.
LOGS_EVERY_S = 30.0
# How often it is asked which processes write to the logs that were named.
WRITERS_EVERY_S = 10.0
# A job without processes has ended when its logs were silent for so long.
OVER_S = 2.0
MOST_NAMED = 5


class AttachedWatch:
    """Watches what it has not started; nothing of it is ever signalled."""

    def __init__(self, asked: Asked) -> None:
        """Raises WatchError where there is nothing that can be watched."""
        self.asked = asked
        self.began = monotonic()
        self.tails = {path: Tail(path) for path in asked.logs}
        self.pid = asked.pid
        self._start: int | None = None
        if self.pid is not None:
            self._start = _start_of(self.pid)
        self._scope = Scope(self._seeds, frozenset((os.getpid(),)))
        self._bytes = 0
        self._output_at = self.began - self._silent_s()
        self._logs_at = self._writers_at = float("-inf")
        self._writers: dict[int, int] = {}  # pid to start
        self._interrupted = 0
        self._had_processes = False
        self.key = self._key()
        self.watch = Watch(
            asked,
            new_directory(asked),
            OwnScreen(status=asked.status),
            Sampler(
                self._scope,
                lambda: (self._bytes, self._output_at),
                driver=lambda: self.pid,
            ),
            usual_times.load(self.key) if self.key else Usual(),
        )
        self.watch.began = self._output_at
        if len(asked.logs) == 1:
            self.watch.log = asked.logs[0]

    def _key(self) -> str:
        if self.pid is None:
            return ""
        command = procfs.full_command(self.pid).split()
        return usual_times.key(command, procfs.link(self.pid, "cwd"))

    def _silent_s(self) -> float:
        """For how long the logs that were named are silent already."""
        last = max((one.written_at for one in self.tails.values()), default=0.0)
        return max(0.0, time.time() - last) if last else 0.0

    def _seeds(self, table: dict[int, Stat]) -> Iterable[int]:
        if self.pid is not None:
            here = table.get(self.pid)
            return [self.pid] if here is not None and here.start == self._start else []
        known = self._writers.items()
        alive = [pid for pid, at in known if pid in table and table[pid].start == at]
        now = monotonic()
        if len(alive) < len(known) or now >= self._writers_at + WRITERS_EVERY_S:
            self._writers_at = now
            self._writers = {pid: table[pid].start for pid in self._find_writers(table)}
        return self._writers

    def _find_writers(self, table: dict[int, Stat]) -> list[int]:
        wanted = {str(path.resolve()) for path in self.tails}
        mine = [pid for pid in table if procfs.user(pid) in (os.getuid(), None)]
        others = [pid for pid in mine if pid != os.getpid()]
        return [pid for pid in others if wanted & set(scope.open_files(pid))]

    def run(self) -> int:
        """Until the job has ended or the user has seen enough; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        screen = self.watch.screen
        self._look_for_logs()
        screen.say(self._what())
        while not self._interrupted and not self._is_over():
            time.sleep(TICK_S)
            if monotonic() > self._logs_at + LOGS_EVERY_S:
                self._look_for_logs()
            data = b"".join(self._read())
            self.watch.tick(data)
        if self._interrupted:
            self.watch.close()
            return exits.SIGNAL + self._interrupted
        status = self._over()
        self.watch.close()
        return status

    def _stop(self, number: int, _frame: object) -> None:
        self._interrupted = number

    def _what(self) -> str:
        found = self._scope.find(monotonic())
        self._had_processes = bool(found)
        lines = []
        if self.pid is not None:
            lines.append(
                f"watching {self.pid} ({procfs.command(self.pid)}) and what is below "
                f"it (processes: {len(found)})"
            )
        elif found:
            some = ", ".join(map(str, sorted(found)[:5]))
            some += ", ..." if len(found) > 5 else ""
            lines.append(f"who writes these logs: {some}")
        else:
            lines.append(
                "no process of yours has these logs open: only what they say can be "
                "judged; name the job's process as well with --pid"
            )
        lines += [f"following {path}" for path in [*self.tails][:MOST_NAMED]]
        if len(self.tails) > MOST_NAMED:
            lines.append(f"following {len(self.tails) - MOST_NAMED} more")
        if not self.tails:
            lines.append(
                "its output goes to no file: steps and phases cannot be followed; "
                "processes are"
            )
        return "\n".join(lines)

    def _look_for_logs(self) -> None:
        """Files that the job writes to, and the logs of its Ray workers."""
        self._logs_at = monotonic()
        if self.asked.logs and self.pid is None:
            return
        found = self._scope.find(monotonic(), closely=True)
        for path in scope.written_logs(found):
            if path not in self.tails and ".gkd/" not in str(path):
                try:
                    tail = Tail(path)
                except WatchError:
                    continue  # no text, or not ours to read
                self.tails[path] = tail
                silent_s = max(0.0, time.time() - tail.written_at)
                self._output_at = max(self._output_at, monotonic() - silent_s)

    def _read(self) -> Iterable[bytes]:
        for tail in self.tails.values():
            data = tail.read()
            for note in tail.taken_notes():
                self.watch.screen.say(note)
            if data:
                first = self._bytes == 0
                self._bytes += len(data)
                if not first:
                    self._output_at = monotonic()
                yield data

    def _is_over(self) -> bool:
        if self.pid is not None:
            return not procfs.is_alive(self.pid, self._start or 0)
        progress = self.watch.progress
        silent = monotonic() - self._output_at > OVER_S
        if not silent:
            return False
        alive = bool(self._scope.find(monotonic())) if self._had_processes else True
        return not alive or (not self._had_processes and progress.finished)

    def _over(self) -> int:
        """What the logs say of how it ended."""
        self.watch.tick(b"".join(self._read()))
        watch, progress = self.watch, self.watch.progress
        for path in self.tails:
            found = stuck_report.diagnosed(path, self.asked.rules)
            for one in found["causes"][:1]:
                why = (f"{one['title']} [{one['cause']}]", f"gkd diagnose {path}")
                watch.verdict = Verdict(DEAD, 0.0, why, phase=found["phase"])
                watch.tell(watch.verdict, watch.in_words(watch.verdict))
                return exits.DEAD
        if progress.finished:
            watch.verdict = Verdict(FINISHED, phase=progress.phase)
            watch.screen.say("finished")
            follower = watch.follower
            if self.key:
                usual_times.learn(
                    self.key, follower.phases, follower.silences, progress.step_s
                )
            return 0
        if progress.failed:
            verdict = Verdict(DEAD, 0.0, ("its last lines tell of an error",))
            watch.tell(verdict, watch.in_words(verdict))
            return exits.DEAD
        watch.screen.say(
            "it has ended, and nothing tells how: its exit status is known to who "
            "started it alone"
        )
        return exits.UNKNOWN


def _start_of(pid: int) -> int:
    """When a process began. Raises WatchError where it cannot be watched."""
    here = procfs.stat(pid)
    if here is None or here.state in procfs.DEAD:
        raise WatchError(
            f"watch: --pid {pid}: there is no such process"
            + (" (it has ended)" if here else " (pid of another machine or container?)")
        )
    user = procfs.user(pid)
    if os.getuid() and user not in (os.getuid(), None):
        raise WatchError(
            f"watch: --pid {pid}: belongs to another user (uid {user}); watch it as "
            "that user or as root, or follow its log: gkd watch --log FILE"
        )
    if pid == os.getpid():
        raise WatchError(f"watch: --pid {pid}: is this command itself")
    return here.start
