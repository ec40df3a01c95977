"""Hydra's command line, word by word, as hydra-core 1.3.2 was seen to judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check, hydra_grammar
from pytest_gkd.job.check import Checked
from pytest_gkd.job.hydra_grammar import Function, RefusedError, Sweep

RELEASE = "verl==0.9.1"
START = "python3 -m verl.trainer.main_ppo"
SIZES = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.name=vllm"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("''", ""),
        (" a b ", "a b"),
        ("a:b", "a:b"),
        ("null", None),
        ("NULL", None),
        ("None", "None"),
        ("True", True),
        ("true", True),
        ("yes", "yes"),
        ("'True'", "True"),
        ("'8'", "8"),
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("1__000", "1__000"),
        ("007", "007"),
        ("0x10", "0x10"),
        ("+5", 5),
        ("1.5.2", "1.5.2"),
        ("inf", "inf"),
        ("$HOME", "$HOME"),
        (r"\$", r"\$"),
        ("x${trainer.nnodes}y", "x${trainer.nnodes}y"),
        ("${oc.env:HOME,'a b'}", "${oc.env:HOME,'a b'}"),
        ("s3://bucket/a?b@c", "s3://bucket/a?b@c"),
        ("a|b%c*d", "a|b%c*d"),
        (r"a\,b", "a,b"),
        (r"a\ b\=c", "a b=c"),
        (r"a\\b", r"a\b"),
        (r"a\b", r"a\b"),
        (r"'it\'s'", "it's"),
        (r"'a\\'", "a\\"),
        (r"'a\\b'", r"a\\b"),
        ("'a,b'", "a,b"),
        ("'a\nb'", "a\nb"),
        ("[a,b]", ["a", "b"]),
        ("['a','b']", ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ("[1,2.5,null,true]", [1, 2.5, None, True]),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("[]", []),
        ("{a:1,b:[1,2]}", {"a": 1, "b": [1, 2]}),
        ("{a: {b: c}}", {"a": {"b": "c"}}),
        ("{a:b:c}", {"a": "b:c"}),
        ("{a b:c}", {"a b": "c"}),
        ("int(3)", 3),
        ("str(3)", "3"),
        ("bool(yes)", Function("bool(yes)")),
        ("a,b", Sweep("a,b")),
        ("choice(a,b)", Sweep("choice(a,b)")),
    ],
)
def test_a_value_is_what_hydra_makes_of_it(text: str, value: Any) -> None:
    found = hydra_grammar.assignment(f"a.b={text}").value
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("a.b", "has no value"),
        ("=3", "has no key"),
        ("a.b:chat", "not key:value"),
        ("a.b =3", "has a blank in its key"),
        ("a..b=3", "has no key that Hydra reads"),
        (".a=3", "has no key that Hydra reads"),
        ("a/b.c=3", "has no key that Hydra reads"),
        ("+++a=3", "has no key that Hydra reads"),
        ("+1=3", "has no key that Hydra reads"),
        ("--a=3", "is not an override"),
        ("", "has no key"),
        ("a==3", "has a second ="),
        ("a=b=c", "has a second ="),
        ("a={b}", "has a } where"),
        ('a={"b":1}', "key in quotes: leave them out"),
        ("a={", "bracket is still open"),
        ("a=[b,c", "bracket is still open"),
        ("a=b}", "has a } where"),
        ("a=[b,]", "has a ] where"),
        ("a=[b,,c]", "has a , where"),
        ("a=(b)", "has a ( where"),
        ("a=${b", "has a { where"),
        ("a=${b:${c}}", "has a } where"),
        ("a='b", "has a ' that nothing closes"),
        ('a="b', 'has a " that nothing closes'),
        ("a=it's", "has a ' that nothing closes"),
        ("a=b'c'd", "has 'c' in quotes, and something before it"),
        ("a='b' c", "after the closing quote"),
        ("a=~/b", "has ~ outside of quotes"),
        ("a=b&c", "has & outside of quotes"),
        ("a=b;c", "has ; outside of quotes"),
        ("a=b#c", "has # outside of quotes"),
        ("a=<|b|>", "has < outside of quotes"),
        ("a=b\nc", "has a line break outside of quotes"),
        ("a=b\r", "has a carriage return outside of quotes"),
        ("a=ä", "has ä outside of quotes"),
        ("a=f(1)", "calls f(...), and Hydra knows int"),
        ("a=[ ]x", "has a x where"),
    ],
)
def test_what_hydra_refuses_is_told_with_its_cause(word: str, says: str) -> None:
    with pytest.raises(RefusedError) as caught:
        hydra_grammar.assignment(word)
    assert says in str(caught.value)


def checked(path: Path, words: str) -> Checked:
    script = path / "run.sh"
    script.write_text(f"{START} {words}\n")
    return check.check(script, (), RELEASE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trainer.nnodes =2", "trainer.nnodes and =2 are two words to bash"),
        ("trainer.nnodes = 2", "trainer.nnodes and = are two words to bash"),
        ("trainer.nnodes= 2", "2 stands behind a blank, which ends trainer.nnodes="),
        ("--trainer.nnodes=2", "Hydra has no option --trainer.nnodes"),
        ("data.prompt_key=a,b", "several values, which Hydra refuses without"),
        ("--conf x", "--conf may mean --config-dir, --config-name, --config-path"),
        ("--cfg nothing", "--cfg nothing: Hydra knows job, hydra, all"),
        (
            "data.seed=1 --config-name=ppo_trainer data.seed=2",
            "Hydra refuses data.seed=2 and what follows: overrides stand together",
        ),
        ("~data.prompt_key=other", "data.prompt_key is prompt and not other"),
    ],
)
def test_what_hydras_command_line_refuses_is_an_error(
    words: str, says: str, tmp_path: Path
) -> None:
    found = checked(tmp_path, f"{words} {SIZES}" if words[0] == "-" else words)
    told = [f for f in found.findings if f.level == "error" and says in f.message]
    assert [one.line for one in told] == [1], found.findings


@pytest.mark.parametrize(
    "words",
    [
        "-cn ppo_trainer",
        "-cn=ppo_trainer",
        "--config-nam=ppo_trainer --config-path=config",
        "-m data.prompt_key=a,b",
        "--",
        "'hydra.run.dir=outputs/${now:%Y-%m-%d}'",
        "\"+data.mine='a=b'\"",
        "+data.mine=$'x\\ty'",
        "data.train_files=[a,'b c']",
    ],
)
def test_what_hydra_takes_is_no_fault(words: str, tmp_path: Path) -> None:
    found = checked(tmp_path, f"{words} {SIZES}")
    assert not [f for f in found.findings if f.level == "error"]


def test_what_is_not_known_may_stand_anywhere(tmp_path: Path) -> None:
    found = checked(tmp_path, f"{SIZES} $MORE --config-name=ppo_trainer data.seed=1")
    assert {finding.level for finding in found.findings} == {"note"}


def test_a_job_of_several_is_not_certain_in_what_they_differ(tmp_path: Path) -> None:
    found = checked(tmp_path, f"--multirun trainer.nnodes=1,2 {SIZES}")
    assert found.values["nodes"].source == "undetermined"
    assert found.values["nodes"].alternatives == ["depends on 1,2"]


def test_hydra_only_prints_with_some_options(tmp_path: Path) -> None:
    (told,) = checked(tmp_path, f"--cfg job {SIZES}").findings
    assert told.message.endswith("Hydra only prints something and starts no job")
