"""What is wrong with a command line is told in the user's language."""

from __future__ import annotations

import re
from pathlib import Path

import fresh_python
import pytest

# Names, values, commands and paths stay as they are; a word of prose does not.
PROSE = re.compile(r"(?<![\w./=-])(?:is|the|a|no|not|and|of|to|give|name|has|it)\b")


def said(words: list[str], place: Path) -> str:
    done = fresh_python.run(*words, cwd=place)
    assert done.returncode not in (0, 1), done.stdout + done.stderr
    lines = [one for one in done.stderr.splitlines() if "usage: " not in one]
    return "\n".join(one for one in lines if re.search(r"[\u4e00-\u9fff]|rror", one))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gkd-world-size=0"], "--gkd-world-size：'0' 不是大于 0 的整数"),
        (["--gkd-loss=other"], "--gkd-loss：'other' 不是可选值之一：topk, full"),
        (["--gkd-timeout=nccl"], "--gkd-timeout：'nccl' 不是 NAME=TIME 的形式"),
        (["--gkd-stages=ncl"], "没有阶段 'ncl'；是不是想写 'nccl'？"),
        (["--gkd-report=pytest.ini"], "pytest.ini 不是目录"),
        (["--setup-only"], "--setup-only 不运行任何测试"),
    ],
)
def test_pytest_refuses_an_option_in_chinese(
    tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    given = ["-m", "pytest", "--gkd-stages", "--gkd-lang=zh", *words]
    shown = said(given, tmp_path)
    assert told in shown
    assert not PROSE.search(shown), shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["diagnose", "empty.log"], "empty.log：是空的"),
        (["diagnose", "--format=xml", "x.log"], "参数 --format：'xml' 不是可选值之一"),
        (["diagnose"], "缺少必需的参数：LOG"),
        (["diagnose", "--now=never", "x.log"], "--now=never：不是有效的时间"),
        (["diagnose", "empty.log", "--colour"], "无法识别的参数：--colour"),
        (["watch"], "watch：没有可看的对象"),
        (["watch", "--stuck-after=0", "--pid=1"], "'0' 不是大于 0 的时长"),
        (["watch", "--on-stuck=kill", "--pid=1"], "'kill' 不是 report、end 或"),
        (["watch", "--notify=http://x", "--pid=1"], "'http://x'：只接受 https"),
        (["report", "absent"], "absent 不存在"),
    ],
)
def test_gkd_refuses_a_command_in_chinese(
    tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "x.log").write_text("step 1\n")
    shown = said(["-m", "pytest_gkd", "--lang=zh", *words], tmp_path)
    assert told in shown
    assert not PROSE.search(shown), shown
