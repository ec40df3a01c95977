"""Gathers, redacts, sums up and writes a bundle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.bundle import archive, collectors, gathering, redaction, summary
from pytest_gkd.bundle.anonymity import Anonymity
from pytest_gkd.bundle.gathering import Missing, Part
from pytest_gkd.bundle.redaction import Redaction

SUMMARY, REDACTED, MISSING = "SUMMARY.md", "redacted.txt", "missing.txt"


@dataclass(frozen=True)
class Bundle:
    """What was written: the file's size in bytes, what is in it, what is not.

    ``is_whole`` says that everything named by the user, report and logs, is in it.
    """

    output: Path
    size_bytes: int
    files: tuple[str, ...]
    redacted: tuple[Redaction, ...]
    missing: tuple[Missing, ...]
    summary: str
    is_whole: bool

    def to_json(self) -> dict[str, Any]:
        """For programs; the places of secrets, never the secrets."""
        return {
            "schema": 1,
            "output": str(self.output),
            "size_bytes": self.size_bytes,
            "files": list(self.files),
            "redacted": [one._asdict() for one in self.redacted],
            "missing": [one._asdict() for one in self.missing],
            "summary": self.summary,
        }


def make(asked: collectors.Asked, output: Path, *, anonymous: bool = False) -> Bundle:
    """Make a bundle. Raises OutputError if there is something at ``output`` already,
    or nothing can be written there."""
    archive.refuse_existing(output)
    wanted = collectors.of(asked)
    gathered = gathering.gather(wanted)
    found = [one for each in gathered for one in each]
    texts: dict[str, str] = {}
    missing = [one for one in found if isinstance(one, Missing)]
    left = asked.limit_bytes
    for one in found:
        if not isinstance(one, Part):
            continue
        if len(one.text) > left:
            missing.append(Missing(one.file, "the bundle is full"))
            continue
        left -= len(one.text)
        texts[one.file] = texts.get(one.file, "") + one.text
    more = asked.logs[collectors.MOST_LOGS :]
    missing += [
        Missing(str(path), f"over {collectors.MOST_LOGS} logs") for path in more
    ]
    is_whole = not more and all(
        any(isinstance(one, Part) for one in each)
        for collector, each in zip(wanted, gathered, strict=True)
        if collector.is_named
    )

    texts[MISSING] = summary.missing_text(missing)
    named = {_file_name(name): text for name, text in sorted(texts.items())}
    clean, redacted = redaction.redact(named, redaction.of_environment(os.environ))
    missing = [Missing(*map(_line, one)) for one in missing]
    files = {REDACTED: summary.redacted_text(redacted), **clean}
    files = {SUMMARY: summary.markdown(files, missing), **files}
    if anonymous:
        words = Anonymity(files.values())
        files = {words.text(name): words.text(text) for name, text in files.items()}
        missing = [Missing(*map(words.text, one)) for one in missing]
        redacted = [one._replace(file=words.text(one.file)) for one in redacted]
    return Bundle(
        output=output,
        size_bytes=archive.write(output, files),
        files=tuple(files),
        redacted=tuple(redacted),
        missing=tuple(missing),
        summary=files[SUMMARY],
        is_whole=is_whole,
    )


def _file_name(name: str) -> str:
    return redaction.text(name).replace(sanitize.MASK, "redacted")


def _line(text: str) -> str:
    return redaction.text(sanitize.line(text))
