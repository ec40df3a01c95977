"""Completion of ``gkd`` by the shell: subcommands, options, cause ids and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import shtab

FILES = ("LOG", "FILE", "MODEL", "PATH")
# bash splits --format=json into three words, of which shtab knows two; and what it does
# not know, such as the command behind `gkd watch --`, may be a file.
BASH = """
_gkd() {
    local -a words=()
    local index word at=$COMP_CWORD
    for index in "${!COMP_WORDS[@]}"; do
        word=${COMP_WORDS[index]}
        if [ "$word" != "=" ]; then
            words+=("$word")
        elif ((index == COMP_CWORD)); then
            words+=("")
        elif ((index < COMP_CWORD)); then
            ((at--))
        fi
    done
    local -a COMP_WORDS=("${words[@]}")
    local COMP_CWORD=$at
    _shtab_gkd
}
complete -o bashdefault -o default -F _gkd gkd
"""


def script(parser: argparse.ArgumentParser, shell: str, causes: Iterable[str]) -> str:
    """What ``shell`` (bash, zsh or fish) is to source; asks nothing of gkd when used.

    ``parser`` is changed and of no other use afterwards.
    """
    for action in _actions(parser):
        if action.dest == "cause":
            action.choices = list(causes)
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    made = str(shtab.complete(parser, shell))
    return made + BASH if shell == "bash" else made


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
