"""Why a stage failed: turns its evidence and the catalogue into a Diagnosis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis import exceptions, parts
from pytest_gkd.diagnosis.catalogue import (
    FIELD,
    TRAINERS,
    Catalogue,
    Fix,
    Rule,
    Signature,
    explain_command,
)
from pytest_gkd.diagnosis.evidence import EvidenceLine, StageEvidence, TextSource
from pytest_gkd.diagnosis.patterns import Pattern, pattern_of
from pytest_gkd.diagnosis.root_cause import Candidate, choose
from pytest_gkd.diagnosis.scan import Hit, Scanner, index
from pytest_gkd.stage_api import UNKNOWN

MAX_FIXES = 3
MAX_EVIDENCE = 4
# A stage runs our own code: its reader has no verl or TRL configuration at hand.
STAGE_FRAMEWORKS = ("vllm", "ray")

# The texts in which a stage reports its failure itself.
OWN = ("failure", "error", "output")

_EXCEPTION = Pattern(
    rb"^(?:E +|\[[\w:]+\]:? *|\([^)]{0,80}\) *)*"
    rb"[\w.]*(?:Error|Exception|Fault|Timeout)\b"
)
# What a launcher or an engine prints about a child that has printed more itself.
_SUMMARY = Pattern(
    rb"ChildFailedError|CalledProcessError|Engine core initialization failed"
)
_TROUBLE = Pattern(
    rb"(?i)\b(?:error|fatal|failed|killed|abort(?:ed)?|segmentation fault|panic)\b"
)


@dataclass(frozen=True)
class Diagnosis:
    """One cause: its headline, why it matters, what proves it, what to do.

    ``advice`` has one line per fix, the most likely first; ``explain`` is the command
    that prints more. ``also`` names other causes found in a stage that this one does
    not explain, ``consequences`` what followed from it in a log, each with the line
    that shows it.
    """

    cause: str
    confidence: str
    title: str
    why: str
    evidence: tuple[EvidenceLine, ...]
    advice: tuple[str, ...]
    explain: str
    also: tuple[str, ...] = ()
    consequences: tuple[tuple[str, EvidenceLine], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The diagnosis of a stage as report.json holds it."""
        told = {**vars(self), "evidence": [line._asdict() for line in self.evidence]}
        del told["consequences"]  # of a log's
        return told


def diagnose(
    evidence: StageEvidence, catalogue: Catalogue, shown: Callable[[Path], str] = str
) -> Diagnosis | None:
    """The cause of the stage's failure, or None if nothing known fits.

    A cause named by the stage stands, unless the texts prove another that is known to
    bring it about. ``shown`` converts a rule's path for display.
    """
    if evidence.fault is not None and evidence.fault.cause == UNKNOWN:
        return None
    candidates = choose(_stage_hits(evidence, catalogue), catalogue)
    candidates = [one for one in candidates if not one.weak]
    facts, also = dict(evidence.facts), list[str]()
    if evidence.fault is not None:
        facts |= evidence.fault.facts
        cause = evidence.fault.cause
        if cause is not None and cause in catalogue:
            own = [hit for one in candidates if one.cause == cause for hit in one.hits]
            candidates = [one for one in candidates if _explains(one, cause, catalogue)]
            also = [cause]
    if candidates:
        root, *rest = candidates
        rule, confidence = catalogue[root.cause], root.confidence
        title, hits = headline(rule, root.best), root.hits
        facts |= root.best.facts
        also += [one.cause for one in rest if not one.explained and one.rank == 0]
    elif also:
        rule, confidence = catalogue[also.pop()], "certain"
        title = evidence.message.strip().partition("\n")[0] or rule.title
        hits = tuple(own)
    else:
        return None
    proofs = tuple(_proofs(evidence, rule, hits))
    return Diagnosis(
        cause=rule.id,
        confidence=confidence,
        title=title,
        why=rule.why,
        evidence=proofs,
        advice=advice(
            rule,
            STAGE_FRAMEWORKS,
            facts,
            words_shown(title, proofs),
            stage=evidence.stage,
        ),
        explain=explain_command(rule, shown),
        also=tuple(dict.fromkeys(also)),
    )


def _explains(one: Candidate, cause: str, catalogue: Catalogue) -> bool:
    if one.cause == cause or one.rank > 0 or one.confidence == "guess":
        return False
    known = catalogue[cause].consequence_of
    return one.cause in known or "*" in known


