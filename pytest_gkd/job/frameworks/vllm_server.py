"""A vLLM server that a script starts beside its training."""

from __future__ import annotations

import itertools

from pytest_gkd.job.shell_values import Command, Word

# Of vLLM, which still starts it this way, too (vllm/entrypoints/openai/api_server.py).
MODULE = "vllm.entrypoints.openai.api_server"


def arguments(command: Command) -> tuple[Word, ...] | None:
    """What it is given, from the model on; None if the command starts none."""
    values = [word.text.value or "" for word in command.words]
    for at, (first, second) in enumerate(itertools.pairwise(values)):
        is_cli = first.rpartition("/")[2] == "vllm" and second == "serve"
        if is_cli or (first, second) == ("-m", MODULE):
            return command.words[at + 2 :]
    return None
