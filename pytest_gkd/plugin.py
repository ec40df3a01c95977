"""pytest's way in: options, ini twins, marker; registers the rest when stages run."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_gkd.settings import OPTIONS

if TYPE_CHECKING:
    from pytest_gkd.context import StageContext

MARKER = (
    "gkd_stage(name, *, lane=None, needs=None, timeout=None): this test is a stage. "
    "pytest --gkd-stages runs it in its lane's own process, after its needs, and ends "
    "it with everything it started when its timeout (seconds) is over."
)
ALL = "all"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gkd", "staged smoke tests for GKD jobs (pytest-gkd)")
    stages_help = "run the stages, all of them or those named: --gkd-stages=nccl,vllm"
    timeout_help = "a stage's budget in seconds, repeatable; all=SECONDS for every one"
    report_help = "directory of report.json, stacks and output (default: .gkd/last)"
    group.addoption(
        "--gkd-stages", nargs="?", const=ALL, metavar="NAMES", help=stages_help
    )
    group.addoption(
        "--gkd-timeout",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help=timeout_help,
    )
    group.addoption("--gkd-report", metavar="DIR", help=report_help)
    parser.addini("gkd_stages", stages_help, default=None)
    parser.addini("gkd_timeout", timeout_help, type="linelist", default=[])
    parser.addini("gkd_report", report_help, default=None)
    parser.addini(
        "gkd_stage_files",
        "files with stages of your own that --gkd-stages also runs",
        type="linelist",
        default=[],
    )
    parser.addini(
        "gkd_rules",
        "files with rules (causes) of your own",
        type="linelist",
        default=[],
    )
    for option in OPTIONS:
        default = f" (default: {option.default})" if option.default else ""
        choices = f" [{', '.join(option.choices)}]" if option.choices else ""
        text = (option.help + choices + default).replace("%", "%%")
        if option.kind == "flag":
            group.addoption(
                option.flag, dest=option.ini, action="store_true", help=text
            )
        elif option.kind == "list":
            group.addoption(
                option.flag,
                dest=option.ini,
                action="append",
                metavar=option.metavar,
                help=text,
            )
        else:
            group.addoption(
                option.flag, dest=option.ini, metavar=option.metavar, help=text
            )
        if option.kind == "list":
            parser.addini(option.ini, option.help, type="linelist", default=None)
        else:
            parser.addini(option.ini, option.help, default=None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    # Before pytest-xdist reads -n; its workers come through here too and must not
    # start workers of their own.
    if _asked_for(config) and not hasattr(config, "workerinput"):
        from pytest_gkd import session

        session.prepare(config)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if _asked_for(config):
        from pytest_gkd import session

        session.register(config)


def _asked_for(config: pytest.Config) -> bool:
    """Whether anything on the command line or in the ini could mean stages.

    Decided without importing more than this module: a test run that has nothing to
    do with stages must not feel that the plugin is installed.
    """
    if config.option.gkd_stages is not None or config.getini("gkd_stages"):
        return True
    if config.option.keyword:
        from pytest_gkd.plan import mentioned

        if mentioned(config.option.keyword):
            return True
    given = config.args_source == config.ArgsSource.ARGS
    return given and any("stages" in arg for arg in config.args)


@pytest.fixture(scope="session")
def gkd(request: pytest.FixtureRequest) -> StageContext:
    """The running stage's settings, directories and voice (see StageContext)."""
    from pytest_gkd import session

    return session.context(request.config, request.getfixturevalue("tmp_path_factory"))
