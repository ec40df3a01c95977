"""The page of a standstill: processes, who waits for whom, and all stacks as one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_checks import assert_accessible

from pytest_gkd import language
from pytest_gkd.__main__ import main
from pytest_gkd.diagnosis.stack_dump import MAIN, Frame, Thread
from pytest_gkd.files import write_json
from pytest_gkd.report import flame, standstill_page
from pytest_gkd.watch import stack_tree
from pytest_gkd.watch.samples import ProcessSample, Role

HOSTILE = "</code><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
TOLD: dict[str, Any] = {
    "schema": 1,
    "verdict": "stuck",
    "since_s": 31.2,
    "confidence": "certain",
    "phase": "checkpoint",
    "why": ["8 processes used 0.1 s of CPU in 10 s, and every stack is as it was"],
    "odd_pids": [107],
    "waits": ["ranks 0-6 wait in all_reduce for rank 7, which is in save (ckpt.py:7)"],
    "evidence": [],
    "causes": [],
    "suspects": [],
    "problems": [],
    "processes": [
        {"pid": 99, "ppid": 1, "state": "S", "does": "torchrun (pid 99) is in main"},
        *(
            {"pid": 100 + n, "ppid": 99, "state": "S", "does": f"rank {n} waits"}
            for n in range(8)
        ),
    ],
}


def rank(number: int, *frames: Frame, size: int = 8) -> ProcessSample:
    role = Role("rank", f"rank {number}", number, number, size)
    thread = Thread(MAIN, 1, frames)
    return ProcessSample(100 + number, 1, 99, role, "train.py", threads=(thread,))


def eight(file: str = "train.py") -> list[ProcessSample]:
    """Seven ranks in a collective, and the last one elsewhere."""
    fit, step = Frame(file, 9, "fit"), Frame("trainer.py", 6, "step")
    save = Frame("ckpt.py", 7, "save_checkpoint")
    return [rank(n, fit, save if n == 7 else step) for n in range(8)]


def kept(folder: Path, sampled: list[ProcessSample], **more: Any) -> str:
    """The page of what ``gkd watch`` keeps of such a standstill."""
    write_json(folder / "tree.json", stack_tree.build(sampled).to_json())
    told = TOLD | more
    return standstill_page.html(told, folder)


def test_the_rank_that_the_others_wait_for_is_marked_everywhere(tmp_path: Path) -> None:
    text = kept(tmp_path, eight())
    assert_accessible(text)
    assert '<h1><span class="failed">stuck for 31 s in checkpoint</span></h1>' in text
    assert "<strong>Look here:</strong> ranks 0-6 wait in all_reduce for rank 7" in text
    (odd,) = re.findall(r'<div class="box odd"><strong>(.*?)</strong>', text)
    assert odd == "rank 7/8 leaves the others here"
    assert "<strong>ranks 0-6/8 </strong>" in text
    # By their number: one to seven, in one row below the eight.
    assert re.findall(r'<li style="flex-grow:(\d+)">', text) == ["8", "7", "1"]
    assert re.findall(r'<span class="odd">(.*?)</span>', text) == ["rank 7 waits"]
    # The ranks are below their launcher.
    tree = text.partition('<ul class="tree">')[2].partition("</ul></li></ul>")[0]
    assert tree.count("<li>") == 9
    assert tree.index("torchrun") < tree.index("<ul>") < tree.index("rank 0 waits")


def test_a_standstill_is_told_in_chinese_to_those_who_ask(tmp_path: Path) -> None:
    language.use("zh")
    suspect = {
        "cause": "comm.mismatch",
        "observation": "two ranks stand in different collectives, such as all_reduce "
        "here and all_gather there: they took different branches",
        "where": "On each node, for each rank of the trainer",
        "command": "py-spy dump --pid PID",
    }
    processes = [
        {
            "pid": 1,
            "state": "S",
            "does": "rank 1 (pid 7) waits for an event (f, a.py:4)",
        }
    ]
    text = kept(tmp_path, eight(), suspects=[suspect], processes=processes)
    for told in (
        '<h1><span class="failed">卡住已 31 s，阶段 checkpoint</span></h1>',
        '<p class="soft">8 个进程用了 0.1 s 的 CPU（10 s 内），而所有调用栈',
        "<strong>请看这里：</strong> ranks 0-6 在 all_reduce 中等待 rank 7，它处于",
        "<li>可能是：两个 rank 停在不同的集合通信里",
        "[comm.mismatch]；在每个节点上，对训练端的每个 rank：py-spy dump",
        "--pid PID<",
        "rank 1（pid 7）在等一个事件（f, a.py:4）",
        "状态 S，CPU 用时 0.0 s，0 MiB",
        "<h4>rank，MainThread：8 个进程</h4>",
    ):
        assert told in text, told


def test_of_two_ranks_the_one_that_is_waited_for_is_marked(tmp_path: Path) -> None:
    text = kept(tmp_path, eight()[-2:])
    (odd,) = re.findall(r'<div class="box odd"><strong>(.*?)</strong>', text)
    assert odd == "rank 7/8 waited for"


def test_a_long_run_of_frames_is_folded_and_one_that_stays_above_is_told(
    tmp_path: Path,
) -> None:
    deep = [Frame("model.py", line, f"layer_{line}") for line in range(1, 31)]
    ranks = [rank(n, *deep, Frame("a.py", 1, "step")) for n in range(7)]
    text = kept(tmp_path, [*ranks, rank(7, *deep)])
    folded = text.partition("<details><summary>25 more frame(s)</summary>")[2]
    assert folded.partition("</details>")[0].count("<code>") == 25
    assert "1 of them stands here" in text


def test_the_stacks_of_a_process_are_under_what_it_does(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    for pid in (103, 2000):
        (tmp_path / f"stacks/{pid}.txt").write_text("main (train.py:1)")
    text = kept(tmp_path, eight())
    assert "<summary>stacks/103.txt: rank 3 waits</summary>" in text
    assert "<summary>stacks/2000.txt</summary>" in text


def test_nothing_that_a_job_says_of_itself_is_markup(tmp_path: Path) -> None:
    processes = [{"pid": 1, "ppid": 0, "does": HOSTILE, "command": HOSTILE}]
    lines = {name: [HOSTILE] for name in ("why", "waits", "evidence", "problems")}
    suspect = dict.fromkeys(("cause", "observation", "where", "command"), HOSTILE)
    cause = {"title": HOSTILE, "cause": HOSTILE, "why": HOSTILE, "advice": [HOSTILE]}
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/1.txt").write_text(f"\x1b[31m{HOSTILE}")
    text = kept(
        tmp_path,
        eight(f"\x1b]0;owned\x07{HOSTILE}"),
        **lines,
        phase=HOSTILE,
        suspects=[suspect],
        causes=[cause],
        processes=processes,
    )
    assert text.count("&lt;script&gt;") > 10
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert not re.search(r"(?:src|href|action)\s*=\s*\"|url\(|@import", text)


def test_a_large_job_whose_stacks_all_differ_stays_below_a_megabyte(
    tmp_path: Path,
) -> None:
    def differing(number: int) -> ProcessSample:
        frames = [Frame(f"{number}/{'x' * 200}.py", line, "f") for line in range(30)]
        return rank(number, *frames, size=300)

    processes = [
        {"pid": n, "ppid": 1, "does": "x" * 5000, "command": ""} for n in range(1024)
    ]
    (tmp_path / "stacks").mkdir()
    for number in range(60):
        (tmp_path / f"stacks/{number}.txt").write_text("<" * 100_000)
    text = kept(tmp_path, [*map(differing, range(300))], processes=processes)
    assert "has not room for all of them" in text
    assert 500_000 < len(text.encode()) < 1_000_000


@pytest.mark.parametrize(
    "tree", ["[1]", "{", '{"groups": [{}]}', '{"groups": 7}', '{"a":' * 10**5]
)
def test_stacks_that_cannot_be_drawn_cost_nothing_else(
    tmp_path: Path, tree: str
) -> None:
    (tmp_path / "tree.json").write_text(tree)
    assert "ranks 0-6 wait in all_reduce" in standstill_page.html(TOLD, tmp_path)


def test_recursion_in_the_job_is_no_recursion_here(tmp_path: Path) -> None:
    node: dict[str, Any] = {"children": []}
    for depth in range(5000):
        node = {
            "name": f"f (a.py:{depth})",
            "value": 1,
            "members": "pid 1",
            "odd": False,
            "pids": [1],
            "children": [node] if depth else [],
        }
    group = {"kind": "process", "thread": MAIN, "members": [{"rank": None}]}
    tree = {"groups": [group | {"tree": {"children": [node]}}]}
    (graph,), is_whole = flame.graphs(tree)
    assert len(graph.boxes[0].top) + len(graph.boxes[0].folded) < 5000
    assert not is_whole


def test_the_command_makes_it_anew_where_watch_has_kept_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "tree.json", stack_tree.build(eight()).to_json())
    (tmp_path / "report.json").write_text(json.dumps(TOLD))
    assert main(["report", "--html", str(tmp_path)]) == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert "leaves the others here" in path.read_text("utf-8")
