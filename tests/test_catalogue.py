"""The advice files: their form, and what every one of them promises."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

from pytest_gkd.diagnosis import catalogue
from pytest_gkd.diagnosis.catalogue import Rule, RuleError, Signature
from pytest_gkd.diagnosis.diagnose import StageEvidence, TextSource, diagnose
from pytest_gkd.report import explain
from pytest_gkd.stage_api import StageFault

CATALOGUE = catalogue.load()
ALL = list(CATALOGUE.values())
CURES = re.compile(
    r"^(use|avoid|set|increase|raise|lower|reduce|install|check)\b", re.I
)

PLACE = re.compile(r"<[a-z_]+>")
GOOD = {"title": "a thing is broken", "tier": "cause", "why": "It broke."}


def of_text(rule: Rule) -> list[Signature]:
    return [one for one in rule.signatures if one.text]


def evidence_for(signature: Signature) -> StageEvidence:
    name = "stacks.txt" if signature.source == "stacks" else "rank0.log"
    return StageEvidence(
        stage=signature.stages[0] if signature.stages else "probe",
        outcome=signature.outcomes[0] if signature.outcomes else "failed",
        texts=(TextSource(name, signature.example),),
        exit_signal=signature.signals[0] if signature.signals else None,
    )


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_a_rule_proofreads_clean(rule: Rule) -> None:
    assert catalogue.proofread(rule, rule.id) == []


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_an_example_is_diagnosed_as_its_own_cause(rule: Rule) -> None:
    for signature in of_text(rule):
        found = diagnose(evidence_for(signature), CATALOGUE)
        assert found is not None, signature.example
        assert found.cause == rule.id, signature.example
        assert len(found.title) <= 70, found.title


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_every_text_has_an_example_and_a_near_miss(rule: Rule) -> None:
    assert all(one.example and one.near_miss for one in of_text(rule))


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_no_place_stays_open_in_what_is_shown(rule: Rule) -> None:
    """A shell would take ``<pid>`` for a file to read from."""
    shown = [line for fix in rule.fixes for line in (fix.line({}), fix.form)]
    asked = "\n".join((explain.cause_text(rule), pages.page(rule, CATALOGUE)))
    examples = "\n".join(one.example for one in rule.signatures)
    open_places = set(PLACE.findall(asked)) - set(PLACE.findall(examples))
    assert [line for line in shown if PLACE.search(line)] == []
    assert not open_places - {"<module>"}  # of tracebacks, in a myth


def test_a_place_without_its_fact_is_said_to_be_the_readers() -> None:
    fix = catalogue.Fix("Dump its stacks", "py-spy dump --pid <pid>")
    assert fix.line({"pid": 7}) == "Dump its stacks: py-spy dump --pid 7"
    assert fix.line({}).endswith("py-spy dump --pid PID (fill in PID)")


@pytest.mark.parametrize(
    ("value", "word", "quoted"),
    [
        ("/a b/c.json", "ls '/a b/c.json'", 'cat "/a b/c.json"'),
        ("x; rm -rf ~", "ls 'x; rm -rf ~'", 'cat "x; rm -rf ~"'),
        ("$(reboot)", "ls '$(reboot)'", 'cat "PATH"'),
        ('"; reboot; "', "ls '\"; reboot; \"'", 'cat "PATH"'),
        ("x\nreboot", "ls PATH", 'cat "PATH"'),
        (["a", "b c"], "ls a 'b c'", 'cat "PATH"'),
    ],
)
def test_what_a_log_says_is_no_part_of_a_command(
    value: object, word: str, quoted: str
) -> None:
    for run, expected in (("ls <path>", word), ('cat "<path>"', quoted)):
        line = catalogue.Fix("Look", run).line({"path": value})
        assert line.removeprefix("Look: ").partition(" (fill in")[0] == expected


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_a_title_names_the_problem_and_no_cure(rule: Rule) -> None:
    assert not CURES.match(rule.title)
    assert not rule.title.endswith(".")


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_a_rule_tells_what_to_do_for_a_stage_and_where_it_is_from(rule: Rule) -> None:
    found = diagnose(
        StageEvidence("probe", "failed", StageFault(rule.id, "It is broken")),
        CATALOGUE,
    )
    assert found is not None
    assert 1 <= len(found.advice) <= 3
    assert all("\n" not in line and line[0].isupper() for line in found.advice)
    assert rule.sources
    assert rule.confirm


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_consequences_name_causes_that_exist(rule: Rule) -> None:
    assert set(rule.consequence_of) <= {*CATALOGUE, "*"}


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_no_fix_uses_a_setting_that_nobody_reads(rule: Rule) -> None:
    told = " ".join(f"{fix.do} {fix.run}" for fix in rule.fixes)
    for nobody in ("NCCL_TIMEOUT", "NCCL_BACKEND", "ray shutdown", "pkill"):
        assert nobody not in told


def test_an_unknown_key_is_refused_by_path_and_key() -> None:
    with pytest.raises(RuleError, match=r"a/b\.toml: unknown key 'titel'; known: "):
        catalogue.parse_rule({**GOOD, "titel": "x"}, "a.b", "a/b.toml")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(RuleError, match=r"x: why is missing"):
        catalogue.parse_rule({**GOOD, "why": ""}, "a.b", "x")


def test_a_wrong_tier_is_refused_with_the_right_ones() -> None:
    with pytest.raises(RuleError, match="'reason' is not one of cause, symptom"):
        catalogue.parse_rule({**GOOD, "tier": "reason"}, "a.b", "x")


def test_a_wrong_type_is_refused() -> None:
    with pytest.raises(RuleError, match=r"signature 1: text: 'oops' is not a list"):
        catalogue.parse_rule({**GOOD, "signature": [{"text": "oops"}]}, "a.b", "x")


def test_a_knob_of_an_unknown_kind_is_refused() -> None:
    fix = {"do": "Turn it", "knobs": ["magic:x"]}
    with pytest.raises(RuleError, match="fix 1: knobs: 'magic:x' is not kind:name"):
        catalogue.parse_rule({**GOOD, "fix": [fix]}, "a.b", "x")


def test_a_signature_without_any_condition_is_refused() -> None:
    with pytest.raises(RuleError, match="signature 1: needs text"):
        catalogue.parse_rule({**GOOD, "signature": [{"example": "x"}]}, "a.b", "x")


def test_a_file_that_is_not_toml_is_refused_by_path(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("title = ")
    with pytest.raises(RuleError, match=r"bad\.toml: is not TOML"):
        catalogue.read_rule(bad)


def test_a_rule_of_the_users_own_wins_over_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('id = "cuda.oom"\ntitle = "x"\ntier = "cause"\nwhy = "y"\n')
    assert catalogue.load([own])["cuda.oom"].title == "x"


def test_proofreading_finds_a_pattern_that_does_not_fit_its_example() -> None:
    signature = {"text": ["boom"], "pattern": "^boom$", "example": "a boom"}
    rule = catalogue.parse_rule({**GOOD, "signature": [signature]}, "a.b", "x")
    assert catalogue.proofread(rule, "x") == [
        "x: signature 1: example does not match its own signature"
    ]
