"""An SGLang server that a launch script starts beside the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_gkd.job.arguments import Option, parsed
from pytest_gkd.job.frameworks.reading import derived
from pytest_gkd.job.overrides import Given, Job
from pytest_gkd.job.served_memory import Served
from pytest_gkd.job.shell_values import Command

MODULE = "sglang.launch_server"
DEVICES = "CUDA_VISIBLE_DEVICES"
# sglang/srt/server_args.py (0.5.9 to 0.5.16); only these options are read.
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
    "chunked_prefill_size": None,
    "max_running_requests": None,
    "disable_cuda_graph": False,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "quantization": None,
}
OPTIONS = {
    "--model-path": Option("model_path"),
    "--model": Option("model_path"),
    "--host": Option("host"),
    "--port": Option("port", "int"),
    "--mem-fraction-static": Option("mem_fraction_static", "float"),
    "--context-length": Option("context_length", "int"),
    "--enable-dp-attention": Option("enable_dp_attention", "true"),
    "--chunked-prefill-size": Option("chunked_prefill_size", "int"),
    "--max-running-requests": Option("max_running_requests", "int"),
    "--disable-cuda-graph": Option("disable_cuda_graph", "true"),
    "--dtype": Option("dtype"),
    "--kv-cache-dtype": Option("kv_cache_dtype"),
    "--quantization": Option("quantization"),
    **{
        name: Option(f"{short}_size", "int")
        for short, long in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline"))
        for name in (f"--{short}-size", f"--{short}", f"--{long}-parallel-size")
    },
}
# The ones in a memory plan, by Engine's field names, with the option of each.
SIZES = {
    "tensor": ("tp_size", "--tp"),
    "pipeline": ("pp_size", "--pp"),
    "share": ("mem_fraction_static", "--mem-fraction-static"),
    "length": ("context_length", "--context-length"),
    "batched_tokens": ("chunked_prefill_size", "--chunked-prefill-size"),
    "sequences": ("max_running_requests", "--max-running-requests"),
    "eager": ("disable_cuda_graph", "--disable-cuda-graph"),
    "dtype": ("dtype", "--dtype"),
}
UNPLANNED: dict[str, tuple[str, tuple[object, ...]]] = {
    "enable_dp_attention": ("the memory of data parallel attention", (False,)),
    "kv_cache_dtype": ("the cache in that dtype", ("auto",)),
    "quantization": ("the memory of quantised weights", (None,)),
}
# Tokens whose log-probabilities are computed at once; chunking is on by default from
# 0.5.16 on, off before (sglang/srt/environ.py).
CHUNK = 2048
CHUNKS = ("SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", "SGLANG_ENABLE_LOGPROB_CHUNK")


@dataclass(frozen=True)
class Server:
    """A server's command, and its options."""

    command: Command
    job: Job

    def find(self, key: str) -> Given:
        """One of the keys of ``DEFAULTS``."""
        return self.job.find(key)

    def devices(self) -> tuple[int, ...] | None:
        """The GPUs it is given by index; None if undetermined, or all."""
        word = self.command.environment.get(DEVICES)
        parts = ((word and word.text.value) or "").split(",")
        if not all(part.strip().isdigit() for part in parts):
            return None
        return tuple(int(part) for part in parts)

    def served(self, role: str, *, in_chunks: bool) -> Served:
        """The server for a memory plan; ``in_chunks`` says that its release computes
        log-probabilities in chunks unless the environment says otherwise.
        """
        sizes = {name: self.find(key) for name, (key, _) in SIZES.items()}
        model = self.find("model_path")
        doubts = [
            f"{key} is not certain"
            for key, given in {"its model": model, **sizes}.items()
            if given.needs
        ]
        for key, (text, harmless) in UNPLANNED.items():
            given = self.find(key)
            if given.needs or given.value not in harmless:
                doubts.append(f"{text} is not known")
        for name in CHUNKS:
            word = self.command.environment.get(name)
            if word is not None:
                in_chunks = str(word.text.value).lower() in ("1", "true", "yes", "y")
        found = {name: given.value for name, given in sizes.items()}
        found["scored_tokens"] = CHUNK if in_chunks else None
        keys = {name: option for name, (_, option) in SIZES.items()}
        doubt = next(iter(doubts), "")
        return Served(role, model.value, found, "sglang", keys, doubt)

    def number_of_gpus(self) -> Given:
        """How many of the visible GPUs it takes.

        Under DP attention the DP ranks are among the TP ranks.
        """
        keys = ("tp_size", "pp_size", "dp_size", "enable_dp_attention")
        return derived(
            "--tp * --pp * --dp",
            lambda tp, pp, dp, shared: tp * pp * (1 if shared else dp),
            *map(self.find, keys),
        )


def servers(commands: Iterable[Command]) -> Iterator[Server]:
    """The servers that these commands start, in order."""
    for command in commands:
        words = [word.text.value for word in command.words]
        if MODULE in words:
            rest = command.words[words.index(MODULE) + 1 :]
            said = parsed(rest, OPTIONS, "SGLang", abbreviations=False, refuses=False)
            yield Server(command, Job(DEFAULTS, said.said))
