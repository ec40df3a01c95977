"""What TRL makes of a job's values, and which of them it refuses.

Each rule names its source file, in TRL 1.16.0 unless stated otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_gkd.job import documents, model_files
from pytest_gkd.job.arguments import MISSING
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks import vllm_server
from pytest_gkd.job.frameworks.accelerate import (
    CONFLICT,
    COUNT,
    PARALLEL,
    Started,
    existing,
)
from pytest_gkd.job.frameworks.reading import names
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Command, Word

LOCAL = ("0.0.0.0", "127.0.0.1", "localhost")  # noqa: S104 - names of this host
TEACHER = "teacher_model_name_or_path"
# The default port of both `trl vllm-serve` and `vllm serve`.
SERVER_PORT = 8000


@dataclass
class TrlJob:
    """A start of TRL on one path through the script.

    ``fields`` are the keys that its script reads, ``classes`` what it reads them into;
    ``unread`` says why defaults are not known, if so. ``is_upstream``: the script is
    TRL's own, so that what it does with the values is known.
    """

    job: Job
    launcher: Started
    launch: Launch
    fields: frozenset[str]
    classes: frozenset[str]
    unread: frozenset[str]
    release: Release
    is_upstream: bool

    @property
    def whose(self) -> str:
        """The release that judges, for messages."""
        return f"TRL {self.release}"

    def since(self, release: str) -> bool:
        """Whether the judging release is that one or a later one."""
        return self.release.is_at_least(release)

    def find(self, key: str) -> Given:
        """A key's value; None for one that the script does not read."""
        given = self.job.find(key)
        if given.needs == {key} and given.word is None:
            if key not in self.fields and not self.unread:
                return Given("default")
            needs = self.unread or frozenset({"the script that reads it"})
            return Given("undetermined", needs=needs)
        return given

    def number(self, key: str) -> Any:
        """A key's value if it is a certain number, else None."""
        value = self.find(key).value
        return value if type(value) in (int, float) else None

    def finding(self, cause: str, level: str, key: str, text: str) -> Finding:
        """A finding at the place where the key is given, or at the start."""
        word, start = self.find(key).word, self.launch.command
        file, line = (
            (start.file, start.line) if word is None else (word.file, word.line)
        )
        return Finding(cause, level, text, file, line, key)

    @property
    def place(self) -> Path:
        """The folder of the script."""
        return Path(self.launch.command.file).parent

    @property
    def server(self) -> Server | None:
        """The vLLM server that the same script starts, if any."""
        found = servers(self.launch.beside)
        return found[0] if len(found) == 1 else None


@dataclass
class Server:
    """A ``trl vllm-serve`` or ``vllm serve``: its words, and options by name."""

    command: Command
    is_trl: bool
    words: tuple[Word, ...]
    said: dict[str, Word]

    def value(self, name: str, default: Any) -> Any:
        """An option, as an integer if it is one; None if it cannot be determined."""
        word = self.said.get(name)
        if word is None:
            return default
        text = word.text.value
        return int(text) if text and text.isdecimal() and len(text) < 9 else text


def servers(commands: Iterable[Command]) -> list[Server]:
    """The vLLM servers that the commands start."""
    return [server for one in commands if (server := _server(one)) is not None]


def _server(command: Command) -> Server | None:
    values = [word.text.value or "" for word in command.words]
    pairs = enumerate(itertools.pairwise(values))
    own = [
        command.words[at + 2 :]
        for at, (first, second) in pairs
        if (first.rpartition("/")[2], second) == ("trl", "vllm-serve")
    ]
    rest = own[0] if own else vllm_server.arguments(command)
    if rest is None:
        return None
    said = {}
    for number, word in enumerate(rest):
        name, equals, inline = word.text.shape.partition("=")
        if not name.startswith("--"):
            continue
        key = name[2:].replace("-", "_")
        if equals:
            text = type(word.text)(inline, word.text.needs)
            said[key] = word._replace(text=text)
        elif number + 1 < len(rest):
            said[key] = rest[number + 1]
    return Server(command, bool(own), rest, said)


# -- values ------------------------------------------------------------------------


