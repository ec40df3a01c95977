"""Make the index of ``diagnosis/nearest.py``: the words of known failures, by cause.

    python tools/nearest_words.py pytest_gkd/diagnosis/nearest_words.json

Counted are the words of the first error of every labelled log for development (none
that is held out), for each cause that is right for it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from rule_precision import labelled

from pytest_gkd.diagnosis import catalogue as rules
from pytest_gkd.diagnosis import first_error, log_file, logs, nearest


def index(
    labels: Iterable[tuple[Path, frozenset[str], bool]],
) -> dict[str, Counter[str]]:
    """The words of the logs by cause; a log counts once for each of its causes."""
    catalogue = rules.load()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path, causes, _ in labels:
        if not causes - {""}:
            continue
        with log_file.opened(path) as stream:
            log = log_file.read(stream, str(path), 0, catalogue)
        words = {*logs.telling_words([log], next(iter(first_error.of([log])), None))}
        words.add(nearest.name(logs.judge([log], catalogue).phase))
        for cause in causes - {""}:
            found[cause].update(words)
    return found


if __name__ == "__main__":
    made = index(labelled())
    lines = (
        f'"{cause}": {json.dumps(dict(sorted(words.items())))}'
        for cause, words in sorted(made.items())
    )
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
