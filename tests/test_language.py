"""What users read comes in English and Chinese (pytest_gkd.language)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_render import DIAGNOSIS, block, record

from pytest_gkd import language, options
from pytest_gkd.__main__ import main
from pytest_gkd.columns import cells, padded, wrapped
from pytest_gkd.diagnosis import catalogue, diagnose, suspects, translated
from pytest_gkd.diagnosis.catalogue import FIELD, PLACE, Rule
from pytest_gkd.report import explain, page, render
from pytest_gkd.report.compare import Report
from pytest_gkd.report.record import PASSED, TIMEOUT

CHINESE_TEXT = re.compile("[\u4e00-\u9fff]")
RULES = catalogue.built_in()
LOG = Path(__file__).parent / "logs/comm.collective-timeout"
PROBE = """
import pytest

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    assert gkd is None, "no kernel image is available for execution on the device"
"""


@pytest.fixture
def chinese() -> None:
    language.use("zh")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh"}, "zh"),
        ({"LANG": "zh-Hans"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_US", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "en_US", "LC_ALL": "", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LC_ALL": "zh_CN", "LANGUAGE": "en_US:zh_CN"}, "en"),
        ({"LC_ALL": "en_US", "LANGUAGE": "fr:zh_CN:en"}, "zh"),
        ({"LANG": "zhuang"}, "en"),
    ],
)
def test_the_locale_chooses_as_gettext_has_it(
    environment: dict[str, str], expected: str
) -> None:
    assert language.of_locale(options.LANGUAGES, environment) == expected


def test_every_language_offered_but_english_has_a_catalogue() -> None:
    found = {path.name for path in language.CATALOGUES.iterdir() if path.is_dir()}
    assert found == set(options.LANGUAGES) - {language.ENGLISH}


def test_in_english_nothing_of_the_catalogue_is_read() -> None:
    code = (
        "import os, sys\n"
        "sys.addaudithook(lambda name, found: name == 'open' and"
        " str(found[0]).endswith('.po') and os._exit(7))\n"
        "from pytest_gkd import language\n"
        "from pytest_gkd.__main__ import main\n"
        "assert main(['explain', 'comm.ib']) == 0\n"
        "assert 'rich.cells' not in sys.modules\n"
        "language.use('zh')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 7, done.stderr  # and only at the last line
    assert b"InfiniBand or RoCE failed" in done.stdout


def test_a_start_of_pytest_imports_nothing_of_it() -> None:
    code = "import sys, pytest_gkd.plugin; print('pytest_gkd.language' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"False\n"


def facts(names: Iterator[str]) -> dict[str, str]:
    return {name: f"{name.upper()} (a) b; c" for name in names}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_what_was_said_of_a_cause_is_recognized_with_its_facts(
    rule: Rule, chinese: None
) -> None:
    for one in rule.signatures:
        if one.say:
            told = facts(iter(FIELD.findall(one.say)))
            shown = translated.title(rule.id, one.say.format_map(told))
            assert CHINESE_TEXT.search(shown), one.say
            assert all(value in shown for value in told.values()), shown
    assert translated.title(rule.id, rule.title) == language.tr(rule.title)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_advice_keeps_its_command_and_its_facts(
    rule: Rule, filled: bool, chinese: None
) -> None:
    for fix in rule.fixes:
        names = {*PLACE.findall(fix.do), *PLACE.findall(fix.run)}
        told = {name: f"{name.upper()}7" for name in names} if filled else {}
        line = fix.line(told)
        shown = translated.advice(rule.id, line)
        wanted = replace(
            fix,
            do=language.tr(fix.do),
            when=language.tr(fix.when),
        ).line(told)
        assert plain(shown) == plain(wanted)


def plain(text: str) -> str:
    """Without what differs in the punctuation between the parts."""
    return re.sub(r"[\s:：()（）]", "", text)


def test_the_framework_of_advice_stays_with_its_condition(chinese: None) -> None:
    found: dict[bool, str] = {}
    for rule in RULES.values():
        for fix in rule.fixes:
            line = diagnose.of_framework(fix).line({})
            shown = translated.advice(rule.id, line)
            when = f"{fix.framework}; {language.tr(fix.when)}".removesuffix("; ")
            assert f"（{when}）" in shown, line
            found[bool(fix.when)] = shown
    assert len(found) == 2


STEPS = (
    ("", ""),
    ("step 3 of 9 has begun: ", "第 3 步（共 9 步）已开始："),
    ("step 3 is done: ", "第 3 步已完成："),
    ("no step of 9 is done yet: ", "9 步中还没有完成任何一步："),
)


@pytest.mark.parametrize("phase", suspects.load().signs)
def test_the_last_sign_of_a_hang_keeps_its_step_and_its_facts(
    phase: str, chinese: None
) -> None:
    for sign in suspects.load().signs[phase]:
        said = f"{sign.done}; {sign.open}"
        told = facts(iter(FIELD.findall(said)))
        for step, chinese_step in STEPS:
            text = step + said.format_map(told)
            shown = translated.last_sign(phase, suspects.Suspicion(sign.name, text))
            wanted = f"{language.tr(sign.done)}；{language.tr(sign.open)}"
            assert shown == chinese_step + wanted.format_map(told)


def test_a_hang_is_told_in_chinese(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "train.log"
    log.write_text("[2026-11-21 10:00:00] Using config file x\n")
    monkeypatch.setenv("LANGUAGE", "zh")
    main(["diagnose", str(log), "--now=2026-11-21 18:00"])
    text = capsys.readouterr().out
    assert "卡住：停在" in text
    assert "  检查  1. " in text
    said = re.sub(r"\([^)]*\)|（[^）]*）|`[^`]*`", "", text)
    lines = [line for line in said.splitlines() if "  检查" in line or "  状态" in line]
    assert lines
    assert all(CHINESE_TEXT.search(line) for line in lines)


def test_a_text_that_is_not_the_catalogues_stays(chinese: None) -> None:
    own = "the pool of my own has no room: 7"
    assert translated.title("comm.ib", own) == f"InfiniBand 或 RoCE 出错：{own}"
    assert translated.advice("comm.ib", own) == own
    assert translated.title("my.own-rule", own) == own
    huge = "rank " * 100_000
    assert translated.title("comm.collective-timeout", huge).endswith(f"：{huge}")


def test_a_failure_is_told_in_chinese_with_its_labels_in_a_column(
    chinese: None,
) -> None:
    rule = RULES["comm.collective-timeout"]
    found = replace(
        DIAGNOSIS,
        title="rank 3 waited 600000 ms in ALLREDUCE, peers missing",
        why=rule.why,
        advice=diagnose.advice(rule, ("vllm",), {}),
    )
    made = record(outcome=TIMEOUT, diagnosis=found, step="summing", message=found.title)
    lines = block(made)
    text = "\n".join(lines)
    assert lines[0].startswith("阶段 nccl 在 12.3 s 后被终止（预算 60 s）")
    assert "rank 3 在 ALLREDUCE 中等了 600000 ms，其他 rank 没有到" in text
    assert "集合通信" in text
    assert "py-spy dump --pid PID" in " ".join(text.split())
    starts = [re.match(r"  (\S\S) +", line) for line in lines[1:]]
    told = dict.fromkeys(start[1] for start in starts if start)
    assert [*told] == ["原因", "证据", "说明", "处理", "此外", "更多"]
    assert {cells(start[0]) for start in starts if start} == {render.LABEL + 2}
    assert max(map(cells, lines)) <= 80
    assert made.diagnosis is not None
    assert made.diagnosis.title == found.title  # what report.json has


def test_a_stage_out_of_time_says_so_in_chinese(chinese: None) -> None:
    made = record(outcome=TIMEOUT, step="loading")
    made.message = render.ending(made)
    assert made.message == "not finished within 60 s while loading"
    assert render.headline(made) == "在 60 s 内没有完成，当时正在：loading [unknown]"
    made.message = render.early_ending(made)
    made.diagnosis = replace(DIAGNOSIS, title=made.message)
    assert made.message == "stuck while loading"
    cause = language.tr(RULES[DIAGNOSIS.cause].title)
    told = f"{cause}：卡住，当时正在：loading [{DIAGNOSIS.cause}]"
    assert render.headline(made) == told


def test_who_is_stuck_is_told_in_chinese(chinese: None) -> None:
    own = "22 (the stage's own process): f (a.py:1) < g (a.py:9)"
    state = "stuck: its process used 0.00 s of CPU in 10.1 s and was in the same "
    state += "place before and after"
    lines = block(record(outcome=TIMEOUT, stuck=[own], state=state))
    assert "  卡住   22（阶段自身的进程）：f (a.py:1) < g (a.py:9)" in lines
    assert any(one.startswith("  状态   卡住：它的进程在") for one in lines)
    stage = {"name": "s", "outcome": "timeout", "step": "my own step"}
    stage |= {"message": "stuck while my own step"}
    html = page.html(Report("x", {"stages": [stage], "settings": {}}), Path())
    assert "卡住，当时正在：my own step" in html
    assert '<h2>s：<span class="timeout">超时</span></h2>' in html
    assert "stuck while" not in html


def test_results_stay_in_their_columns(chinese: None) -> None:
    passed = render.result_line(record(outcome=PASSED, message="x"))
    failed = render.result_line(record(outcome=TIMEOUT, message="x"))
    assert "通过" in passed
    assert "超时" in failed
    assert cells(passed.partition("x")[0]) == cells(failed.partition("x")[0])


def test_lines_break_between_characters_but_not_before_a_stop() -> None:
    text = "组内所有 rank 都进入集合通信，它才会结束（见 docs/x.md）。" * 6
    lines = wrapped("  说明   ", text)
    assert len(lines) > 3
    assert max(map(cells, lines)) <= 80
    assert min(map(cells, lines[:-1])) > 60
    assert all(line.startswith("         ") for line in lines[1:])
    assert not any(line.strip()[0] in "，。）" for line in lines)
    assert not any(line[-1] == "（" for line in lines)
    assert "docs/x.md" in lines[0] + lines[1]
    assert "".join("".join(lines).split()) == "说明" + "".join(text.split())


def test_a_word_longer_than_a_line_stays_whole() -> None:
    path = "/checkpoints/" + "x" * 100
    assert path in wrapped("  ", f"路径 {path} 不存在")[1]


def test_a_wide_character_takes_two_columns() -> None:
    assert [cells("显存"), cells("rank 显存"), cells("abc")] == [4, 9, 3]
    assert padded("显存", 7) == "显存   "


def test_the_page_is_chinese_and_says_so(chinese: None) -> None:
    rule = RULES["vllm.kv-cache"]
    stage = {
        "name": "vllm",
        "outcome": "failed",
        "budget_s": 120,
        "duration_s": 3.0,
        "diagnosis": {
            "cause": rule.id,
            "title": "no memory is left for the KV cache",
            "why": rule.why,
            "advice": list(diagnose.advice(rule, ("vllm",), {"share": 0.3})),
            "explain": "gkd explain vllm.kv-cache",
        },
    }
    html = page.html(Report("x", {"stages": [stage], "settings": {}}), Path())
    assert '<html lang="zh">' in html
    for text in ("处理办法", "没有显存留给 KV cache", "提高冒烟测试的显存比例", "失败"):
        assert text in html
    why = language.tr(rule.why).partition("。")[0]
    assert why not in rule.why
    assert why in html
    assert not re.search(r">(Evidence|Why|What to do|Stages|First:|outcome)<", html)


def test_everything_of_a_cause_is_explained_in_chinese(chinese: None) -> None:
    rule = RULES["comm.collective-timeout"]
    text = explain.cause_text(rule)
    after = text.partition("处理办法：")[2].partition("来源：")[0]
    assert "常见误解：" in text
    english = [
        line
        for line in after.splitlines()
        if len(re.findall(r"\b[a-z]+ [a-z]+ [a-z]+\b", line)) > 1
    ]
    assert not english
    assert explain.cause_json(rule)["title"] == rule.title


@pytest.mark.parametrize(
    "arguments",
    [["--lang=zh", "explain"], ["--lang", "zh", "explain"], ["explain", "--lang=zh"]],
)
def test_gkd_takes_the_language_before_and_behind_its_command(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LANGUAGE", "en")
    assert main([*arguments, "comm.ib"]) == 0
    assert "InfiniBand 或 RoCE 出错" in capsys.readouterr().out
    assert main(["explain", "comm.ib"]) == 0
    assert "InfiniBand or RoCE failed" in capsys.readouterr().out


def test_gkd_follows_the_locale_and_json_stays_english(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGUAGE", "zh_CN")
    logs = [str(path) for path in sorted(LOG.iterdir()) if path.is_file()][:1]
    main(["diagnose", *logs])
    text = capsys.readouterr().out
    main(["diagnose", *logs, "--format=json"])
    told = json.loads(capsys.readouterr().out)
    assert "处理" in text
    assert not CHINESE_TEXT.search(json.dumps(told, ensure_ascii=False))


def test_a_language_that_is_not_there_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--lang=fr", "explain", "comm.ib"])
    assert ended.value.code == 2
    assert "'en'" in (said := capsys.readouterr().err)
    assert "'zh'" in said
    assert "'fr'" in said


def test_a_watched_command_keeps_its_own_lang(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--lang=fr"]
    where = f"--dir={tmp_path / 'watch'}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gkd", "watch", where, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "['--lang=fr']" in done.stdout, done.stderr


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (place / "test_probe.py").write_text(PROBE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["test_probe.py", "--gkd-stages=probe", *arguments]
    return subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False
    )


def pytest_help(place: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "how", [("--help", "--gkd-lang=zh"), ("-o", "gkd_lang=zh", "-h")]
)
def test_the_help_of_pytest_tells_of_our_options_in_chinese(
    tmp_path: Path, how: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = pytest_help(tmp_path, *how)
    ours = text.partition("GKD 任务的分阶段冒烟测试")[2].partition("\n\n")[0]
    assert ours.count("--gkd-") > len(options.WITH_FLAG)
    keys = re.findall(r"(?m)^  gkd_\w+ .*\n(?: {24}.*\n)*", text)
    assert len(keys) == len(options.WITH_INI) + 1
    for told in (*re.split(r"\n  (?=--gkd)", ours)[1:], *keys):
        assert CHINESE_TEXT.search(told), told
    lines = (*ours.splitlines(), *"".join(keys).splitlines())
    assert max(map(cells, lines)) <= 80


def test_the_help_of_pytest_is_english_for_the_others(tmp_path: Path) -> None:
    assert not CHINESE_TEXT.search(pytest_help(tmp_path, "--help"))
    assert "把这个测试标为一个阶段" in pytest_help(
        tmp_path, "--markers", "--gkd-lang=zh"
    )


def test_stages_fail_in_chinese_and_report_in_english(tmp_path: Path) -> None:
    done = run(tmp_path, "--gkd-lang=zh")
    assert "阶段 probe 在" in done.stdout, done.stdout + done.stderr
    assert "处理" in done.stdout
    assert "没有为这块 GPU" in done.stdout
    report = (tmp_path / ".gkd/last/report.json").read_text()
    assert not CHINESE_TEXT.search(json.dumps(json.loads(report), ensure_ascii=False))


def test_the_ini_gives_the_language_and_an_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ngkd_lang = fr\n")
    done = run(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "gkd_lang in pytest.ini: 'fr' is not one of en, zh" in done.stderr


def test_a_log_and_its_page_have_no_english_between_the_chinese(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = (f"step {n}/9 loss: {'nan' if n > 4 else n}\n" for n in range(9))
    Path("a.log").write_text("".join(steps))
    main(["--lang=zh", "diagnose", "--plot", "a.log"])
    assert "  loss  0 到 4，第 8 步为 nan\n" in capsys.readouterr().out
    main(["--lang=zh", "report", "--html", "a.log"])
    assert '<p class="soft">失败；阶段' in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("diagnose gone.log", "gkd: gone.log：没有这个文件或目录\n"),
        ("diagnose --rules=bad gone.log", "gkd: bad 不是有效的 TOML：Invalid value ("),
        ("explain", "gkd: explain：请给出一个原因"),
        ("explain comm.xyz", "这个原因；是不是想写 'comm."),
        ("explain nccl", "gkd: explain：没有 'nccl' 这个原因。\n"),
        ("check bad.yaml", "gkd: bad.yaml 不是有效的 YAML：did not find expected"),
        ("check bad", "之一的命令；其中没有任何命令\n"),
        ("rules check wrong.toml", "\nwrong.toml：缺少 why\n"),
        ("check run.sh", "（收录的最新版本，因为没有安装），启动于第 1 行\n"),
        (
            "check run.sh",
            "\n  rollout_engine                  必须给出" + 26 * " " + "默认值",
        ),
        ("debug-config bad", "之一的命令；其中没有任何命令\n"),
    ],
)
def test_what_is_refused_is_told_in_chinese(
    words: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("a=[\n")
    Path("bad.yaml").write_text("a: [1\nb: {")
    Path("run.sh").write_text("python3 -m verl.trainer.main_ppo\n")
    Path("wrong.toml").write_text("id = 'own.x'\n")
    assert main(["--lang=zh", *words.split()])
    assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loss: is nan from here on; 1.5 before (step 37)", "loss：从这里起为 nan"),
        ("kl: from 0 to 1 of the responses are cut off", "kl：从 0 到 1 的回答被截断"),
        ("own.toml: why is missing", "own.toml：缺少 why"),
        ("d: holds no log: no file ends in .log, .out or .err; name one", "没有日志"),
        ("torchrun (pid 9) is in <module> (torchrun:8)", "处于 <module> (torchrun:8)"),
        (
            "rank 1 (pid 8) waits for an event (f, a.py:4)",
            "rank 1（pid 8）在等一个事件（f",
        ),
        ("could not remove all of /tmp/x: it is busy", "没能全部删除 /tmp/x"),
        ("no key 'a'; did you mean 'b' or 'c'?", "；是不是想写 'b' 或 'c'？"),
    ],
)
def test_what_is_put_together_is_told_in_chinese(
    text: str, told: str, chinese: None
) -> None:
    assert told in language.tr_filled(text)