def values(job: TrlJob) -> dict[str, Given]:
    """All values of the job by the names of ``gkd check``."""
    found = {}
    for name, key in (names("trl") | names("trl-memory")).items():
        if key in job.fields or (job.unread and not job.fields):
            found[name] = job.find(key)
    if {"GKDConfig", "GOLDConfig"} & job.classes:
        # Their compute_loss ignores SFTConfig's loss_type and reads beta.
        found.pop("loss", None)
        # experimental/utils.py, DataCollatorForChatML: the last max_length tokens stay.
        found["truncation"] = Given("default", "left", expression="its only way")
    asks = {"GRPOConfig", "DistillationConfig"} & job.classes
    if asks and "max_prompt_length" not in job.fields:
        # GRPO from 0.28 on, Distillation since it left experimental: only the model and
        # its engine bound a prompt.
        found["truncation"] = Given("default", "keep", expression="its only way")
    elif "DistillationConfig" in job.classes:
        # experimental/distillation/distillation_trainer.py, _DistillationCollator
        side = "the tokenizer's truncation_side, right unless its files say left"
        found["truncation"] = Given("default", "right", expression=side)
    if "max_new_tokens" in job.fields and "max_response_length" not in found:
        found["max_response_length"] = job.find("max_new_tokens")
    if job.unread and "student" not in found:
        found["student"] = job.find("model_name_or_path")
    peft = job.find("use_peft")
    if "lora_r" in job.fields:
        is_off = peft.value is False
        found["lora_rank"] = Given(peft.source, 0, peft.word) if is_off else peft
        if peft.value is True:
            found["lora_rank"] = job.find("lora_r")
    found |= _sharding(job) | _places(job)
    sizes = [
        job.find("per_device_train_batch_size"),
        found["trainer_gpus"],
        job.find("gradient_accumulation_steps"),
    ]
    if "per_device_train_batch_size" in job.fields:
        found["train_batch_size"] = _product(
            sizes, "per_device_train_batch_size * trainer_gpus * accumulation"
        )
    return found


def _product(parts: list[Given], expression: str) -> Given:
    needs = frozenset[str]().union(*(part.needs for part in parts))
    whole = 1
    for part in parts:
        if type(part.value) is not int:
            needs = needs or frozenset({expression})
            return Given("undetermined", None, None, needs, expression)
        whole *= part.value
    source = "user" if any(part.source == "user" for part in parts) else "default"
    return Given(source, whole, None, NOBODY, expression)


def _sharding(job: TrlJob) -> dict[str, Given]:
    """What ZeRO, FSDP and accelerate's other parallelism are set to."""
    find, found = job.launcher.find, {}
    ds = deepspeed(job)
    for name, key, path in (
        ("zero_stage", "zero_stage", "zero_optimization.stage"),
        ("offload_param", "offload_param_device", "zero_optimization.offload_param"),
        (
            "offload_optimizer",
            "offload_optimizer_device",
            "zero_optimization.offload_optimizer",
        ),
    ):
        given = ds.get(path) or ds.get(f"{path}.device") or job.launcher.given.get(key)
        if given is not None:
            read = find(key) if given.key == key else _said(given)
            if name != "zero_stage" and not read.needs:
                is_on = read.value not in (None, "none", {})
                read = Given(read.source, is_on, read.word)
            found[name] = read
    if find("distributed_type").value == "FSDP" or find("use_fsdp").value is True:
        found["fsdp_version"] = find("fsdp_version", 1)
        found["offload_param"] = find("fsdp_offload_params", default=False)
    context = [find(f"{PARALLEL}{name}_size") for name in ("cp", "sp")]
    if any(one.source != "default" for one in context):
        used = [one for one in context if one.needs or one.value not in (None, 1)]
        found["context_parallel_size"] = used[0] if used else context[0]
    tensor = find(f"{PARALLEL}tp_size")
    if tensor.source != "default":
        found["train_tensor_parallel_size"] = tensor
    return found


def _said(override: Override) -> Given:
    source = "undetermined" if override.needs else "user"
    return Given(source, override.value, override.word, override.needs)


