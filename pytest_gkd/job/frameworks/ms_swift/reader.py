"""ms-swift: command lines of ``swift`` and ``megatron``, and their configurations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gkd.job import dataclass_options, documents, releases
from pytest_gkd.job.arguments import Arguments, Option, parsed
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks import accelerate, vllm_server
from pytest_gkd.job.frameworks.ms_swift import megatron_plan
from pytest_gkd.job.frameworks.ms_swift import plan as ms_swift_plan
from pytest_gkd.job.frameworks.ms_swift import rules as ms_swift_rules
from pytest_gkd.job.frameworks.ms_swift.job import Server, Start
from pytest_gkd.job.frameworks.reading import UNKNOWN, Reading, launched
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import Text, Word

PROGRAM = re.compile(
    r"(?P<cli>swift|megatron) (?P<cli_does>rlhf|sft|pt)"
    r"|(?:.*/)?swift/cli/(?P<file>_megatron/)?(?P<file_does>rlhf|sft|pt)\.py"
    r"|swift\.cli\.(?P<module>_megatron\.)?(?P<module_does>rlhf|sft|pt)"
)
CONFIGURATIONS = (".yaml", ".yml", ".json")
# Renamed in 4.0, as its own examples show (examples/megatron, v3.12.5 and v4.0.0;
# train_type was accepted until 4.0.4), and in 3.10 for `swift rollout`.
RENAMED = {
    "train_type": "tuner_type",
    "save": "output_dir",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "ref_load": "mcore_ref_model",
    "ref_adapter_load": "mcore_ref_adapter",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "max_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "limit_mm_per_prompt": "vllm_limit_mm_per_prompt",
    "use_async_engine": "vllm_use_async_engine",
}
# A Ray configuration's sections (swift/ray/megatron/driver_utils.py, 4.6.0).
GROUPS = ("train", "rollout", "teacher")
RAY_KEYS = ("gpus", "colocate_groups", "nnodes")
# vLLM's own server, as far as a teacher's matters; its other options are not judged.
VLLM = {
    f"--{name}": Option(name.replace("-", "_"), kind)
    for name, kind in {
        "model": "str",
        "port": "int",
        "host": "str",
        "max-logprobs": "int",
        "tensor-parallel-size": "int",
        "data-parallel-size": "int",
        "pipeline-parallel-size": "int",
        "max-model-len": "int",
        "max-num-seqs": "int",
        "enforce-eager": "true",
        "gpu-memory-utilization": "float",
    }.items()
}
VLLM_DEFAULTS = {
    "port": 8000,
    "max_logprobs": 20,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of ms-swift's."""
    trains = {"tuner_type", "learning_rate", "lr", "num_train_epochs", "train_iters"}
    return "rlhf_type" in keys or ({"model", "dataset"} <= keys and bool(trains & keys))


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of ms-swift, and what its release makes of the options."""
    program = _program(launch)
    environment = dict(launch.command.environment)
    words, problem = list(launch.arguments), ""
    findings: list[Finding] = []
    ray: dict[str, dict[str, Any]] = {}
    try:
        path, words = _configuration(launch, program)
        if path is not None:
            settings = documents.settings(path)
            if not launch.document and any(w.source == "--config" for w in words):
                findings += _passed_over(words)
                words = []
            ray = _groups(settings) if program == "megatron rlhf" else {}
            words = [*_words(settings, environment, ray), *words]
    except CheckError as error:
        problem = str(error)
    found = _parsed(words, program, release)
    defaults = {
        key: field["default"]
        for key, field in _fields(program, release).items()
        if "default" in field
    }
    launcher = accelerate.started(
        launch.before,
        Path(launch.command.file).parent,
        releases.beside(release, "accelerate").release,
    )
    start = Start(
        program,
        Job(defaults, found.said),
        environment,
        launch.command,
        _servers(launch, release),
        ray,
        _fields(program, release).keys(),
        launcher,
    )
    if not problem:
        findings += [*launcher.findings, *found.findings]
        for server in start.servers:
            findings += server.findings
        findings += ms_swift_rules.findings(start)
    values = start.values()
    if problem:  # the configuration may say anything
        needs = frozenset({problem})
        values = {
            name: given
            if given.word is not None
            else Given("undetermined", None, None, needs)
            for name, given in values.items()
        }
    pools = () if start.ray else launched(values)
    plan = megatron_plan if start.is_megatron else ms_swift_plan
    recipe = None if problem else plan.recipe(start, release)
    return Reading(found.said, values, findings, problem, pools, recipe)


def _program(launch: Launch) -> str:
    """``swift rlhf`` or the like; for a configuration, judged by its keys."""
    found = PROGRAM.fullmatch(launch.program)
    if found is not None:
        does = found["cli_does"] or found["file_does"] or found["module_does"]
        is_megatron = found["cli"] == "megatron" or found["file"] or found["module"]
        return f"{'megatron' if is_megatron else 'swift'} {does}"
    if launch.document is None:
        raise CheckError(f"{launch.program} is not one of ms-swift's commands")
    keys = {setting.key for setting in documents.settings(launch.document)}
    is_megatron = keys & {"micro_batch_size", "global_batch_size", "train.gpus"}
    does = "rlhf" if "rlhf_type" in keys else "sft"
    return f"{'megatron' if is_megatron else 'swift'} {does}"


# -- configurations ----------------------------------------------------------------


def _configuration(launch: Launch, program: str) -> tuple[Path | None, list[Word]]:
    """The configuration that is read first, and the words after it.

    It is the first word (swift/cli/main.py, parse_yaml_args), or with ``--use_ray``
    what ``--config`` names (swift/cli/_megatron/rlhf.py). Raises CheckError if it
    cannot be read.
    """
    words = list(launch.arguments)
    if launch.document is not None:
        given = []
        for word in words:  # KEY=VALUE of gkd check's own command line
            name, _, value = word.text.shape.partition("=")
            given += [_like(word, f"--{name.lstrip('-')}"), _like(word, value)]
        return launch.document, given
    values = [word.text.shape for word in words]
    if program == "megatron rlhf" and "--use_ray" in values:
        at = values.index("--use_ray")
        uses = values[at + 1 : at + 2] != ["false"]
        if uses and "--config" in values[:-1]:
            return _path(words[values.index("--config") + 1], launch), words
    if values and values[0].endswith(CONFIGURATIONS):
        return _path(words[0], launch), words[1:]
    return None, words


def _path(word: Word, launch: Launch) -> Path:
    name = word.text.value
    if name is None:
        needs = ", ".join(sorted(word.text.needs))
        raise CheckError(f"which configuration is read cannot be determined: {needs}")
    beside = Path(launch.command.file).parent / name
    return beside if not Path(name).exists() and beside.exists() else Path(name)


def _like(word: Word, text: str) -> Word:
    return word._replace(text=Text(text, word.text.needs))


def _words(
    settings: Iterable[Override],
    environment: dict[str, Word],
    ray: Mapping[str, Mapping[str, Any]],
) -> list[Word]:
    """The words that ms-swift makes of a configuration (parse_yaml_args).

    What is under ``ENV`` goes into ``environment`` unless already set there. For a Ray
    configuration the words are what the trainer gets, and vLLM's part of the rollout.
    """
    found: list[Word] = []
    tables: dict[str, dict[str, Any]] = {}
    for setting in settings:
        head, _, rest = setting.key.partition(".")
        if ray and head in GROUPS and rest:
            is_own = head == "train" or (head == "rollout" and rest.startswith("vllm_"))
            if not is_own or rest in RAY_KEYS:
                continue
            head, rest = rest, ""
        elif ray and head in RAY_KEYS:
            continue
        if head == "ENV":
            if rest:
                environment.setdefault(rest, _like(setting.word, str(setting.value)))
        elif rest:
            is_new = head not in tables
            tables.setdefault(head, {})[rest] = setting.value
            if is_new:
                found += [_like(setting.word, f"--{head}"), setting.word]
        else:
            value = setting.value
            parts = value if isinstance(value, list) else [value]
            texts = [p if isinstance(p, str) else _plain(p) for p in parts]
            found += [_like(setting.word, t) for t in (f"--{head}", *texts)]
    names = [word.text.shape for word in found]
    for name, table in tables.items():
        at = names.index(f"--{name}") + 1
        found[at] = _like(found[at], json.dumps(table, default=str))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    return str(value)


def _groups(settings: Iterable[Override]) -> dict[str, dict[str, Any]]:
    """Train, rollout and teacher of a Ray configuration, each with its settings."""
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        head, _, rest = setting.key.partition(".")
        if head in GROUPS and rest:
            found.setdefault(head, {})[rest] = setting
        elif head in RAY_KEYS:
            found.setdefault("", {})[head] = setting
    return found if "train" in found else {}


def _passed_over(words: Iterable[Word]) -> Iterable[Finding]:
    """With ``--use_ray`` only ``--config`` is read from the command line."""
    for word in words:
        name = word.text.shape
        if name.startswith("--") and name not in ("--use_ray", "--config"):
            yield Finding(
                UNKNOWN,
                "warning",
                f"{name} is never read: with --use_ray only --config is; write it "
                "into the configuration",
                word.file,
                word.line,
                name,
            )


# -- options -----------------------------------------------------------------------


def _transformers(release: Release) -> Release:
    return releases.beside(release, "transformers").release


@cache
def _fields(program: str, release: Release) -> dataclass_options.Fields:
    whole = release.schema
    theirs = _transformers(release).schema["classes"]
    known = {**whole["classes"], **{f"Hf{name}": own for name, own in theirs.items()}}
    known["HfSeq2SeqTrainingArguments"] = {
        **theirs["Seq2SeqTrainingArguments"],
        "bases": ["HfTrainingArguments"],
    }
    return dataclass_options.fields(whole["programs"][program], known)


@cache
def _options(program: str, release: Release) -> Mapping[str, Option]:
    """The options of a command; JSON is parsed, and repaired, after the parser."""
    found = dataclass_options.options(_fields(program, release), none=False)
    return {
        name: dataclasses.replace(option, type="str")
        if option.type in ("json", "dict")
        else option
        for name, option in found.items()
    }


def _parsed(words: list[Word], program: str, release: Release) -> Arguments:
    """The words as HfArgumentParser reads them; leftovers end ms-swift.

    swift/pipelines/base.py, SwiftPipeline._parse_args: ``remaining_argv``.
    """
    values = [word.text.shape for word in words]
    at = values.index("--ignore_args_error") if "--ignore_args_error" in values else -1
    refuses = at < 0 or values[at + 1 : at + 2] == ["false"]
    options, whose = _options(program, release), f"ms-swift {release}'s {program}"
    found = parsed(words, options, whose, refuses=refuses)
    found.findings = [
        f._replace(message=_explained(f, program, release) or f.message)
        for f in found.findings
    ]
    found.said = [_certain(override, program, release) for override in found.said]
    for word in found.rest if refuses else ():
        text = f"{whose} refuses {word.source[:60]}: it does not follow any option"
        found.findings.append(Finding(UNKNOWN, "error", text, word.file, word.line, ""))
    return found


def _certain(override: Override, program: str, release: Release) -> Override:
    """The same; a value that is not of its option's type is undetermined."""
    field = _fields(program, release).get(override.key, {})
    value = override.value
    parts = value if isinstance(value, list) else [value]
    if field.get("type") in ("int", "float", "bool") and any(
        isinstance(part, str) for part in parts
    ):
        needs = frozenset({override.word.source[:60]})
        return override._replace(value=None, needs=needs)
    return override


