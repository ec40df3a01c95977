"""Users write rules of their own: from the page, checked at once, found again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd import __main__ as command
from pytest_gkd.diagnosis import catalogue, logs

PAGE = Path(__file__).parent.parent / "docs" / "own-rules.md"
EXAMPLE, OF_EXCEPTION = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
STAGE = """
import pytest

@pytest.mark.gkd_stage("probe")
def test_probe():
    raise RuntimeError("reward server r1.example said 503")
"""
TABLES = (catalogue.Signature, catalogue.Fix, catalogue.Myth, catalogue.Source)
KEYS = {key for kind in (catalogue.Rule, *TABLES) for key in catalogue.keys(kind)}


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "rules" / "reward down.toml"
    path.parent.mkdir()
    path.write_text(EXAMPLE)
    return path


@pytest.mark.parametrize("key", sorted(KEYS))
def test_the_page_tells_every_key(key: str) -> None:
    assert re.search(rf"`(\[\[)?{key}(\]\])?`", PAGE.read_text())


def test_the_pages_example_is_good(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["rules", "check", str(example)]) == 0
    assert capsys.readouterr().out == f"{example}: good\n"


def test_the_pages_example_of_an_exception_is_good_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, log = tmp_path / "verifier.toml", tmp_path / "train.log"
    rule.write_text(OF_EXCEPTION)
    assert command.main(["rules", "check", str(rule)]) == 0, capsys.readouterr().out
    (signature, *_) = catalogue.read_rule(rule).signatures
    log.write_text(signature.example)
    assert command.main(["diagnose", str(log), "--rules", str(rule)]) == 1
    assert "the verifier failed for one answer: 'gold'" in capsys.readouterr().out


def test_the_words_of_ones_own_program_are_as_sure_as_the_rule_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, log = tmp_path / "moon.toml", tmp_path / "train.log"
    rule.write_text(
        'id = "own.moon"\ntitle = "the moon rose"\ntier = "cause"\nwhy = "It did."\n'
        '[[signature]]\ntext = ["the moon rose"]\nexample = "the moon rose"\n'
        'near_miss = ["the sun"]\n[[fix]]\ndo = "Wait"\n'
    )
    log.write_text(
        'Traceback (most recent call last):\n  File "/job/go.py", line 3, in score\n'
        '    raise ValueError("the moon rose")\nValueError: the moon rose\n'
    )
    report = logs.examine([log], catalogue.load([rule]))
    assert [(one.cause, one.confidence) for one in report.causes] == [
        ("own.moon", "certain")
    ]


def test_a_rule_that_takes_what_others_leave_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    form = """
id = "own.{name}"
title = "a thing"
tier = "cause"
why = "It broke."
[[signature]]
text = ["{text}"]
example = "{text} over"
near_miss = ["{miss}"]
[[fix]]
do = "Wait"
"""
    one.write_text(form.format(name="one", text="the moon ", miss="the sun"))
    text = form.format(name="other", text="the moon rose", miss="the moon set")
    other.write_text(text)
    assert command.main(["rules", "check", str(one), str(other)]) == 1
    said, good = capsys.readouterr().out.splitlines()
    told = "signature 1: also matches what own.other names as a near miss: "
    assert said == f"{one}: {told}'the moon set'"
    assert good == f"{other}: good"


def test_a_line_that_a_built_in_rule_calls_harmless_is_told_of(
    tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = example.read_text()
    text = text.replace('["reward server "]', '["NCCL INFO init.cc:"]', 1)
    text = re.sub(r"^(pattern|unless_pattern|unless|say) = .*\n", "", text, flags=re.M)
    text = text.replace("RuntimeError: reward", "NCCL INFO init.cc: reward")
    example.write_text(text)
    assert command.main(["rules", "check", str(example)]) == 1
    told = capsys.readouterr().out
    assert "also matches what comm.nccl-other names as a near miss: 'node1:" in told


def test_a_rule_that_cannot_be_read_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["rules", "check", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: cannot be read: No such file" in capsys.readouterr().err


def test_a_run_names_the_example_and_a_command_that_explains_it(
    tmp_path: Path, example: Path
) -> None:
    (tmp_path / "test_probe.py").write_text(STAGE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ngkd_rules =\n  {example}\n")
    ran = fresh_python.run(
        "-m", "pytest", "--gkd-stages=probe", "test_probe.py", cwd=tmp_path
    )
    assert "[reward.server-down]" in ran.stdout, ran.stdout
    assert "Wait a minute and start again" in ran.stdout
    (told,) = re.findall(r"^ +(gkd explain .*)$", ran.stdout, re.MULTILINE)
    assert told == "gkd explain reward.server-down --rules 'rules/reward down.toml'"
    explained = fresh_python.run(
        "-m", "pytest_gkd", *shlex.split(told)[1:], cwd=tmp_path
    )
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.startswith("reward.server-down: the reward server ")


@pytest.mark.parametrize("by", ["ini", "entry point"])
def test_a_rule_that_cannot_be_used_ends_the_run_by_who_gave_it(
    tmp_path: Path, by: str
) -> None:
    rules = tmp_path / "theirs"
    rules.mkdir()
    (rules / "bad.toml").write_text('id = "a.b"')
    (tmp_path / "test_probe.py").write_text(STAGE)
    ini, origin = "", "rules of an installed package"
    if by == "ini":
        ini, origin = "gkd_rules = theirs/bad.toml", "gkd_rules in pytest.ini"
    else:
        info = tmp_path / "theirs-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: theirs\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[pytest_gkd.rules]\nx = theirs\n")
        (rules / "__init__.py").touch()
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    ran = fresh_python.run(
        "-m", "pytest", "--gkd-stages=probe", "test_probe.py", cwd=tmp_path
    )
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    said = f"ERROR: {origin}: {rules / 'bad.toml'}: title is missing"
    assert said in ran.stderr.splitlines()


def test_a_diagnosed_log_tells_how_to_explain_it(
    tmp_path: Path, example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: reward server r1.example said 503\n")
    assert command.main(["diagnose", str(log), "--rules", str(example)]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert command.main(shlex.split(told)[2:]) == 0


def test_all_that_is_wrong_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(
        'titel = "x"\ntier = "reason"\n'
        '[[signature]]\ntext = ["boom"]\npattern = "boom(?!x)"\n'
        '[[signature]]\npattern = "x"\nconfidence = "sure"\n'
        '[[fix]]\nrun = "ls"\nknobs = ["ls"]\n'
    )
    assert command.main(["rules", "check", str(bad)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{bad}: ").partition(": ")[0] for line in told] == [
        "id is missing",
        "unknown key 'titel' (did you mean 'title'?); known",
        "title is missing",
        "why is missing",
        "tier",
        "signature 2",
        "signature 2",
        "signature 2",
        "fix 1",
        "fix 1",
        "signature 1",
    ], told


@pytest.mark.parametrize(
    ("word", "near"),
    [("nccl", "comm.nccl-version"), ("comm", "comm.ib"), ("port", "comm.port-in-use")],
)
def test_a_word_that_is_no_cause_gets_near_ones(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["explain", word]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"gkd: explain: there is no cause {word!r}")
    assert any(line.split()[1] == near for line in told[1:])


def test_the_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["faults"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^nccl:rank-killed +\S.*\(found as comm\.peer-died", told, re.M)