def deepspeed(job: TrlJob) -> dict[str, Override]:
    """The settings of DeepSpeed's own file, if one is named and exists."""
    given = job.find("deepspeed")
    if given.value is None:
        given = job.launcher.find("deepspeed_config_file")
    if not isinstance(given.value, str):
        return {}
    path = existing(given.value, job.place)
    try:
        settings = documents.settings(path) if path else []
    except CheckError:
        return {}
    return {one.key: one for one in settings}


def _places(job: TrlJob) -> dict[str, Given]:
    """The GPUs for the trainer, the rollouts and the teacher."""
    launcher = job.launcher
    trainer, machines = launcher.processes, launcher.machines
    if launcher.name == "python":
        # Without a launcher, Trainer takes all visible GPUs (nn.DataParallel).
        visible = visible_gpus(job.launch.command)
        needs = frozenset({"CUDA_VISIBLE_DEVICES", COUNT})
        trainer = Given("undetermined", needs=needs)
        if visible is not None:
            trainer = Given("user", len(visible), expression="CUDA_VISIBLE_DEVICES")
    found = {"nodes": machines, "trainer_gpus": trainer}
    sizes = (trainer.value, machines.value)
    if all(type(one) is int and one > 0 for one in sizes):
        found["gpus_per_node"] = trainer
        if machines.value > 1:
            each = trainer.value // machines.value
            text = "trainer_gpus / nodes"
            found["gpus_per_node"] = Given(trainer.source, each, expression=text)
    generates = {"max_completion_length", "max_new_tokens"} & job.fields
    server, mode = job.server, job.find("vllm_mode")
    is_known = not job.unread or mode.source == "user"
    is_split = mode.value == "server" and job.find("use_vllm").value is True
    if not is_known:
        is_split = server is not None
    if not generates and is_known:
        return {**found, "total_gpus": trainer}
    rollout = trainer
    if is_split:
        rollout = Given("undetermined", needs=frozenset({"the vLLM server"}))
        if server is not None:
            sizes_of = [
                server.value(f"{kind}_parallel_size", 1)
                for kind in ("tensor", "data", "pipeline")
            ]
            if all(type(size) is int for size in sizes_of):
                whole = sizes_of[0] * sizes_of[1] * sizes_of[2]
                rollout = Given("user", whole, expression="the vLLM server's")
    found["rollout_gpus"] = rollout
    if is_known:
        use = job.find("use_vllm")
        engine = "vllm" if use.value is True else "transformers"
        found["rollout_engine"] = (
            use if use.needs else Given(use.source, engine, use.word)
        )
    found["placement"] = Given("user" if is_split else mode.source, "split")
    if not is_split:
        text = "no vLLM server"
        found["placement"] = Given("default", "colocated", mode.word, NOBODY, text)
    if TEACHER in job.fields:
        is_served = job.find("teacher_model_server_url").value
        found["teacher_gpus"] = Given("default", 0, expression="in the trainer")
        if is_served:
            needs = frozenset({"the teacher's server"})
            found["teacher_gpus"] = Given("undetermined", needs=needs)
    parts = [trainer, *([rollout] if is_split else [])]
    parts += [found[name] for name in ("teacher_gpus",) if name in found]
    found["total_gpus"] = _sum(parts)
    return found


def _sum(parts: list[Given]) -> Given:
    needs = frozenset[str]().union(*(part.needs for part in parts))
    if needs or any(type(part.value) is not int for part in parts):
        return Given("undetermined", needs=needs or frozenset({COUNT}))
    return Given("user", sum(part.value for part in parts), expression="all together")


def visible_gpus(command: Command) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES gives to a command, None if undetermined."""
    word = command.environment.get("CUDA_VISIBLE_DEVICES")
    if word is None or word.text.value is None:
        return None
    return [one.strip() for one in word.text.value.split(",") if one.strip()]


# -- rules -------------------------------------------------------------------------


def findings(job: TrlJob) -> Iterator[Finding]:
    """What is wrong with the job's values."""
    for rule in RULES:
        yield from rule(job)


def _world(job: TrlJob) -> int | None:
    value = job.launcher.processes.value
    return value if type(value) is int and value > 0 else None


