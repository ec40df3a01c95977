"""Messages with their values in them are translated by their templates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_estimate import HALF_B, QWEN_7B
from test_job_memory import shape
from test_language import CHINESE_TEXT

from pytest_gkd import language
from pytest_gkd.__main__ import main
from pytest_gkd.filled_texts import LONGEST, PLACE, FilledTexts
from pytest_gkd.options import Settings
from pytest_gkd.report import page, render
from pytest_gkd.report.compare import Report
from pytest_gkd.report.record import FAILED, PASSED, RunRecord, StageRecord
from pytest_gkd.watch import status_line
from pytest_gkd.watch.samples import AT_WORK, Progress, Usual, Verdict
from pytest_gkd.watch.screen import own_lines

TEXTS = {
    "{file} has no rows{more}": "{file} 没有行{more}",
    ", only blank lines": "，只有空行",
    "is empty (0 bytes)": "是空的（0 字节）",
    "rank {rank} waits for {others}": "rank {rank} 等待 {others}",
    "{some} of {all} ranks": "{all} 个 rank 中的 {some} 个",
    "column {name} is {wrong}; expected text": "列 {name} 是 {wrong}；应为文本",
    "a list without messages": "没有消息的列表",
    "GPU {a} and GPU {a} are one": "GPU {a} 只有一个",
}
JOINTS = {"; ": "；", ": ": "：", ", ": "，", "\n": "\n", " ": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl has no rows", "a.jsonl 没有行"),
        ("a.jsonl has no rows, only blank lines", "a.jsonl 没有行，只有空行"),
        (
            "--data: /x/a.parquet is empty (0 bytes)",
            "--data: /x/a.parquet 是空的（0 字节）",
        ),
        ("2 of 4 ranks.", "4 个 rank 中的 2 个。"),
        ("rank 3 waits for 2 of 4 ranks", "rank 3 等待 4 个 rank 中的 2 个"),
        (
            "column 'a' is a list without messages; expected text",
            "列 'a' 是没有消息的列表；应为文本",
        ),
        ("GPU 1 and GPU 1 are one", "GPU 1 只有一个"),
        # What was not made of these templates stays.
        ("GPU 1 and GPU 2 are one", None),
        ("the best of all ranks", None),
        ("my own pool has no room: 7", None),
        ("rank", None),
        ("", None),
    ],
)
def test_a_text_is_known_with_its_values(text: str, expected: str | None) -> None:
    known = FilledTexts(TEXTS, JOINTS, "。")
    assert known.translate(text) == (text if expected is None else expected)


def test_a_value_that_looks_like_a_place_is_not_filled() -> None:
    known = FilledTexts(TEXTS, JOINTS, "。")
    text = "rank {others} waits for {rank}\\1"
    assert known.translate(text) == "rank {others} 等待 {rank}\\1"


def test_a_huge_text_is_left_alone() -> None:
    text = "rank 1 waits for " + "; : , " * LONGEST
    assert FilledTexts(TEXTS, JOINTS, "。").translate(text) == text


@pytest.mark.parametrize(
    "part",
    ["rank 1: rank 2: ", "rank 1 waits for ", "x.py has no rows, ", "2 of 4 ranks\n"],
)
def test_a_text_with_too_many_readings_is_left_alone(part: str) -> None:
    text = part * (LONGEST // len(part) - 1) + "rank 3"
    assert FilledTexts(TEXTS, JOINTS, "。").translate(text) == text


@pytest.fixture
def chinese() -> None:
    language.use("zh")


def test_every_message_of_the_stages_is_known_again(chinese: None) -> None:
    found = dict(language.filled_texts())
    assert len(found) > 500
    for text, told in found.items():
        shown = language.tr_filled(PLACE.sub(r"\1_7", text))
        assert shown == PLACE.sub(r"\1_7", told), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Another reading knows as much: it puts what follows into a value.
        (
            "train_batch_size 6 is not a multiple of ppo_mini_batch_size 256, and is "
            "less: verl refuses it",
            "train_batch_size 6 不是 ppo_mini_batch_size 256 的倍数，而且更小：verl "
            "会拒绝",
        ),
        (
            "no step for 46 s, 91 times the usual 0.5 s; rank 3 uses 19 % of a core",
            "46 s 内没有新的一步，是通常 0.5 s 的 91 倍；rank 3 占用一个核的 19 %",
        ),
        (
            "live.py (pid 3) is in wait_for_it (live.py:3)",
            "live.py（pid 3）处于 wait_for_it (live.py:3)",
        ),
        (
            "x.parquet: no prompt column; expected one of prompt, messages, text (the "
            "default), found answer",
            "x.parquet：没有 prompt 列；应有 prompt, messages, text 之一（默认值），"
            "实际有 answer",
        ),
        # What stands before the text, and is none of its values.
        (
            "line 1: 2 processes are started on a machine, and CUDA_VISIBLE_DEVICES "
            "shows them 1 GPU(s): the last ones find no device",
            "第 1 行：一台机器上启动 2 个进程，而 CUDA_VISIBLE_DEVICES 只给它们 1 块 "
            "GPU：最后几个进程找不到设备",
        ),
        (
            "step and dir are mutually exclusive (in resume): prime-rl 0.8.0 refuses "
            "it (validate_step_xor_dir)",
            "step 和 dir 互斥（在 resume 中）：prime-rl 0.8.0 会拒绝"
            "（validate_step_xor_dir）",
        ),
        # A user's own words in a text that says where they are, and an amount.
        (
            '8 if [ "$A" = gpu ] || [ "$B" = small ] (line 3)',
            '8 若 [ "$A" = gpu ] || [ "$B" = small ]（第 3 行）',
        ),
        ("logits and loss 57.8 GiB", "logits 与 loss 57.8 GiB"),
        (
            'LOSS.topk has no value (unless [ "$BIG" ] (line 1))',
            'LOSS.topk 没有值（若非 [ "$BIG" ]（第 1 行））',
        ),
        (
            "8 if a is b (line 1); or unless a is c (line 2)",
            "8 若 a is b（第 1 行）；或若非 a is c（第 2 行）",
        ),
        ("no --dataset is given (my own words here)", None),
        # Words that are in no template, around words that are.
        ("line 3: my own text about a file that is empty", None),
        ("as verl requires without any of my options", None),
    ],
)
def test_of_several_readings_the_right_one_is_shown(
    text: str, expected: str | None, chinese: None
) -> None:
    assert language.tr_filled(text) == (text if expected is None else expected)


def stage(**more: object) -> StageRecord:
    made = StageRecord("data", "test_data.py::test_data", "cpu", 20.0, duration_s=1.0)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_what_a_stage_says_is_shown_in_chinese(chinese: None) -> None:
    failed = stage(
        outcome=FAILED,
        step="checking the rows: 512 read",
        message="/x/a.jsonl has no rows, only blank lines",
        also=["[data.schema] no rows", "mine: own words"],
        state="",
    )
    text = "\n".join(render.failure_block(failed, "report.json"))
    assert "，当时正在：检查各行：已读取 512 行" in text
    assert "/x/a.jsonl 没有行，只有空行" in text
    assert render.further(failed.also[0]) == "[data.schema] 没有行"
    assert render.further(failed.also[1]) == failed.also[1]
    passed = stage(
        outcome=PASSED, facts={"summary": "12 tensors, 3.0 MB, nccl, 0.1 s a push"}
    )
    assert "12 个张量，3.0 MB，nccl，每次推送 0.1 s" in render.result_line(passed)
    running = stage(started=1.0, step="comparing the vocabularies")
    assert "比较词表" in render.live_line([running], 3.0, 200)
    settings = Settings(layout_why="2 GPUs are visible").to_json()
    (line,) = render.header(RunRecord("x", {}, settings), 2, [])
    assert "（看到 2 个 GPU）" in line
    html = page.html(Report("x", {"stages": [failed.to_json()]}), Path())
    assert "没有行，只有空行" in html


def test_a_memory_plan_is_told_in_chinese_and_answered_in_english(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape(tmp_path / "s", HALF_B)
    shape(tmp_path / "t", QWEN_7B)
    script = tmp_path / "run.sh"
    script.write_text(
        "accelerate launch --num_processes 4 --multi_gpu examples/scripts/gkd.py "
        f"--dataset_name d --max_length 1000 --model_name_or_path {tmp_path}/s "
        f"--teacher_model_name_or_path {tmp_path}/t --per_device_train_batch_size 2\n"
    )
    asked = ("--framework=trl==1.16.0", "--machine=memory=30GiB")
    told = {}
    for form in ("text", "json"):
        main(["--lang=zh", "check", str(script), *asked, f"--format={form}"])
        told[form] = capsys.readouterr().out
    shown = told["text"]
    assert "一块 GPU 的显存（预估）：\n  trainer          " in shown
    assert "\n  trainer          前向与反向            61.4 GiB，共" in shown
    assert "GiB，共 30.0 GiB：放不下\n" in shown
    assert "  teacher 的权重 float32 28.4 GiB，logits 与 loss " in shown
    assert "错误：第 1 行：trainer 在前向与反向阶段放不下：需要 " in shown
    assert "最大的几项：teacher 的权重 float32 28.4 GiB，logits 与 loss " in shown
    assert not CHINESE_TEXT.search(told["json"])


STAGE = """
import pytest
from pytest_gkd.stage_api import StageFault

