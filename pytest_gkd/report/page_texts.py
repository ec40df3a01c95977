"""What the HTML pages have in common: texts cut to a length, causes, ends of files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_gkd import columns, sanitize
from pytest_gkd.diagnosis import translated
from pytest_gkd.language import tr, tr_filled

# What a page takes in of files with stacks and output, from their ends, so that it
# stays below 1 MB.
FILE_BYTES = 40_000
FILES_BYTES = 500_000
LEAST_BYTES = 200
LINE_CHARS = 2_000


def cut(text: str, length: int = LINE_CHARS) -> str:
    """A line of the page in at most so many characters."""
    return columns.cut(text, length)


def diagnosis(found: Mapping[str, Any]) -> dict[str, Any]:
    """A cause as the template has it, of one in a report's JSON."""
    cause = str(found.get("cause", ""))
    headline = translated.title(cause, str(found.get("title") or ""))
    advice = [translated.advice(cause, str(one)) for one in found.get("advice") or ()]
    return {
        "cause": cause,
        "headline": cut(tr_filled(headline)),
        "evidence": lines(found.get("evidence") or ()),
        "why": tr(str(found.get("why", ""))),
        "advice": [cut(line) for line in advice],
        "explain": found.get("explain") or f"gkd explain {found.get('cause')}",
    }


def lines(evidence: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of evidence, each with its place."""
    found = []
    for one in evidence:
        number = "" if one.get("line") is None else f":{one['line']}"
        place = one.get("source", one.get("file"))
        found.append(cut(f"{place}{number}  {one.get('text')}"))
    return found


class Files:
    """Ends of files in a report's directory, at most FILES_BYTES of all together.

    Counted as a page writes them: a character may become five.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = folder.resolve()
        self._room = FILES_BYTES

    def ends(self, names: Iterable[Any]) -> Iterator[dict[str, str]]:
        """Of those that lie in the directory, whatever directory names begin with."""
        for name in names:
            path = Path(str(name))
            tails = (Path(*path.parts[n:]) for n in (0, 1, 2, 3))
            for one in (self._folder / tail for tail in tails):
                inside = one.is_file() and one.resolve().is_relative_to(self._own)
                if self._room > LEAST_BYTES and inside:
                    text = _end(one, min(FILE_BYTES, self._room))
                    self._room -= _written(text)
                    yield {"name": str(name), "text": text}
                    break


def _end(path: Path, length: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - length))
            text = file.read(length).decode("utf-8", "replace")
    except OSError as error:
        return tr("cannot be read: {why}").format(why=error.strerror)
    told = "\n".join(cut(line) for line in sanitize.text(text).splitlines())
    while (written := _written(told)) > length:
        told = told[-max(1, len(told) * length * 9 // (written * 10)) :]
        size = max(size, length + 1)
    if size <= length:
        return told
    return tr("(the end of {size} bytes)").format(size=size) + f"\n{told}"


def _written(text: str) -> int:
    return len(html.escape(text).encode("utf-8", "replace"))
