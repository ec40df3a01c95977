"""The language of what users read: English, or Chinese from a gettext catalogue.

A text's key is the text itself in English, so ids and JSON stay English and a text
without a translation is shown as it is. ``tools/translations.py`` keeps the catalogue,
which is read as it lies in the tree: nothing has to be compiled after a change of it.
In English nothing is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
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
# A text of the catalogue, with its context; the empty one is its header.
ENTRY = rf'^(?:msgctxt "({FILLED})"\n)?msgid (".+")\nmsgstr (".*")$'

# Of this process, as gettext has it: texts are made everywhere. The translations, under
# their contexts and texts.
_catalogue: dict[tuple[str, str], str] | None = None
_filled_texts: FilledTexts | None = None


def use(language: str) -> None:
    """Show texts in a language of options.LANGUAGES from now on."""
    global _catalogue, _filled_texts
    _filled_texts = None
    _catalogue = None if language == ENGLISH else catalogue(language)


def catalogue(language: str) -> dict[tuple[str, str], str]:
    """The catalogue of a language: strings as JSON has them, long ones in pieces."""
    import json
    import re

    path = CATALOGUES / language / "LC_MESSAGES" / f"{DOMAIN}.po"
    joined = path.read_text("utf-8").replace('"\n"', "")
    contexts, *columns = zip(*re.findall(ENTRY, joined, re.MULTILINE), strict=True)
    texts, told = (json.loads(f"[{','.join(column)}]") for column in columns)
    return dict(zip(zip(contexts, texts, strict=True), told, strict=True))


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
    return text if _catalogue is None else _catalogue.get(("", text)) or text


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
    """The texts of FILLED, and others without places, with their translations."""
    for (context, text), told in (_catalogue or {}).items():
        if " " in text and (context == FILLED or "{" not in text):
            yield text, told


def marked(text: str) -> str:
    """The text as it is, for the catalogue: ``tr`` is asked when it is shown."""
    return text


# Between texts that were made apart, and at the end of a sentence.
STOP = marked(".")
JOINTS = (marked("; or "), marked("; "), marked(": "), marked(", "))
BRACKETS = (marked(" ("), marked(")"))
