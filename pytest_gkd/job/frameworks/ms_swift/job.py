"""What a start of ms-swift means: GPUs, batches, models, servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_gkd.job import documents
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.accelerate import Started
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.shell_values import Command, Word

# swift/config/*.json, 4.6.0: a name means a stage, and what goes to the CPU.
ZERO = {
    "zero0": (0, False, False),
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, False, True),
    "zero3_offload": (3, True, True),
}


def combined(
    expression: str, make: Callable[..., Any], *parts: Given, is_set: bool = False
) -> Given:
    """What ``make`` makes of the values; undetermined if one of them or the result is.

    It is the user's if one of the parts is, or if ``is_set``.
    """
    needs = frozenset[str]().union(*(part.needs for part in parts))
    value = None if needs else make(*(part.value for part in parts))
    if needs or value is None:
        needs = needs or frozenset({expression})
        return Given("undetermined", None, None, needs, expression)
    theirs = [part for part in parts if part.source == "user"]
    source = "user" if theirs or is_set else "default"
    word = theirs[0].word if len(parts) == 1 and theirs else None
    return Given(source, value, word, frozenset(), expression)


def unknown(need: str) -> Given:
    """A value that only ``need`` would determine."""
    return Given("undetermined", None, None, frozenset({need}))


def whole(given: Given) -> Given:
    """A value that must be an integer, such as one from the environment."""
    if given.needs or isinstance(given.value, int):
        return given
    text = str(given.value)
    if text.isascii() and text.isdigit() and len(text) < 10:
        return Given(given.source, int(text), given.word)
    return Given("undetermined", None, given.word, frozenset({text}))


def visible(environment: Mapping[str, Word]) -> frozenset[str] | None:
    """The GPUs of CUDA_VISIBLE_DEVICES, None if it is not given, or not certain."""
    word = environment.get("CUDA_VISIBLE_DEVICES")
    if word is None or word.text.value is None:
        return None
    return frozenset(part.strip() for part in word.text.value.split(",") if part)


@dataclass
class Server:
    """A server that the job's script starts.

    ``kind`` is teacher or rollout, ``name`` swift deploy, swift rollout or vllm serve;
    ``blocks`` is whether the training would wait for it to end, which it never does.
    """

    kind: str
    name: str
    command: Command
    job: Job
    findings: list[Finding]
    blocks: bool

    @property
    def port(self) -> int | None:
        """The port it listens on."""
        value = self.job.find("port").value
        return value if isinstance(value, int) else None

    def gpus(self) -> Given:
        """How many GPUs it takes: the product of its parallel sizes."""
        parts = (
            self.job.find(f"{self.prefix}{kind}_parallel_size")
            for kind in ("tensor", "pipeline", "data")
        )
        return combined("its parallel sizes", _product, *parts)

    @property
    def prefix(self) -> str:
        """The prefix of vLLM's own names among its options."""
        return "" if self.name == "vllm serve" else "vllm_"


