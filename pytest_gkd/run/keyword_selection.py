"""Lets ``-k NAME`` choose stages, and says so."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

import pytest

from pytest_gkd import options
from pytest_gkd.options import WITH_INI, SettingsError
from pytest_gkd.stage_plan import mentioned
from pytest_gkd.stage_specs import BY_NAME


@dataclass(frozen=True)
class Verdict:
    """What ``-k`` did about stages, in one line, and the stages that then run."""

    line: str = ""
    runs: tuple[str, ...] = ()


def chosen(config: pytest.Config, option: argparse.Namespace) -> tuple[str, ...]:
    """The stages that ``-k`` names and runs alongside the project's own tests."""
    return named(config, option) if reason(config, option) else ()


def named(config: pytest.Config, option: argparse.Namespace) -> tuple[str, ...]:
    """The stages that ``-k`` selects if it may, in this run or the next."""
    if config.getini("gkd_keyword") is False:
        return ()
    return tuple(
        name
        for name in mentioned(option.keyword or "")
        if not (needed := BY_NAME[name].option)
        or getattr(option, options.named(needed).ini, None)
        or config.getini(options.named(needed).ini)
    )


def reason(config: pytest.Config, option: argparse.Namespace) -> str:
    """Why this project is taken to want stages, in words; empty if nothing says so."""
    if config.getini("gkd_keyword"):
        return "gkd_keyword is set"
    for one in WITH_INI:
        if getattr(option, one.ini, None):
            return f"{one.flag} is given"
        if config.getini(one.ini):
            return f"{one.ini} is set"
    for file in (config.rootpath / "stages").glob("test_*.py"):
        with contextlib.suppress(OSError):  # the user's file, whatever it is
            if file.is_file() and b"gkd_stage" in file.read_bytes():
                return f"stages/{file.name} is there"
    return ""


def verdict(config: pytest.Config, collected: int, failed: int, status: int) -> Verdict:
    """The verdict after a session with ``collected`` tests and ``failed`` unreadable
    files.

    ``status`` is its exit status: a session that was cut short chose nothing.
    """
    option = config.option
    names = named(config, option)
    if not names or option.gkd_stages is not None or config.getini("gkd_stages"):
        return Verdict()
    asked, stages = f"-k {option.keyword!r}", " and ".join(names)
    command = f"pytest --gkd-stages={','.join(names)}"
    why = reason(config, option)
    if why:
        never = "gkd_keyword = false in the ini: only your tests"
        return Verdict(f"{asked} chose {stages} too, since {why} ({never})")
    if collected:
        return Verdict(f"{asked} chose tests of yours only; {command} runs {stages}")
    if failed:
        return Verdict(
            f"{asked} chose nothing yet: a file could not be read ({command})"
        )
    if status != pytest.ExitCode.NO_TESTS_COLLECTED:
        return Verdict(f"{asked} chose nothing yet: the session was ended ({command})")
    told = f"{asked} chose no test here, so {stages} runs now ({command})"
    return Verdict(told, names)


def shown(config: pytest.Config, verdict: Verdict) -> str:
    """Its line in the user's language."""
    # Only here: most sessions with -k have nothing to do with stages.
    from pytest_gkd import language
    from pytest_gkd.run import user_language

    with contextlib.suppress(SettingsError):
        user_language.use(config)
    return f"gkd: {language.tr_filled(verdict.line)}"
