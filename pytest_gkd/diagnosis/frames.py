"""In which phase of a job a traceback was raised, judging by its functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from pytest_gkd.diagnosis import log_phases, phase_words
from pytest_gkd.diagnosis.exceptions import Chain, Raised
from pytest_gkd.diagnosis.stack_dump import Frame

# The role of a Ray actor or process, by its class name; the first match counts.
_ROLES = (
    ("teacher-init", "teacher", re.compile("teacher", re.IGNORECASE)),
    ("", "generation", re.compile("reward|verifier", re.IGNORECASE)),
    ("", "", re.compile("actor_?rollout", re.IGNORECASE)),  # verl's are both
    ("rollout-init", "generation", re.compile("rollout|generat", re.IGNORECASE)),
    ("actor-init", "", re.compile("trainer|student|policy|learner", re.IGNORECASE)),
)
# Processes of an engine, which start and then answer requests.
_ENGINE = re.compile(r"vllm|sglang|EngineCore|LLMRayActor", re.IGNORECASE)
_ANSWERS = re.compile(
    r"generate|request|validate|execute_model|sampl|schedul|event_loop|_step$|^step"
)
_WAITS_FOR = re.compile(r"wait_(?:for|until)|connect|health|is_ready", re.IGNORECASE)
_TASK = re.compile(r"ray::(\w+)\.(\w+)\(\)")
_INITS = re.compile(r"__init__$|(?:build|load|init|setup)(?:_|$)", re.IGNORECASE)
_LOADS = ("config", "actor-init", "rollout-init")
_TEACHER = re.compile(
    r"^(?:[\w., ]*teacher[\w., ]* = "
    r"|(?:await |return |[\w., ]+ = )?[\w.]*teacher[\w.]*\()",
    re.IGNORECASE,
)
# An assignment that calls nothing: of an index, a list or the like.
_TAKES_APART = re.compile(r" = (?:\[\w+\[|[\w.]+\[[^(]*$)")
# What the trainer asks of both its own model and a teacher.
_LOG_PROBS = re.compile(r"log_?probs?", re.IGNORECASE)
# Libraries and frameworks, also where they run from their sources or a model's folder.
_LIBRARY = re.compile(
    r"/(?:(?:site|dist)-packages|transformers_modules|pytest_gkd|verl|trl|swift|slime"
    r"|nemo_rl|openrlhf|lightrft|skyrl\w*|areal|roll|llamafactory|megatron|deepspeed"
    r"|vllm|sglang|transformers|accelerate|peft|datasets|axolotl|torchtune|torchtitan"
    r"|open_instruct|prime_rl|trlx|rlinf|rllm)/|\.(?:pyx|pxi)$"
)
# What only calls the code of others, such as a module's ``forward``.
_CALLER = re.compile(
    r"^<|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|/ray/_private/"
    r"|/torch/(?:nn/modules/(?:module|container)|utils/\w+|autograd/\w+)\.py$"
)
# Libraries with files that are called as an engine's, such as ``core.py``.
_OF_DATA = re.compile(r"(?:^|/)(?:pyarrow|numpy|pandas|fsspec)/")
# A line that makes an object of settings.
_SETS = re.compile(r"\s*(?:\w+ ?= ?)?[\w.]*[A-Z]\w*(?:Config|Arguments|Args)\(")
_RAISES = re.compile(r"\s*(?:raise|assert)\b")
_IMPORTING = re.compile(
    r"^(?:<module>|__getattr__|_get_module|import_module|_gcd_import|_find_and_load\w*"
    r"|_call_with_frames_removed|_load_unlocked|exec_module)$"
)
_OF_IMPORT = re.compile(r"^(?:Import|ModuleNotFound|Syntax|Indentation|Tab)Error$")
# Files and functions in these reveal nothing about the job.
_GENERAL = re.compile(
    r"^<|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|^\w+\.py$"
    r"|(?:^|/(?:site|dist)-packages/)(?:torch|ray|hydra|omegaconf|pydantic|numpy|importlib\w*"
    r"|urllib3|requests|httpx|httpcore|aiohttp|anyio|uvloop|click|typer|fire|absl|jinja2"
    r"|pandas|pyarrow|safetensors|huggingface_hub|vllm|sglang)/|\.(?:pyx|pxi)$"
)


def phase_of(chain: Chain, last: str = "") -> str:
    """The phase in which chained exceptions were raised, by their innermost functions.

    The first exception counts, since the others followed from it. In a role's process,
    what its ``__init__`` raises belongs to that role's start. For log-probabilities,
    the phase marked ``last`` tells whose they are. Empty if none of the functions
    tells.
    """
    init, role = _role_of(chain)
    if init:
        return init
    if chain and _imports(chain[0]):
        return "config"
    if phase := _by_table(chain, role, last):
        return phase
    begun = last not in {"", "unknown", *log_phases.STARTS}
    for one in chain:
        own = [frame for frame in one.frames if not is_general(frame)]
        names = (phase_words.of_name(_name(f), begun=begun) for f in own[::-1])
        calls = (_calls(frame.code, begun=begun) for frame in own[::-1])
        if phase := _first(names) or _first(calls):
            return "teacher-init" if not begun and _awaits_teacher(one) else phase
    return role or _by_file(chain) or _of_engine(chain, begun=begun)


def is_at(frame: Frame, word: str) -> bool:
    """Whether a frame is in a function, in a file or folder, or both with a colon."""
    path, _, function = word.rpartition(":")
    if not path and ("/" in word or word.endswith(".py")):
        path, function = word, ""
    if function and frame.function.rpartition(".")[2] != function:
        return False
    file = "/" + frame.file.replace("\\", "/")
    return (
        f"/{path}" in file
        if path.endswith("/")
        else file.endswith(f"/{path}" * bool(path))
    )


def is_general(frame: Frame) -> bool:
    """Whether a frame lies in Python's own files or a library that every job uses."""
    return _GENERAL.search(frame.file) is not None


