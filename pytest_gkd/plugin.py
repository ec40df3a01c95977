"""pytest's entry point: options, ini keys, marker; registers the rest if stages run."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_gkd.options import WITH_FLAG, WITH_INI

if TYPE_CHECKING:
    from pytest_gkd.run.keyword_selection import Verdict
    from pytest_gkd.run.session import Prepared
    from pytest_gkd.stage_api import StageContext

TITLE = "staged smoke tests for GKD jobs (pytest-gkd)"
KEYWORD = (
    "whether -k NAME also runs the stage of that name (default: where the project has "
    "settings or stages of its own, or has no test that -k chooses)"
)
MARKER = (
    "gkd_stage(name, *, lane=None, needs=None, timeout=None): this test is a stage. "
    "pytest --gkd-stages runs it in its lane's own process, after its needs, and ends "
    "it with everything it started when its timeout (seconds) is over."
)
BY_KEYWORD: pytest.StashKey[Verdict] = pytest.StashKey()
PREPARED: pytest.StashKey[Prepared | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gkd", TITLE)
    for option in WITH_FLAG:
        text = option.told().replace("%", "%%")
        how: dict[str, Any] = {"metavar": option.metavar}
        if option.kind == "flag":
            how = {"action": "store_true"}
        elif option.kind == "list":
            how["action"] = "append"
        elif option.bare:
            how |= {"nargs": "?", "const": option.bare}
        group.addoption(option.flag, dest=option.ini, help=text, **how)
    for option in WITH_INI:
        kind: Literal["linelist"] | None = "linelist" if option.kind == "list" else None
        parser.addini(option.ini, option.help, type=kind, default=None)
    parser.addini("gkd_keyword", KEYWORD, type="bool", default=None)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config,
) -> Generator[None]:
    # pytest-cov decides in its own implementation of this hook whether there will be
    # workers.
    known = early_config.known_args_namespace
    if _asked_for(early_config, known, known.file_or_dir):
        from pytest_gkd.run import session

        if not session.one_process(early_config, known):
            known.dist = "load"
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(
    config: pytest.Config,
) -> Generator[None, int | None, int | None]:
    # Before pytest-xdist reads -n; its workers get here, too, and must not start
    # workers of their own.
    if hasattr(config, "workerinput"):
        return (yield)
    if config.option.help:
        from pytest_gkd.run import user_language

        user_language.translate_help(config, TITLE, {"gkd_keyword": KEYWORD})
    if _names_an_option(config):
        from pytest_gkd.run import option_origins

        problem = option_origins.lost_ini(config)
        if problem:
            from pytest_gkd.run import session

            raise session.refusal(config, problem)
    if _asked_for(config, config.option, _paths(config)):
        from pytest_gkd.run import session

        config.stash[PREPARED] = session.prepare(config)
    code = yield
    found = config.stash.get(BY_KEYWORD, None)
    ended = code != pytest.ExitCode.NO_TESTS_COLLECTED
    if ended or found is None or not found.runs:
        return code
    # The session without tests is over; this starts another one.
    asked = config.invocation_params
    with contextlib.chdir(asked.dir):
        return pytest.main([*asked.args, f"--gkd-stages={','.join(found.runs)}"])


def _names_an_option(config: pytest.Config) -> bool:
    words = [os.environ.get("PYTEST_ADDOPTS", ""), *config.invocation_params.args]
    return any("--gkd-" in str(word) for word in words)


def pytest_configure(config: pytest.Config) -> None:
    marker = MARKER
    if config.option.markers:
        from pytest_gkd.run import user_language

        marker = user_language.of_marker(config, MARKER)
    config.addinivalue_line("markers", marker)
    if PREPARED in config.stash or "gkd" in getattr(config, "workerinput", ()):
        from pytest_gkd.run import session

        session.register(config, config.stash.get(PREPARED, None))


def _paths(config: pytest.Config) -> list[str]:
    return config.args if config.args_source == config.ArgsSource.ARGS else []


def _asked_for(
    config: pytest.Config, option: argparse.Namespace, paths: list[str]
) -> bool:
    """Whether anything on the command line or in the ini could mean stages.

    Decided without importing more than this module: a test run that has nothing to do
    with stages must not notice that the plugin is installed.
    """
    if option.gkd_stages is not None or config.getini("gkd_stages"):
        return True
    if option.keyword:
        from pytest_gkd.run import keyword_selection

        if keyword_selection.chosen(config, option):
            return True
    return any("stages" in path for path in paths)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.option.keyword and not hasattr(config, "workerinput"):
        from pytest_gkd.run import keyword_selection

        config.stash[BY_KEYWORD] = keyword_selection.verdict(
            config, session.testscollected, session.testsfailed, session.exitstatus
        )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(BY_KEYWORD, None)
    if found is not None and found.line:
        from pytest_gkd.run import keyword_selection

        terminalreporter.write_line(keyword_selection.shown(config, found))


@pytest.fixture(scope="session")
def gkd(request: pytest.FixtureRequest) -> StageContext:
    """The running stage's settings, directories and reporting (see StageContext)."""
    from pytest_gkd.run import session

    return session.context(request)
