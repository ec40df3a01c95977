"""The language of what users read: English, or Chinese from a gettext catalogue.

A text's key is the text itself in English, so ids and JSON stay English and a text
without a translation is shown as it is. ``tools/translations.py`` keeps the catalogue.
In English nothing is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from gettext import NullTranslations
from pathlib import Path

ENGLISH, CHINESE = "en", "zh"
DOMAIN = "gkd"
CATALOGUES = Path(__file__).parent / "locale"
# In the order in which gettext looks at them.
VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")

# Of this process, as gettext itself has it: texts are made everywhere.
_catalogue: NullTranslations | None = None


def use(language: str) -> None:
    """Show texts in a language of options.LANGUAGES from now on."""
    global _catalogue
    if language == ENGLISH:
        _catalogue = None
        return
    from gettext import translation

    _catalogue = translation(DOMAIN, CATALOGUES, [language])


def of_locale(
    known: Collection[str], environment: Mapping[str, str] = os.environ
) -> str:
    """The first language of ``known`` that the locale's variables name, else English.

    The first variable that is set decides; ``zh_CN.UTF-8`` and ``zh_TW`` are ``zh``.
    """
    named = next((value for one in VARIABLES if (value := environment.get(one))), "")
    for one in named.split(":"):
        short = one.replace("-", "_").partition(".")[0].partition("_")[0].lower()
        if short in ("c", "posix"):
            return ENGLISH
        if short in known:
            return short
    return ENGLISH


def current() -> str:
    """The language in use."""
    return ENGLISH if _catalogue is None else CHINESE


def tr(text: str) -> str:
    """The text in the user's language; its ``{name}`` places are filled afterwards."""
    # gettext has the catalogue's own header under the empty text.
    return text if _catalogue is None or not text else _catalogue.gettext(text)


def marked(text: str) -> str:
    """The text as it is, for the catalogue: ``tr`` is asked when it is shown."""
    return text