def _proofs(
    evidence: StageEvidence, rule: Rule, hits: Iterable[Hit]
) -> Iterator[EvidenceLine]:
    """What the stage itself has shown, then what the texts say beyond that."""
    fault = evidence.fault
    if fault is None or fault.cause is None:
        yield from evidence_lines(hits)
        return
    own = [EvidenceLine(*line) for line in fault.evidence]
    yield from own
    # The stage knows; lines of its own traceback would only repeat it. Unless it knows
    # only that a process ended: that process's output says more.
    asks = rule.id != fault.cause or rule.tier == "fallback"
    for line in evidence_lines(hits):
        beyond = asks and (line.line or 0) > evidence.traceback_lines
        # A stage gives the path of its processes' output, a text only the name.
        known = any(
            (Path(one.source).name, one.line) == (line.source, line.line) for one in own
        )
        if not known and (
            line.source not in OWN or (line.source == "output" and beyond)
        ):
            yield line


def _stage_hits(evidence: StageEvidence, catalogue: Catalogue) -> Iterator[Hit]:
    texts = [*evidence.texts]
    if evidence.message:
        texts.insert(0, TextSource("failure", evidence.message))
    signatures = index(catalogue, of_stage=True)
    for number, source in enumerate(texts):
        scanner = Scanner(signatures, source.name, number)
        data = source.text.encode("utf-8", "replace")
        scanner.feed(data)
        scanner.finish()
        of = "stacks" if "stack" in source.name else ""
        chains = exceptions.read(data) if scanner.hits else []
        for hit in parts.hold(scanner.hits, chains):
            if hit.signature.source == of and _holds(hit.signature, evidence):
                yield hit
    for rule in catalogue.values():
        for signature in rule.signatures:
            if not signature.anchors and _holds(signature, evidence):
                yield Hit(
                    cause=rule.id,
                    signature=signature,
                    tier=signature.tier or rule.tier,
                    source=f"stage {evidence.stage}",
                    line=None,
                    text=_what_happened(evidence),
                    source_index=len(texts),
                )


def _holds(signature: Signature, evidence: StageEvidence) -> bool:
    """Whether the signature's conditions on the stage hold; true if there are none."""
    outcomes = {evidence.outcome}
    if evidence.outcome == "timeout" and not evidence.alive:
        outcomes.add("stuck")
    if signature.outcomes and not outcomes & set(signature.outcomes):
        return False
    if signature.stages and evidence.stage not in signature.stages:
        return False
    if signature.signals and evidence.exit_signal not in signature.signals:
        return False
    doing = evidence.doing.encode("utf-8", "replace")
    return pattern_of(f"(?i){signature.doing}").search(doing) is not None


def _what_happened(evidence: StageEvidence) -> str:
    during = f" while {evidence.doing}" if evidence.doing else ""
    if evidence.exit_signal:
        return f"ended by {evidence.exit_signal}{during}"
    if evidence.outcome == "timeout":
        return f"did not finish within its budget{during}"
    return f"{evidence.outcome}{during}"


def headline(rule: Rule, hit: Hit) -> str:
    """The signature's own words with its facts, else the rule's title."""
    say = hit.signature.say
    names = FIELD.findall(say)
    if say and all(hit.facts.get(name) for name in names):
        return say.format_map(dict(hit.facts))
    return rule.title


def advice(
    rule: Rule,
    frameworks: Iterable[str],
    facts: Mapping[str, Any] | None = None,
    shown: str = "",
    *,
    of_stage: bool = True,
    stage: str = "",
) -> tuple[str, ...]:
    """The rule's fixes for these frameworks, in order, at most MAX_FIXES.

    Of those for particular words, which come first, only those for words in what is
    ``shown`` of the cause. For a stage those come first that need its facts (see
    ``Fix.facts``), in place of what says the same without them, and none tells the user
    to run that same ``stage``. For a log (not ``of_stage``) the smoke test's options
    are left out, the knobs of the trainer that wrote it come before more general ones,
    and take the place of the engine's own options for the same.
    """
    wanted = {"any", "env", "pytorch", rule.id.partition(".")[0], *frameworks}
    if "sglang" in wanted and "vllm" not in {*frameworks}:
        wanted.discard("vllm")  # the engine is another
    every = [
        fix
        for fix in rule.fixes
        if not fix.said or any(one in shown for one in fix.said)
    ]
    fixes = [fix for fix in every if fix.framework in wanted]
    if of_stage:
        ours = {knob for fix in fixes for knob in fix.knobs if knob.startswith("gkd:")}
        fixes = [fix for fix in fixes if not _has_twin(fix, ours)]
        fixes = [fix for fix in fixes if all(map((facts or {}).get, fix.facts))]
        again = re.compile(rf"--gkd-stages={stage}(?!\w)")
        fixes = [fix for fix in fixes if not (stage and again.search(fix.run))]
        # An option is set to one value; a command may be run for more than one reason.
        exact = {fix.knobs for fix in fixes if fix.facts and not _is_command(fix)}
        fixes = [fix for fix in fixes if fix.facts or fix.knobs not in exact]
        fixes.sort(key=lambda fix: (not fix.said, -len(fix.facts)))
    else:
        fixes = [fix for fix in fixes if not _of_smoke_test(fix)]
        fixes = fixes or [of_framework(f) for f in every if not _of_smoke_test(f)]
        fixes = _as_trainer_spells(fix for fix in fixes if not fix.facts)
        fixes.sort(key=lambda fix: not fix.said)
        own = [fix for fix in fixes if fix.framework in TRAINERS]
        others = [fix for fix in fixes if fix.framework not in TRAINERS]
        kept = own[:2] + others[: MAX_FIXES - len(own[:2])]
        fixes = [fix for fix in fixes if fix in kept]
    return tuple(fix.line(facts or {}) for fix in fixes[:MAX_FIXES])