def _explained(finding: Finding, program: str, release: Release) -> str:
    """Why an option is unknown: it was removed, renamed, or is another command's."""
    if finding.cause != UNKNOWN or not finding.key.startswith("--"):
        return ""
    key = finding.key[2:].replace("-", "_")
    head = f"ms-swift {release}'s {program} has no option {finding.key}"
    fields = _fields(program, release)
    new = RENAMED.get(key, "")
    last = release.schema.get("removed", {}).get(key)
    if new in fields:
        since = f"; {last[0]} had it" if last else ""
        return f"{head}{since}: it is --{new}"
    if last:
        return f"{head}: {last[0]} had it, {last[1]} has not"
    theirs = _transformers(release).schema.get("removed", {})
    old = theirs.get("TrainingArguments", {}).get(key)
    if old and "learning_rate" in fields:
        return (
            f"{head} with transformers {old[1]}; with {old[0]} it is taken, as one of "
            "its TrainingArguments"
        )
    does = program.partition(" ")[2]
    others = sorted(
        (
            other
            for other in release.schema["programs"]
            if key in _fields(other, release)
        ),
        key=lambda other: not other.endswith(does),
    )
    if not others:
        return ""
    same = {"learning_rate": "lr", "per_device_train_batch_size": "micro_batch_size"}
    hint = f"; here it is --{same[key]}" if same.get(key) in fields else ""
    return f"{head}: it is one of {', '.join(others[:3])}{hint}"