def _precision(job: TrlJob) -> Iterator[Finding]:
    # transformers 5.19.0, training_args.py: _validate_args; TRL's bf16 is on without
    # fp16 (trl/trainer/base_config.py).
    for pair in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if all(job.find(key).value is True for key in pair):
            text = f"{pair[0]} and {pair[1]} are both on: transformers refuses it"
            yield job.finding(CONFLICT, "error", pair[1], text)
    # trl/trainer/model_config.py: __post_init__
    if all(job.find(key).value is True for key in ("load_in_8bit", "load_in_4bit")):
        text = f"load_in_8bit and load_in_4bit are both on: {job.whose} refuses it"
        yield job.finding(CONFLICT, "error", "load_in_4bit", text)


def _ranges(job: TrlJob) -> Iterator[Finding]:
    # trl/experimental/{gkd/gkd,gold/gold,iw_opd/iw_opd}_config.py and
    # trl/trainer/distillation_config.py: __post_init__
    distils = {"GKDConfig", "GOLDConfig", "IWOPDConfig", "DistillationConfig"}
    if distils & job.classes:
        for key in ("lmbda", "beta"):
            value = job.number(key)
            if value is not None and not 0 <= value <= 1:
                text = f"{key} is {value}: {job.whose} requires a value between 0 and 1"
                yield job.finding(CONFLICT, "error", key, text)
        # trl/experimental/gkd/gkd_trainer.py, training_step: the student's rollouts are
        # used if random() <= lmbda.
        if job.find("seq_kd").value is True and job.number("lmbda") == 1:
            text = "seq_kd changes nothing with lmbda=1: all rollouts are the student's"
            yield job.finding(CONFLICT, "warning", "seq_kd", text)


def _generation_batch(job: TrlJob) -> Iterator[Finding]:
    """Generation batches must consist of full groups of completions."""
    if not {"num_generations", "generation_batch_size"} <= job.fields or job.unread:
        return
    per_device = job.number("per_device_train_batch_size")
    steps = job.number("gradient_accumulation_steps")
    count = job.number("num_generations")
    if per_device is None or steps is None or count is None:
        return
    if "GRPOConfig" in job.classes or "RLOOConfig" in job.classes:
        # trl/trainer/{grpo,rloo}_config.py: __post_init__
        if count < 2:
            text = f"num_generations is {count}: {job.whose} requires 2 or more"
            yield job.finding(CONFLICT, "error", "num_generations", text)
        # 0.29.1 accepts it.
        if job.since("1.9") and job.find("auto_find_batch_size").value is True:
            text = f"auto_find_batch_size is on: {job.whose} refuses it here"
            yield job.finding(CONFLICT, "error", "auto_find_batch_size", text)
    if "steps_per_generation" in job.fields:
        if count > 0:
            yield from _global_batch(job, per_device, steps, count)
        return
    # trl/experimental/{gold/gold,iw_opd/iw_opd}_config.py: __post_init__
    if count < 1:
        text = f"num_generations is {count}: {job.whose} requires 1 or more"
        yield job.finding(CONFLICT, "error", "num_generations", text)
        return
    given = job.find("generation_batch_size")
    local = per_device * steps
    batch = local // count if given.value is None else given.value
    if not given.needs and type(batch) is int and batch * count != local:
        text = (
            f"per_device_train_batch_size {per_device} * gradient_accumulation_steps "
            f"{steps} = {local} is not generation_batch_size {batch} * num_generations "
            f"{count}: {job.whose} refuses it"
        )
        yield job.finding(CONFLICT, "error", "num_generations", text)


