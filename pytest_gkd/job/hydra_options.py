"""Hydra's command line: its own options, and the overrides beside them.

After get_args_parser in hydra/_internal/utils.py of hydra-core 1.3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gkd.job import arguments, overrides
from pytest_gkd.job.arguments import UNKNOWN, Option
from pytest_gkd.job.findings import Finding, note
from pytest_gkd.job.overrides import Override
from pytest_gkd.job.shell_values import Word

CONFIGS = ("job", "hydra", "all")
INFOS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SPELLINGS = {
    ("--help", "-h"): Option("help", "true"),
    ("--hydra-help",): Option("hydra_help", "true"),
    ("--version",): Option("version", "true"),
    ("--cfg", "-c"): Option("cfg", choices=CONFIGS),
    ("--resolve",): Option("resolve", "true"),
    ("--package", "-p"): Option("package"),
    ("--run", "-r"): Option("run", "true"),
    ("--multirun", "-m"): Option("multirun", "true"),
    ("--shell-completion", "-sc"): Option("shell_completion", "true"),
    ("--config-path", "-cp"): Option("config_path"),
    ("--config-name", "-cn"): Option("config_name"),
    ("--config-dir", "-cd"): Option("config_dir"),
    ("--experimental-rerun",): Option("experimental_rerun"),
    ("--info", "-i"): Option("info", nargs="?", choices=INFOS),
}
OPTIONS = {name: option for names, option in SPELLINGS.items() for name in names}
# With these Hydra prints, and starts nothing.
PRINTS = ("help", "hydra_help", "version", "cfg", "info", "shell_completion")


@dataclass
class CommandLine:
    """Hydra's options by name, the overrides, and what Hydra refuses."""

    options: dict[str, Override]
    overrides: list[Override]
    findings: list[Finding]


def read(words: Iterable[Word]) -> CommandLine:
    """What a program with ``@hydra.main`` makes of its words."""
    words = list(words)
    shapes = [word.text.shape for word in words]
    end = shapes.index("--") if "--" in shapes else len(words)
    found = arguments.parsed(words[:end], OPTIONS, "Hydra", positionals=True)
    own = [*found.rest, *words[end + 1 :]]
    options = {one.key: one for one in found.said if one.key}
    uncertain = [one for one in found.said if not one.key]
    findings = [*found.findings, *_apart(words, own)]
    for word, text in overrides.refused(own, sweeps="multirun" in options):
        shown = word.text.shape[:80]
        text = f"{shown} {text}"
        findings.append(
            Finding(UNKNOWN, "error", text, word.file, word.line, _key(word))
        )
    for name in options.keys() & PRINTS:
        word = options[name].word
        text = (
            f"with {word.text.shape[:60]} Hydra only prints something and starts no job"
        )
        findings.append(note(text, word.file, word.line))
    return CommandLine(options, [*uncertain, *overrides.parsed(own)], findings)


def _apart(words: Sequence[Word], own: Sequence[Word]) -> Iterator[Finding]:
    """Overrides in more than one block: argparse refuses those after the first."""
    owned = {id(word) for word in own}
    is_own = [id(word) in owned for word in words]
    if any(word.text.needs for word in words):
        return  # such a word may be anything, or nothing at all
    blocks = [n for n, here in enumerate(is_own) if here and not (n and is_own[n - 1])]
    if len(blocks) > 1 and "--" not in [word.text.shape for word in words]:
        word, option = words[blocks[1]], words[blocks[1] - 1]
        text = (
            f"Hydra refuses {word.text.shape[:60]} and what follows: overrides stand "
            f"together, and its options, such as {option.text.shape[:40]}, before them"
        )
        yield Finding(UNKNOWN, "error", text, word.file, word.line, _key(word))


def _key(word: Word) -> str:
    return word.text.shape.partition("=")[0][:80]
