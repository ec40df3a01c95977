"""Secrets do not survive in a bundle, and ordinary text does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import planted
import pytest

from pytest_gkd import sanitize
from pytest_gkd.bundle import redaction

SECRETS = [*planted.secrets()]
# Judged once before the redaction knew any of them: 5 of 24 kinds leaked.
LATER = [*planted.secrets(file="secrets_later.toml")]
IN_VIEW = sorted({one.kind for one in SECRETS if not one.is_held_out})
KEY = "q7Zk2Lw9Xb4Nf8Rt3Vy6Hs1D"


@pytest.mark.parametrize("kind", IN_VIEW)
def test_nothing_of_a_planted_secret_can_be_read(kind: str) -> None:
    for one in SECRETS:
        if one.kind == kind:
            redacted = redaction.text(one.text)
            assert not one.survivors(redacted), redacted


def test_no_kind_leaks_that_was_held_out_when_the_redaction_was_written() -> None:
    held = [*(one for one in SECRETS if one.is_held_out), *LATER]
    leaking = {one.kind for one in held if one.survivors(redaction.text(one.text))}
    assert len({one.kind for one in held}) == 58
    assert not leaking


@pytest.mark.parametrize(
    "text",
    [
        "batch['key'] = 'a-column-of-the-data-set-2048'",
        "kwargs[\"pad_token\"] = '<|endoftext|>'",
        "config['sort_key'] = 'sequence_length_of_response_2048'",
        "row['session'] = row['session_id']",
        "config['api_key'] = f'{prefix}_{name}'",
        "os.environ['HF_TOKEN'] = token",
        "config['password'] = getpass.getpass()",
        "unknown key actor_rollout_ref_rollout_max_tokens2 in the configuration",
        "invalid token <|im_start|> at row 12",
        "set token budget_of_a_whole_rollout_batch_4096",
        "12:34:567890:AllReduce_of_the_gradients_took_3_s_of",
        "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
    ],
)
def test_what_looks_like_a_later_kind_stays(text: str) -> None:
    assert redaction.text(text) == text


@pytest.mark.parametrize(
    "text", ["app.config['SECRET_KEY'] = '{}'", 'cfg["db"]["password"]="{}"']
)
def test_a_secret_under_a_subscript_is_masked_wherever_text_is_shown(text: str) -> None:
    assert sanitize.line(text.format("tulip-4711-x")) == text.format("***")


def test_ordinary_text_stays_as_it_is() -> None:
    changed = [o.text for o in planted.ordinary() if redaction.text(o.text) != o.text]
    assert not changed


def test_logs_of_real_runs_stay_as_they_are_but_for_a_few_words() -> None:
    logs = sorted(Path(__file__).parent.rglob("*.log"))[::5]
    texts = {str(path): path.read_text("utf-8", "replace") for path in logs}
    _, found = redaction.redact(texts)
    assert len(logs) > 100
    assert len(found) <= len(logs) / 50, found


@pytest.mark.parametrize(
    "elsewhere",
    [
        f"401 for {KEY}",
        f"401 for {KEY[:15]}...",
        f"shown as {KEY[:12]}\n{KEY[12:]} by a narrow terminal",
        f"http://teacher/{KEY}/v1",
    ],
)
def test_a_secret_named_once_is_redacted_wherever_else_it_appears(
    elsewhere: str,
) -> None:
    texts = {"a.log": f"api_key='{KEY}'", "b.log": elsewhere}
    redacted, _ = redaction.redact(texts)
    assert KEY[:10] not in redacted["b.log"]
    assert KEY[-10:] not in redacted["b.log"]


def test_a_secret_of_the_environment_is_redacted_without_its_name() -> None:
    known = redaction.of_environment(
        {"MY_DB_PASSWORD": "tulip-4711-x", "HOME": "/root"}
    )
    assert known == {"tulip-4711-x"}
    assert redaction.redact({"a": "no tulip-4711-x here"}, known)[0] == {
        "a": "no *** here"
    }


def test_the_list_says_which_line_of_the_redacted_text_and_why_but_not_what() -> None:
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", "MIIE" * 16, "MIIE" * 16])
    raw = f"one\n{key}\n-----END PRIVATE KEY-----\nfive\napi_key={KEY}\nlast"
    redacted, found = redaction.redact({"a.log": raw})
    lines = redacted["a.log"].split("\n")
    assert [(one.file, one.why) for one in found] == [
        ("a.log", "-----BEGIN PRIVATE KEY-----"),
        ("a.log", "api_key"),
    ]
    assert all(sanitize.MASK in lines[one.line - 1] for one in found)
    assert KEY not in str(found)


@pytest.mark.parametrize("between", ["\x1b[31m", "\x1b]8;;http://x\x07"])
def test_colours_within_a_secret_hide_it_from_nobody(between: str) -> None:
    raw = f"hf_{KEY[:10]}{between}{KEY[10:]} {KEY[:5]}{between}{KEY[5:]}"
    assert redaction.text(raw) == "*** ***"


@pytest.mark.parametrize("text", ["İ api_key=", "Kelvin K api_key="])
def test_letters_that_grow_in_lower_case_shift_nothing(text: str) -> None:
    assert redaction.text(f"{text}'{KEY}' end") == f"{text}'***' end"


@pytest.mark.parametrize(
    "made",
    [
        lambda n: "a" * n,
        lambda n: "key=" * (n // 4),
        lambda n: "password: " * (n // 10),
        lambda n: "A1b" * (n // 3),
        lambda n: "curl " * (n // 5),
        lambda n: "-----END PRIVATE KEY" * (n // 20),
        lambda n: "eyJ" * (n // 3) + ".",
        lambda n: "x.token['" * (n // 9),
        lambda n: "login a password " * (n // 17),
    ],
)
def test_a_hostile_line_ends(made: Callable[[int], str]) -> None:
    redaction.text(made(1 << 16))


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("aEVha16jzhGH5uAiY0sgRag8SduVlZF9Fn7CUAbp", True),
        ("Qwen2_5_VLForConditionalGeneration", False),
        ("3f2a9c1b9b1f0c7d5e4a38261f0b9c8d7e6f5a4b", False),
        ("/data/models/Qwen3-30B-A3B-Instruct-2507", False),
        ("GPU-8f0c13aa-1d2e-77b1-a0f1-0d5b6cfe1f10", False),
        ("raysubmit_6kTzSp2QvCgWx1LB", False),
    ],
)
def test_random_text_is_told_from_names_hashes_and_ids(
    token: str, expected: bool
) -> None:
    assert redaction.is_random(token) is expected
