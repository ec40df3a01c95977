"""Starts a real vLLM engine, generates with it, and reads its weights."""

from __future__ import annotations

import gc
import importlib
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import procfs, tree
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import collector, exit_reasons
from pytest_gkd.workload.deadline import GRACE_S, begun, late_fault
from pytest_gkd.workload.engine import engine_errors, load_times
from pytest_gkd.workload.engine.engine_config import EngineConfig
from pytest_gkd.workload.sync import push
from pytest_gkd.workload.sync.broadcast import Info, Rendezvous
from pytest_gkd.workload.sync.push import ParameterMap

if TYPE_CHECKING:
    from torch import Tensor

# What vLLM takes by itself for one process; on a CPU vLLM 0.22 starts another process
# where that is called "uni" (platforms/cpu.py).
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
EXTENSION = "pytest_gkd.workload.engine.engine_worker.WeightReceiver"
MAX_SEQUENCES = 16
CLOSE_BUDGET_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True)
class Completion:
    """What the engine made of one prompt.

    ``logprobs`` (nats) are those of the tokens in ``token_ids``, one each.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def prepare_environment(config: EngineConfig) -> None:
    """Set what vLLM reads from the environment, before it is imported.

    The user's own values are kept for variables that only control logging.
    """
    Path(config.socket_dir).mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if config.multiprocess else "0"
    os.environ["VLLM_RPC_BASE_PATH"] = config.socket_dir
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # Setting it keeps the tokenizers' threads from warning about every fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    prepare_torch(config)
    if config.settings.device == "cpu" and config.settings.tensor_parallel_size > 1:
        # A rank wants a NUMA node of its own; few machines have one to spare.
        os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "1")
    if config.offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


def prepare_torch(config: EngineConfig) -> None:
    """Set what torch and numpy read when they are imported, by whichever comes first:
    the engine, the trainer or a tokenizer.
    """
    if config.settings.device == "cpu":
        # With other work running, OpenMP threads that spin while waiting cost the most.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # A thread that numpy's OpenBLAS starts on import would forbid a fork.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # vLLM's sampler compiles the ranking of log-probabilities even in eager mode:
        # 2.9 s, 23 s of CPU time where nothing is cached, and a C++ compiler, for what
        # takes no time uncompiled.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def import_vllm() -> None:
    """Import vLLM without garbage collections, which took 1.4 s of 6.4."""
    with collector.paused():
        importlib.import_module("vllm.entrypoints.llm")


class Engine:
    """One vLLM engine. After any exception it must not be used again: partly loaded
    weights stay, and the next ``generate`` may never return.
    """

    def __init__(
        self, config: EngineConfig, budget_s: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Start it with the weights in ``config.model``; raises whatever vLLM raises.

        ``budget_s`` says how many seconds a call into its processes may take.
        """
        from pytest_gkd.workload.engine import engine_fork, engine_worker

        engine_worker.keep_weights_in_place()
        engine_errors.forget(config.socket_dir)
        self.config = config
        self._shards = config.settings.tensor_parallel_size > 1
        self._budget_s = budget_s
        how = engine_fork.choose(config) if config.multiprocess else "in this process"
        started = monotonic()
        before = _children()
        kills = exit_reasons.oom_kills()
        with engine_fork.chosen(how):
            from vllm import LLM

            with exit_reasons.recorded() as self.cores:
                try:
                    self.llm: Any = LLM(**arguments(config))
                except RuntimeError as error:
                    codes = exit_reasons.exit_codes(self.cores)
                    if not codes:
                        raise
                    said = engine_errors.kept(config.socket_dir, config.model)
                    if said is not None and min(codes.values()) > 0:
                        raise said from error
                    raise exit_reasons.ended_fault(
                        codes, "while it started", kills
                    ) from error
                except AttributeError as error:
                    if fault := engine_errors.missing_key(error, config.model):
                        raise fault from error
                    raise
        self._processes = _children() - before
        self.start_s = monotonic() - started
        self.how = how

    def describe(self) -> dict[str, Any]:
        """What is running, as facts for the report."""
        import vllm

        identity = self.identities()[0]
        return {
            "vllm": str(vllm.__version__),
            "engine": f"vLLM {vllm.__version__}, processes: {self.how}",
            "engine_start_s": round(self.start_s, 2),
            "engine_dtype": self.config.dtype,
            "engine_device": identity["device"],
            "max_model_len_tokens": self.config.max_model_len,
            **self._load_times().facts(),
        }

    def slow_loading(self) -> str:
        """What made loading the weights slow, and what would help; empty if nothing."""
        from vllm.config import load

        strategies = get_args(getattr(load, "SafetensorsLoadStrategy", None))
        return load_times.advice(
            self._load_times(),
            Path(self.config.model),
            prefetches="prefetch" in strategies,
        )

    def _load_times(self) -> load_times.LoadTimes:
        # The slowest rank's: the others wait for it.
        ranks = [load_times.LoadTimes(**one) for one in self._rpc("gkd_load_times")]
        return max(ranks, key=lambda one: one.seconds)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of ``texts`` by the tokenizer that the engine loaded."""
        tokenizer = self.llm.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Completion]:
        """One completion per prompt (token ids); ``temperature`` 0 is greedy."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed + number,
                logprobs=0,  # the chosen token's alone
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]

        outputs = self.watched(
            lambda: self.llm.generate(asked, sampling, use_tqdm=False), "generation"
        )
        return [_completion(output.outputs[0]) for output in outputs]

    def identities(self) -> list[dict[str, str]]:
        """Device and UUID of every rank."""
        return self._rpc("gkd_identity")

    def parameter_map(self, names: list[str]) -> ParameterMap:
        """Where the engine keeps the trainer tensors ``names``."""
        answer = self._rpc("gkd_parameters", names)[0]
        return push.read_map(names, answer, shards=self._shards)

    def digests(self, mapped: ParameterMap) -> dict[str, str]:
        """A digest per trainer tensor, computed where the parameters are."""
        inexact = sorted(mapped.by_content)
        ranks = self._rpc("gkd_digests", dict(mapped.engine_names), inexact)
        found = push.whole(ranks, shards=self._shards)
        if not mapped.unmapped:
            # Parameters that no tensor of the trainer's could mean, such as scales.
            found.pop("*", None)
        return found

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``weights`` in place, in this process."""
        self._rpc("gkd_load", weights)
        self.forget_prefixes()

    def receive(self, infos: list[Info], rendezvous: Rendezvous) -> None:
        """Join the trainer's broadcast and load what it sends."""
        self._rpc("gkd_receive", infos, asdict(rendezvous))
        self.forget_prefixes()

    def take_shared(self, infos: list[Info], handles: str) -> None:
        """Load from the memory behind CUDA IPC ``handles``."""
        self._rpc("gkd_import", infos, handles)
        self.forget_prefixes()

    def open_shared(self, handles: str) -> list[Any]:
        """What each rank reads through CUDA IPC ``handles``: the first tensor's values,
        or in words why it cannot."""
        return self._rpc("gkd_open", handles)

    def forget_prefixes(self) -> None:
        """Drop cached keys and values, which come from the old weights.

        Raises StageFault ``sync.not-applied`` where the engine keeps them.
        """
        # False, or None before it told: vllm/v1/core/block_pool.py, reset_prefix_cache.
        if self.llm.reset_prefix_cache() is False:
            raise StageFault(
                "sync.not-applied",
                "the engine did not drop the keys and values that it cached for the "
                "old weights (reset_prefix_cache returned False, as it does while "
                "requests are running); expected none after new weights",
            )

    def close(self) -> None:
        """End the engine's processes, or free its memory in this one."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        # Its shutdown waits for the core, which a stuck one never answers.
        ending = begun(llm.llm_engine.engine_core.shutdown, "the engine's shutdown")
        wait([ending], CLOSE_BUDGET_S)
        for pid, start in self._processes:
            tree.stop(pid, itself=True, start=start, limit_s=CLOSE_BUDGET_S)
        del llm
        gc.collect()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        # vLLM checks its own timeout in the engine core: stopped, it never returns.
        return self.watched(
            lambda: self.llm.collective_rpc(method, args=args),
            f"the call of {method} in the engine's processes",
            self._budget_s(),
        )

    def watched(
        self, call: Callable[[], list[Any]], what: str, budget_s: float = math.inf
    ) -> list[Any]:
        """``call()``, given up after ``budget_s`` or when an engine's process is gone.

        vLLM may wait forever for the answer of a dead process; otherwise it only says
        that something failed, and to look above.
        """
        if not self.config.multiprocess:
            return call()
        kills = exit_reasons.oom_kills()
        until = monotonic() + budget_s
        running = begun(call, what)
        while not wait([running], POLL_S).done and monotonic() < until:
            if exit_reasons.exit_codes(self.cores):
                wait([running], GRACE_S)
                break
        codes = exit_reasons.exit_codes(self.cores)
        error = running.exception() if running.done() else None
        if codes and (not running.done() or error is not None):
            raise exit_reasons.ended_fault(codes, f"during {what}", kills) from error
        if not running.done():
            how = f"had not finished after {budget_s:.1f} s"
            raise late_fault([what], how, "sync.stuck")
        if error is not None:
            said = engine_errors.kept(self.config.socket_dir, self.config.model)
            if isinstance(said, StageFault):
                raise said from error
        return running.result()


def _children() -> set[tuple[int, int]]:
    """Pid and start of all processes below this one, but for resource trackers.

    Those end by themselves and unlink the shared memory that others leave.
    """
    table = procfs.table()
    pids = procfs.below([os.getpid()], table) - {os.getpid()}
    return {(pid, table[pid].start) for pid in pids if not procfs.is_tracker(pid)}


def _completion(output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    logprobs = tuple(
        float(entry[token].logprob)
        for token, entry in zip(tokens, output.logprobs or [], strict=True)
    )
    return Completion(tokens, logprobs, str(output.finish_reason))


def arguments(config: EngineConfig) -> dict[str, Any]:
    """What ``vllm.LLM`` is made with."""
    given: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "enforce_eager": True,
        "max_model_len": config.max_model_len,
        "max_num_seqs": MAX_SEQUENCES,
        "tensor_parallel_size": config.settings.tensor_parallel_size,
        "trust_remote_code": config.settings.trust_remote_code,
        "gpu_memory_utilization": config.settings.gpu_memory_utilization,
        "worker_extension_cls": EXTENSION,
        "seed": 0,
    }
    if config.settings.tensor_parallel_size > 1:
        # In a placement group of Ray's vLLM would have Ray start the workers.
        given["distributed_executor_backend"] = "mp"
    elif config.settings.device == "cpu" and not config.multiprocess:
        given["distributed_executor_backend"] = UNIPROC
    if config.kv_cache_bytes is not None:
        given["kv_cache_memory_bytes"] = config.kv_cache_bytes
    return given
