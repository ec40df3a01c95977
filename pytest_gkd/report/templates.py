"""The templates of the HTML pages: no page runs a script or asks for anything."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

from pytest_gkd import language

if TYPE_CHECKING:
    import jinja2

# What every other one begins with, and what they share.
BASE, PARTS = "base.html.jinja", "parts.html.jinja"


def load(name: str) -> jinja2.Template:
    """A template by its file's name, compiled once."""
    return _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    # Imported only here: nothing else needs it.
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals |= {"tr": language.tr, "language": language.current}
    return made


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
