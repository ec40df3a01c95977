"""Why a stage failed: its evidence and the catalogue give a Diagnosis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.diagnosis.catalogue import Catalogue, Fix, Rule, Signature
from pytest_gkd.diagnosis.patterns import Pattern, pattern_of
from pytest_gkd.diagnosis.root_cause import Found, choose
from pytest_gkd.diagnosis.scan import Hit, scan_texts

MAX_FIXES = 3
MAX_EVIDENCE = 4
# A stage runs our own code: its reader has no verl or TRL configuration at hand.
STAGE_FRAMEWORKS = ("vllm", "ray")
TRAINERS = ("verl", "trl", "lightrft", "deepspeed")

_EXCEPTION = Pattern(rb"^(?:E +)?[\w.]*(?:Error|Exception|Fault|Timeout)\b")
_TROUBLE = Pattern(
    rb"(?i)\b(?:error|fatal|failed|killed|abort(?:ed)?|segmentation fault|panic)\b"
)


@dataclass(frozen=True)
class TextSource:
    """A text of a run, such as ``rank1.log`` or ``stacks/rank0.txt``."""

    name: str
    text: str


@dataclass(frozen=True)
class StageEvidence:
    """What is known of a stage that did not pass.

    ``outcome`` is ``failed``, ``timeout`` or ``crashed``. ``cause`` is the id that
    the stage itself named, if it knew. ``texts`` are the failure text, the captured
    output of all processes, the ranks' logs and the stacks; a source whose name holds
    ``stack`` counts as stacks. ``exit_signal`` is a name such as ``SIGKILL``.
    ``alive`` says that a stage whose time was up still made progress.
    """

    stage: str
    outcome: str
    cause: str | None = None
    message: str = ""
    texts: tuple[TextSource, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    exit_signal: str | None = None
    doing: str = ""
    alive: bool = False


@dataclass(frozen=True)
class EvidenceLine:
    """A line that proves the cause, with its source and number where it has one."""

    source: str
    line: int | None
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """One cause: its headline, why it matters, what proves it, what to do.

    ``advice`` is in order, the most likely first, a line each. ``also`` names other
    causes that were found and are not explained by this one.
    """

    cause: str
    confidence: str
    title: str
    why: str
    evidence: tuple[EvidenceLine, ...]
    advice: tuple[str, ...]
    also: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as the report holds it."""
        return {
            "cause": self.cause,
            "confidence": self.confidence,
            "title": self.title,
            "why": self.why,
            "evidence": [
                {"source": line.source, "line": line.line, "text": line.text}
                for line in self.evidence
            ],
            "advice": list(self.advice),
            "also": list(self.also),
        }


def diagnose(evidence: StageEvidence, catalogue: Catalogue) -> Diagnosis | None:
    """The cause of the stage's failure, or None when nothing known fits.

    A cause that the stage named stands, unless the texts prove another that is known
    to bring it about.
    """
    found = choose(_stage_hits(evidence, catalogue), catalogue)
    found = [one for one in found if not one.weak]
    if evidence.cause is None or evidence.cause not in catalogue:
        return _of_texts(found, evidence, catalogue) if found else None
    deeper = [one for one in found if _explains(one, evidence.cause, catalogue)]
    if deeper:
        return _of_texts(deeper, evidence, catalogue, also=(evidence.cause,))
    rule = catalogue[evidence.cause]
    own = [hit for one in found if one.cause == rule.id for hit in one.hits]
    return Diagnosis(
        cause=rule.id,
        confidence="certain",
        title=_first_line(evidence.message) or rule.title,
        why=rule.why,
        evidence=tuple(evidence_lines(own)),
        advice=advice(rule, STAGE_FRAMEWORKS, evidence.facts, stage=evidence.stage),
        also=(),
    )


def _explains(one: Found, cause: str, catalogue: Catalogue) -> bool:
    if one.cause == cause or one.rank > 0 or one.confidence == "guess":
        return False
    known = catalogue[cause].consequence_of
    return one.cause in known or "*" in known


