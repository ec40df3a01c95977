"""A server of SGLang's that a launch script starts beside the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_gkd.job.arguments import Option, parsed
from pytest_gkd.job.frameworks.reading import derived
from pytest_gkd.job.overrides import Given, Job
from pytest_gkd.job.shell_values import Command

MODULE = "sglang.launch_server"
DEVICES = "CUDA_VISIBLE_DEVICES"
# sglang/srt/server_args.py (0.5.9 to 0.5.16), of which only these are read.
DEFAULTS = {
    "model_path": None,
    "host": "127.0.0.1",
    "port": 30000,
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "mem_fraction_static": None,
    "context_length": None,
    "enable_dp_attention": False,
}
OPTIONS = {
    "--model-path": Option("model_path"),
    "--model": Option("model_path"),
    "--host": Option("host"),
    "--port": Option("port", "int"),
    "--mem-fraction-static": Option("mem_fraction_static", "float"),
    "--context-length": Option("context_length", "int"),
    "--enable-dp-attention": Option("enable_dp_attention", "true"),
    **{
        name: Option(f"{short}_size", "int")
        for short, long in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline"))
        for name in (f"--{short}-size", f"--{short}", f"--{long}-parallel-size")
    },
}


@dataclass(frozen=True)
class Server:
    """A server's command, and what it is started with."""

    command: Command
    job: Job

    def find(self, key: str) -> Given:
        """One of the keys of ``DEFAULTS``."""
        return self.job.find(key)

    def devices(self) -> tuple[int, ...] | None:
        """The GPUs it is given by number; None where undetermined, or all."""
        word = self.command.environment.get(DEVICES)
        parts = ((word and word.text.value) or "").split(",")
        if not all(part.strip().isdigit() for part in parts):
            return None
        return tuple(int(part) for part in parts)

    def number_of_gpus(self) -> Given:
        """How many GPUs it takes of those that it sees.

        Under DP attention the ranks of DP are among those of TP.
        """
        keys = ("tp_size", "pp_size", "dp_size", "enable_dp_attention")
        return derived(
            "--tp * --pp * --dp",
            lambda tp, pp, dp, shared: tp * pp * (1 if shared else dp),
            *map(self.find, keys),
        )


def servers(commands: Iterable[Command]) -> Iterator[Server]:
    """The servers that these commands start, in their order."""
    for command in commands:
        words = [word.text.value for word in command.words]
        if MODULE in words:
            rest = command.words[words.index(MODULE) + 1 :]
            said = parsed(rest, OPTIONS, "SGLang", abbreviations=False, refuses=False)
            yield Server(command, Job(DEFAULTS, said.said))
