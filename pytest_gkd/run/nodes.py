"""pytest-xdist's side of the workers: starting, instructing and giving up on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gkd import typed_json
from pytest_gkd.language import tr_filled
from pytest_gkd.processes import tree
from pytest_gkd.run.assignment import SAFE_PATH, Assignment
from pytest_gkd.run.parts import RunParts
from pytest_gkd.stage_plan import PlannedStage


class Nodes:
    """Gives each of pytest-xdist's nodes its assignment, and reports it lost.

    ``starts`` is set while processes are started, so that an error is reported as such.
    """

    def __init__(self, run: RunParts) -> None:
        self.starts = False
        self._run = run
        run.on_lost = self.lost
        self._safe_path = os.environ.get(SAFE_PATH)

    def begin(self) -> None:
        """Called before the first of them is started."""
        os.environ[SAFE_PATH] = self._safe_path or "1"
        self.hush()

    def end(self) -> None:
        """Called after the last has ended."""
        if self._safe_path is None:
            os.environ.pop(SAFE_PATH, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        self.starts = True
        self._run.spare_plugins()
        # Replacement workers are started through this, too, without any hook.
        group = self._run.config.pluginmanager.getplugin("dsession").nodemanager.group
        start = group.makegateway

        def makegateway(spec: object) -> object:
            self._run.home.hand_on_mark(of_run=True)
            try:
                return start(spec)
            finally:
                self._run.home.hand_on_mark(of_run=False)

        group.makegateway = makegateway

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._run.nodes[node.gateway.id] = node
        node.notify_inproc = until_down(node.notify_inproc)
        assignment = Assignment(
            node.gateway.id,
            self._run.request,
            self._run.home.path,
            self._run.report.path,
            self._run.home.manifest.handle,
            self._run.events.add(node.gateway.id),
            self._run.verdicts_file.path,
            self._run.home.guardian.pulse.path if self._run.home.guardian else None,
            self._safe_path,
        )
        node.workerinput["gkd"] = typed_json.dumps(assignment)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        popen = getattr(getattr(gateway, "_io", None), "popen", None)
        if popen is not None:
            self._run.watchdog.spared.add(popen.pid)
            self._run.watchdog.expect(gateway.id, popen.pid)
            self._run.manifest_writer.note(popen.pid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self) -> Any:
        from pytest_gkd.run.scheduler import LaneScheduling

        return LaneScheduling(self._run.workers, self._agreed_plan, self._run.config)

    def _agreed_plan(self) -> tuple[PlannedStage, ...]:
        self._run.watchdog.drain()
        if self._run.recorder.problem:
            raise pytest.UsageError(tr_filled(self._run.recorder.problem))
        return self._run.recorder.plan

    def hush(self) -> None:
        """Keep xdist quiet unless the user asked for more output."""
        # Its lines about workers coming and going would duplicate ours.
        manager = self._run.config.pluginmanager
        if self._run.config.get_verbosity() > 0:
            return
        session = manager.getplugin("dsession")
        if session is not None:
            session.terminal = None
        chatter = manager.getplugin("terminaldistreporter")
        if chatter is not None:
            manager.unregister(chatter)

    def lost(self, worker: str) -> None:
        """Tell pytest-xdist that a worker is gone; it would wait for it otherwise."""
        watch = self._run.watchdog.workers[worker]
        if not tree.is_dead(watch.pid, watch.start):
            what = f"the process of {watch.stage or worker}, which survives SIGKILL"
            self._run.recorder.note_survivors([f"{watch.pid} {what}"])
        node = self._run.nodes[worker]
        if not node._down:
            node._down = True
            error = "its process, or another that holds its pipe, does not end"
            node.notify_inproc("errordown", node=node, error=error)


def until_down(notify: Callable[..., None]) -> Callable[..., None]:
    """Wrap a worker's ``notify`` so that its end is announced once, and nothing after.

    xdist, in its own thread, and the watchdog may notice it at the same time; and a
    worker that was given up on may start sending again.
    """
    one = threading.Lock()
    is_down = False

    def notify_until_down(eventname: str, **values: Any) -> None:
        nonlocal is_down
        with one:
            if not is_down:
                is_down = eventname == "errordown"
                notify(eventname, **values)

    return notify_until_down
