"""What a log only repeats is no evidence; what it says right after that is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, echoes, log_file
from pytest_gkd.diagnosis.scan import Hit

CATALOGUE = catalogue.load()
# What real programs printed (programs/prints.py), and what each log repeats.
LOGS = sorted(Path(__file__).with_name("echoes").glob("*.log"))
OOM = (
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    b" a total capacity of 79.11 GiB of which 1.00 GiB is free.\n"
)
DISK = b"OSError: [Errno 28] No space left on device\n"
YAML = b"actor:\n  strategy: fsdp2\n  lr: 1e-6\n  warmup: 10\n"
FRAME = b'Traceback (most recent call last):\n  File "/opt/a.py", line 7, in f\n'


def strong(text: bytes) -> list[Hit]:
    log = log_file.read(io.BytesIO(text), "x.log", 0, CATALOGUE)
    return [hit for hit in log.hits if not hit.weak]


def causes(text: bytes) -> set[str]:
    return {hit.cause for hit in strong(text)}


@pytest.mark.parametrize("prefix", [b"", b"(TaskRunner pid=7) ", b"[rank0]: "])
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_what_is_repeated_is_no_evidence(path: Path, prefix: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    told = causes(b"".join(prefix + line for line in lines))
    # argparse's own words, behind its usage, are the program's.
    assert told == ({"config.unknown-option"} if path.stem == "usage_error" else set())


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_what_follows_an_echo_is_evidence(path: Path) -> None:
    text = path.read_bytes() + b"2026-11-21 10:00:00,123 INFO step 7\n"
    assert "env.disk-full" in causes(text + DISK)
    assert "cuda.oom" in causes(text + FRAME + b"    f()\n" + OOM)


@pytest.mark.parametrize(
    ("before", "line", "kind"),
    [
        (b"", b"+ python train.py " + OOM, "command"),
        (b"", b"$ srun python train.py " + DISK, "command"),
        (b"torchrun --nnodes 2 \\\n", b"  --note '" + DISK, "command"),
        (b"usage: a.py [-h]\n\noptions:\n", b"  --x X  after " + OOM, "help"),
        (YAML, b"  note: " + OOM, "options"),
        (YAML + b"  note: 'after\n", b"      " + DISK, "options"),
        (b"", b"config {'actor': {'note': '" + OOM, "options"),
        (b"", b"Args(a='b', c=None, note='" + OOM, "options"),
        (b"[response] it says\n", OOM, "sample"),
        (b"", b"<|im_start|>user\\nWhy " + OOM, "sample"),
        (FRAME, b"    raise E('" + OOM.strip() + b"')", "source"),
        (b"", b'  File "/x/No space left on device.py", line 1, in f', "source"),
    ],
)
def test_each_kind_is_told(before: bytes, line: bytes, kind: str) -> None:
    at = max(line.find(b"CUDA out"), line.find(b"No space"))
    assert echoes.kind(before, line.rstrip(), at) == kind


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (b"", OOM),
        (YAML, DISK),
        (YAML, b"error: " + OOM),
        (b"usage: a.py [-h]\n", b"a.py: error: " + DISK),
        (b"[prompt] a\n[response] b\n[score] 0.0\n", OOM),
        (b"[response] b\nTraceback (most recent call last):\n", OOM),
        (b"<|im_start|>assistant\nb<|im_end|>\n", OOM),
        (b"", b'{"level": "error", "message": "' + OOM),
        (b"", b"{'loss': 0.1, 'note': '" + OOM),
        (b"", b"Answer(status=500, reason='x', detail='" + OOM),
        (b"", b"{'CPU': 1} * 8: " + DISK),
        (b"", b"Command '['python', 'a.py']' failed: " + DISK),
        (b"", b"bash: line 1: cannot write: " + DISK),
        (b"  reason: OOMKilled\n  a: b\n  c: d\n", b"  message: " + DISK),
        (b"+ python a.py\n", DISK),
        (b"tool: a\ntool: b\ntool: c\n", b"tool: cannot write: " + DISK),
        (FRAME + b"    f()\n", DISK),
        (b"(A pid=1) [response] b\n", b"(A pid=2) " + OOM),
    ],
)
def test_what_only_looks_like_one_is_not(before: bytes, line: bytes) -> None:
    at = max(line.find(b"CUDA out"), line.find(b"No space"))
    assert echoes.kind(before, line.rstrip(), at) == ""


def test_a_rule_about_source_lines_finds_them() -> None:
    frame = '  File "/opt/vllm/v1/core/kv_cache_utils.py", line 7, in get_kv'
    about = catalogue.Signature(text=("kv_cache_utils",), example=frame)
    assert echoes.of_source(about)
    code = "(EngineCore pid=7)     assert numerator % 8 == 0"
    assert echoes.of_source(catalogue.Signature(text=("assert ",), example=code))
    about = catalogue.Signature(text=("CUDA out",), example=OOM.decode())
    assert not echoes.of_source(about)


@pytest.mark.parametrize(
    "line",
    [
        b"{'a': " * 500,
        b"a=1, (" * 500,
        b"(A pid=1)" * 300,
        b"python -" * 400,
        b"+" * 3000,
    ],
    ids=["dictionaries", "objects", "prefixes", "commands", "traces"],
)
def test_no_line_takes_long(line: bytes) -> None:
    for _ in range(20):
        echoes.kind(line * 10, line, len(line) - 1)
