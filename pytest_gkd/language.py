"""The language of what users read: English, or Chinese from a gettext catalogue.

A text's key is the text itself in English, so ids and JSON stay English and a text
without a translation is shown as it is. ``tools/translations.py`` keeps the catalogue.
In English nothing is read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator, Mapping
from gettext import NullTranslations
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gkd.filled_texts import FilledTexts

ENGLISH, CHINESE = "en", "zh"
DOMAIN = "gkd"
CATALOGUES = Path(__file__).parent / "locale"
# In the order in which gettext looks at them.
VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")

# The context, as gettext has it, of texts that are translated with their values filled.
FILLED = "filled"

# Of this process, as gettext itself has it: texts are made everywhere.
_catalogue: NullTranslations | None = None
_filled_texts: FilledTexts | None = None


def use(language: str) -> None:
    """Show texts in a language of options.LANGUAGES from now on."""
    global _catalogue, _filled_texts
    _filled_texts = None
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


def tr_filled(text: str) -> str:
    """A text of a stage, with its values in it, in the user's language.

    What was made of no template in the catalogue stays as it is.
    """
    global _filled_texts
    if _catalogue is None:
        return text
    if _filled_texts is None:
        from pytest_gkd.filled_texts import FilledTexts

        joints = {**{one: tr(one) for one in JOINTS}, "\n": "\n", " ": ""}
        ends = tr(STOP), [tr(one) for one in BRACKETS]
        _filled_texts = FilledTexts(dict(filled_texts()), joints, *ends)
    return _filled_texts.translate(text)


def filled_texts() -> Iterator[tuple[str, str]]:
    """The texts of FILLED, and others without places, with their translations.

    gettext cannot list them, so they are read as its manual describes the file ("The
    Format of GNU MO Files"): how many, and where their lengths and places stand.
    """
    data = (CATALOGUES / CHINESE / "LC_MESSAGES" / f"{DOMAIN}.mo").read_bytes()
    count, *tables = struct.unpack_from("<III", data, 8)
    for number in range(count):
        places = (struct.unpack_from("<II", data, at + 8 * number) for at in tables)
        text, told = (data[at : at + size].decode() for size, at in places)
        context, mark, own = text.rpartition("\x04")
        if " " in own and (context == FILLED or (not mark and "{" not in own)):
            yield own, told


def marked(text: str) -> str:
    """The text as it is, for the catalogue: ``tr`` is asked when it is shown."""
    return text


# Between texts that were made apart, and at the end of a sentence.
STOP = marked(".")
JOINTS = (marked("; or "), marked("; "), marked(": "), marked(", "))
BRACKETS = (marked(" ("), marked(")"))
