"""Collects stages: which tests are stages, which of them run, in which order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from pytest_gkd import sanitize, stage_plan
from pytest_gkd.options import SettingsError
from pytest_gkd.run.built_in_stages import StageModule, stages_dir
from pytest_gkd.run.other_plugins import gentle_s
from pytest_gkd.run.selection import Request
from pytest_gkd.stage_events import Collected, Event
from pytest_gkd.stage_plan import PlannedStage, StageItem


class StageCollection:
    """Plans what ``request`` asks for from the tests that pytest has found."""

    def __init__(self, request: Request, say: Callable[[Event], None]) -> None:
        self.plan: tuple[PlannedStage, ...] = ()
        self.by_nodeid: dict[str, PlannedStage] = {}
        self._request = request
        self._say = say

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        if module_path.parent != stages_dir():
            return None
        # The same name for a stage wherever the package is installed.
        module: pytest.Module = StageModule.from_parent(
            parent, path=module_path, nodeid=f"stages/{module_path.name}"
        )
        return module

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        everything = list(items)
        yield
        selected, settings = self._request.selection.names, self._request.settings
        try:
            found = {item.nodeid: read_marker(item) for item in everything}
            names = [stage.name for stage in found.values() if stage is not None]
            # --lf leaves whole files unread, and some files cannot be read.
            all_known = not session.testsfailed and not getattr(config.option, "lf", 0)
            if all_known:
                self._request.check_names(names)
            left = [one for item in items if (one := found[item.nodeid])]
            self.plan = stage_plan.build(
                left,
                selected,
                self._request.budgets,
                names if all_known else None,
                gpus=settings.gpus,
                exclusive=settings.exclusive,
            )
        except SettingsError as error:
            # The controller turns this into a usage error; nothing may run here.
            self._say(Collected(error=str(error)))
            items.clear()
            return
        self.by_nodeid = {stage.nodeid: stage for stage in self.plan}
        asked = names if selected is None else selected
        chosen = {one.name for one in left}
        missing = [name for name in names if name in asked and name not in chosen]
        # What -k and -m deselect is no surprise to whoever passed them.
        told = not config.option.keyword and not config.option.markexpr
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            is_stage = found[item.nodeid] is not None
            keep = (
                item.nodeid in self.by_nodeid
                if is_stage
                else not self._request.selection.only
            )
            (kept if keep else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        position = {stage.nodeid: at for at, stage in enumerate(self._run_order())}
        kept.sort(key=lambda item: position.get(item.nodeid, len(position)))
        items[:] = kept
        gentle = config.pluginmanager.hasplugin("timeout")
        retries = config.pluginmanager.hasplugin("pytest-retry")
        for item in items:
            stage = self.by_nodeid.get(item.nodeid)
            # pytest-retry reruns a test so marked from pytest_runtest_makereport.
            if stage is not None and retries and item.get_closest_marker("flaky"):
                item.add_marker(pytest.mark.flaky(condition=False), append=False)
            if stage is not None and gentle:
                after_s = gentle_s(stage)
                item.add_marker(pytest.mark.timeout(after_s, method="signal"))
            if item.path.parent == stages_dir():
                # torch's and vLLM's own deprecations are not the user's concern.
                item.add_marker(pytest.mark.filterwarnings("ignore"))
        self._say(Collected(self.plan, deselected=tuple(missing if told else ())))

    def _run_order(self) -> list[PlannedStage]:
        return [stage for lane in stage_plan.lanes(self.plan, 1) for stage in lane]


def read_marker(item: pytest.Item) -> StageItem | None:
    """The stage that a test's ``gkd_stage`` marker describes, None without one.

    Raises SettingsError for a malformed marker.
    """
    marker = item.get_closest_marker("gkd_stage")
    if marker is None:
        return None
    options = dict(marker.kwargs)
    lane, needs = options.pop("lane", None), options.pop("needs", None)
    timeout_s = options.pop("timeout", None)
    problem = ""
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        problem = "takes the stage's name"
    elif options:
        problem = f"does not know {', '.join(options)}; it knows lane, needs, timeout"
    elif needs is not None and (
        isinstance(needs, str) or not all(isinstance(need, str) for need in needs)
    ):
        problem = f"takes needs as a list of stage names, not {needs!r}"
    elif timeout_s is not None and (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, (int, float))
        or not 0 < timeout_s < float("inf")
    ):
        problem = f"takes timeout as seconds above 0, not {timeout_s!r}"
    if problem:
        raise SettingsError(f"{item.nodeid}: the marker gkd_stage {problem}")
    name = marker.args[0]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        name = f"{name}[{callspec.id}]"
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise SettingsError(
            f"{item.nodeid}: {name!r} cannot be the name of the stage's directory in "
            "the report: it has an empty, '.' or '..' part between slashes"
        )
    for shown in (name, item.nodeid):
        # Stages are looked up by both, so both have to be shown unchanged.
        if sanitize.plain(shown) != shown:
            raise SettingsError(
                f"{item.nodeid}: {shown!r} holds characters that a terminal or a CI "
                "runner would obey; give the stage and its file another name"
            )
    listed = None if needs is None else tuple(needs)
    return StageItem(item.nodeid, name, lane, listed, timeout_s)
