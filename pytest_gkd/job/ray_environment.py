"""Which variables of a job on Ray reach its workers, and which stay behind.

A worker has the environment of its node's raylet, hence of the shell that started Ray,
and ``env_vars`` of the job's runtime environment; not that of the shell that starts the
job (ray 2.60: _private/services.py, start_raylet; runtime_env/runtime_env.py). ``ray
job submit`` starts the driver in the same way as a worker
(dashboard/modules/job/job_supervisor.py, _exec_entrypoint).
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd.job import documents
from pytest_gkd.job.environment import (
    CONFLICT,
    INVALID,
    ROWS,
    about,
    is_own,
    readers,
)
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.reading import Reading
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import literal
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import GIVEN, Command, Text, Word

LOST = "env.variable-not-propagated"
TOO_FEW = "ray.no-resources"
DEVICES = "CUDA_VISIBLE_DEVICES"
OVERRIDES = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
# These start Ray, or join it, and leave the workers' environment to it; NeMo-RL passes
# its own on (distributed/virtual_cluster.py, init_ray, of 0.7.0).
LEAVES_IT = ("verl", "slime", "miles")
ON_RAY = (*LEAVES_IT, "nemo-rl")
# Read by workers only, if the driver is started in the shell itself.
OF_WORKERS = (
    *("NCCL_", "TORCH_NCCL_", "VLLM_", "SGLANG_", "PYTORCH_", "GLOO_"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_DISTRIBUTED_DEBUG"),
)
# verl passes the driver's values of these to its workers, ALWAYS even if unset
# (trainer/constants_ppo.py, get_ppo_ray_runtime_env, since 0.9.0).
ALWAYS = {"VERL_FULL_DETERMINISM", "VLLM_BATCH_INVARIANT", "VERL_RL_INSIGHT_ENABLE"}
WHEN_SET = {
    *("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"),
    *("NCCL_DETERMINISTIC", "NCCL_ALGO"),
}
FORWARDING = "0.9.0"
OF_VERL = "ray_kwargs.ray_init.runtime_env.env_vars."
MOST_NAMES = 8


class RuntimeEnv(NamedTuple):
    """``env_vars`` of a ``ray job submit``, and the word that holds them.

    ``variables`` are None if not certain; ``problem`` is why Ray refuses it.
    """

    variables: dict[str, Any] | None
    word: Word
    problem: str = ""


def findings(
    launch: Launch, reading: Reading, release: Release, text: str
) -> Iterator[Finding]:
    """Variables that do not reach the workers as given; ``text`` is the script's."""
    before = [word.text.value or "" for word in launch.before]
    is_submitted = _is_ray(before, "job", "submit")
    job = _runtime_env(launch) if is_submitted else None
    own = {
        one.key.removeprefix(OF_VERL): one
        for one in reading.said
        if one.key.startswith(OF_VERL)
    }
    if launch.framework == "verl":
        for name, one in own.items():
            if not one.needs and not isinstance(one.value, str):
                yield _no_text(name, one.value, f"\\'{one.value}\\'", one.word)
    for variable in reading.variables:
        if variable.must_be_text and not isinstance(variable.value, str):
            name, value, word, _ = variable
            yield _no_text(name, value, json.dumps(str(value)), word)
    if job is not None:
        for name, value in (job.variables or {}).items():
            word = job.word._replace(text=Text(str(value), job.word.text.needs))
            yield from about(name, word, reading, text)
        yield from _refused(job)
        yield from _twice(launch, release, job, set(own))
    given = {*own, *((job.variables or {}) if job else {})}
    given |= {variable.name for variable in reading.variables}
    if job is None or job.variables is not None:
        yield from _left(launch, release, given, text, is_submitted=is_submitted)
    yield from _devices(launch, reading, is_submitted=is_submitted)


def _is_ray(words: list[str], *following: str) -> bool:
    return any(
        posixpath.basename(word) == "ray"
        and tuple(words[at + 1 : at + 1 + len(following)]) == following
        for at, word in enumerate(words)
    )


def _starts(launch: Launch) -> list[Command]:
    """The ``ray start`` commands before the job, since the last ``ray stop``."""
    found: list[Command] = []
    for command in launch.beside:
        if command is launch.command:
            break
        words = [word.text.value or "" for word in command.words]
        if _is_ray(words, "start"):
            found.append(command)
        elif _is_ray(words, "stop"):
            found = []
    return found


# -- ray job submit ----------------------------------------------------------------


def _option(words: tuple[Word, ...], *names: str) -> Word | None:
    """An option's value, from ``--name=value`` or ``--name value``."""
    found = None
    for number, word in enumerate(words):
        name, equals, value = word.text.shape.partition("=")
        if name == "--":
            break
        if name in names and equals:
            found = word._replace(text=Text(value, word.text.needs))
        elif name in names and number + 1 < len(words):
            found = words[number + 1]
    return found


def _runtime_env(launch: Launch) -> RuntimeEnv | None:
    words = launch.before
    written = _option(words, "--runtime-env-json")
    file = _option(words, "--runtime-env")
    if written is not None:
        try:
            whole = json.loads(written.text.shape)
        except (ValueError, RecursionError) as error:
            problem = "" if written.text.needs else f"it is not valid JSON: {error}"
            return RuntimeEnv(None, written, problem)
        found = whole.get("env_vars", {}) if isinstance(whole, dict) else None
        return RuntimeEnv(found if isinstance(found, dict) else None, written)
    if file is None:
        return RuntimeEnv({}, launch.command.words[0])
    path = Path(file.text.value or "")
    try:
        settings = documents.settings(path) if file.text.value else None
    except (CheckError, OSError, ValueError):
        settings = None
    if settings is None:
        return RuntimeEnv(None, file)
    start = "env_vars."
    names = {
        one.key.removeprefix(start): one.value
        for one in settings
        if one.key.startswith(start)
    }
    return RuntimeEnv(names, file)