# -- servers -----------------------------------------------------------------------

SERVERS = {"deploy": "teacher", "rollout": "rollout"}


def _servers(launch: Launch, release: Release) -> list[Server]:
    """The servers that the same script starts, for teachers and the rollout."""
    found = []
    own = launch.beside.index(launch.command) if launch.beside else 0
    for number, command in enumerate(launch.beside):
        blocks = command.waits and number < own
        values = [word.text.value or "" for word in command.words]
        for at, (name, does) in enumerate(itertools.pairwise(values)):
            kind = SERVERS.get(does, "") if name.endswith("swift") else ""
            rest = list(command.words[at + 2 :])
            if kind:
                program = f"swift {does}"
                arguments = _parsed(rest, program, release)
                fields = _fields(program, release)
                defaults = {
                    k: f["default"] for k, f in fields.items() if "default" in f
                }
                job = Job(defaults, arguments.said)
                found.append(
                    Server(kind, program, command, job, arguments.findings, blocks)
                )
                break
        words = vllm_server.arguments(command)
        if words is not None:
            arguments = parsed(list(words), VLLM, "vLLM", refuses=False)
            job = Job(VLLM_DEFAULTS, [*arguments.said, *_vllm_model([*words])])
            found.append(Server("teacher", "vllm serve", command, job, [], blocks))
    return found


def _vllm_model(words: list[Word]) -> list[Override]:
    word = words[0] if words and not words[0].text.shape.startswith("-") else None
    if word is None:
        return []
    return [Override("", "model", word.text.value, word.text.needs, word)]
