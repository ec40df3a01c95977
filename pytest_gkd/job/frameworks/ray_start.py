"""The GPUs that a launch script's own ``ray start`` gives to Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_gkd.job.findings import Finding
from pytest_gkd.job.shell_values import Command, Word

CONFLICT = "config.invalid-combination"


def gpus(commands: Iterable[Command]) -> tuple[int, Word] | None:
    """The GPUs that the commands' only ``ray start`` gives Ray, and its word."""
    words = [
        command.words
        for command in commands
        if [word.text.value for word in command.words[:2]] == ["ray", "start"]
    ]
    if len(words) != 1:
        return None
    for number, word in enumerate(words[0]):
        name, equals, value = word.text.shape.partition("=")
        if name == "--num-gpus":
            following = words[0][number + 1 : number + 2]
            text = value if equals else "".join(w.text.value or "" for w in following)
            return (int(text), word) if text.isdigit() else None
    return None


def too_few(commands: Iterable[Command], total: int) -> Iterator[Finding]:
    """A job of ``total`` GPUs on one node with fewer: its placement groups pend."""
    found = gpus(commands)
    if found is None or total <= found[0]:
        return
    number, word = found
    text = (
        f"the job needs {total} GPUs, and Ray is started with {number}: it waits, "
        "and trains only if other nodes join"
    )
    yield Finding(CONFLICT, "warning", text, word.file, word.line, "--num-gpus")