@pytest.mark.gkd_stage("probe", timeout=60)
def test_probe(gkd):
    gkd.step("comparing the vocabularies")
    text = "RANK=1 in the environment: launchers set these for each rank themselves."
    gkd.note("probe.note", text)
    fault = StageFault("data.empty", "/x/a.jsonl has no rows, only blank lines")
    raise StageFault("data.schema", "own words about 7 rows", also=[fault])
"""


@pytest.mark.parametrize("chosen", ["en", "zh"])
def test_a_fault_is_told_in_chinese_and_recorded_in_english(
    tmp_path: Path, chosen: str
) -> None:
    (tmp_path / "test_probe.py").write_text(STAGE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["test_probe.py", "--gkd-stages=probe", f"--gkd-lang={chosen}"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    shown = "".join(done.stdout.split())  # lines are broken anywhere
    assert ("/x/a.jsonl没有行，只有空行" in shown) == (chosen == "zh"), done.stdout
    assert ("环境里有RANK=1：启动器" in shown) == (chosen == "zh"), done.stdout
    assert "own words about 7 rows" in done.stdout
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    (found,) = report["stages"]
    assert found["message"] == "own words about 7 rows"
    assert found["step"] == "comparing the vocabularies"
    assert found["also"] == ["[data.empty] /x/a.jsonl has no rows, only blank lines"]
    text = json.dumps(report, ensure_ascii=False)
    assert not CHINESE_TEXT.search(text)


def test_english_loads_no_templates() -> None:
    code = (
        "import sys\n"
        "from pytest_gkd import language\n"
        "from pytest_gkd.report import render\n"
        "assert language.tr_filled('no rows') == 'no rows'\n"
        "assert 'pytest_gkd.filled_texts' not in sys.modules\n"
        "language.use('zh')\n"
        "assert 'pytest_gkd.filled_texts' not in sys.modules\n"
        "assert language.tr_filled('no rows') != 'no rows'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WATCHED = """\
