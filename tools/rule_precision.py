"""Count how often each rule is right: docs/rule-precision.md.

    python tools/rule_precision.py docs/rule-precision.md

Every signature is held against every labelled log for development (tests/logs,
tests/runs, tests/metrics_runs, tests/written_runs; none that is held out). Where it
counts, after what the run survived is left out, it is right when the log is labelled
with its cause, or with one that is known to bring its cause about.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pytest_gkd.diagnosis import catalogue as rules
from pytest_gkd.diagnosis import log_file, logs
from pytest_gkd.diagnosis.catalogue import Catalogue, Signature

TESTS = Path(__file__).parent.parent / "tests"
ENDS = ("healthy", "running", "interrupted", "hung")
MADE = "python tools/rule_precision.py docs/rule-precision.md"
NOTE = """<!-- Made by {made}; do not edit. -->

# How often each rule is right

On the labelled logs for development, {logs} of them: **right** counts logs with the
rule's cause, or with one that is known to bring it about, **wrong** those with another,
**sound** those of runs that are sound. Rules that are never wrong on three logs or more
are summed up at the end; those that no log meets are left out. A log that was composed
for a rule says little for it: real runs count in **runs**.

| cause | rule | confidence | right | wrong | sound | runs |
|---|---|---|---|---|---|---|
"""


def labelled() -> Iterator[tuple[Path, frozenset[str], bool]]:
    """Each log with the causes that are right for it; whether it is of a real run."""
    for path in sorted((TESTS / "logs").glob("*/*.log")):
        cause = path.parent.name
        ends = cause.partition(".")[0] in ENDS
        yield path, frozenset() if ends else frozenset({cause}), False
    for folder in ("runs", "metrics_runs", "written_runs"):
        table = tomllib.loads((TESTS / folder / "labels.toml").read_text("utf-8"))
        for label in table["run"]:
            wanted = frozenset({label.get("cause", ""), *label.get("also", ())})
            sound = label["outcome"] in {"healthy", "survived", "running"}
            for path in (TESTS / folder / "development").glob(f"{label['name']}.log*"):
                real = folder != "written_runs"
                yield path, frozenset() if sound else wanted | {""}, real


Counts = dict[tuple[str, Signature], Counter[str]]


def count(catalogue: Catalogue) -> tuple[Counts, int]:
    """How often each signature counts, by its cause; and how many logs there are."""
    counts: Counts = {}
    every = 0
    for path, wanted, real in labelled():
        every += 1
        with log_file.opened(path) as stream:
            log = log_file.read(stream, path.name, 0, catalogue)
        hits = [hit for hit in logs.counted([log]) if not hit.weak]
        for key in {(hit.cause, hit.signature): hit for hit in hits}:
            known = {key[0], *catalogue[key[0]].consequence_of}
            right = bool(known & wanted) or ("*" in known and bool(wanted))
            kind = "right" if right else "wrong" if wanted else "sound"
            counts.setdefault(key, Counter()).update([kind] + ["runs"] * real)
    return counts, every


def sought(signature: Signature) -> str:
    """What a signature looks for, in short."""
    return (signature.text or signature.raised or signature.innermost)[0]


def page(counts: Counts, every: int) -> str:
    """The whole page, of what ``count`` found."""
    rows, good = [], 0
    for (cause, signature), found in sorted(
        counts.items(),
        key=lambda item: (-item[1]["wrong"] - item[1]["sound"], item[0][0]),
    ):
        if not found["wrong"] + found["sound"]:
            good += found["right"] >= 3
            continue
        text = (signature.say or sought(signature)).replace("|", "\\|")[:60]
        figures = " | ".join(str(found[k]) for k in ("right", "wrong", "sound", "runs"))
        rows.append(f"| {cause} | {text} | {signature.confidence} | {figures} |")
    told = f"\n{good} rules are right on three logs or more and never wrong.\n"
    return NOTE.format(made=MADE, logs=every) + "\n".join(rows) + "\n" + told


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(*count(rules.load())), "utf-8")