def _of_texts(
    found: Sequence[Found],
    evidence: StageEvidence,
    catalogue: Catalogue,
    also: tuple[str, ...] = (),
) -> Diagnosis:
    root = found[0]
    rule = catalogue[root.cause]
    facts = {**evidence.facts, **root.best.facts}
    others = (one.cause for one in found[1:] if not one.explained and one.rank == 0)
    return Diagnosis(
        cause=rule.id,
        confidence=root.confidence,
        title=headline(rule, root.best),
        why=rule.why,
        evidence=tuple(evidence_lines(root.hits)),
        advice=advice(rule, STAGE_FRAMEWORKS, facts, stage=evidence.stage),
        also=tuple(dict.fromkeys((*also, *others))),
    )


def _stage_hits(evidence: StageEvidence, catalogue: Catalogue) -> Iterator[Hit]:
    texts = [*evidence.texts]
    if evidence.message:
        texts.insert(0, TextSource("failure", evidence.message))
    encoded = [(t.name, t.text.encode("utf-8", "replace")) for t in texts]
    for hit in scan_texts(encoded, catalogue):
        in_stacks = "stack" in hit.source
        wanted = hit.signature.source == "stacks"
        if in_stacks == wanted and _holds(hit.signature, evidence):
            yield hit
    for rule in catalogue.rules.values():
        for signature in rule.signatures:
            if not signature.text and _holds(signature, evidence):
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
    """Whether the signature's conditions on the stage hold; without any they do."""
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
    names = re.findall(r"\{(\w+)\}", say)
    if say and all(hit.facts.get(name) for name in names):
        return say.format_map(dict(hit.facts))
    return rule.title


def advice(
    rule: Rule,
    frameworks: Iterable[str],
    facts: Mapping[str, Any] | None = None,
    *,
    of_stage: bool = True,
    stage: str = "",
) -> tuple[str, ...]:
    """The rule's fixes for these frameworks, in their order, at most MAX_FIXES.

    For a stage those that its facts ask for come first (see ``Fix.facts``), and none
    is to run that same ``stage``.
    For a log (not ``of_stage``) the options of the smoke test are left out, and the
    knobs of the trainer that wrote it come before more general ones.
    """
    wanted = {"any", "env", "pytorch", rule.id.partition(".")[0], *frameworks}
    fixes = [fix for fix in rule.fixes if fix.framework in wanted]
    if of_stage:
        ours = {knob for fix in fixes for knob in fix.knobs if knob.startswith("gkd:")}
        fixes = [fix for fix in fixes if not _has_twin(fix, ours)]
        fixes = [fix for fix in fixes if all(map((facts or {}).get, fix.facts))]
        again = re.compile(rf"--gkd-stages={stage}(?!\w)")
        fixes = [fix for fix in fixes if not (stage and again.search(fix.run))]
        fixes.sort(key=lambda fix: -len(fix.facts))
    else:
        fixes = [fix for fix in fixes if not _of_smoke_test(fix)]
        fixes = fixes or [_of_framework(f) for f in rule.fixes if not _of_smoke_test(f)]
        fixes = [fix for fix in fixes if not fix.facts]
        own = [fix for fix in fixes if fix.framework in TRAINERS]
        others = [fix for fix in fixes if fix.framework not in TRAINERS]
        kept = own[:2] + others[: MAX_FIXES - len(own[:2])]
        fixes = [fix for fix in fixes if fix in kept]
    return tuple(fix.line(facts or {}) for fix in fixes[:MAX_FIXES])


def _has_twin(fix: Fix, ours: set[str]) -> bool:
    """Whether the smoke test has an option for the engine argument of this fix."""
    return fix.framework == "vllm" and any(
        "gkd:--gkd-" + knob.removeprefix("vllm:").replace("_", "-") in ours
        for knob in fix.knobs
    )


def _of_framework(fix: Fix) -> Fix:
    """The fix with its framework's name, for a log that does not tell its own."""
    return replace(fix, when=f"{fix.framework}; {fix.when}".rstrip("; "))


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
    """The lines that say most of a failure that nobody knows, the best first.

    Exceptions that end a traceback come first, the last of each source before
    earlier ones, then other lines that speak of an error, then the very last lines.
    """
    ranked: list[tuple[int, int, EvidenceLine]] = []
    for order, source in enumerate(texts):
        lines = [line.strip() for line in source.text.splitlines()]
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line]
        for back, (number, line) in enumerate(reversed(numbered)):
            start = line[:400].encode("utf-8", "replace")
            if _EXCEPTION.search(start):
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


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