stuck for 3:00 in training-step (likely)
  saw   rank 1 is stopped by a signal (SIGSTOP); kill -CONT 4711 lets it go on
  wait  rank 0 waits for all_reduce: it is idle
  cause a rank did not enter the collective [comm.collective-timeout]
  more  gkd explain comm.collective-timeout
  2.    perhaps every rank stands in synchronize [cuda.xid]
        On each node with an engine (no line: it is gone): ray list X
dead: exit code 1 after 1:09, step 2 in phase rollout
the machine slept for 0:42
my own words"""


def test_what_the_watcher_says_is_translated_with_its_labels(chinese: None) -> None:
    lines = own_lines(WATCHED).splitlines()
    assert all(line.startswith("gkd: ") for line in lines)
    assert lines[0].startswith("gkd: 卡住已 3:00，阶段 training-step")
    assert lines[1].startswith(
        "gkd:   证据  rank 1 被信号停住（SIGSTOP）；kill -CONT 4711"
    )
    assert lines[2] == "gkd:   等待  rank 0 在等 all_reduce：它是空闲的"
    assert re.search(r"原因 .*\[comm.collective-timeout\]", lines[3])
    assert lines[4] == "gkd:   更多  gkd explain comm.collective-timeout"
    assert lines[5].startswith("gkd:   2. ")
    assert lines[6].startswith("gkd:         在每个有引擎的节点上")
    assert lines[6].endswith("：ray list X")
    assert (
        lines[7]
        == "gkd: 异常退出：运行 1:09 后以退出码 1 结束，第 2 步（阶段 rollout）"
    )
    assert lines[8:] == ["gkd: 机器休眠了 0:42", "gkd: my own words"]
    progress = Progress(phase="rollout", phase_at=0.0, step=3, total=9)
    told = status_line.parts(Verdict(AT_WORK), progress, Usual(), None, 0.0, 42.0)
    assert told == ["rollout 0:42", "第 3/9 步"]
    assert "正常工作" in status_line.line(Verdict(AT_WORK), told, 80)


def test_what_the_watcher_says_in_english_is_as_it_was() -> None:
    assert own_lines(WATCHED) == "".join(f"gkd: {x}\n" for x in WATCHED.splitlines())
