"""Exceptions are read the same, however the log was cut up (tests/tracebacks)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import exceptions
from pytest_gkd.diagnosis.exceptions import Chain
from pytest_gkd.diagnosis.stack_dump import Frame

LOGS = Path(__file__).with_name("tracebacks")
# Of each log its chains: class, innermost function, how it hangs together.
CLASS = re.compile(r"^[\w.]+\.(?=\w+(\(\w+\))?$)")
MISSING = ("FileNotFoundError", "read_config", "")
NOT_CONVERTED = ("ValueError", "convert", "cause")
KEY = ("KeyError", "update_actor", "")
TOLD = {
    "chain": [
        [
            ("KeyError", "during", ""),
            ("FileNotFoundError", "read_config", "context"),
            NOT_CONVERTED,
        ]
    ],
    "group": [
        [
            ("KeyError", "update_actor", "within"),
            ("TimeoutError", "sample", "within"),
            ("ExceptionGroup", "__aexit__", ""),
        ]
    ],
    "pool": [[KEY, ("KeyError", "get", "cause")]],
    "executor": [[MISSING, NOT_CONVERTED, ("ValueError", "__get_result", "cause")]],
    "logged": [[KEY]],
    "threads": [[KEY]],
    "boxed": [[MISSING, NOT_CONVERTED]],
    "lines": [[("ValueError", "lines", "")]],
    "loader": [[("KeyError", "__getitem__", "within"), ("KeyError", "reraise", "")]],
    "ray_actors": [
        [
            ("KeyError", "update_actor", "within"),
            ("RuntimeError", "update_actor", "cause"),
            ("RayTaskError(RuntimeError)", "fit", "within"),
            ("RayTaskError(RuntimeError)", "get_objects", ""),
        ]
    ],
    "ray_killed": [[("ActorDiedError", "get_objects", "")]],
    "elastic": [
        [MISSING, NOT_CONVERTED],
        [("RuntimeError", "barrier", "")],
        [
            ("FileNotFoundError", "read_config", "within"),
            NOT_CONVERTED,
            ("RuntimeError", "barrier", "within"),
            ("ChildFailedError", "launch_agent", ""),
        ],
    ],
}


def told(chains: list[Chain]) -> list[list[tuple[str, str, str]]]:
    return [
        [(CLASS.sub("", one.type), one.frames[-1].function, one.came) for one in chain]
        for chain in chains
    ]


def lines(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


def before_lines(prefix: bytes, text: bytes) -> bytes:
    return b"".join(prefix + line for line in lines(text))


def with_colours(text: bytes) -> bytes:
    return b"".join(
        b"\x1b[36m\x1b[1m" + line.rstrip() + b"\x1b[0m\n" for line in lines(text)
    )


def with_carriage_returns(text: bytes) -> bytes:
    return text.replace(b"\n", b"\r\n")


def of_a_ray_worker(text: bytes) -> bytes:
    return b"".join(
        b"\x1b[36m(WorkerDict pid=7, ip=10.0.0.3)\x1b[0m " + line
        for line in lines(text)
    )


def repeated(text: bytes) -> bytes:
    folded = text.replace(b"\n", b" [repeated 7x across cluster]\n")
    return before_lines(b"(WorkerDict pid=7) ", folded)


def of_a_rank(text: bytes) -> bytes:
    return before_lines(b"[default3]:", text)


def of_a_node_and_rank(text: bytes) -> bytes:
    return before_lines(b"[15:6]:", text)


def of_an_engine(text: bytes) -> bytes:
    before = b"(EngineCore_DP0 pid=268) ERROR 11-21 10:00:00 [core.py:718] "
    return before_lines(before, text)


def of_a_container(text: bytes) -> bytes:
    return before_lines(b"trainer-1  | ", text)


def of_srun(text: bytes) -> bytes:
    return before_lines(b"3: ", text)


def of_ts(text: bytes) -> bytes:
    return before_lines(b"[2026-11-29 10:04:01] ", text)


def of_a_timed_worker(text: bytes) -> bytes:
    return before_lines(b"(WorkerDict pid=7) 2026-11-29 10:04:01,213 ", text)


def of_journald(text: bytes) -> bytes:
    return before_lines(b"Nov 29 10:04:01 node-3 train.sh[4711]: ", text)


def of_kubectl(text: bytes) -> bytes:
    return before_lines(b"[pod/trainer-0/main] ", text)


def after_a_bar(text: bytes) -> bytes:
    """A bar does not end its line before it is full."""
    bar = b"Train:   0%|          | 3/940 [14:02<73:38:20, 282.92s/it]"
    return b"".join(
        bar + line if line.startswith(b"Traceback") else line for line in lines(text)
    )


def of_kubernetes(text: bytes) -> bytes:
    return before_lines(b"2026-11-29T10:04:01.123456789Z stderr F ", text)


def among_others(text: bytes) -> bytes:
    """The same text of another process at the same time, a line of each in turn."""
    return b"".join(
        b"(Actor pid=1) " + line + b"(Actor pid=2) " + line for line in lines(text)
    )


def among_bars(text: bytes) -> bytes:
    bar = b"Loading shards:  %d%%|##   | %d/100 [00:01<00:09, 1.2it/s]\n"
    shown = (bar % (n, n) for n in itertools.count())
    kept = []
    for line in lines(text):
        frame = line.lstrip().startswith(b"File ")
        kept += [line, next(shown)] if frame else [line]
    return b"".join(kept)


WAYS: list[Callable[[bytes], bytes]] = [
    bytes,
    with_colours,
    with_carriage_returns,
    of_a_ray_worker,
    repeated,
    of_a_rank,
    of_a_node_and_rank,
    of_an_engine,
    of_a_container,
    of_srun,
    of_ts,
    of_a_timed_worker,
    of_journald,
    of_kubernetes,
    of_kubectl,
    after_a_bar,
    among_others,
    among_bars,
]


# Of torchrun's log as it is: it has several processes, each with its own prefix.
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in TOLD for way in WAYS if way is bytes or name != "elastic"],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_real_programs_raised(name: str, way: Callable[[bytes], bytes]) -> None:
    found = exceptions.read(way((LOGS / f"{name}.log").read_bytes()))
    times = 2 if way is among_others else 1
    assert told(found) == [chain for chain in TOLD[name] for _ in range(times)]


def test_a_message_may_end_with_a_port() -> None:
    text = (
        b"Traceback (most recent call last):\n"
        b'  File "/job/buffer.py", line 20, in connect\n    sock = dial(host)\n'
        b"DialError: nobody answers at 10.0.0.5:6379\n"
    )
    ((one,),) = exceptions.read(text)
    assert (one.type, one.message) == ("DialError", "nobody answers at 10.0.0.5:6379")


@pytest.mark.parametrize("width", [65, 70, 80, 100, 120])
@pytest.mark.parametrize("name", ["loader", "ray_actors", "ray_killed"])
def test_the_width_of_a_terminal_changes_nothing(name: str, width: int) -> None:
    text = re.sub(r"\x1b\[\d+m", "", (LOGS / f"{name}.log").read_text())
    cut = "\n".join(
        line[at : at + width]
        for line in text.splitlines()
        for at in range(0, max(1, len(line)), width)
    )
    assert cut != text.rstrip("\n")
    assert told(exceptions.read(cut.encode())) == TOLD[name]


def test_the_parts_of_an_exception() -> None:
    text = (LOGS / "chain.log").read_bytes()
    ((first, second, last),) = exceptions.read(text)
    assert first.message == "'model'"
    assert (
        second.message == "[Errno 2] No such file or directory: '/nowhere/config.json'"
    )
    assert last.message == "cannot convert the checkpoint /nowhere/config.json"
    frame = second.frames[-1]
    assert (frame.file, frame.function) == ("/home/user/job/raises.py", "read_config")
    assert text[second.start :].startswith(b"Traceback")
    assert text[: second.end].endswith(b"config.json'\n")


def test_elastics_root_cause_is_first_whatever_is_told_before_it() -> None:
    text = (LOGS / "elastic.log").read_bytes()
    table = text.index(b"Failures:")
    chained = b"""KeyError: 'a'

  The above exception was the direct cause of the following exception:

  Traceback (most recent call last):
    File "a.py", line 1, in f
  RuntimeError"""
    text = text[:table] + text[table:].replace(b"RuntimeError", chained, 1)
    *_, of_table = exceptions.read(text)
    kinds = ["FileNotFoundError", "ValueError", "KeyError", "RuntimeError"]
    assert [one.type for one in of_table[:-1]] == kinds


def test_a_message_of_several_lines_ends_at_a_blank_one() -> None:
    ((one,),) = exceptions.read((LOGS / "lines.log").read_bytes())
    assert one.message == "two lines:\n  first: a\nsecond: b"


@pytest.mark.parametrize("name", ["Exception", "ValueError", "StopIteration"])
def test_the_most_general_class_is_read_as_any_other(name: str) -> None:
    text = f"""Traceback (most recent call last):
  File "/opt/a.py", line 3, in ask
    raise {name}("no")
{name}: no
"""
    ((raised,),) = exceptions.read(text.encode())
    assert (raised.type, raised.message) == (name, "no")


def test_a_log_that_ends_in_a_traceback_keeps_its_frames() -> None:
    text = (LOGS / "threads.log").read_bytes()
    text = text[: text.index(b"KeyError")]
    ((one,),) = exceptions.read(text)
    assert (one.type, one.frames[-1].function) == ("", "update_actor")


def test_a_long_text_is_read_in_parts_wherever_they_are_cut() -> None:
    filler = b"INFO 11-21 10:00:00 [core.py:718] all is well\n" * 3000
    text = filler.join(
        (LOGS / f"{name}.log").read_bytes() for name in ("chain", "pool", "loader")
    )
    text += filler
    whole = exceptions.read(text)
    for size in (31, 4096, 1 << 20):
        collector = exceptions.Collector()
        for at in range(0, len(text), size):
            collector.feed(text[at : at + size])
        assert collector.chains() == whole, size
    assert told(whole) == TOLD["chain"] + TOLD["pool"] + TOLD["loader"]


def test_the_first_and_the_last_of_very_many_are_kept() -> None:
    one = (LOGS / "threads.log").read_bytes() + b"all is well\n" * 9000
    collector = exceptions.Collector()
    for number in range(200):
        collector.feed(one.replace(b"log_probs", b"n%d" % number))
    kept = [int(re.sub(r"\D", "", chain[0].message)) for chain in collector.chains()]
    assert kept[:3] == [0, 1, 2]
    assert kept[-3:] == [197, 198, 199]
    assert len(kept) == exceptions.FIRST + exceptions.LAST


@pytest.mark.parametrize("before", [-3, 1, 20, 33, 34, 60, 200, 400])
@pytest.mark.parametrize("others", [0, exceptions.FIRST + 2])
def test_a_traceback_that_two_blocks_share_is_whole(before: int, others: int) -> None:
    size, gap = 100_000, b"all is well\n" * 9000
    one = (LOGS / "threads.log").read_bytes()
    late = one.replace(b"update_actor", b"update_late")
    text = (one + gap) * others
    # So much of the late one lies in the first of the two blocks.
    text += b"." * (-len(text) % size + size - before - 1) + b"\n" + late + gap
    collector = exceptions.Collector()
    for at in range(0, len(text), size):
        collector.feed(text[at : at + size])
    (whole,) = exceptions.read(late)[0]
    assert [one.frames for one in collector.chains()[-1]] == [whole.frames]


def test_a_ranks_traceback_may_begin_on_the_line_of_a_bar() -> None:
    text = of_a_rank((LOGS / "logged.log").read_bytes())
    bar = b"  0%|          | 3/940 [14:02<73:38, 2.92s/it]"
    start = text.index(b"[default3]:Traceback")
    found = exceptions.read(text[:start] + bar + text[start:])
    assert told(found) == TOLD["logged"]


def test_a_line_belongs_to_the_exceptions_of_its_own_process() -> None:
    text = among_others((LOGS / "threads.log").read_bytes())
    chains = exceptions.read(text)
    at = text.rindex(b"KeyError")
    (own,) = exceptions.Near(chains).around(at, "(Actor pid=2)")
    (other,) = exceptions.Near(chains).around(at, "(Actor pid=1)")
    assert (own.process, other.process) == ("(Actor pid=2)", "(Actor pid=1)")


BEGIN = b"Traceback (most recent call last):\n"
FRAME = b'  File "a.py", line 1, in f\n'
HOSTILE = {
    "frames without end": BEGIN + FRAME * 50_000,
    "starts without end": BEGIN * 50_000,
    "a line of a megabyte": BEGIN + b'  File "' + b"a" * (1 << 20) + b'", line 1, in f',
    "parts without end": BEGIN + b'  File "aaaaaaaa\n' * 100_000,
    "trees": BEGIN + b"| " * 400_000 + b"\n",
    "prefixes": BEGIN + b"[rank1]:" * 100_000,
    "links": b"During handling of the above exception, another ex\n" * 20_000,
    "messages": (BEGIN + FRAME + b"ValueError: x\n") * 20_000,
    "numbers": BEGIN + b'  File "a", line ' + b"9" * 5000 + b", in f\n",
    "processes": b"".join(b"(A pid=%d) %b" % (n, BEGIN) for n in range(20_000)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_takes_more_than_its_length(text: bytes) -> None:
    collector = exceptions.Collector()
    for at in range(0, len(text), 1 << 20):
        collector.feed(text[at : at + (1 << 20)])
    kept = sum(len(part.text) for part in collector.parts)
    assert kept <= (exceptions.FIRST + exceptions.LAST) * exceptions.PART
    for chain in collector.chains():
        assert all(len(one.message) < 100_000 for one in chain)


def test_a_path_that_a_box_is_too_narrow_for_is_put_together() -> None:
    box = """╭── Traceback (most recent call last) ──╮