@dataclass
class Start:
    """A training that is started: its options, environment, and servers beside it.

    ``ray`` are the sections of a Ray configuration, "" the section of its own keys.
    """

    program: str
    job: Job
    environment: Mapping[str, Word]
    command: Command
    servers: list[Server]
    ray: dict[str, dict[str, Override]]
    options: AbstractSet[str]
    launcher: Started
    _found: dict[str, Given] = field(default_factory=dict)

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron trains."""
        return self.program.startswith("megatron")

    def get(self, key: str) -> Given:
        """An option of the command."""
        return self.job.find(key)

    def value(self, key: str) -> Any:
        """An option's value, None if it cannot be determined."""
        return self.job.find(key).value

    @property
    def algorithm(self) -> Given:
        """gkd, grpo, ...; sft and pt for a command without one."""
        if self.program.endswith(" rlhf"):
            return self.get("rlhf_type")
        return Given("user", self.program.partition(" ")[2])

    @property
    def mode(self) -> Given:
        """What generates: none, colocate or server (vllm_mode), or transformers."""
        if self.ray:
            return Given("user", "colocate" if self._shares() else "server")
        return combined(
            "use_vllm, vllm_mode",
            lambda rlhf, uses, mode: (
                "none"
                if rlhf not in ("grpo", "gkd", "ppo")
                else (mode or "")
                if uses
                else "transformers"
            ),
            self.algorithm,
            self.get("use_vllm"),
            self.get("vllm_mode"),
        )

    def _shares(self) -> bool:
        groups = self.ray.get("", {}).get("colocate_groups")
        listed = groups.value if groups else []
        pairs = listed if isinstance(listed, list) else []
        return any(isinstance(p, list) and {"train", "rollout"} <= {*p} for p in pairs)

    # -- GPUs --------------------------------------------------------------------------

    def variable(self, name: str) -> Given:
        """An environment variable as an integer; None if it is not set."""
        word = self.environment.get(name)
        if word is None:
            return Given("default", None)
        if word.text.needs:
            return Given("undetermined", None, word, word.text.needs)
        return whole(Given("user", word.text.value, word))

    @property
    def is_launched(self) -> bool:
        """Whether a launcher before the program says how many processes there are."""
        return self.launcher.name != "python"

    def nodes(self) -> Given:
        """NNODES (swift/cli/main.py, get_torchrun_args), or the launcher's."""
        if self.ray:
            said = self.ray.get("", {}).get("nnodes")
            if said is None:
                return Given("default", 1)
            return whole(Given("user", said.value, said.word))
        if self.is_launched:
            return self.launcher.machines
        own = self.variable("NNODES")
        return Given("default", 1) if own.value is None and not own.needs else own

    def per_node(self) -> Given:
        """NPROC_PER_NODE, or the launcher's; without, one process has all GPUs."""
        if self.is_launched:
            return self.launcher.each or combined(
                "processes / nodes", _exact, self.launcher.processes, self.nodes()
            )
        own = self.variable("NPROC_PER_NODE")
        if own.value is not None or own.needs:
            return own
        if self.variable("NNODES").value is not None:
            return Given("default", 1)  # torchrun's own
        word, seen = (
            self.environment.get("CUDA_VISIBLE_DEVICES"),
            visible(self.environment),
        )
        if word is None or seen is None:
            return unknown("NPROC_PER_NODE or CUDA_VISIBLE_DEVICES")
        return Given("user", len(seen), word)

    def processes(self) -> Given:
        """The world size: nodes times processes, one without NPROC_PER_NODE."""
        if self.ray:
            return self._group("train")
        if self.is_launched:
            return self.launcher.processes
        own = self.variable("NPROC_PER_NODE")
        if own.value is None and not own.needs:
            own = Given("default", 1)
        return combined("NNODES * NPROC_PER_NODE", _product, self.nodes(), own)

    def _group(self, name: str) -> Given:
        own = self.ray.get(name, {}).get("gpus")
        if own is None:
            return Given("default", 0)
        return whole(Given("user", own.value, own.word))

    def trainer(self) -> Given:
        """The GPUs of the training."""
        if self.ray:
            return self._group("train")
        return combined(
            "nodes * gpus_per_node", _product, self.nodes(), self.per_node()
        )

    def rollout(self) -> Given:
        """The GPUs of the rollout: the trainer's, or its server's."""
        if self.ray:
            return self._group("rollout")
        if self.mode.needs:
            return Given("undetermined", None, None, self.mode.needs)
        if self.mode.value != "server":
            return self.trainer()
        return self._of_server("rollout", "gpus")

    def teacher(self) -> Given:
        """The teacher's own GPUs: those of its server."""
        if self.ray:
            return self._group("teacher")
        server = self.get("teacher_model_server")
        if server.value is None and not server.needs:
            return Given("default", 0, expression="it shares those of the trainer")
        return self._of_server("teacher", "gpus")

    def served(self, kind: str) -> Server | None:
        """The one server of that kind in the script."""
        found = [server for server in self.servers if server.kind == kind]
        return found[0] if len(found) == 1 else None

    def _of_server(self, kind: str, key: str) -> Given:
        """A value of the script's server of that kind, if it has one."""
        server = self.served(kind)
        name = "swift rollout" if kind == "rollout" else "the teacher's server"
        if server is None:
            return unknown(f"how {name} is started")
        found = server.gpus() if key == "gpus" else server.job.find(key)
        if found.source == "undetermined" and found.word is None:
            return unknown(f"how {name} is started")
        return found

    # -- batches -----------------------------------------------------------------------

    def model_parallel(self) -> Given:
        """Megatron: the GPUs of one replica (megatron_args.py, _init_distributed)."""
        return combined(
            "TP * PP * CP",
            _product,
            self.get("tensor_model_parallel_size"),
            self.get("pipeline_model_parallel_size"),
            self.get("context_parallel_size"),
        )

    def data_parallel(self) -> Given:
        """Megatron: replicas; undetermined if the world size is not a multiple."""
        return combined(
            "world / (TP * PP * CP)",
            lambda world, one: world // one if one and world % one == 0 else None,
            self.processes(),
            self.model_parallel(),
        )

    def accumulation(self) -> Given:
        """Micro-batches per step.

        Unless given it is 1 for GRPO (rlhf_args.py, _set_default), else what makes a
        batch of 16 (trainers/arguments.py, TrainArgumentsMixin).
        """
        if self.is_megatron:
            return combined(
                "global_batch_size / (micro_batch_size * DP)",
                _exact,
                self.get("global_batch_size"),
                self.get("micro_batch_size"),
                self.data_parallel(),
            )
        own = self.get("gradient_accumulation_steps")
        if own.value is not None or own.needs:
            return own
        if self.algorithm.value == "grpo":
            return Given("default", 1)
        return combined(
            "16 / per_device_train_batch_size / processes",
            lambda size, world: (
                max(1, math.ceil(16 / size / world)) if size and world else None
            ),
            self.get("per_device_train_batch_size"),
            self.processes(),
        )

    def batch(self) -> Given:
        """Samples per optimizer step."""
        if self.is_megatron:
            return self.get("global_batch_size")
        return combined(
            "per_device_train_batch_size * processes * gradient_accumulation_steps",
            lambda size, world, steps, ways: (
                size * world * steps if ways == 1 else None
            ),
            self.get("per_device_train_batch_size"),
            self.processes(),
            self.accumulation(),
            self.get("sequence_parallel_size"),
        )

    # -- all values ------------------------------------------------------------------

    def values(self) -> dict[str, Given]:
        """All values of the job, by the names of ``gkd check``."""
        if not self._found:
            table = "ms-swift-megatron" if self.is_megatron else "ms-swift"
            self._found = {
                name: self.get(key)
                for name, key in names(table).items()
                if key in self.options
            }
            self._found |= self._common() | self._memory()
            if self.program.endswith(" rlhf"):
                self._found |= self._reinforced()
        return self._found

    def _common(self) -> dict[str, Given]:
        algorithm, nodes = self.algorithm, self.nodes()
        tuner = self.get("tuner_type")
        dataset = self.get("dataset")
        rate = self.get("lr" if self.is_megatron else "learning_rate")
        if rate.value is None and not rate.needs:
            # sft_args.py, _init_override; megatron_args.py, _set_default
            rate = combined(
                "the default of tuner_type",
                lambda tuner: 1e-5 if tuner == "full" else 1e-4,
                tuner,
            )
        return {
            "algorithm": algorithm,
            "truncation": self._truncation(),
            "train_files": combined("", _single, dataset) if dataset.value else dataset,
            "learning_rate": rate,
            "gradient_accumulation_steps": self.accumulation(),
            "train_batch_size": self.batch(),
            "dtype": self._dtype(),
            "lora_rank": combined(
                "tuner_type, lora_rank",
                lambda tuner, rank: 0 if tuner == "full" else rank,
                tuner,
                self.get("lora_rank"),
            ),
            "nodes": nodes,
            "gpus_per_node": self.trainer() if self.ray else self.per_node(),
            "trainer_gpus": self.trainer(),
        }

    def _truncation(self) -> Given:
        """What happens to rows over max_length (arguments/rlhf_args.py, _init_grpo;
        base_args/template_args.py; megatron/arguments/rlhf_args.py).
        """
        return combined(
            "truncation_strategy, or else by rlhf_type",
            lambda own, kind: (own or ("left" if kind == "grpo" else "delete")).replace(
                "delete", "drop"
            ),
            self.get("truncation_strategy"),
            self.algorithm,
        )

    def _dtype(self) -> Given:
        """``--bf16 true`` overrides torch_dtype in Megatron (_map_dtype)."""
        for key, name in (("fp16", "float16"), ("bf16", "bfloat16")):
            own = self.get(key)
            if self.is_megatron and own.value is True:
                return Given(own.source, name, own.word)
        return self.get("torch_dtype")

    def _memory(self) -> dict[str, Given]:
        """DeepSpeed's stage, FSDP, and what leaves the GPU."""
        offloads = {
            "offload_param": self.get("offload_model"),
            "offload_optimizer": self.get("offload_optimizer"),
        }
        if not self.program.endswith(" rlhf"):
            offloads = dict.fromkeys(offloads, Given("default", False))
        if self.is_megatron:
            return offloads
        zero = combined("deepspeed", zero_of, self.get("deepspeed"), is_set=False)
        if self.get("deepspeed").value is None and not self.get("deepspeed").needs:
            zero = Given("default", (None, False, False))
        found = {"zero_stage": _part(zero, 0)}
        for number, name in enumerate(offloads, 1):
            found[name] = combined(
                "deepspeed, offload_*",
                lambda both, own: bool(both or own),
                _part(zero, number),
                offloads[name],
            )
        fsdp = self.get("fsdp")
        if fsdp.value in (None, "fsdp2"):  # sft_args.py, _init_fsdp
            value = None if fsdp.value is None else 2
            fsdp = Given(fsdp.source, value, fsdp.word, fsdp.needs)
            found["fsdp_version"] = fsdp
        return found

    def _reinforced(self) -> dict[str, Given]:
        """What generates, and what it learns from."""
        mode, rlhf = self.mode, self.algorithm
        beta = self.get("beta")
        if beta.value is None and not beta.needs:
            # rlhf_args.py: _init_grpo, _init_simpo, _set_default
            beta = combined(
                "the default of rlhf_type",
                lambda kind: {"grpo": 0.04, "gkd": 0.5, "simpo": 2.0}.get(kind, 0.1),
                rlhf,
            )
        found = {
            "loss_beta": beta,
            "loss": self._loss(),
            # GKD has one response per prompt (megatron_args.py sets it so).
            "samples_per_prompt": combined(
                "rlhf_type, num_generations",
                lambda kind, number: 1 if kind == "gkd" else number,
                rlhf,
                self.get("num_generations"),
            ),
            "rollout_engine": combined(
                "use_vllm",
                lambda mode: "vllm" if mode in ("", "colocate", "server") else mode,
                mode,
            ),
            "rollout_gpus": self.rollout(),
            "teacher_gpus": self.teacher(),
            "placement": combined(
                "vllm_mode",
                lambda mode: "split" if mode == "server" else "colocated",
                mode,
                is_set=mode.source == "user",
            ),
        }
        is_split = mode.value == "server"
        parts = [
            self.trainer(),
            *([self.rollout()] if is_split else []),
            self.teacher(),
        ]
        found["total_gpus"] = combined("all together", lambda *n: sum(n), *parts)
        if is_split and not self.ray:
            for name, key in (
                ("tensor_parallel_size", "vllm_tensor_parallel_size"),
                ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
                ("max_model_len", "vllm_max_model_len"),
            ):
                found[name] = self._of_server("rollout", key)
        found |= self._addresses()
        return found

    def _loss(self) -> Given:
        own, rlhf = self.get("loss_type"), self.algorithm
        if own.value is not None or own.needs:
            return combined("", _single, own)
        return combined(
            "the default of rlhf_type",
            # rlhf_args.py, _set_default
            lambda kind: {"dpo": "sigmoid", "cpo": "sigmoid"}.get(kind, kind),
            rlhf,
        )

    def _addresses(self) -> dict[str, Given]:
        """The teacher and its server, and the rollout's server."""
        found: dict[str, Given] = {}
        server = self.get("teacher_model_server")
        teacher = self.get("teacher_model")
        group = self.ray.get("teacher", {})
        if server.value is not None or server.needs:
            found["teacher"] = self._of_server("teacher", "model")
            found["teacher_server_ip"] = combined(
                "teacher_model_server", lambda v: _host(v)[0], server
            )
            found["teacher_server_port"] = combined(
                "teacher_model_server", lambda v: _host(v)[1], server
            )
            for name, key in (
                ("teacher_tensor_parallel_size", "tensor_parallel_size"),
                ("teacher_gpu_memory_utilization", "gpu_memory_utilization"),
                ("teacher_max_model_len", "max_model_len"),
            ):
                served = self.served("teacher")
                prefix = served.prefix if served else ""
                found[name] = self._of_server("teacher", f"{prefix}{key}")
        elif "model" in group and (teacher.value is None):
            found["teacher"] = Given("user", group["model"].value, group["model"].word)
        else:
            found["teacher"] = teacher
        if self.mode.value == "server" and not self.ray:
            hosts, ports = self.get("vllm_server_host"), self.get("vllm_server_port")
            url = self.get("vllm_server_base_url")
            if url.value is not None or url.needs:
                hosts = combined(
                    "vllm_server_base_url", lambda v: _host(_single(v))[0], url
                )
                ports = combined(
                    "vllm_server_base_url", lambda v: _host(_single(v))[1], url
                )
            found["rollout_server_ip"] = combined("", _single, hosts)
            found["rollout_server_port"] = combined("", _single, ports)
        return found


