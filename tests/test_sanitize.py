"""Nothing that a log, a test or a process says is obeyed by a terminal or a CI runner,
and no secret in it is shown."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh_python
import pytest

from pytest_gkd import sanitize

PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
# What terminals obey, and the two ways in which GitHub's runner is commanded.
HOSTILE = (
    "\x1b]0;owned\x07",
    "\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\",
    "\x1bP+q544e\x1b\\",
    "\x1b[2J\x1b[1A\x1b[31mred",
    "\x1bc",
    "\x9b2J\x9d0;owned\x9c",
    "seen\x08\x08\x08\x08gone",
    "overwritten\rby this",
    "\n::add-mask::a",
    "\r  ::error file=a.py,line=1::planted",
    "\u2028::warning::x",
    "\x85::stop-commands::y",
    "##[error]planted",
    "::\u200badd-mask::z",
    "#\u200b#[group]hidden",
    "\u202egnp.exe\u2066\u2069",
    "zero\u200bwidth\ufeff\u2060",
    "\x00\x01\x7f\x0b\x0c\x1c",
    "\U000e0041\ud800",
)
SECRETS = {
    "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7cF0xR3u": "hf_***",
    "AKIA" + "IOSFODNN7EXAMPLE": "AKIA***",
    "github_pat_" + "11ABCDEFG0abcdefghijkl_mnopqrstuvwx": "github_pat_***",
    "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789": "ghp_***",
    "sk-" + "proj-abcDEF123456ghiJKL7890": "sk-***",
    "xoxb-" + "123456789012-abcdefghijkl": "xoxb-***",
    "postgres://me:p4ss%word@db.example.org/x": "postgres://me:***@db.example.org/x",
    "--token tk4711abc": "--token ***",
    "--api-key=k-4711-abc run": "--api-key=*** run",
    "--db.password 'two words' run": "--db.password '***' run",
    "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567": "WANDB_API_KEY=***",
    "wandb login 0123456789abcdef0123456789abcdef01234567": "wandb login ***",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG+bPxRfi": "AWS_SECRET_ACCESS_KEY=***",
    "['serve', '--api-key', 'ab12']": "['serve', '--api-key', '***']",
    "MY_TOKEN=plainword": "MY_TOKEN=***",
    "{'HF_TOKEN': 'ab12', 'HOME': '/root'}": "{'HF_TOKEN': '***', 'HOME': '/root'}",
    'environ({"client_secret": "ab12"})': 'environ({"client_secret": "***"})',
    "api_key='ab12', seed=1": "api_key='***', seed=1",
    "hf_token=ab12, seed=1": "hf_token=***, seed=1",
    "password: hunter2": "password: ***",
    "authorization: Bearer abcdefghijklmnop": "authorization: Bearer ***",
    "https://x.blob/y?sv=1&sig=ab%2B12&se=2": "https://x.blob/y?sv=1&sig=***&se=2",
    # Addresses: parameters, signatures, and users.
    "https://h/x?token=abcd1234efgh5678&a=b": "https://h/x?token=***&a=b",
    "https://h/x?a=b&key=abcd1234efgh5678#top": "https://h/x?a=b&key=***#top",
    "https://h/x?session_id=abcd1234efgh&a=b": "https://h/x?session_id=***&a=b",
    "https://b/k?x-oss-signature=733255ef022bec3f2a&a=b": (
        "https://b/k?x-oss-signature=***&a=b"
    ),
    "https://abcd1234efgh5678@h/x.git": "https://***@h/x.git",
    "postgres://me:p@ssw0rd@db/x": "postgres://me:***@db/x",
    # Headers, also as dictionaries and pairs.
    "Authorization: Basic dXNlcjpodW50ZXIycGFzcw==": "Authorization: Basic ***",
    "401: Basic dXNlcjpodW50ZXIycGFzcw==": "401: Basic ***",
    "('authorization', 'Basic dXNlcjpodW50ZXI=')": "('authorization', 'Basic ***')",
    "(b'Authorization', b'Bearer ab12cd')": "(b'Authorization', b'Bearer ***')",
    "AUTHORIZATION=Bearer ab12cd": "AUTHORIZATION=Bearer ***",
    "Authorization: ApiKey VnVhQ2ZHY0JDZGJr": "Authorization: ApiKey ***",
    "Authorization: AWS AKIAIOSFODNN7EXAMPLE:frJIUN8DYpKD+": "Authorization: AWS ***",
    "Signature=" + "f0e8bdb8" * 8: "Signature=***",
    '{"auth": "dXNlcjpodW50ZXIycGFzcw=="}': '{"auth": "***"}',
    "http://h/?h=Bearer%20abcdefghijklmnop": "http://h/?h=Bearer%20***",
    "Cookie: a=1; session=abcdef012345; b=": "Cookie: ***",
    "Set-Cookie: SID=31d4d96e; HttpOnly": "Set-Cookie: ***; HttpOnly",
    "{'Cookie': 'session=abcdef01', 'x': 1}": "{'Cookie': '***', 'x': 1}",
    "<Cookie session=abcdef01 for h/>": "<Cookie *** for h/>",
    "X-Vault-Token: abcd": "X-Vault-Token: ***",
    # A cloud's id of a key, and the key.
    "AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": "AKIA*** ***",
    "('AKIAIOSFODNN7EXAMPLE', 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY')": (
        "('AKIA***', '***')"
    ),
    f"AKIAIOSFODNN7EXAMPLE at {'0a1b2c3d' * 5}": f"AKIA*** at {'0a1b2c3d' * 5}",
    # In sentences.
    'password "hunter2pass"': 'password "***"',
    "Password 'p4ss word' refused": "Password '***' refused",
    "api key `abcd1234efgh5678` is not valid": "api key `***` is not valid",
    "Incorrect API key provided: abcd1234efgh5678.": "Incorrect API key provided: ***.",
    "401 for token abcd1234efgh5678": "401 for token ***",
    # JSON in JSON, pairs, other signs and names.
    r'"{\"HF_TOKEN\": \"ab12\"}"': r'"{\"HF_TOKEN\": \"***\"}"',
    r'"{\\\"token\\\": \\\"abcd1234ef\\\"}"': r'"{\\\"token\\\": \\\"***\\\"}"',
    "HF_TOKEN:            ab12": "HF_TOKEN:            ***",
    "│ hf_token     │ abcd1234efgh │": "│ hf_token     │ *** │",
    "wandb_key .............. abcd1234efgh": "wandb_key .............. ***",
    "{'name': 'HF_TOKEN', 'value': 'ab12'}": "{'name': 'HF_TOKEN', 'value': '***'}",
    "- name: HF_TOKEN\n  value: ab12": "- name: HF_TOKEN\n  value: ***",
    "name=HF_TOKEN value=ab12": "name=HF_TOKEN value=***",
    "token%3Dabcd1234efgh%26a%3Db": "token%3D***%26a%3Db",
    "api_key\uff1aab12": "api_key\uff1a***",
    "密码\uff1ahunter2pass\uff0c": "密码\uff1a***\uff0c",
    "https://h/x;jsessionid=ABCD1234EFGH?a=b": "https://h/x;jsessionid=***?a=b",
    "+ curl -s -u me:hunter2pass http://h": "+ curl -s -u me:*** http://h",
    "+ sshpass -p hunter2pass ssh h": "+ sshpass -p *** ssh h",
    f"wandb.login(key='{'0a1b2c3d' * 5}')": "wandb.login(key='***')",
    "docker login -u me -p hunter2pass h": "docker login -u me -p *** h",
    "docker login --password=hunter h": "docker login --password=*** h",
    "mysql -h db -u me -phunter x": "mysql -h db -u me -p*** x",
    "machine h login me password hunter": "machine h login me password ***",
    "<password>hunter two</password>": "<password>***</password>",
    "GET /x jwt=abcd1234efgh": "GET /x jwt=***",
    r'password="hunter\"2pass", x="y"': r'password="***", x="y"',
    "('token', 'abcd1234efgh')": "('token', '***')",
    "HF_TOKEN => ab12": "HF_TOKEN => ***",
    "token=abcd1234; x": "token=***; x",
    "MYSQL_PWD=ab12": "MYSQL_PWD=***",
    "DB_PASS=ab12": "DB_PASS=***",
    "PGPASSWORD=ab12": "PGPASSWORD=***",
    # Like what is yet to be filled in, and more than that.
    "HF_TOKEN=...ab12": "HF_TOKEN=***",
    "KEY=xxx9": "KEY=***",
    "postgres://me:$ecret@db": "postgres://me:***@db",
    "authorization: <a>b12345": "authorization: ***",
}
HARMLESS = (
    "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "max_token=5",
    "num_tokens: 12",
    "--max-tokens 64 --max-token 64",
    "--max-num-batched-tokens=8192",
    "pad_token=<eos>, eos_token='</s>', bos_token: <s>",
    "--pad-token <|endoftext|>",
    "pad_token_id=151643",
    "PAD_TOKEN=[PAD]",
    "hf_token=None, use_auth_token=True",
    "TOKENIZERS_PARALLELISM=false",
    "RAY_AUTH_MODE=token",
    "PWD=/home/me/job1 OLDPWD=/home/me/job2",
    "RAY_AUTH_TOKEN_PATH=/etc/ray/token",
    "tokenizer=Qwen/Qwen2.5-0.5B",
    "data.prompt_key=prompt reward_fn_key=data_source",
    "Unexpected key(s) in state_dict: lm_head.weight",
    "KeyError: 'model.embed_tokens.weight'",
    "missing key: lm_head.weight",
    "num_key_value_heads: 8, key_cache: 3, monkey=1",
    "token: 13, next_token=abcd1234",
    "hf_overrides=None hf_quantizer",
    "task-abcdefghijklmnopqrstuvwxyz0123",
    "tcp://127.0.0.1:29500",
    "token=eos_token, tokens per second, token budget=4096, loss/token: 1.2345e-05",
    "unknown token 'foo2bar' at 12, stop token \"</s>\", token Qwen2TokenizerFast",
    "for token in ('token', 'eos_token'), ['api_key', 'base_url', 'password']",
    'password authentication failed for user "me", password "" is empty',
    "password must not contain \"abc1\"; Password for user 'me':",
    'secrets "regcred" is forbidden, secretKeyRef: hf-token, secret "hf-2" not found',
    "Basic block size, Basic BasicTransformerBlock2Dwith2048, Basic implementation2",
    'WWW-Authenticate: Basic realm="x1", basic data parallelism',
    "cookie cutter, Cookie: none, cookie policy: lax, No cookie named session=abc",
    "Cookie: session=<id>; cookies: 3 accepted, cookie_consent=yes, cookie size=5",
    'authorization: Basic realm="x", Authorization: Bearer token is missing',
    "Authorization: required, Authorization: Bearer <token>, authorization = f(x)",
    "{'authorization', 'proxy-authorization'}, authorization missing",
    "https://h/x?page=2&key=accuracy_of_all&code=200&auth=basic&session=1&token=&a=b",
    "https://h/x?token=<token>&a=b, https://h/x?token=$TOKEN&a=b",
    "git+https://me@h/x.git@abc123 ssh://git@github.com/x/y.git",
    "cache key 3f2a9c1b9b1f0c7d5e4a38261f0b9c8d7e6f5a4b, sort key=loss2",
    "AKIA and commit 0123456789abcdef0123456789abcdef01234567",
    "| password | string | required |, Ed25519PrivateKey | Ed448PrivateKey, token...",
    "pad_token ............. 151643, key ............. abcd1234efgh",
    "HF_TOKEN value: not set, name: eos_token\n  value: abcd1234efgh",
    "密码错误, 令牌数: 128, 密码为空, 密码: 128, 密码: required",
    "curl -u me:$PASSWORD http://h:80, curl -U x http://10.0.0.1:8000/v1",
    "docker login -u me --password-stdin h, docker run -p 80",
    "docker login -p $PASSWORD h",
    "mysql -P 3306 -p -h db, mysql --port=3306, echo mysql -p$PASSWORD",
    "default login and password are required, machine h login me password <password>",
    "<token>13</token>, <password></password>, jwt=required",
    "signature=(input_ids, attention_mask), Signature=forward(x)",
    "first pass: 12, pass@1=0.53, BYPASS=yes1, FIRST_PASS=yes1, PWD=/x, `DB_PASS=`",
    "tests/test_a.py::test_b[x] std::vector<int>::at [::]:80 ::1",
    "中文\u3000日本 naïve 🚀".replace("\u3000", " "),
    "C:\\x1b written out, a\ttab",
    # What the reader is to fill in.
    "KEY=... python train.py, KEY='...' or HF_TOKEN=… or (WANDB_API_KEY=...)",
    "export HF_TOKEN=hf_..., HF_TOKEN=hf_xxx, --api-key xxxxxx",
    "required: FILE, KEY=VALUE; [KEY=VALUE ...] HF_TOKEN=VALUE,...",
    "--token <token> --api-key=$API_KEY KEY=${KEY} KEY=%KEY% KEY=$(cat key)",
    "Authorization: $HF_TOKEN",
    "authorization: token <token>",
    "http://me:$PASSWORD@host http://me:<password>@host http://me:...@host",
    "https://x.blob/y?sig=...&se=2 ?sig=<signature> ?sig=$SIG",
)


def obeyed(text: str) -> list[str]:
    """What of it a terminal or a CI runner would act upon."""
    found = [
        f"character {char!r}"
        for char in set(text) - {"\n", "\t"}
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]
    found += re.findall(r"^\s*::[A-Za-z][\w-]*(?: .*)?::.*", text, re.MULTILINE)
    return found + re.findall(r"##\w*\[.*", text)


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_hostile_is_left(hostile: str) -> None:
    for text in (hostile, f"before {hostile} after", f"a\n{hostile}::group::x"):
        assert obeyed(sanitize.text(text)) == []
        assert obeyed(sanitize.line(text)) == []
        assert "\n" not in sanitize.line(text)


def test_whatever_is_put_together_is_harmless_and_stays_so() -> None:
    random.seed(5)
    pieces = [*HOSTILE, *SECRETS, *HARMLESS, *"\x1b]P[[\x9b::##abc =\n\r;m\x07\\'\""]
    for _ in range(3000):
        text = "".join(random.choices(pieces, k=random.randint(1, 8)))
        shown = sanitize.text(text)
        assert obeyed(shown) == [], repr(text)
        assert sanitize.text(shown) == shown, repr(text)
        assert sanitize.line(sanitize.line(text)) == sanitize.line(text), repr(text)


@pytest.mark.parametrize("secret", SECRETS)
def test_of_a_secret_only_its_kind_is_shown(secret: str) -> None:
    shown = SECRETS[secret]
    assert sanitize.text(secret) == shown
    said = f"2026-11-21 INFO (pid=3) tokenizer: {secret}\nnext"
    assert sanitize.text(said) == f"2026-11-21 INFO (pid=3) tokenizer: {shown}\nnext"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_and_no_command_stays_as_it_is(text: str) -> None:
    assert sanitize.text(text) == text


def test_a_placeholders_word_at_the_head_of_a_secret_does_not_show_it() -> None:
    assert sanitize.text("HF_TOKEN=VALUE12345678") == "HF_TOKEN=***"


def test_secrets_are_masked_by_their_key_too() -> None:
    given = {"hf_token": "ab12", "env": [{"WANDB_API_KEY": "cd34"}], "max_token": "5"}
    assert sanitize.data(given) == {
        "hf_token": "***",
        "env": [{"WANDB_API_KEY": "***"}],
        "max_token": "5",
    }


@pytest.mark.parametrize("secret", ["$ecret9", "-s3cretword", "%9Ab7secret"])
def test_a_secret_may_begin_as_a_placeholder_does(secret: str) -> None:
    assert secret not in sanitize.line(f"password={secret} host=x")
    assert secret not in sanitize.line(f"--api-key {secret}")


def test_a_secret_of_this_process_is_masked_bare() -> None:
    secret = "0a1b2c3d" * 5
    said = f"saw {secret}! in /home/me/job1/run2"
    program = f"from pytest_gkd import sanitize; print(sanitize.text({said!r}))"
    environ = {"WANDB_API_KEY": secret, "PWD": "/home/me/job1"}
    assert fresh_python.output(program, environ) == "saw ***! in /home/me/job1/run2\n"


@pytest.mark.parametrize(
    "piece",
    [
        "token=",
        'token="',
        "sk-",
        " ::a",
        "\x1b]",
        "\x90",
        "://a:",
        "key ",
        "a",
        "--",
        "cookie:a=b;",
        "cookie a",
        "?key=",
        "AKIA*** ",
        "token ",
        "token",
        "token1a2b3",
        "AKIA",
        "token...",
        'token="\\',
        "curl ",
        "token   ",
        "password '",
        "('token', ",
        "authorization: basic ",
    ],
)
def test_time_is_linear(piece: str) -> None:
    spent = []
    for size in (20_000, 320_000):
        text = piece * (size // len(piece))
        before = time.process_time()
        sanitize.text(text)
        spent.append(time.process_time() - before)
    assert spent[1] < max(64 * spent[0], 5.0)  # sixteen times as long; squared: 256


# -- everything that leaves a run ------------------------------------------------------

TOKEN = next(iter(SECRETS))
PROBE = f'''
import os, subprocess, sys, time, warnings
import pytest

HOSTILE = {HOSTILE!r}
ALL = " ".join(HOSTILE) + " --token tk4711abc {TOKEN} "
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def say_all(gkd):
    print(ALL)
    print(ALL, file=sys.stderr)
    os.write(1, ALL.encode("utf-8", "replace"))
    gkd.fact("summary", ALL)
    gkd.fact("name " + ALL, [ALL, {{"hf_token": "ab12xyz"}}])
    gkd.fact("notes", [{{"id": "x.y", "text": ALL}}])
    (gkd.output_dir / "child.log").write_text(ALL, "utf-8", "replace")
    warnings.warn(ALL.encode("utf-8", "replace").decode())
    gkd.step(ALL)
    print(os.environ["PLANTED"])


@pytest.mark.gkd_stage("green", timeout=60)
def test_green(gkd):
    say_all(gkd)


@pytest.mark.gkd_stage("red", timeout=60)
def test_red(gkd, record_property):
    say_all(gkd)
    record_property("theirs", "\\x1b]0;owned\\x07\\u202e{TOKEN}")
    arguments = [a.replace("\\0", "").encode("utf-8", "replace") for a in HOSTILE]
    subprocess.Popen([*SLEEPER, *arguments, "--token", "tk4711abc", "{TOKEN}"])
    raise AssertionError(ALL)


@pytest.mark.gkd_stage("skipped", timeout=60)
def test_skipped(gkd):
    pytest.skip(ALL)


@pytest.mark.gkd_stage("dies", timeout=60)
def test_dies(gkd):
    say_all(gkd)
    os.kill(os.getpid(), 11)


@pytest.mark.gkd_stage("hangs", timeout=2)
def test_hangs(gkd):
    say_all(gkd)
    arguments = [a.replace("\\0", "").encode("utf-8", "replace") for a in HOSTILE]
    child = subprocess.Popen([*SLEEPER, *arguments, "--token", "tk4711abc"])
    time.sleep(60)
'''


def texts_of(value: Any) -> Iterator[str]:
    """Every string in a JSON value, the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from texts_of(key)
            yield from texts_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)


