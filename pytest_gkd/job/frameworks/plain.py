"""Configurations in the names of ``gkd check`` itself, for unknown frameworks."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gkd import checkpoint
from pytest_gkd.job import documents, model_files
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.reading import UNKNOWN, Reading, derived
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Override, parsed
from pytest_gkd.job.releases import Release
from pytest_gkd.options import near

PROGRAM = re.compile(r"(?!)")  # no program: only files use these names
TABLE = "gkd"
CONFLICT = "config.invalid-combination"
MOST_TOLD = 40
PLACEMENTS = ("colocated", "split")
FILES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".gz", ".zst")


def _is_whole(value: Any, least: float) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda v: isinstance(v, str)),
    "texts": (
        "a string or a list of strings",
        lambda v: all(isinstance(one, str) for one in (v if type(v) is list else [v])),
    ),
    "count": ("an integer, 1 or more", lambda v: _is_whole(v, 1)),
    "whole": ("an integer, 0 or more", lambda v: _is_whole(v, 0)),
    "integer": ("an integer", lambda v: _is_whole(v, -math.inf)),
    "number": ("a number, 0 or more", lambda v: _is_number(v) and v >= 0),
    "share": ("a number above 0 and up to 1", lambda v: _is_number(v) and 0 < v <= 1),
    "truth": ("true or false", lambda v: type(v) is bool),
    "placement": (" or ".join(PLACEMENTS), lambda v: v in PLACEMENTS),
    "table": ("a table", lambda v: isinstance(v, dict)),
}


@cache
def kinds() -> dict[str, str]:
    """The kind of each value of ``gkd check``, in order."""
    text = (Path(__file__).parent / "values.toml").read_text("utf-8")
    return dict(tomllib.loads(text))


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a file has a table ``gkd``, or ``student`` at the top level."""
    return "student" in keys or any(key.startswith(f"{TABLE}.") for key in keys)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a file, those derived from them, and what is wrong.

    If there is a table ``gkd``, the file's other tables are ignored.
    """
    if launch.document is None:
        raise CheckError(
            f"{launch.command.file}: --framework={TABLE} is for a configuration file "
            "with the names of gkd check, which a script does not have"
        )
    settings = documents.settings(launch.document)
    start = f"{TABLE}."
    if any(setting.key.startswith(start) for setting in settings):
        settings = [setting for setting in settings if setting.key.startswith(start)]
    settings = [
        setting._replace(key=setting.key.removeprefix(start))
        for setting in [*settings, *parsed(launch.arguments)]
    ]
    given, findings = _judged(settings, release)
    values = _placed(given, launch.document.parent)
    for name, one in _gpus(values).items():
        values.setdefault(name, one)
    values = {name: values[name] for name in kinds() if name in values}
    for rule in RULES:
        findings += rule(_Job(values))
    return Reading(list(parsed(launch.arguments)), values, findings)


def _judged(
    settings: Iterable[Override], release: Release
) -> tuple[dict[str, Given], list[Finding]]:
    """The known values of the right kind, and what is wrong with the others."""
    known, findings = kinds(), list[Finding]()
    given: dict[str, Given] = {}
    for setting in settings:
        name, _, rest = setting.key.partition(".")
        word, value = setting.word, setting.value
        if rest and known.get(name) == "table":
            before = given[name].value if name in given else {}
            given[name] = Given("user", {**before, rest: value}, word)
            continue
        if setting.key not in known:
            if len(findings) < MOST_TOLD:
                hint = near(setting.key.rpartition(".")[2], known)
                text = f"gkd check {release} has no value {setting.key}{hint}"
                findings.append(_finding(UNKNOWN, "error", text, word, setting.key))
            continue
        expected, fits = KINDS[known[name]]
        if setting.needs or fits(value):
            source = "undetermined" if setting.needs else "user"
            given[name] = Given(source, value, word, setting.needs)
        else:
            text = f"{name}: {value!r} is not {expected}"[:200]
            findings.append(_finding(UNKNOWN, "error", text, word, name))
    return given, findings


def _placed(given: Mapping[str, Given], folder: Path) -> dict[str, Given]:
    """Models and files beside the configuration, with their full path."""
    found = dict(given)
    for name in ("student", "teacher", "tokenizer", "train_files"):
        if name not in given or given[name].needs:
            continue
        value, one = given[name].value, given[name]
        is_list = isinstance(value, list)
        places = [_place(each, folder) for each in (value if is_list else [value])]
        placed = places if is_list else places[0]
        found[name] = Given(one.source, placed, one.word)
    return found


def _place(name: str, folder: Path) -> str:
    try:
        path = folder.resolve() / Path(name).expanduser()
        return str(path) if path.exists() else name
    except (OSError, ValueError, RuntimeError):
        return name


def _gpus(values: Mapping[str, Given]) -> dict[str, Given]:
    """The derived GPUs: of all nodes, and those that trainer and rollout share."""
    found: dict[str, Given] = {}
    if "gpus_per_node" in values:
        nodes = values.get("nodes", Given("default", 1))
        found["total_gpus"] = derived(
            "nodes * gpus_per_node",
            lambda nodes, each: nodes * each,
            nodes,
            values["gpus_per_node"],
        )
    return found


# -- rules ---------------------------------------------------------------------------
# None is specific to a framework: they follow from what the values mean, or from vLLM.


class _Job:
    """The values that are certain; None for one that is uncertain or not given."""

    def __init__(self, values: Mapping[str, Given]) -> None:
        self._values = values

    def __call__(self, name: str) -> Any:
        one = self._values.get(name)
        return None if one is None or one.needs else one.value

    def fault(
        self, name: str, text: str, level: str = "error", cause: str = CONFLICT
    ) -> Finding:
        """What is wrong, at the line of ``name``."""
        one = self._values.get(name)
        word = one.word if one else None
        return _finding(cause, level, text, word, name)


def _lengths(job: _Job) -> Iterator[Finding]:
    """An engine cuts a response at max_model_len, and refuses a longer prompt.

    vLLM 0.32, v1/engine/input_processor.py; verl's vllm_async_server.py, generate.
    """
    prompt, response = job("max_prompt_length"), job("max_response_length")
    most, whole = job("max_model_len"), (prompt or 0) + (response or 0)
    said = f"prompt {prompt} and response {response}"
    if prompt and most and prompt >= most:
        text = f"max_model_len {most} leaves no room for a response after a prompt of "
        yield job.fault("max_model_len", f"{text}{prompt}", cause="vllm.max-model-len")
    elif response and most and whole > most:
        text = f"max_model_len {most} is less than {said}: the responses of long "
        text = f"{text}prompts are cut short"
        cause = "vllm.max-model-len"
        yield job.fault("max_model_len", text, "warning", cause)
    if not (prompt and response):
        return
    longest, teachers = job("max_length"), job("teacher_max_model_len")
    if longest and whole > longest:
        text = f"max_length {longest} is less than {said}: the trainer sees the rest "
        yield job.fault("max_length", f"{text}of no longer sequence", "warning")
    # An engine that scores a prompt also generates one token.
    if teachers and whole + 1 > teachers:
        text = f"teacher_max_model_len {teachers} is less than {said} and the one "
        text = f"{text}token that an engine adds: it refuses the longest sequences"
        cause = "vllm.max-model-len"
        yield job.fault("teacher_max_model_len", text, cause=cause)


def _roles(job: _Job) -> Iterator[Finding]:
    """The GPUs of the roles compared with those available."""
    total = job("total_gpus")
    if total is None:
        return
    roles = ("trainer_gpus", "rollout_gpus", "teacher_gpus")
    for name in roles:
        if (job(name) or 0) > total:
            yield job.fault(
                name, f"{name} {job(name)} are more than the {total} GPUs in total"
            )
    trainer, rollout = job("trainer_gpus"), job("rollout_gpus")
    if job("placement") != "split" or not (trainer and rollout):
        return
    if max(trainer, rollout) <= total < trainer + rollout:
        text = f"placement is split: trainer_gpus {trainer} and rollout_gpus {rollout}"
        yield job.fault("placement", f"{text} are more than all {total}")


def _parallel(job: _Job) -> Iterator[Finding]:
    """Each engine, and each trainer replica, takes a whole number of GPUs."""
    for role, gpus, parts in (
        (
            "the rollout",
            "rollout_gpus",
            ("tensor_parallel_size", "pipeline_parallel_size"),
        ),
        ("the teacher", "teacher_gpus", ("teacher_tensor_parallel_size",)),
        (
            "the trainer",
            "trainer_gpus",
            (
                "train_tensor_parallel_size",
                "train_pipeline_parallel_size",
                "context_parallel_size",
            ),
        ),
    ):
        given = [part for part in parts if job(part)]
        size = math.prod(job(part) for part in given)
        own = job(gpus)
        most = own if own is not None else job("total_gpus")
        if not (given and most):
            continue
        said = " * ".join(f"{part} {job(part)}" for part in given)
        whose = f"{role} has {own}" if own is not None else f"the job has {most}"
        if size > most:
            yield job.fault(given[0], f"{said} needs {size} GPUs, and {whose}")
        elif own is not None and own % size:
            text = f"the {own} GPUs of {role} are not a multiple of {said}"
            yield job.fault(given[0], text)


def _models(job: _Job) -> Iterator[Finding]:
    """What models on this machine say about the values.

    vLLM 0.32, config/model.py: verify_with_parallel_config, _get_and_verify_max_len.
    """
    for role, tensor, length in (
        ("student", "tensor_parallel_size", "max_model_len"),
        ("teacher", "teacher_tensor_parallel_size", "teacher_max_model_len"),
    ):
        config = model_files.config(job(role))
        size, heads = job(tensor), checkpoint.heads(config)
        if size and heads and heads % size:
            text = f"{tensor} {size} does not divide the {heads} attention heads of "
            text = f"{text}the {role}"
            yield job.fault(tensor, text, cause="vllm.tp-divisibility")
        most, known = job(length), config.get("max_position_embeddings")
        scaled = config.get("rope_scaling") or config.get("rope_parameters")
        if most and _is_whole(known, 1) and most > known and not scaled:
            text = f"{length} {most} is more than the {known} positions of the {role} "
            text = f"{text}(max_position_embeddings): vLLM refuses it"
            level = "error" if job("rollout_engine") == "vllm" else "warning"
            yield job.fault(length, text, level, "vllm.max-model-len")
    sizes = [model_files.vocabulary(job(one)) for one in ("student", "teacher")]
    if all(_is_whole(size, 1) for size in sizes) and sizes[0] != sizes[1]:
        text = f"the vocabularies of student and teacher have {sizes[0]} and {sizes[1]}"
        text = f"{text} entries: a loss over all of them cannot be computed, and one "
        text = f"{text}over the teacher's top-k needs the same tokenizer"
        cause = "tokenizer.vocab-mismatch"
        yield job.fault("teacher", text, "warning", cause)


def _not_there(job: _Job) -> Iterator[Finding]:
    """Paths that cannot be names on a hub."""
    for name in ("student", "teacher", "tokenizer", "train_files"):
        value = job(name)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, str) or "\0" in one:
                continue
            is_path = one.startswith(("/", "./", "../", "~")) or (
                name == "train_files" and one.endswith(FILES)
            )
            # A pattern may match existing files.
            if is_path and not re.search(r"[*?\[]", one) and not Path(one).exists():
                text = f"{name}: {one} does not exist, on this machine"
                is_data = name == "train_files"
                cause = "data.file-missing" if is_data else "checkpoint.missing"
                yield job.fault(name, text, "warning", cause)


RULES: tuple[Callable[[_Job], Iterator[Finding]], ...] = (
    _lengths,
    _roles,
    _parallel,
    _models,
    _not_there,
)


def _finding(cause: str, level: str, text: str, word: Any, key: str) -> Finding:
    file, line = (word.file, word.line) if word else ("", 0)
    return Finding(cause, level, text, file, line, key)