def _global_batch(
    job: TrlJob, per_device: int, accumulation: int, count: int
) -> Iterator[Finding]:
    # trl/trainer/{grpo,rloo}_config.py and trl/experimental/{sdft,sdpo}/: __post_init__
    batch = job.find("generation_batch_size")
    steps = job.find("steps_per_generation")
    world = _world(job)
    if batch.needs or steps.needs:
        return
    if batch.value is not None and steps.value is not None:
        text = (
            "generation_batch_size and steps_per_generation are both given: "
            f"{job.whose} refuses it; the one follows from the other"
        )
        yield job.finding(CONFLICT, "error", "steps_per_generation", text)
        return
    if world is None:
        return
    once = per_device * world
    whole = batch.value
    if whole is None:
        times = accumulation if steps.value is None else steps.value
        whole = once * times
        how = f"{per_device} per device * {world} processes * {times} steps = {whole}"
    else:
        how = f"generation_batch_size {whole}"
        if type(whole) is int and once and whole % once:
            text = (
                f"{how} is not a multiple of per_device_train_batch_size {per_device} "
                f"* {world} processes: {job.whose} refuses it"
            )
            yield job.finding(CONFLICT, "error", "generation_batch_size", text)
    if type(whole) is int and whole % count:
        text = (
            f"{how}, which num_generations {count} does not divide: {job.whose} "
            "refuses it, as each prompt's completions must be generated together"
        )
        yield job.finding(CONFLICT, "error", "num_generations", text)
    evaluates = job.find("eval_strategy").value not in (None, "no", False)
    many = job.number("num_generations_eval") or count
    each = job.number("per_device_eval_batch_size")
    if evaluates and each is not None and each * world % many:
        text = (
            f"per_device_eval_batch_size {each} * {world} processes is not a multiple "
            f"of the {many} generations: {job.whose} refuses it"
        )
        yield job.finding(CONFLICT, "error", "per_device_eval_batch_size", text)


def _lengths(job: TrlJob) -> Iterator[Finding]:
    whole, answer = job.number("max_length"), job.number("max_completion_length")
    # trl/experimental/{gold/gold,iw_opd/iw_opd}_config.py: __post_init__
    bound = {"GOLDConfig", "IWOPDConfig"} & job.classes
    if bound and whole is not None and answer is not None and answer >= whole:
        text = (
            f"max_completion_length {answer} leaves no room for the prompt in "
            f"max_length {whole}: {job.whose} refuses it"
        )
        yield job.finding(CONFLICT, "error", "max_completion_length", text)
    room = job.number("vllm_max_model_length")
    if room is not None and answer is not None and answer >= room:
        text = (
            f"max_completion_length {answer} does not fit in vllm_max_model_length "
            f"{room} beside a prompt: vLLM ends completions early, or refuses prompts"
        )
        yield job.finding(CONFLICT, "warning", "vllm_max_model_length", text)


def _vllm(job: TrlJob) -> Iterator[Finding]:
    use, mode = job.find("use_vllm"), job.find("vllm_mode")
    if use.value is False:
        # None of them is read without use_vllm.
        given = [k for k in job.fields if k.startswith("vllm_")]
        said = sorted(k for k in given if job.find(k).source == "user")
        if said:
            text = f"{', '.join(said)}: nothing reads it without use_vllm"
            yield job.finding(CONFLICT, "warning", said[0], text)
    if use.value is not True or mode.value is None:
        return
    # trl/generation/vllm_generation.py: _init_vllm
    if mode.value not in ("server", "colocate"):
        text = f"vllm_mode is {mode.value}: {job.whose} knows server and colocate"
        yield job.finding(CONFLICT, "error", "vllm_mode", text)
    size, world = job.number("vllm_tensor_parallel_size"), _world(job)
    if mode.value == "colocate" and size and world and world % size:
        text = (
            f"vllm_tensor_parallel_size {size} does not divide the {world} processes: "
            f"{job.whose} refuses it"
        )
        yield job.finding(CONFLICT, "error", "vllm_tensor_parallel_size", text)
    if mode.value == "server" and job.server is not None:
        yield from _served(job, job.server)


