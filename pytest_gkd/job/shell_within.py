"""Finds the script that a command gives to a shell: a text, or a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pytest_gkd.job.shell_values import HOLE, JOINED, Source, Text, Word

SHELLS = {"bash", "sh", "dash", "zsh", "ksh"}
# Short options that include a c: the script follows.
GIVES = re.compile(r"-[a-z]*c[a-z]*")
VALUED = {"-o", "+o", "-O", "+O", "--rcfile", "--init-file"}
# ssh(1): options with a value.
SSH_VALUED = re.compile(r"-[BbcDEeFIiJLlmOopQRSWw]")
# Programs that start the shell on another machine, or in a container, without this
# environment.
FAR = {"ssh", "docker", "podman", "kubectl", "nerdctl"}
# sbatch(1): short options with a value after a blank; long options without a value.
SBATCH_VALUED = re.compile(r"-[AaBbCcDdeFGiJLMmNnopqStuwx]")
SBATCH_FLAGS = {
    *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "no-kill"),
    *("no-requeue", "overcommit", "oversubscribe", "parsable", "quiet", "reboot"),
    *("requeue", "spread-job", "test-only", "use-min-nodes", "verbose", "wait"),
}
# Suffixes of a script without a shell before it, and what may be before it.
SCRIPT = re.compile(r"[^:=]*\.(?:sh|bash|slurm|sbatch)")
STARTERS = {
    *("srun", "nohup", "env", "sudo", "setsid", "timeout", "nice", "numactl"),
    *("mpirun", "singularity", "apptainer"),
}
# Programs that may be a training, or that it needs to run.
PROGRAM = re.compile(
    r"python[\d.]*|torchrun|deepspeed|accelerate|trl|swift|megatron|uv|ray|vllm|sglang"
    r"|.+\.py"
)


class Within(NamedTuple):
    """A script among the words of a command: its words, its arguments, and whether it
    sees what the outer one exports.
    """

    words: Sequence[Word]
    arguments: tuple[Word, ...]
    inherits: bool


def names(words: Sequence[Word]) -> list[str]:
    """The words as program names, without their folders."""
    return [(word.text.value or "").rpartition("/")[2] for word in words]


def inherits(words: Sequence[Word]) -> bool:
    """Whether what the words start sees what the script exports.

    A job on Ray runs in its own environment (ray_environment).
    """
    return not (set(names(words)) & FAR or is_submitted(words))


def exported(words: Sequence[Word]) -> Word | None:
    """The last ``--export=`` given to Slurm's srun or sbatch."""
    if not {"srun", "sbatch"} & set(names(words)):
        return None
    given = [word for word in words if word.text.shape.startswith("--export=")]
    return given[-1] if given else None


def trains(words: Sequence[Word]) -> bool:
    """Whether a command may be a training, or something that one needs to run."""
    return any(PROGRAM.fullmatch(name) for name in names(words))


def is_submitted(words: Sequence[Word]) -> bool:
    """Whether the words are a ``ray job submit``."""
    found = names(words)
    at = found.index("ray") if "ray" in found else len(found)
    return found[at + 1 : at + 3] == ["job", "submit"]


def script(words: Sequence[Word]) -> Within | None:
    """The script among the words of a command; None if there is none."""
    found = names(words)
    for at, name in enumerate(found):
        if name in SHELLS and (given := _given(words, at)) is not None:
            behind = tuple(words[given + 2 :])
            return Within([words[given]], behind, inherits(words[:at]))
    if "ssh" in found:
        asked = words[_behind_host(words, found.index("ssh")) :]
        if any(re.search(r"\s", word.text.shape) for word in asked):
            return Within(asked, (), inherits=False)
    if "sbatch" in found:
        for at, word in enumerate(words):
            name, equals, text = word.text.shape.partition("=")
            if name == "--wrap" and equals:
                whole = word._replace(text=Text(text, word.text.needs))
                return Within([whole], (), inherits=True)
            if name == "--wrap" and at + 1 < len(words):
                return Within([words[at + 1]], (), inherits=True)
    return None