def in_library(raised: Raised) -> bool:
    """Whether a library's code raised it, as far as its frames tell."""
    files = [frame.file for frame in raised.frames if not _CALLER.search(frame.file)]
    return not files or _LIBRARY.search(files[-1]) is not None


def own_words(raised: Raised) -> bool:
    """Whether the program's own code raised it by ``raise`` or ``assert``."""
    return not in_library(raised) and any(
        _RAISES.match(frame.code) and not _CALLER.search(frame.file)
        for frame in raised.frames[-1:]
    )


def _imports(raised: Raised) -> bool:
    """Whether a program's own start failed while its modules were imported."""
    names = [frame.function for frame in raised.frames]
    return bool(names) and (
        all(_IMPORTING.search(name) for name in names)
        and (len(names) > 1 or _OF_IMPORT.search(raised.type) is not None)
    )


def _by_table(chain: Chain, role: str, last: str) -> str:
    """The phase of the first known framework function, from the innermost frame out."""
    for one in chain:
        for frame in reversed(one.frames):
            if _OF_DATA.search(frame.file):
                continue
            name = _name(frame)
            phase = log_phases.raised_in(f"{PurePosixPath(frame.file).name}:{name}")
            if phase in log_phases.STARTS and any(map(_of_teacher, one.frames)):
                return "teacher-init" if phase in _LOADS else phase
            if phase == "training-step" and _LOG_PROBS.search(name):
                asks = any("teacher" in each.code.lower() for each in one.frames)
                phase = "teacher" if asks or "teacher" in (role, last) else phase
            if phase == "training-step" and _of_teacher(frame):
                phase = "teacher"
            if phase:
                return phase
    return ""


def _calls(code: str, *, begun: bool) -> str:
    """The phase that a line of code implies by what it calls and creates."""
    if _TAKES_APART.search(code):
        return ""
    if _SETS.match(code):
        return "config"
    called = re.search(r"\w+$", code.partition("(")[0])
    phase = log_phases.raised_in(called[0] if called else "")
    return phase or phase_words.of_code(code, begun=begun)


def _awaits_teacher(raised: Raised) -> bool:
    """Whether a function waits for a teacher, or connects to one."""
    waits = any(_WAITS_FOR.search(frame.function) for frame in raised.frames)
    return waits and any("teacher" in frame.code.lower() for frame in raised.frames)


def _of_teacher(frame: Frame) -> bool:
    """Whether a line of the program creates or calls a teacher."""
    return _TEACHER.search(frame.code) is not None


def _first(phases: Iterable[str]) -> str:
    return next(filter(None, phases), "")


def _of_engine(chain: Chain, *, begun: bool) -> str:
    """What an engine's process was at: answering, or its start."""
    if not any(_ENGINE.search(one.process) for one in chain):
        return ""
    names = [_name(frame) for one in chain for frame in one.frames]
    return "generation" if begun or any(map(_ANSWERS.search, names)) else "rollout-init"


def _name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


def _role_of(chain: Chain) -> tuple[str, str]:
    """The role's start phase if that failed, else the phase of the role's work."""
    for one in chain:
        task = _TASK.search(one.message)
        name = task[1] if task else one.process
        found = next((role for role in _ROLES if name and role[2].search(name)), None)
        if found is None:
            continue
        own = (each.function for each in one.frames if "/ray/" not in each.file)
        method = (task[2] if task else next(own, "")).rpartition(".")[2]
        phase = log_phases.raised_in(method) or phase_words.of_name(method)
        starts = _INITS.search(method) and phase in {"", *log_phases.STARTS}
        return (found[0], "") if starts else ("", found[1])
    return "", ""


def _by_file(chain: Chain) -> str:
    """What the names of the program's own files imply."""
    files = (
        PurePosixPath(frame.file).stem
        for one in chain
        for frame in reversed(one.frames)
        if frame.function != "<module>" and not is_general(frame)
    )
    return _first(map(phase_words.of_file, files))
