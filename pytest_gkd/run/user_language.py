"""The language of a pytest run: asked for, else the locale's; also of pytest --help."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest

from pytest_gkd import language, options
from pytest_gkd.columns import wrapped
from pytest_gkd.language import tr
from pytest_gkd.options import LANG, WITH_INI, SettingsError
from pytest_gkd.run import option_origins

# Where argparse and pytest begin the texts of options and ini keys.
HELP_COLUMN, LEAST_WIDTH = 24, 30


def use(config: pytest.Config) -> None:
    """Show texts in the user's language from now on.

    Raises SettingsError for one that there is not.
    """
    one = option_origins.given(config, LANG)
    chosen = options.read_value(LANG, one.value, one.origin)
    language.use(chosen or language.of_locale(options.LANGUAGES))


def translate_help(config: pytest.Config, title: str, keys: dict[str, str]) -> None:
    """Put what pytest --help tells of the plugin into the user's language.

    ``title`` is that of its options; ``keys`` are ini keys that are no options, with
    their texts.
    """
    # pytest keeps no option that follows --help.
    config.option.gkd_lang = config.known_args_namespace.gkd_lang
    with contextlib.suppress(SettingsError):
        use(config)
    if language.current() == language.ENGLISH:
        return
    width = max(shutil.get_terminal_size().columns - HELP_COLUMN, LEAST_WIDTH)
    told = {one.ini: one.told(tr) for one in WITH_INI}
    keys = {one.ini: tr(one.help) for one in WITH_INI} | {
        name: tr(text) for name, text in keys.items()
    }

    def lines(text: str) -> str:
        return "\n".join(wrapped("", text, width=width))

    # pytest has no public place of them; should it move them, they stay English.
    with contextlib.suppress(AttributeError, KeyError):
        parser: Any = config._parser
        for group in parser.optparser._action_groups:
            if group.title == title:
                group.title = tr(title)
        for action in parser.optparser._actions:
            if action.dest in told:
                action.help = lines(told[action.dest]).replace("%", "%%")
        for name, text in keys.items():
            parser._inidict[name] = (lines(text), *parser._inidict[name][1:])


def of_marker(config: pytest.Config, text: str) -> str:
    """What pytest --markers tells of the marker."""
    with contextlib.suppress(SettingsError):
        use(config)
    return tr(text)
