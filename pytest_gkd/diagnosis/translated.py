"""The texts of a cause in the user's language; in English, as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gkd.language import ENGLISH, current

if TYPE_CHECKING:
    from pytest_gkd.diagnosis.catalogue import Rule
    from pytest_gkd.diagnosis.diagnose import Diagnosis
    from pytest_gkd.diagnosis.suspects import Suspicion

# ``translating`` reads the whole catalogue, which a run in English that passes saves.


def rule(told: Rule) -> Rule:
    """A rule with all that its reader sees translated."""
    if current() == ENGLISH:
        return told
    from pytest_gkd.diagnosis import translating

    return translating.rule(told)


def diagnosis(found: Diagnosis) -> Diagnosis:
    """A diagnosis with its headline, its reason and its advice translated."""
    if current() == ENGLISH:
        return found
    from pytest_gkd.diagnosis import translating

    return translating.diagnosis(found)


def title(cause: str, text: str) -> str:
    """A headline of the cause; after the cause's title if what a stage has said in its
    own words has no translation."""
    if current() == ENGLISH:
        return text
    from pytest_gkd.diagnosis import translating

    return translating.title(cause, text)


def advice(cause: str, text: str) -> str:
    """A line of advice of the cause, its command unchanged."""
    if current() == ENGLISH:
        return text
    from pytest_gkd.diagnosis import translating

    return translating.advice(cause, text)


def last_sign(phase: str, suspicion: Suspicion) -> str:
    """The last sign of life of a run that hangs in this phase."""
    if current() == ENGLISH:
        return suspicion.last_sign
    from pytest_gkd.diagnosis import translating

    return translating.last_sign(phase, suspicion)