def zero_of(name: str | None) -> tuple[int | None, bool, bool] | None:
    """The stage, and whether parameters and optimizer go to the CPU; None if unknown.

    From one of ms-swift's own names, from JSON, or from a JSON file
    (json_parse_to_dict).
    """
    if name in ZERO:
        return ZERO[name]
    keys = zero_settings(str(name))
    if keys is None:
        return None
    parts = [
        keys.get(f"zero_optimization.{part}.device") not in (None, "none")
        for part in ("offload_param", "offload_optimizer")
    ]
    stage = keys.get("zero_optimization.stage", 0)
    return (stage, parts[0], parts[1]) if isinstance(stage, int) else None


def zero_settings(given: str) -> dict[str, Any] | None:
    """The settings of DeepSpeed's JSON, given inline or as a file, by their dotted
    keys; None if there are none.
    """
    try:
        if given.startswith("{"):
            settings = documents.settings_of(given, "a.json", documents.OMEGACONF)
        else:  # its numbers are JSON's: 2e8 is a number
            settings = documents.settings(Path(given), documents.OMEGACONF)
    except (CheckError, ValueError):
        return None
    found = {setting.key: setting.value for setting in settings}
    return None if found.get("zero_optimization") else found


def _part(given: Given, number: int) -> Given:
    value = None if given.value is None else given.value[number]
    return Given(given.source, value, given.word, given.needs, given.expression)


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _product(a: Any, b: Any, c: Any = 1) -> int | None:
    numbers = [n for n in (a, b, c) if isinstance(n, int)]
    return math.prod(numbers) if len(numbers) == 3 else None


def _exact(total: int, *parts: int) -> int | None:
    one = math.prod(parts)
    return total // one if one > 0 and total % one == 0 else None


def _host(url: Any) -> tuple[str | None, int | None]:
    """Host and port of a URL; neither for a JSON list of teachers."""
    try:
        found = urlsplit(str(url))
        port = found.port or (443 if found.scheme == "https" else 80)
    except ValueError:
        return None, None
    return found.hostname, port if found.hostname else None