│ /home/user/venv/lib/python3.11/site-pa │
│ ckages/trl/trainer/grpo_trainer.py:12  │
│ in training_step                       │
╰────────────────────────────────────────╯
KeyError: 'a'
"""
    ((one,),) = exceptions.read(box.encode())
    packages = "/home/user/venv/lib/python3.11/site-packages/"
    file = f"{packages}trl/trainer/grpo_trainer.py"
    assert one.frames == [Frame(file, 12, "training_step")]


def test_two_processes_of_a_journal_are_two() -> None:
    own = (LOGS / "logged.log").read_bytes().splitlines(keepends=True)
    before = b"Nov 29 10:04:01 node-3 train.sh[%d]: "
    both = b"".join(before % pid + line for line in own for pid in (41, 42))
    found = exceptions.read(both)
    assert told(found) == [TOLD["logged"][0]] * 2
    assert {chain[0].process for chain in found} == {"train.sh[41]", "train.sh[42]"}


def test_a_traceback_of_another_node_is_read_without_its_host() -> None:
    lines = ["Traceback (most recent call last):"]
    lines += ['  File "/opt/job/train.py", line 9, in step', "    run()"]
    lines += ["RuntimeError: too far"]
    text = "".join(f"n02: {line}\nn03: {line}\n" for line in lines)
    found = [one for chain in exceptions.read(text.encode()) for one in chain]
    assert [(one.type, one.message) for one in found] == [
        ("RuntimeError", "too far")
    ] * 2
    assert [one.frames[-1].function for one in found] == ["step"] * 2
    quoted = "RuntimeError: " + "\n".join(lines)  # no host, as its frames tell
    found = [one for chain in exceptions.read(quoted.encode()) for one in chain]
    assert {one.type for one in found} == {"RuntimeError"}


LONG = b"RuntimeError: the ledger of the shard 0001 is out of balance by more than 4"
STEPS = b"".join(
    b"[2026-11-29 10:00:%02d,123][INFO] step %2d/9000 | loss %.5f | tok/s 12345.6\n"
    % (n, n, 1 / (n + 1))
    for n in range(9)
)


@pytest.mark.parametrize(
    "others",
    [
        STEPS,
        b"".join(b"words of line %d, " % n * 9 + b"\n" for n in range(9)),
        (BEGIN + b'  File "/home/me/a.py", line 1, in f\n    a()\n' + LONG + b"\n") * 9,
        (b"x" * 84 + b"\n" + BEGIN + FRAME + b"KeyError: 1\n") * 9,
        b"".join(
            BEGIN
            + b'  File "/home/me/%b.py", line 3, in %b\n    get()\nKeyError: 1\n'
            % (b"%c" % (97 + n) * 40, b"f" * 9)
            for n in range(9)
        ),
    ],
)
def test_lines_that_are_as_long_as_each_other_are_not_wrapped(others: bytes) -> None:
    text = others + BEGIN + FRAME + b"proj.Locked: no shard\n" + others
    found = [one for chain in exceptions.read(text) for one in chain]
    (locked,) = (one for one in found if one.type == "proj.Locked")
    assert locked.message.splitlines()[0] == "no shard"
    assert len(found) == text.count(BEGIN)
    assert all(one.type for one in found)
    assert all(
        [len(f.function) in (1, 9) for f in one.frames] == [True] for one in found
    )
    assert all(text[one.start :].startswith(BEGIN) for one in found)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"DialError: nobody answers at 10.0.0.5:6379", "DialError"),
        (b"proj.net.Undialled: nobody at scorehost:8123", "proj.net.Undialled"),
        (b"Undialled: nobody at scorehost:8123", "Undialled"),
        (b"Undialled: nobody", "Undialled"),
    ],
)
def test_any_class_ends_a_traceback(line: bytes, kind: str) -> None:
    code = b"    sock = dial(host)\n"
    between = b"Train:   0%|          | 3/940 [14:02<73:38:20, 2.92s/it]\nINFO: up\n"
    text = BEGIN + FRAME + code + between + FRAME + code + line + b"\n"
    ((one,),) = exceptions.read(text)
    assert (one.type, one.message) == (kind, line.decode().partition(": ")[2])
    assert len(one.frames) == 2


def shown(text: str) -> list[tuple[str, str, list[tuple[str, int, str, str]]]]:
    """Of each exception its class, its message, and its frames."""
    return [
        (
            one.type,
            one.message,
            [(f.file, f.line, f.function, f.code) for f in one.frames],
        )
        for chain in exceptions.read(text.encode())
        for one in chain
    ]


def test_code_that_python_cannot_read_is_the_innermost_place() -> None:
    text = """Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    import ledger
  File "/job/ledger.py", line 41
    def total(self
             ^
SyntaxError: '(' was never closed
"""
    frames = [
        ("/job/train.py", 3, "<module>", "import ledger"),
        ("/job/ledger.py", 41, "<module>", "def total(self"),
    ]
    assert shown(text) == [("SyntaxError", "'(' was never closed", frames)]
    without = text.replace("    def total(self\n             ^\n", "")
    frames[1] = ("/job/ledger.py", 41, "<module>", "")
    assert shown(without) == [("SyntaxError", "'(' was never closed", frames)]


def test_loguru_marks_the_frame_that_caught_it() -> None:
    text = """Traceback (most recent call last):

  File "/job/train.py", line 88, in <module>
    main()
    └ <function main at 0x7f>

> File "/job/ledger.py", line 31, in post
    raise Unbalanced(c)
          │          └ 4
          └ <class 'Unbalanced'>

proj.ledger.Unbalanced: 4
"""
    frames = [
        ("/job/train.py", 88, "<module>", "main()"),
        ("/job/ledger.py", 31, "post", "raise Unbalanced(c)"),
    ]
    assert shown(text) == [("proj.ledger.Unbalanced", "4", frames)]


def test_a_box_marks_the_line_of_a_frame() -> None:
    text = """╭──────────── Traceback (most recent call last) ────────────╮
│ /job/train.py:88 in <module>                              │
│                                                           │
│   87 │   if ready:                                        │
│ ❱ 88 │   │   main()                                       │
│   89 │   else:                                            │
│                                                           │
│ /job/ledger.py:9 in post                                  │
│                                                           │
│ ❱  9     raise Unbalanced(c)                              │
╰───────────────────────────────────────────────────────────╯
Unbalanced: 4
"""
    frames = [
        ("/job/train.py", 88, "<module>", "main()"),
        ("/job/ledger.py", 9, "post", "raise Unbalanced(c)"),
    ]
    assert shown(text) == [("Unbalanced", "4", frames)]


@pytest.mark.parametrize(
    "said",
    [
        r"""worker said: 'Traceback (most recent call last):\n  File "q.py", line 3'""",
        "it told `Traceback (most recent call last)` and stopped",
    ],
)
def test_a_message_that_quotes_a_traceback_begins_none(said: str) -> None:
    text = f"""Traceback (most recent call last):
  File "/job/a.py", line 41, in rescale
    ask()
ValueError: {said}
"""
    frames = [("/job/a.py", 41, "rescale", "ask()")]
    assert shown(text) == [("ValueError", said, frames)]


@pytest.mark.parametrize(
    ("cell", "module"),
    [
        ("Cell In[3], line 7", "Cell In[3]"),
        ("Cell In [3], line 7", "Cell In [3]"),
        ("Input In [3], in <cell line: 7>()", "Input In [3]"),
    ],
)
def test_a_notebooks_traceback(cell: str, module: str) -> None:
    text = f"""{"-" * 75}
LedgerError                               Traceback (most recent call last)
{cell}
      5 def f():
      6     x = 1
----> 7 ledger.total(x)

File ~/job/ledger.py:31, in Ledger.total(self, x)
     29 def total(self, x):
---> 31     raise LedgerError("c")

LedgerError: column 4 does not balance

During handling of the above exception, another exception occurred:

AttributeError                            Traceback (most recent call last)
Cell In[3], line 9, in close(x)
----> 9 x.close()

AttributeError: no close
"""
    frames = [
        (module, 7, "<module>", "ledger.total(x)"),
        ("~/job/ledger.py", 31, "Ledger.total", 'raise LedgerError("c")'),
    ]
    assert shown(text) == [
        ("LedgerError", "column 4 does not balance", frames),
        ("AttributeError", "no close", [("Cell In[3]", 9, "close", "x.close()")]),
    ]


def test_the_line_under_a_group_is_no_part_of_its_last_message() -> None:
    ((*_, last, _),) = exceptions.read((LOGS / "group.log").read_bytes())
    assert last.type == "TimeoutError"
    assert "---" not in last.message


@pytest.mark.parametrize("chained", [b"", BEGIN + FRAME + b"KeyError: 1\n\n"])
def test_what_another_prints_between_the_frames_ends_no_traceback(
    chained: bytes,
) -> None:
    if chained:
        chained += b"During handling of the above exception, another exception\n\n"
    other = b"Reward: of 4 tasks\nSaved: yes\n"
    text = chained + BEGIN + FRAME + b"    f()\n" + other + FRAME + b"Undialled: no\n"
    (chain,) = exceptions.read(text)
    assert [one.type for one in chain] == ["KeyError"] * bool(chained) + ["Undialled"]
    last = chain[-1]
    assert (last.message, len(last.frames)) == ("no", 2)
    assert text[last.at :] == b"Undialled: no\n"


def test_what_follows_a_class_alone_is_no_message() -> None:
    text = """Traceback (most recent call last):
  File "/opt/a.py", line 3, in ask
    grow()
MemoryError
step:5 - actor/loss:0.1
"""
    ((raised,),) = exceptions.read(text.encode())
    assert (raised.type, raised.message) == ("MemoryError", "")
    ((raised,),) = exceptions.read(text.replace("Error\n", "Error:\n").encode())
    assert raised.message == "step:5 - actor/loss:0.1"