def _served(job: TrlJob, server: Server) -> Iterator[Finding]:
    """The trainer must connect to the server that the same script starts."""
    url, host = job.find("vllm_server_base_url"), job.find("vllm_server_host")
    port = job.find("vllm_server_port")
    key, asked, on = "vllm_server_port", port.value, host.value
    if isinstance(url.value, str):
        # trl/generation/vllm_client.py: VLLMClient.__init__
        key = "vllm_server_base_url"
        try:
            parts = urlsplit(url.value)
            on, asked = parts.hostname, parts.port
        except ValueError:
            return
        asked = asked or {"http": 80, "https": 443}.get(parts.scheme)
    given = server.value("port", SERVER_PORT)
    is_known = not (url.needs or port.needs) and type(given) is int
    if is_known and on in LOCAL and asked != given:
        where = f"line {server.command.line}"
        text = (
            f"the trainer asks port {asked} for its vLLM server, and the one of "
            f"{where} listens on {given}: it waits for vllm_server_timeout and gives up"
        )
        yield job.finding(CONFLICT, "error", key, text)
    if not server.is_trl and not job.since("1.10"):
        # 1.9.0: trl/generation/vllm_client.py asks for /get_world_size/,
        # /init_communicator/ and /update_named_param/, which trl/scripts/vllm_serve.py
        # has; 1.16.0 uses vLLM's own endpoints.
        text = (
            f"{job.whose} sends weights to a `trl vllm-serve`: the `vllm serve` of "
            f"line {server.command.line} has no place for them"
        )
        yield job.finding(CONFLICT, "error", "vllm_mode", text)
    model, student = server.said.get("model"), job.find("model_name_or_path").value
    served = model.text.value if model is not None else None
    if served and isinstance(student, str) and served != student:
        text = (
            f"the vLLM server has {served}, and the trainer {student}, whose weights "
            "it sends there"
        )
        yield job.finding(CONFLICT, "warning", "model_name_or_path", text)
    here, there = visible_gpus(job.launch.command), visible_gpus(server.command)
    shared = sorted(set(here or ()) & set(there or ()))
    if shared and on in LOCAL:
        # trl/scripts/vllm_serve.py of 1.9.0, init_communicator: NCCL accepts a GPU for
        # one rank only.
        text = (
            f"the trainer and its vLLM server are both given GPU {', '.join(shared)}: "
            "weights cannot be sent between two processes of one GPU"
        )
        yield job.finding(CONFLICT, "error", "vllm_mode", text)


def _gpus(job: TrlJob) -> Iterator[Finding]:
    """Every process needs its own GPU."""
    visible, world = visible_gpus(job.launch.command), _world(job)
    machines = job.launcher.machines.value
    if visible is None or world is None or type(machines) is not int or machines < 1:
        return
    each = world // machines
    if job.find("use_cpu").value is True or each <= len(visible) or each < 2:
        return
    word = job.launch.command.environment["CUDA_VISIBLE_DEVICES"]
    text = (
        f"{each} processes are started on a machine, and CUDA_VISIBLE_DEVICES shows "
        f"them {len(visible)} GPU(s): the last ones find no device"
    )
    yield Finding(CONFLICT, "error", text, word.file, word.line, "CUDA_VISIBLE_DEVICES")


def _needed(job: TrlJob) -> Iterator[Finding]:
    """What TRL's own scripts cannot do without."""
    if not job.is_upstream:
        return
    for key in ("model_name_or_path", TEACHER):
        # The trainers: experimental/gkd/gkd_trainer.py reads the teacher's config.
        one = job.find(key)
        is_served = "teacher_model_server_url" in job.fields and key == TEACHER
        is_none = one.source == "default" and one.value is None
        if key in job.fields and is_none and not is_served:
            text = f"{key} is not given, and {job.whose}'s script has no other"
            yield job.finding(MISSING, "error", key, text)
    own = job.launch.program.removeprefix("trl ")
    if not (job.launch.program.startswith("trl ") or "trl/scripts/" in own):
        return
    # trl/scripts/*.py: main
    one_of = [("dataset_name", "datasets")]
    if "GRPOConfig" in job.classes and job.since("1.9"):
        # trl/trainer/grpo_trainer.py: "No reward source provided"
        one_of.append(("reward_funcs", "reward_model_name_or_path"))
    for keys in one_of:
        given = [job.find(key) for key in keys]
        if job.fields.issuperset(keys) and not any(g.value or g.needs for g in given):
            text = f"neither {keys[0]} nor {keys[1]} is given: {job.whose} refuses it"
            yield job.finding(MISSING, "error", keys[0], text)


