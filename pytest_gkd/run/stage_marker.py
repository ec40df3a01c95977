"""The marker gkd_stage: which stage does a test say that it is?"""

from __future__ import annotations

import pytest

from pytest_gkd import sanitize
from pytest_gkd.options import SettingsError
from pytest_gkd.stage_plan import StageItem


def read_marker(item: pytest.Item) -> StageItem | None:
    """The stage that a test's ``gkd_stage`` marker describes, None without one.

    Raises SettingsError for a marker that cannot be read.
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
        # Stages are looked up by both, so that they have to be shown as they are.
        if sanitize.plain(shown) != shown:
            raise SettingsError(
                f"{item.nodeid}: {shown!r} holds characters that a terminal or a CI "
                "runner would obey; give the stage and its file another name"
            )
    return StageItem(
        item.nodeid,
        name,
        lane,
        None if needs is None else tuple(needs),
        timeout_s,
    )