def file(words: Sequence[Word]) -> Within | None:
    """The script file among the words of a command."""
    found = names(words)
    at: int | None = None
    for number, name in enumerate(found):
        if name in SHELLS:
            at, gives = _behind_options(words, number)
            at = None if gives else at
            break
    else:
        if "sbatch" in found:
            at = _behind_sbatch(words, found.index("sbatch"))
        elif found and (found[0] in STARTERS or SCRIPT.fullmatch(found[0])):
            fits = (n for n, name in enumerate(found) if SCRIPT.fullmatch(name))
            at = next(fits, None)
    if at is None or at >= len(words):
        return None
    return Within([words[at]], tuple(words[at + 1 :]), inherits(words[:at]))


def is_copied(words: Sequence[Word]) -> bool:
    """Whether the file is run as a copy in another folder, as by Slurm's sbatch."""
    found = names(words)
    return "sbatch" in found and not set(found) & SHELLS


def _behind_sbatch(words: Sequence[Word], sbatch: int) -> int:
    at = sbatch + 1
    while at < len(words) and words[at].text.shape.startswith("-"):
        option = words[at].text.shape
        is_long = option.startswith("--") and "=" not in option
        valued = is_long and option[2:] not in SBATCH_FLAGS
        at += 2 if valued or SBATCH_VALUED.fullmatch(option) else 1
    return at


def _given(words: Sequence[Word], shell: int) -> int | None:
    """The position of the script after a shell's ``-c``."""
    at, gives = _behind_options(words, shell)
    return at if "c" in gives and at < len(words) else None


def _behind_options(words: Sequence[Word], shell: int) -> tuple[int, str]:
    """Where a shell's options end, and whether it reads a text (c) or its input (s)."""
    at, gives = shell + 1, ""
    while at < len(words) and words[at].text.shape[:1] in ("-", "+"):
        option = words[at].text.shape
        gives += "c" if GIVES.fullmatch(option) else "s" if option == "-s" else ""
        at += 2 if option in VALUED or option.endswith("o") else 1
        if option == "--":
            break
    return at, gives


def _behind_host(words: Sequence[Word], ssh: int) -> int:
    at = ssh + 1
    while at < len(words) and words[at].text.shape.startswith("-"):
        at += 2 if SSH_VALUED.fullmatch(words[at].text.shape) else 1
    return at + 1


def reads_its_input(words: Sequence[Word]) -> Within | None:
    """Whether a command takes its script from its standard input."""
    found = names(words)
    for at, name in enumerate(found):
        if name in SHELLS:
            shapes = [word.text.shape for word in words[at + 1 :]]
            options = [one for one in shapes if one[:1] in ("-", "+")]
            if "-s" in options or len(options) == len(shapes):
                behind = shapes.index("-s") + 1 if "-s" in shapes else len(shapes)
                rest = [w for w in words[at + 1 + behind :] if w.text.shape != "--"]
                return Within((), tuple(rest), inherits(words[:at]))
            return None
    if "ssh" in found and _behind_host(words, found.index("ssh")) == len(words):
        return Within((), (), inherits=False)
    if found[:1] == ["sbatch"] and _behind_sbatch(words, 0) >= len(words):
        return Within((), (), inherits=True)
    return None


def source(text: Text, file: str, line: int) -> Source:
    """A separate script from the text of a word that begins on that line."""
    lines, whole, offset = [(0, line)], "", 0
    for part in re.split(f"(\n|{JOINED})", text.shape):
        if part in ("\n", JOINED):
            line += 1
        added = "" if part == JOINED else part
        whole += added
        offset += len(added.encode())
        if part in ("\n", JOINED):
            lines.append((offset, line))
    return Source(whole.encode(), file, tuple(lines), text.needs)


def is_whole(text: Text) -> bool:
    """Whether any part of it is certain, so that it can be read."""
    return bool(text.shape.replace(HOLE, "").strip())
