"""Watches a command that it starts itself: its terminal, its signals and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import launcher_summary
from pytest_gkd.processes import procfs
from pytest_gkd.processes.procfs import Stat
from pytest_gkd.watch import (
    stuck_report,
    usual_times,
    verdicts,
)
from pytest_gkd.watch.arguments import Asked
from pytest_gkd.watch.command import SIGNALS, Command
from pytest_gkd.watch.relay import Sign
from pytest_gkd.watch.samples import (
    DEAD,
    FINISHED,
    Verdict,
)
from pytest_gkd.watch.sampling import Sampler
from pytest_gkd.watch.scope import Scope
from pytest_gkd.watch.screen import SharedScreen
from pytest_gkd.watch.terminal import Terminal
from pytest_gkd.watch.watcher import TICK_S, Watch, new_directory

END_S = 30.0
# What a command has left when it was ended: it gets less time, as nobody waits for it.
REST_S = 5.0


class CommandWatch:
    """Watches a command that it starts itself."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.user = Terminal.find()
        # Before the command begins, which may be signalled at once.
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        directory = new_directory(asked)
        self.command = command = Command([*asked.command], directory, self.user)
        relay_pid = command.relay_pid
        scope = Scope(
            lambda table: [s.pid for s in table.values() if s.ppid == relay_pid],
            frozenset((relay_pid, os.getpid())),
        )
        self.key = usual_times.key(asked.command, str(Path.cwd()))
        self.watch = Watch(
            asked,
            directory,
            SharedScreen(command, status=asked.status),
            Sampler(scope, self._output, self._blocked_s, lambda: command.pid),
            usual_times.load(self.key),
        )
        self.watch.log = command.log
        self._seen = 0
        self._typed = b""
        self._told_log = False
        self._interrupted = 0
        self._ending_since: float | None = None

    def _output(self) -> tuple[int, float]:
        shared = self.command.shared
        at = shared[Sign.OUTPUT_AT] / 1e9
        return shared[Sign.TOTAL], at or self.watch.began

    def _blocked_s(self) -> float:
        since = self.command.shared[Sign.BLOCKED_SINCE]
        return max(0.0, monotonic() - since / 1e9) if since else 0.0

    def run(self) -> int:
        """Until the command has ended; its exit status, or ``exits.STUCK``."""
        try:
            self._until_ended(self._woken)
        finally:
            if self.user is not None:
                self.user.give_back()
                self.command.shared[Sign.TAKEN] = False
        return self._over()

    def _until_ended(self, woken: int) -> None:
        if self.command.log_problem:
            self.watch.screen.say(self.command.log_problem)
        ready = select.poll()
        ready.register(woken, select.POLLIN)
        ready.register(self.command.events, select.POLLIN)
        while not self.command.has_ended:
            self._mind_terminal(ready)
            found = {one for one, _ in ready.poll(TICK_S * 1000)}
            if self.command.events in found:
                self.command.heard()
            if woken in found:
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(woken, 256):
                        self._signalled(number)
            if self.user is not None and self.user.descriptor in found:
                self._forward_input()
            if self.command.stopped_by == signal.SIGTSTP:
                self._suspend()
            self._tick()

    def _tick(self) -> None:
        shared = self.command.shared
        data, self._seen = shared.since(self._seen)
        self.watch.tick(data)
        if shared[Sign.LOG_ERRNO] and not self._told_log:
            self._told_log = True
            why = os.strerror(shared[Sign.LOG_ERRNO]).lower()
            self.watch.screen.say(
                f"{self.command.log}: {why}; the job goes on, and its output is kept "
                "again once there is room"
            )
        if self.watch.end is not None:
            self._end(self.watch.end.why)

    # -- the terminal --------------------------------------------------------------

    def _mind_terminal(self, ready: select.poll) -> None:
        """Take what is typed while we are in front, and hand on what had no room."""
        user = self.user
        if user is None:
            return
        in_front = user.in_front()
        self.command.shared[Sign.TAKEN] = in_front
        if in_front and not user.is_ours:
            user.take_over(output=self.command.is_placed)
        elif not in_front and user.is_ours:
            user.give_back()
        if self._typed:
            self._typed = self.command.type(self._typed)
        if user.is_ours and user.reads and not self._typed:
            ready.register(user.descriptor, select.POLLIN)
        else:
            with contextlib.suppress(KeyError):
                ready.unregister(user.descriptor)

    def _forward_input(self) -> None:
        assert self.user is not None
        try:
            data = os.read(self.user.descriptor, 1024)
        except OSError:
            data = b""
        if not data:  # the terminal has hung up
            self.user.reads = False
            return
        if b"\x03" in data:
            self._interrupted = signal.SIGINT
        self._typed = self.command.type(data)

    def _suspend(self) -> None:
        """Ctrl-Z has stopped the job; stop as well, so that the shell takes over."""
        if self.user is not None:
            self.user.give_back()
            self.command.shared[Sign.TAKEN] = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        # Going on: by fg, bg or kill -CONT; or at once, without a shell that waits.
        signal.signal(signal.SIGTSTP, lambda *_: None)
        if self.user is not None:
            self._mind_terminal(select.poll())
            self._resized()
        self.command.send(signal.SIGCONT, group=True)
        until = monotonic() + 1.0
        while self.command.stopped_by and monotonic() < until:
            time.sleep(0.01)

    def _resized(self) -> None:
        screen = self.watch.screen
        if isinstance(screen, SharedScreen):
            screen.resized()

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._resized()
            return
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._interrupted = number
        self.command.send(number, group=number == signal.SIGHUP)

    # -- the end -------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """End the command: SIGTERM first, and what is left of it by SIGKILL."""
        now = monotonic()
        if self._ending_since is None:
            if self.command.returncode() is not None:
                return  # it has ended by itself
            self._ending_since = now
            self.watch.screen.say(f"{why}: ending the command (SIGTERM)")
            self.command.send(signal.SIGTERM, group=True)
            self.command.send(signal.SIGCONT, group=True)
        elif now > self._ending_since + END_S:
            self._send_all(signal.SIGKILL)

    def _send_all(self, *numbers: int) -> None:
        for pid, one in self._processes().items():
            with contextlib.suppress(PermissionError):
                for number in numbers:
                    procfs.send(pid, one.start, number)

    def _end_rest(self) -> None:
        """End what the command, which was ended, has left running."""
        for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
            until = monotonic() + REST_S
            self._send_all(*numbers)
            while monotonic() < until and any(
                one.state != "Z" for one in self._processes().values()
            ):
                time.sleep(0.1)

    def _processes(self) -> dict[int, Stat]:
        """The command's processes; never those of a cluster or server that it uses."""
        table, relay_pid = procfs.table(), self.command.relay_pid
        return {
            pid: table[pid]
            for pid in procfs.below([relay_pid], table) & table.keys() - {relay_pid}
        }

    def _over(self) -> int:
        command, watch = self.command, self.watch
        spent_s = monotonic() - watch.began  # what follows is no time of the command's
        watch.tick(command.shared.since(self._seen)[0])
        refused = command.not_started()
        code = command.returncode()
        end = watch.end if self._ending_since is not None else None
        if end is not None:
            self._end_rest()
        if refused is not None:
            watch.screen.say(f"watch: {refused[1]}")
            watch.verdict = Verdict(DEAD, why=(refused[1],))
        else:
            self._learn(code)
            self._tell_end(code, spent_s)
        status = end.status if end is not None else command.exit_status()
        status = refused[0] if refused is not None else status
        watch.keep_verdict(status)
        watch.close()
        command.leave()
        return status

    def _learn(self, code: int | None) -> None:
        follower = self.watch.follower
        if code == 0 or follower.steps_made > 3:
            usual_times.learn(
                self.key,
                follower.phases,
                follower.silences,
                follower.feed(b"", 0.0).step_s,
            )

    def _tell_end(self, code: int | None, spent_s: float) -> None:
        watch, progress = self.watch, self.watch.progress
        left = self._processes()
        if left and code is not None:
            some = ", ".join(str(pid) for pid in sorted(left)[:5])
            some += ", ..." if len(left) > 5 else ""
            watch.screen.say(
                f"the command has ended; it has left running: {some}; to go on "
                f"watching: gkd watch --pid {min(left)}"
            )
        end = watch.end if self._ending_since is not None else None
        if end is not None and end.status:
            watch.verdict = watch.reported.verdict if watch.reported else watch.verdict
            return
        if not code or end is not None:
            watch.verdict = Verdict(FINISHED, phase=progress.phase)
            watch.notify(watch.verdict, "finished")
            return
        if self._interrupted:
            return
        found = stuck_report.diagnosed(watch.log, self.asked.rules)
        # A traceback tells where it was raised, whether its cause is known or not.
        told = found.get("verdict") in ("failed", "unknown")
        phase = found["phase"] if told else progress.phase
        where = f" in phase {phase}" if phase not in ("", "unknown") else ""
        step = f", step {progress.step}" if progress.step is not None else ""
        spent = verdicts.span(spent_s)
        how_far = f"{spent}{step}{where}"
        why = [f"exit code {code} after {how_far}"]
        if code < 0:
            why = [f"signal {signal.Signals(-code).name} after {how_far}"]
        if who := verdicts.first_to_end(watch.ends, monotonic()):
            why.append(f"{who} was the first of its processes to end")
        elif first := launcher_summary.first_failed(watch.follower.tail):
            who = f"rank {first.rank} (pid {first.pid})"
            why.append(f"torchrun saw {who} fail first, exit code {first.exit_code}")
        elif actor := launcher_summary.dead_actor(watch.follower.tail):
            who = f"ray::{actor.name} (pid {actor.pid})"
            why.append(f"by Ray's last error {who} has died")
        verdict = Verdict(DEAD, 0.0, tuple(why), phase=phase, who=who)
        text = Watch.in_words(verdict) + stuck_report.cause_lines(found, watch.log)
        watch.verdict, watch.causes = verdict, found["causes"]
        watch.telling = [line["text"] for line in found.get("telling", ())]
        watch.tell(verdict, text)