def _refused(job: RuntimeEnv) -> Iterator[Finding]:
    if job.problem:
        said = f"--runtime-env-json is not read: {job.problem}"
        yield Finding(INVALID, "error", said, job.word.file, job.word.line, "env_vars")
    for name, value in (job.variables or {}).items():
        if not isinstance(value, str):
            yield _no_text(name, value, json.dumps(str(value)), job.word)


def _no_text(name: str, value: Any, quoted: str, word: Word) -> Finding:
    """runtime_env/validation.py, parse_and_validate_env_vars, of Ray 2.60."""
    said = (
        f"{name}={value} in env_vars is not a string, and Ray raises TypeError: "
        f"write it as {quoted}"
    )
    return Finding(INVALID, "error", said, word.file, word.line, name)


def _twice(
    launch: Launch, release: Release, job: RuntimeEnv, own: set[str]
) -> Iterator[Finding]:
    """A name both in the job's runtime environment and in that of ray.init: Ray refuses
    it, whatever the values (runtime_env/runtime_env.py, _merge_runtime_env, of 2.60).
    """
    said = set(job.variables or {})
    if OVERRIDES in said:
        return
    if launch.framework == "verl" and release.is_at_least(FORWARDING):
        own = own | ALWAYS | WHEN_SET
    elif launch.framework != "verl":
        own = set()
    both = sorted(said & own)
    if both:
        text = (
            f"{', '.join(both)}: in the runtime environment of ray job submit, and "
            "verl gives it to ray.init, too: Ray raises 'Failed to merge the Job's "
            f"runtime env'. Keep one of the two, or add {OVERRIDES}=1 to the job's"
        )
        place = job.word.file, job.word.line
        yield Finding(CONFLICT, "error", text, *place, both[0])


# -- what stays behind -------------------------------------------------------------


def _left(
    launch: Launch, release: Release, given: set[str], text: str, *, is_submitted: bool
) -> Iterator[Finding]:
    """Variables that the script exports but workers do not see."""
    starts = _starts(launch)
    if not is_submitted and not (starts and launch.framework in LEAVES_IT):
        return
    prefixed = {word.text.shape.partition("=")[0] for word in launch.before}
    found: dict[str, Word] = {}
    for name, word in launch.command.environment.items():
        if word.file == GIVEN or name in given or name in prefixed:
            continue
        if any(_same(start, name, word) for start in starts) or is_own(name, text):
            continue
        if is_submitted:
            is_known = name in ROWS or any(one.is_current for one in readers(name))
            counts = is_known and not name.startswith("RAY_")
        else:
            forwarded = launch.framework == "verl" and name in ALWAYS | WHEN_SET
            counts = name.startswith(OF_WORKERS) and not forwarded
        if counts:
            found[name] = word
    if not found:
        return
    names = list(found)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    said = ", ".join(names[:MOST_NAMES]) + more
    if is_submitted:
        why = "ray job submit passes on nothing that this shell exports; put it into"
        fix = "env_vars of --runtime-env-json"
    else:
        why = "ray start was before, and its workers see what was exported then; export"
        fix = "it before ray start"
        if launch.framework == "verl":
            why, fix = (
                f"{why} it before ray start, or give",
                f"+{OF_VERL}NAME=\\'VALUE\\'",
            )
    text = f"{said} will not reach the workers: {why} {fix}"
    word = found[names[0]]
    yield Finding(LOST, "warning", text, word.file, word.line, names[0])


def _same(command: Command, name: str, word: Word) -> bool:
    there = command.environment.get(name)
    return there is not None and there.text == word.text


# -- GPUs --------------------------------------------------------------------------


def _devices(
    launch: Launch, reading: Reading, *, is_submitted: bool
) -> Iterator[Finding]:
    """The GPUs that Ray finds by CUDA_VISIBLE_DEVICES, compared with the job's."""
    starts = _starts(launch)
    for start in starts:
        seen, word = visible(start)
        asked = _option(start.words, "--num-gpus")
        number = literal(asked.text.value) if asked and asked.text.value else None
        if word and type(number) is int and seen is not None and number > seen:
            # _private/resource_and_label_spec.py of Ray 2.60.
            said = (
                f"ray start is given --num-gpus {number}, and {DEVICES} shows it "
                f"{seen}: Ray raises ValueError"
            )
            yield Finding(TOO_FEW, "error", said, word.file, word.line, DEVICES)
            return
    if launch.framework not in ON_RAY or (is_submitted and not starts):
        return
    if any(_option(start.words, "--num-gpus") for start in starts) or len(starts) > 1:
        return
    if "RAY_ADDRESS" in launch.command.environment:
        return
    seen, word = visible(starts[0] if starts else launch.command)
    nodes, each = (reading.values.get(name) for name in ("nodes", "gpus_per_node"))
    if word is None or seen is None or not nodes or not each or nodes.value != 1:
        return
    if type(each.value) is int and each.value > seen:
        said = (
            f"the job needs {each.value} GPUs on its node, and {DEVICES} shows {seen} "
            "to the Ray that the script starts"
        )
        yield Finding(TOO_FEW, "warning", said, word.file, word.line, DEVICES)


def visible(command: Command) -> tuple[int | None, Word | None]:
    """How many GPUs CUDA_VISIBLE_DEVICES shows to a command, None if not certain."""
    word = command.environment.get(DEVICES)
    if word is None or word.text.value is None or word.file == GIVEN:
        return None, word
    names = [one.strip() for one in word.text.value.split(",")]
    return len([one for one in names if one]), word