def _exclusive(job: TrlJob) -> Iterator[Finding]:
    has_loss = job.since("1.9") and not job.since("1.16")
    if job.find("use_liger_kernel").value is True and has_loss:
        # 1.9.0: trl/experimental/gold/gold_trainer.py, experimental/iw_opd/ and
        # experimental/server_distillation/; 1.16.0 has no Liger loss there.
        for key in ("use_uld_loss", "use_teacher_server", "teacher_model_server_url"):
            if job.find(key).value:
                text = (
                    f"use_liger_kernel and {key} are mutually exclusive in {job.whose}"
                )
                yield job.finding(CONFLICT, "error", "use_liger_kernel", text)
    if job.find("load_best_model_at_end").value is True:
        # transformers 5.19.0, training_args.py: _validate_args
        saving, judging = job.find("save_strategy"), job.find("eval_strategy")
        is_known = not (saving.needs or judging.needs)
        if is_known and saving.value not in ("best", judging.value):
            text = (
                f"load_best_model_at_end requires eval_strategy ({judging.value}) and "
                f"save_strategy ({saving.value}) to be the same"
            )
            yield job.finding(CONFLICT, "error", "load_best_model_at_end", text)


def _lists(job: TrlJob) -> Iterator[Finding]:
    """``--x "a", "b"``: the shell makes the comma part of the first word."""
    for key in sorted(job.fields):
        value = job.find(key).value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            continue
        wrong = [one for one in value if one.endswith(",") and len(one) > 1]
        if wrong:
            text = (
                f"{key} has {wrong[0]} with its comma, which is a part of the name "
                "then: separate the words by spaces only"
            )
            yield job.finding(CONFLICT, "warning", key, text)


def _vocabulary(job: TrlJob) -> Iterator[Finding]:
    # trl/experimental/gkd/gkd_trainer.py and trl/trainer/distillation_trainer.py
    # refuse different sizes; GOLD aligns them with use_uld_loss.
    if not ({"GKDConfig", "DistillationConfig"} & job.classes and job.since("1.9")):
        return
    given = [job.find(key).value for key in ("model_name_or_path", TEACHER)]
    sizes = [model_files.vocabulary(one, job.place) for one in given]
    if None not in sizes and sizes[0] != sizes[1]:
        text = (
            f"the student's vocabulary has {sizes[0]} entries and the teacher's "
            f"{sizes[1]}: {job.whose} refuses it; GOLD with use_uld_loss takes both"
        )
        yield job.finding(CONFLICT, "error", TEACHER, text)


def _zero(job: TrlJob) -> Iterator[Finding]:
    """DeepSpeed's own file must agree with the options, or say "auto"."""
    # transformers 5.19.0, integrations/deepspeed.py: trainer_config_process; refused
    # only when training begins, after the models have been loaded.
    said = deepspeed(job)
    half = job.find("fp16").value
    pairs = {
        "train_micro_batch_size_per_gpu": job.number("per_device_train_batch_size"),
        "gradient_accumulation_steps": job.number("gradient_accumulation_steps"),
        "gradient_clipping": job.number("max_grad_norm"),
        "optimizer.params.lr": job.number("learning_rate"),
        "optimizer.params.weight_decay": job.number("weight_decay"),
        "scheduler.params.warmup_max_lr": job.number("learning_rate"),
        "fp16.enabled": half,
        "bf16.enabled": job.find("bf16").value,
    }
    if pairs["bf16.enabled"] is None and isinstance(half, bool):
        pairs["bf16.enabled"] = not half and "bf16" in job.fields
    world = _world(job)
    sizes = [pairs["train_micro_batch_size_per_gpu"], world]
    sizes.append(pairs["gradient_accumulation_steps"])
    if all(type(size) is int for size in sizes):
        pairs["train_batch_size"] = sizes[0] * sizes[1] * sizes[2]
    for key, wanted in pairs.items():
        one = said.get(key)
        if one is None or wanted is None or one.value in ("auto", None, wanted):
            continue
        if isinstance(one.value, str) and _number(one.value) == wanted:
            continue
        text = (
            f"DeepSpeed's {key} is {one.value}, and TRL's options make it {wanted}: "
            'transformers refuses it when training begins; write "auto"'
        )
        yield Finding(CONFLICT, "error", text, one.word.file, one.word.line, key)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


RULES: Iterable[Callable[[TrlJob], Iterator[Finding]]] = (
    _precision,
    _ranges,
    _generation_batch,
    _lengths,
    _vllm,
    _gpus,
    _needed,
    _exclusive,
    _lists,
    _vocabulary,
    _zero,
)
