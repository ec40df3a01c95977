"""The advice files: their form, and what every one of them promises."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

from pytest_gkd.diagnosis import catalogue, proofreading
from pytest_gkd.diagnosis.catalogue import Fix, Rule, RuleError, Signature
from pytest_gkd.diagnosis.diagnose import advice, diagnose
from pytest_gkd.diagnosis.evidence import StageEvidence, TextSource
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
    assert proofreading.proofread(rule, rule.id) == []


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


def test_a_place_without_its_fact_is_its_name_in_capitals() -> None:
    fix = catalogue.Fix("Dump its stacks", "py-spy dump --pid <pid>")
    assert fix.line({"pid": 7}) == "Dump its stacks: py-spy dump --pid 7"
    assert fix.line({}) == "Dump its stacks: py-spy dump --pid PID"


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
        assert line == f"Look: {expected}"


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


WORDED = [
    pytest.param(rule, fix, id=f"{rule.id}-{fix.said[0]}")
    for rule in ALL
    for fix in rule.fixes
    if fix.said
]


@pytest.mark.parametrize(("rule", "fix"), WORDED)
def test_a_fix_for_some_words_is_shown_where_they_stand_and_there_first(
    rule: Rule, fix: Fix
) -> None:
    told = f"{[(one.text, one.say, one.example) for one in rule.signatures]}"
    for word in fix.said:
        assert word in told
        for of_stage in (False, True):
            lines = advice(rule, {fix.framework}, {}, word, of_stage=of_stage)
            special = {one.line({}) for one in rule.fixes if word in one.said}
            assert fix.line({}) in lines
            assert {*lines[: len(special)]} <= special
            assert fix.line({}) not in advice(
                rule, {fix.framework}, {}, "", of_stage=of_stage
            )


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_consequences_name_causes_that_exist(rule: Rule) -> None:
    assert set(rule.consequence_of) <= {*CATALOGUE, "*"}


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_no_fix_uses_a_setting_that_nobody_reads(rule: Rule) -> None:
    told = " ".join(f"{fix.do} {fix.run}" for fix in rule.fixes)
    for nobody in ("NCCL_TIMEOUT", "NCCL_BACKEND", "ray shutdown", "pkill"):
        assert nobody not in told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"titel": "x"},
            "unknown key 'titel' (did you mean 'title'?); known: title, tier, ",
        ),
        ({"file": "x"}, "unknown key 'file' (did you mean 'title'?); known: "),
        ({"why": ""}, "why is missing"),
        ({"tier": "reason"}, "tier: 'reason' is not one of cause, symptom, fallback"),
        ({"signature": "oops"}, "signature: 'oops' is not tables"),
        ({"signature": [{"text": "oo"}]}, "signature 1: text: 'oo' is not a list of "),
        ({"signature": [{"loud": 1}]}, "signature 1: loud: 1 is not true or false"),
        ({"signature": [{"example": "x"}]}, "signature 1: needs text"),
        ({"fix": [{"run": "ls"}]}, "fix 1: do is missing"),
        ({"fix": [{"do": "x", "knobs": ["a:x"]}]}, "fix 1: knobs: 'a:x' is not kind:"),
        ({"myth": [{"claim": "x"}]}, "myth 1: truth is missing"),
        ({"source": [{"ref": 7}]}, "source 1: ref: 7 is not a text"),
    ],
)
def test_what_a_rule_may_not_hold_is_refused_by_path_and_key(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(RuleError, match=re.escape(f"a/b.toml: {says}")):
        catalogue.parse_rule({**GOOD, **changes}, "a.b", "a/b.toml")


def test_a_file_that_is_not_toml_is_refused_by_path(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("title = ")
    with pytest.raises(RuleError, match=r"bad\.toml is not valid TOML"):
        catalogue.read_rule(bad)


def test_a_rule_of_the_users_own_wins_over_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('id = "cuda.oom"\ntitle = "x"\ntier = "cause"\nwhy = "y"\n')
    assert catalogue.load([own])["cuda.oom"].title == "x"


def test_proofreading_finds_a_pattern_that_does_not_fit_its_example() -> None:
    signature = {"text": ["boom"], "pattern": "^boom$", "example": "a boom"}
    rule = catalogue.parse_rule({**GOOD, "signature": [signature]}, "a.b", "x")
    assert proofreading.proofread(rule, "x") == [
        "x: signature 1: example does not match its own signature"
    ]
