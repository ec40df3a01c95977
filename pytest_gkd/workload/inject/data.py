"""Train files that cannot be used."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.workload.inject.site import Site, changed, checked
from pytest_gkd.workload.models import tiny_text

ROWS = 4000

# linux/capability.h
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def missing_file(site: Site) -> None:
    site.train_file("train.parquet")


def truncated_parquet(site: Site) -> None:
    """An interrupted download."""
    path = _parquet(site, {"prompt": _prompts(ROWS)})
    os.truncate(path, path.stat().st_size * 2 // 3)


def damaged_parquet(site: Site) -> None:
    """A valid footer, but damaged pages."""
    path = _parquet(site, {"prompt": _prompts(ROWS)})
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xa5" * 64)


def bad_row(site: Site) -> None:
    """Far from both ends, which are checked before the file is read."""
    path = _jsonl(site, _prompts(ROWS))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(_with(lines, ROWS // 2, lines[ROWS // 2][:20])) + "\n")


def missing_column(site: Site) -> None:
    """Only a column that no trainer reads as a prompt."""
    _parquet(site, {"answer": _prompts(ROWS)})


def wrong_type(site: Site) -> None:
    """A column with the right name."""
    _parquet(site, {"prompt": list(range(ROWS))})


def mixed_type(site: Site) -> None:
    """Loaders infer a column's type from the first rows."""
    _jsonl(site, _with(_prompts(ROWS), ROWS // 2, 42))


def null_prompt(site: Site) -> None:
    """A type that every column allows."""
    _parquet(site, {"prompt": _with(_prompts(ROWS), ROWS // 2, None)})


def human_roles(site: Site) -> None:
    """A chat template such as ChatML renders any role verbatim."""
    answer = _message("gpt", "Yes.")
    turns = [[_message("human", text), answer] for text in _prompts(100)]
    _rows(site, "messages", turns)


def sharegpt(site: Site) -> None:
    """The spelling of many public conversation datasets."""
    answer = {"from": "gpt", "value": "Yes."}
    turns = [[{"from": "human", "value": text}, answer] for text in _prompts(100)]
    _rows(site, "conversations", turns)


def encoded_messages(site: Site) -> None:
    """Like a column that went through a CSV file."""
    _jsonl(site, [json.dumps([_message("user", text)]) for text in _prompts(100)])


def answer_in_prompt(site: Site) -> None:
    """Whole conversations in a column that is not truncated."""
    answer = _message("assistant", "Yes.")
    _jsonl(site, [[_message("user", text), answer] for text in _prompts(100)])


def images_for_text_student(site: Site) -> None:
    """Like the data of a vision-language job used with another student."""
    site.copied_model()
    images = [[{"bytes": b"not looked at"}]] * 100
    _parquet(site, {"prompt": _prompts(100), "images": images})


def not_utf8(site: Site) -> None:
    """Parquet does not validate text."""
    import pyarrow

    raw = [text.encode() for text in _prompts(ROWS)]
    raw[ROWS // 2] = "caf\xe9".encode("latin-1")
    offsets, data = pyarrow.array(raw, pyarrow.binary()).buffers()[1:]
    texts = pyarrow.StringArray.from_buffers(ROWS, offsets, data)
    _parquet(site, {"prompt": texts})


def half_emoji(site: Site) -> None:
    """Half of a surrogate pair, left when text is cut by UTF-16 length."""
    path = _jsonl(site, _with(_prompts(ROWS), ROWS // 2, "Why \ud83d"))
    assert b"\\ud83d" in path.read_bytes(), "the half is escaped"


def late_value(site: Site) -> None:
    """Like an error column that is rarely set; types are taken from the first 10 MB."""
    rows: list[dict[str, Any]] = [
        {"prompt": text, "error": None, "log": "x" * 99} for text in _prompts(80000)
    ]
    rows[-1]["error"] = {"code": 7}
    _write_rows(site, rows)


def nested_deeply(site: Site) -> None:
    """Like a dumped tree of a conversation's branches."""
    path = _jsonl(site, _prompts(100))
    tree = '{"reply": ' * 300 + "null" + "}" * 300
    with path.open("a") as file:
        file.write(f'{{"prompt": "Why?", "tree": {tree}}}\n')


def rendered_prompts(site: Site) -> None:
    """Like prompts that went through apply_chat_template during preparation."""
    start, end = tiny_text.START_TOKEN, tiny_text.END_TOKEN
    _jsonl(site, [f"{start}user\n{text}{end}\n" for text in _prompts(100)])


def short_context(site: Site) -> None:
    """Like a student with a short context, and a limit set by the user."""
    with changed(site.copied_model() / "config.json") as config:
        config["max_position_embeddings"] = 40
    _jsonl(site, [text * 3 for text in _prompts(100)])


def tokenizer_broken(site: Site) -> None:
    """What the tokenizer stage would report if it were part of the run."""
    (site.copied_model() / "tokenizer.json").write_text("{}", "utf-8")


def hub_unreachable(site: Site) -> None:
    """Prompts with the name of a dataset on the hub."""
    site.no_hub()
    site.settings(train_files=("some-lab/some-prompts",))


def empty_file(site: Site) -> None:
    """What a full disk leaves of a file that was being written."""
    site.train_file().touch()


def no_rows(site: Site) -> None:
    """The output of a filter that lets nothing through."""
    _parquet(site, {"prompt": _prompts(0), "answer": _prompts(0)})


def all_too_long(site: Site) -> None:
    """Twenty of the usual prompts in each."""
    _parquet(site, {"prompt": [text * 20 for text in _prompts(100)]})


def unreadable(site: Site) -> None:
    """Root reads any file by two capabilities, which this thread then lacks."""
    path = _jsonl(site, _prompts(100))
    path.chmod(0)
    site.enter_context(without_rights_of_root())


def cache_locked(site: Site) -> None:
    """The dataset is already cached, as on every start but the first."""
    cache = site.folder / "datasets"
    site.environ("HF_DATASETS_CACHE", str(cache))
    path = _jsonl(site, _prompts(100))
    import datasets

    prepared = datasets.load_dataset(
        "json", data_files=[str(path)], cache_dir=str(cache), split="train"
    )
    arrow = Path(prepared.cache_files[0]["filename"])
    code = "fcntl.flock(descriptor, fcntl.LOCK_EX)"
    _stopped_with(site, Path(f"{arrow.parent}_builder.lock"), code)


def pipe(site: Site) -> None:
    """What ``<(zcat train.jsonl.gz)`` gives a program, with its writer gone."""
    os.mkfifo(site.train_file())


def open_stalls(site: Site) -> None:
    """Like a file on a file server that does not answer.

    The kernel waits for the holder of a write lease to give it up, at most
    /proc/sys/fs/lease-break-time seconds (45 by default; fcntl(2), Leases).
    """
    path = _jsonl(site, _prompts(100))
    code = "fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)"
    _stopped_with(site, path, code)


def _prompts(count: int) -> list[str]:
    made = tiny_text.prompts()
    return [f"{made[row % len(made)]} ({row})" for row in range(count)]


def _with(values: Sequence[Any], row: int, value: Any) -> list[Any]:
    return [*values[:row], value, *values[row + 1 :]]


def _parquet(site: Site, columns: dict[str, Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path, table = site.train_file("train.parquet"), pyarrow.table(columns)
    # The most common codec has no checksum: damage is detected late.
    pyarrow.parquet.write_table(table, path, compression="snappy")
    return path


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _jsonl(site: Site, prompts: Iterable[Any]) -> Path:
    return _rows(site, "prompt", prompts)


def _rows(site: Site, column: str, values: Iterable[Any]) -> Path:
    return _write_rows(site, ({column: value} for value in values))


def _write_rows(site: Site, rows: Iterable[dict[str, Any]]) -> Path:
    path = site.train_file()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _stopped_with(site: Site, path: Path, code: str) -> None:
    """A process that opens the file, runs ``code`` on its descriptor, and stops."""
    source = "import fcntl, os, signal, sys; "
    source += f"descriptor = os.open(sys.argv[1], os.O_RDWR); {code}; "
    source += "os.kill(os.getpid(), signal.SIGSTOP)"
    arguments = [sys.executable, "-I", "-S", "-c", source, str(path)]
    holder = subprocess.Popen(arguments)
    site.callback(holder.wait)
    site.callback(holder.kill)
    _, status = os.waitpid(holder.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise RuntimeError(f"the process that was to hold {path} ended: {status}")


@contextlib.contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Deny this thread files that are not this user's, even if it is root.

    The thread's effective capability set loses two (capset(2)). Raises OSError if the
    kernel refuses that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable for capabilities below 32, then for those above.
    before = (ctypes.c_uint32 * 6)()

    checked(libc.capget(header, before))
    after = (ctypes.c_uint32 * 6)(*before)
    for number in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        after[0] &= ~(1 << number)
    checked(libc.capset(header, after))
    try:
        yield
    finally:
        checked(libc.capset(header, before))