def words_shown(title: str, lines: Iterable[EvidenceLine]) -> str:
    """What a reader sees of a cause: its headline and the lines that show it."""
    return "\n".join((title, *(line.text for line in lines)))


def _as_trainer_spells(fixes: Iterable[Fix]) -> list[Fix]:
    """The fixes; the trainer's that sets an engine argument replaces the engine's."""
    fixes = list(fixes)
    own = [fix for fix in fixes if fix.framework in TRAINERS]
    spelt = (next((one for one in own if _sets_same(one, fix)), fix) for fix in fixes)
    return [*dict.fromkeys(spelt)]


def _sets_same(own: Fix, fix: Fix) -> bool:
    """Whether a trainer's fix sets what this one gives the engine as an option."""
    names = [knob.removeprefix("vllm:") for knob in fix.knobs]
    is_option = fix.framework == "vllm" and fix.run.startswith("--")
    return is_option and any(
        f"vllm:{name}" in own.knobs or name in own.run for name in names
    )


def _has_twin(fix: Fix, ours: set[str]) -> bool:
    """Whether the smoke test has an option for the engine argument of this fix."""
    return fix.framework == "vllm" and any(
        "gkd:--gkd-" + knob.removeprefix("vllm:").replace("_", "-") in ours
        for knob in fix.knobs
    )


def of_framework(fix: Fix) -> Fix:
    """The fix labeled with its framework, for a log that does not reveal its own."""
    return replace(fix, when=f"{fix.framework}; {fix.when}".rstrip("; "))


def _is_command(fix: Fix) -> bool:
    return all(knob.startswith("cmd:") for knob in fix.knobs)


def _of_smoke_test(fix: Fix) -> bool:
    return any(
        knob.startswith("gkd:--gkd-") and knob != "gkd:--gkd-stages"
        for knob in fix.knobs
    )


def evidence_lines(hits: Iterable[Hit]) -> Iterator[EvidenceLine]:
    """The lines of the hits, each text once, at most MAX_EVIDENCE."""
    seen: set[str] = set()
    for hit in hits:
        if hit.text not in seen and len(seen) < MAX_EVIDENCE:
            seen.add(hit.text)
            yield EvidenceLine(hit.source, hit.line, hit.text)


def telling_lines(texts: Iterable[TextSource], limit: int = 6) -> list[EvidenceLine]:
    """The most informative lines of an unknown failure, the best first.

    Exceptions that end a traceback come first, the last of each source before earlier
    ones, then other lines that mention an error, then the very last lines.
    """
    ranked: list[tuple[int, int, EvidenceLine]] = []
    for order, source in enumerate(texts):
        lines = [line.strip() for line in source.text.splitlines()]
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line]
        for back, (number, line) in enumerate(reversed(numbered)):
            start = line[:400].encode("utf-8", "replace")
            if _SUMMARY.search(start):
                kind = 1
            elif _EXCEPTION.search(start):
                kind = 0
            elif _TROUBLE.search(start):
                kind = 1
            elif back < 2:
                kind = 2
            else:
                continue
            entry = EvidenceLine(source.name, number, sanitize.line(line)[:400])
            ranked.append((kind, order * 1_000_000 + back, entry))
    ranked.sort(key=lambda item: item[:2])
    told: dict[str, EvidenceLine] = {}
    for _, _, entry in ranked:
        told.setdefault(entry.text, entry)
    return list(told.values())[:limit]
