"""The environment variables of a job: who reads them, and what they cost."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from packaging.version import Version

from pytest_gkd.job import releases
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks.reading import Reading
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.shell_values import GIVEN, Text, Word
from pytest_gkd.job.sources import files
from pytest_gkd.near_names import SLIP, near_names
from pytest_gkd.variable_table import (
    AS_IT_IS,
    GONE_FROM_VLLM,
    VARIABLES,
    Remark,
    Variable,
)

UNREAD = "config.unread-variable"
DEBUGGING = "config.debug-setting"
INVALID = "env.variable-invalid"
CAUSES = {"value": INVALID, "misread": UNREAD, "setting": DEBUGGING}
CONFLICT = "config.invalid-combination"
SLEEP = "PYTORCH_CUDA_ALLOC_CONF"
# vLLM up to this release exits if its sleep-mode allocator finds expandable segments in
# that variable (device_allocator/cumem.py, CuMemAllocator.__init__, of 0.19.1); since
# 0.20 it turns them off for its own memory.
LAST_TO_REFUSE = "0.19.1"
SLEEP_MODE = "vllm_enable_sleep_mode"  # TRL's; ms-swift turns the segments off itself
# The libraries that these prefixes belong to. vLLM itself warns about any VLLM_ name
# that it does not know (platforms/interface.py, validate_environ, of 0.32.0), and only
# NCCL and torch name variables NCCL_; under the others users' own names are common, so
# that only misspellings of a known name are reported.
STRICT = {"VLLM_": "vllm", "NCCL_": "nccl", "TORCH_NCCL_": "torch"}
SLIPS = (
    *("SGLANG_", "GLOO_", "CUDA_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("PYTORCH_", "RAY_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_"),
)
# Read by plugins: vllm-ascend, torch-npu and the like, and network plugins of NCCL.
PLUGINS = re.compile(
    r"VLLM_VERSION|VLLM_(?:ASCEND|OMNI|NPU|MLU|HPU|METAX|KUNLUN|GAUDI|SPYRE|RBLN|NEURON|MUSA)_\w+"
    r"|NCCL_(?:IBEXT|SHARP|PLUGIN|FASTRAK|GPUDIRECTTCPX?|SHIMNET|UCX|OFI|ROCE|ACCL)_\w+"
    r"|(?:PY)?TORCH_(?:NPU|HCCL|MUSA|MLU|HPU|GCU)_\w+"
)
# From the CUDA programming guide; the driver reads them.
DRIVER = {
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_HOME", "CUDA_PATH"),
    *("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_VERSION"),
    *("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_MPS_PIPE_DIRECTORY"),
    *(
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_TOOLKIT_ROOT_DIR",
    ),
    *("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE", "CUDA_LOG_FILE"),
    *(
        "CUDA_DEVICE_WAITS_ON_EXCEPTION",
        "CUDA_SCALE_LAUNCH_QUEUES",
        "CUDA_GRAPHS_USE_NODE_PRIORITY",
    ),
}


class Reader(NamedTuple):
    """A library that reads a variable, in its releases from ``first`` to ``last``.

    ``takes`` is int, float, or the list of accepted values, if known.
    """

    library: str
    first: str
    last: str
    takes: Any = None

    @property
    def is_current(self) -> bool:
        """Whether the installed release of the library, or the newest, still reads
        it.
        """
        newest = recorded()[self.library]["releases"][-1]
        if self.last == newest:
            return True
        here = installed(self.library)
        return bool(here) and Version(here) <= Version(self.last)


@functools.cache
def recorded() -> dict[str, Any]:
    """What tools/record_variables.py wrote, by library."""
    text = (releases.SCHEMAS / "variables.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@functools.cache
def readers(name: str) -> tuple[Reader, ...]:
    """The libraries that read, or used to read, a variable."""
    whole = recorded().items()
    return tuple(
        Reader(library, *one["names"][name])
        for library, one in whole
        if name in one["names"]
    )


@functools.cache
def installed(library: str) -> str:
    """The release of a library that is installed here, empty if there is none."""
    return files.version(library) or ""


ROWS: Mapping[str, Variable] = {row.name: row for row in VARIABLES}


def given(launch: Launch) -> dict[tuple[str, str], Word]:
    """The variables that a script sets for its commands, by name and value.

    Those from the user's --set are left out.
    """
    found: dict[tuple[str, str], Word] = {}
    for command in (launch.command, *launch.beside):
        for name, word in command.environment.items():
            if word.file != GIVEN:
                found.setdefault((name, word.text.shape), word)
    return found


def findings(launch: Launch, reading: Reading, text: str) -> Iterator[Finding]:
    """What is wrong with the environment of a job; ``text`` is that of its script."""
    words = sorted(given(launch).items(), key=lambda one: one[1].line)
    for (name, _), word in words:
        yield from about(name, word, reading, text)
    for one in reading.variables:
        needs = one.word.text.needs
        word = one.word._replace(text=Text(str(one.value), needs))
        yield from about(one.name, word, reading, text)
    yield from _segments(launch, reading)


def about(name: str, word: Word, reading: Reading, text: str) -> Iterator[Finding]:
    """What is wrong with one variable, whose value is the text of ``word``."""
    row, value = ROWS.get(name), word.text.value
    nodes = reading.values.get("nodes")
    if row is not None:
        remarks = [] if value is None else row.remarks(value, gpus=True)
        if value is None and row.always:
            remarks = [Remark("misread", f"{name} {row.always}")]
        for kind, said, ends_job in remarks:
            if name == "NCCL_IB_DISABLE" and nodes and nodes.value == 1:
                continue
            quiet = {"setting": row.is_choice, "misread": row.is_hint}.get(kind, False)
            level = "error" if ends_job else "note" if quiet else "warning"
            cause = "" if quiet else CAUSES[kind]
            yield Finding(cause, level, said, word.file, word.line, name)
        return
    said = unread(name, text)
    if said and (name, value) in AS_IT_IS:
        yield Finding("", "note", said, word.file, word.line, name)
    elif said:
        yield Finding(UNREAD, "warning", said, word.file, word.line, name)
    elif value and (wanted := refused(name, value)):
        engine = reading.values.get("rollout_engine")
        level = "error" if engine and engine.value == "vllm" else "warning"
        said = f"{name}={value}: vLLM takes {wanted}, and raises ValueError"
        yield Finding(INVALID, level, said, word.file, word.line, name)


def unread(name: str, text: str = "") -> str:
    """Why nothing reads a variable; empty if something does, or may.

    ``text`` is the script: a variable that it looks up itself is its own.
    """
    strict = next(
        (own for prefix, own in STRICT.items() if name.startswith(prefix)), ""
    )
    if not strict and not name.startswith(SLIPS):
        return ""
    if name in DRIVER or PLUGINS.fullmatch(name) or is_own(name, text):
        return ""
    known = readers(name)
    if any(reader.is_current for reader in known):
        return ""
    if known:
        last = max(known, key=lambda reader: reader.library == strict)
        later = recorded()[last.library]["releases"]
        after = later[later.index(last.last) + 1]
        gone = f"{last.library} {after} does not read {name} any more ({last.last} did)"
        hint = GONE_FROM_VLLM.get(name)
        return f"{gone}: {hint}" if hint else gone
    names = {
        other
        for one in recorded().values()
        for other, said in one["names"].items()
        if said[1] == one["releases"][-1]
    }
    near = near_names(name, sorted(names | DRIVER), cutoff=SLIP)
    if not near and strict != "vllm":
        return ""
    library = strict or "library"
    newest = f" {recorded()[strict]['releases'][-1]}" if strict else " that is known"
    does = (
        f"no {library}{newest} reads {name}"
        if not strict
        else f"{library}{newest} does not read {name}"
    )
    return f"{does}; near names: {', '.join(near)}" if near else does


def is_own(name: str, text: str) -> bool:
    """Whether the script uses the variable, other than for its own default."""
    used = re.finditer(rf"\$\{{?{name}\b", text)
    own = re.compile(rf"\b{name}=[\"']?$")
    return any(not own.search(text[: found.start()][-200:]) for found in used)


def refused(name: str, value: str) -> str:
    """What vLLM accepts if it raises ValueError at this value; empty if it does not.

    It evaluates all of vllm/envs.py once its engine is up (enable_envs_cache of 0.32).
    """
    reader = next((one for one in readers(name) if one.library == "vllm"), None)
    takes = reader.takes if reader else None
    if isinstance(takes, list):
        fits = value in takes or value.lower() in takes
        return "" if fits else " or ".join(takes)
    if takes == "int":
        return "" if re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", value) else "an integer"
    if takes == "float":
        try:
            float(value)
        except ValueError:
            return "a number"
    return ""


def _segments(launch: Launch, reading: Reading) -> Iterator[Finding]:
    """Expandable segments combined with vLLM's sleep mode, in the trainer's process."""
    word = launch.command.environment.get(SLEEP)
    if word is None or "expandable_segments:True" not in (word.text.value or ""):
        return
    here = installed("vllm")
    if here and Version(here) > Version(LAST_TO_REFUSE):
        return
    engine, frees = (
        reading.values.get(name) for name in ("rollout_engine", "free_cache_engine")
    )
    sleeps = engine and engine.value == "vllm" and frees and frees.value is True
    sleeps = sleeps or any(
        one.key.lstrip("-") == SLEEP_MODE and one.value is True for one in reading.said
    )
    if sleeps:
        said = (
            f"{SLEEP}={word.text.value} with vLLM's sleep mode: vLLM up to "
            f"{LAST_TO_REFUSE} ends with 'Expandable segments are not compatible with "
            "memory pool'; leave it out, or take vLLM 0.20 or later"
        )
        cause, level = (CONFLICT, "error") if here else ("", "note")
        yield Finding(cause, level, said, word.file, word.line, SLEEP)