def shown_by(
    directory: Path, done: subprocess.CompletedProcess[bytes]
) -> dict[str, str]:
    """All that a run has shown and left, by where it is."""
    found = {
        "stdout": done.stdout.decode(),
        "stderr": done.stderr.decode(),
    }
    for name, text in list(found.items()):
        # The annotations are meant to be commands.
        lines = [x for x in text.split("\n") if not x.startswith("::error title=gkd ")]
        found[name] = "\n".join(lines)
    for path in directory.rglob("*"):
        if path.is_file() and ".gkd" in path.parts and path.suffix in (".txt", ".log"):
            found[str(path)] = path.read_bytes().decode()
    found["step summary"] = (directory / "page.md").read_text("utf-8")
    report = json.loads((directory / ".gkd/last/report.json").read_text())
    found["report.json"] = "\n".join(texts_of(report))
    if (directory / "j.xml").exists():
        parts = []
        for element in ET.parse(directory / "j.xml").iter():
            parts += [element.text or "", *element.attrib.values()]
        found["JUnit"] = "\n".join(parts)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["--junitxml=j.xml"],
        ["-v", "-rA", "--tb=long", "--junitxml=j.xml", "-o", "junit_logging=all"],
        ["-n0", "-v", "-rA", "-k", "green or red or skipped"],
    ],
    ids=["plain", "verbose", "one process"],
)
def test_no_output_of_a_run_is_obeyed_or_holds_a_secret(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE, "utf-8")
    done = subprocess.run(
        [sys.executable, *PYTEST, "--gkd-stages", "-kprobe", "test_probe.py", *options],
        cwd=tmp_path,
        env={
            **os.environ,
            "PLANTED": f"\x1b]0;owned\x07 {TOKEN}",
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(tmp_path / "page.md"),
        },
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout.decode()
    for place, text in shown_by(tmp_path, done).items():
        assert obeyed(text) == [], place
        for secret in (TOKEN, "tk4711abc", "ab12xyz"):
            assert secret not in text, place
    assert b"--token ***" in done.stdout
    assert b"::error title=gkd red::" in done.stdout


@pytest.mark.parametrize(
    "option",
    [
        "--gkd-stages={}",
        "--gkd-timeout={}=4",
        "--gkd-layout={}",
        "--gkd-top-k={}",
        "--gkd-inject={}",
        "--gkd-report=/proc/{}",
    ],
)
def test_an_option_that_cannot_be_used_is_echoed_harmlessly(
    tmp_path: Path, option: str
) -> None:
    given = "\x1b]0;x\x07\r::error::x ##[error]y \u202e --token tk4711abc"
    done = fresh_python.run(*PYTEST, "--gkd-stages", option.format(given), cwd=tmp_path)
    assert done.returncode == 4
    assert obeyed(done.stdout + done.stderr) == []
    assert "tk4711abc" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("test_a.py", "\x1b]0;x\x07"),
        ("test_a.py", "##[error]x"),
        ("test_\x1b[2Ja.py", "fine"),
        ("::error::x/test_a.py", "fine"),
    ],
)
def test_a_stage_that_cannot_be_shown_by_its_name_is_refused(
    tmp_path: Path, file: str, name: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        textwrap.dedent(
            f"""
            import pytest
            @pytest.mark.gkd_stage({name!r})
            def test_x(): pass
            """
        )
    )
    done = fresh_python.run(*PYTEST, "--gkd-stages", "-k", "test_x", ".", cwd=tmp_path)
    assert "would obey; give the stage and its file another name" in done.stderr
    assert obeyed(done.stdout + done.stderr) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "{}"],
        ["explain", "--format", "json", "{}"],
        ["diagnose", "{}"],
        ["{}"],
        ["rules", "check", "{}"],
        ["diagnose", "evil.log"],
        ["diagnose", "--format", "json", "evil.log"],
    ],
    ids=" ".join,
)
def test_the_command_shows_nothing_that_is_obeyed(
    tmp_path: Path, arguments: list[str]
) -> None:
    given = "\x1b]0;x\x07\u202e##[error]y"
    lines = [f"RuntimeError: CUDA out of memory {text} {TOKEN}" for text in HOSTILE]
    (tmp_path / "evil.log").write_text("\n".join(lines), "utf-8", "replace")
    done = fresh_python.run(
        "-m", "pytest_gkd", *(a.format(given) for a in arguments), cwd=tmp_path
    )
    assert done.stdout + done.stderr
    assert obeyed(done.stdout + done.stderr) == []
    assert TOKEN not in done.stdout
