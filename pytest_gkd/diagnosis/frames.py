"""In which phase of a job a traceback was raised, judging by its functions."""

from __future__ import annotations

import itertools
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
    ("rollout-init", "generation", re.compile("rollout|generat|sampl", re.IGNORECASE)),
    ("actor-init", "", re.compile("trainer|student|policy|learner", re.IGNORECASE)),
)
# Processes of an engine, which start and then answer requests.
_ENGINE = re.compile(r"vllm|sglang|EngineCore|LLMRayActor", re.IGNORECASE)
_OF_ENGINE = re.compile(
    r"/sglang/srt/(?!entrypoints)|/vllm/v1/(?:engine|worker|executor)/"
)
# An engine checks its own settings as it starts.
_ENGINES_OWN = re.compile(r"/(?:vllm|vllm_ascend|sglang)/")
_ANSWERS = re.compile(
    r"generate|request|validate|execute_model|sampl|schedul(?!er_process)|event_loop|_step$|^step"
)
_WAITS_FOR = re.compile(r"wait_(?:for|until)|connect|health|is_ready", re.IGNORECASE)
_TASK = re.compile(r"ray::([\w:-]+)\.(\w+)\(\)")
_INITS = re.compile(r"__init__$|(?:build|load|init|setup)(?:_|$)", re.IGNORECASE)
_LOADS = ("config", "actor-init", "rollout-init")
_TEACHER = re.compile(
    r"^(?:[\w., ]*teacher[\w., ]* = "
    r"|(?:await |return |[\w., ]+ = )?[\w.]*teacher[\w.]*\()",
    re.IGNORECASE,
)
# An assignment that calls nothing: of an index, a list or the like.
_TAKES_APART = re.compile(r" = (?:\[\w+\[|[\w.]+\[[^(]*$)")
_POLICY = re.compile(r"student|policy|actor(?!y)|pupil|learner|small", re.IGNORECASE)
# What the trainer asks of both its own model and a teacher.
_LOG_PROBS = re.compile(r"log_?probs?|logps?", re.IGNORECASE)
# Libraries and frameworks, also where they run from their sources or a model's folder.
_LIBRARY = re.compile(
    r"/(?:(?:site|dist)-packages|transformers_modules|pytest_gkd|verl|trl|swift|slime"
    r"|nemo_rl|openrlhf|lightrft|skyrl\w*|areal|roll|llamafactory|megatron|deepspeed"
    r"|vllm|sglang|transformers|accelerate|peft|datasets|axolotl|torchtune|torchtitan"
    r"|open_instruct|prime_rl|trlx|rlinf|rllm|realhf|verifiers|mbridge"
    r"|megatron_bridge|nemo(?:_aligner|_automodel|_gym)?|unsloth(?:_zoo)?)/|\.(?:pyx|pxi)$"
)
# What only calls the code of others, such as a module's ``forward``.
_CALLER = re.compile(
    r"^<|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|^[A-Za-z]:/.*/Lib/(?!site-packages/)"
    r"|/ray/_private/"
    r"|/torch/(?:nn/modules/(?:module|container)|utils/\w+|autograd/\w+)\.py$"
)
# Libraries with files that are called as an engine's, such as ``core.py``.
_OF_DATA = re.compile(r"(?:^|/)(?:pyarrow|numpy|pandas|fsspec)/")
# A line that makes an object of settings.
_SETS = re.compile(
    r"\s*(?:\w+ ?= ?)?[\w.]*[A-Z]\w*(?:Config|Arguments|Args)\("
    r"|.*\bos\.(?:environ|getenv)\b(?!.*(?:RANK|WORLD_SIZE|MASTER_))"
)
# What a driver asks of a Ray actor (``learner.update.remote(``), or creates as one.
_REMOTE = re.compile(r"([\w.]+?)(?:\.options\([^()]*\))?\.remote\(")
# Libraries that record a run: set up with its settings, then told of each step.
_TRACKER = re.compile(
    r"/(?:wandb|mlflow|swanlab|trackio|comet_ml|clearml|tensorboard|prometheus_client)/"
)
# Programs that only turn one checkpoint into another.
_CONVERTS = re.compile(r"^(?:convert|export|merge|consolidate)(?:_|$)|_to_hf$")
_RAISES = re.compile(r"\s*(?:raise|assert)\b")
_IMPORTING = re.compile(
    r"^(?:<module>|_run_module_as_main|_run_code|__getattr__|_get_module|import_module|_gcd_import|_find_and_load\w*"
    r"|_call_with_frames_removed|_load_unlocked|exec_module)$"
)
_IMPORTS = re.compile(r"\s*(?:from|import)\b")
# In verl 0.6 and 0.7 a worker's rollout_mode (verl/workers/fsdp_workers.py, f9c855f7),
# since 0.8 its update_weights (verl/workers/engine_workers.py, 1dda039b) wakes the
# engine for its weights and, once they are there, for its KV cache: part of the sync.
# Else it is woken to answer.
_WAKES = "wake_up"
_OF_IMPORT = re.compile(r"^(?:Import|ModuleNotFound|Syntax|Indentation|Tab)Error$")
# Files and functions in these reveal nothing about the job.
_GENERAL = re.compile(
    r"^<|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|^\w+\.py$"
    r"|^[A-Za-z]:/.*/Lib/(?!site-packages/)"
    r"|(?:^|/(?:site|dist)-packages/)(?:torch|ray|hydra|omegaconf|pydantic|numpy|importlib\w*"
    r"|urllib3|requests|httpx|httpcore|aiohttp|anyio|uvloop|click|typer|fire|absl|jinja2"
    r"|pandas|pyarrow|safetensors|huggingface_hub|vllm|sglang)/|\.(?:pyx|pxi)$"
    r"|/sglang/srt/|/vllm/(?:v1|engine|entrypoints|executor|worker)/"
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
    begun = _begun(last)
    if any(_TRACKER.search(frame.path) for one in chain[:1] for frame in one.frames):
        return "training-step" if begun else "config"
    created = any(map(_creates, chain))
    possible = log_phases.STARTS if created else log_phases.PHASES
    if phase := _by_table(chain, role, last, possible):
        teachers = (phase, last) == ("actor-init", "teacher-init")
        return last if teachers and not _names_policy(chain) else phase
    for one in chain:
        own = [frame for frame in one.frames[::-1] if not is_general(frame)]
        names = (_by_name(frame, one, role, last) for frame in own)
        calls = (_by_call(frame, one, role, last) for frame in own)
        found = (phase for phase in (*names, *calls) if phase in possible)
        if phase := _first(found):
            return "teacher-init" if not begun and _awaits_teacher(one) else phase
    if created:
        return "actor-init"
    return (
        role
        or _by_loose_name(chain)
        or _by_file(chain)
        or _of_engine(chain, begun=begun)
        or _of_module(chain)
    )


def _names_policy(chain: Chain) -> bool:
    """Whether the program's own functions or code name the model that is trained."""
    own = (f for one in chain for f in one.frames if not _LIBRARY.search(f.path))
    return any(_POLICY.search(f"{frame.function} {frame.code}") for frame in own)


def converts(chain: Chain) -> bool:
    """Whether a program that converts checkpoints raised it, by its file's name."""
    files = (f.path for one in chain for f in one.frames if f.function == "<module>")
    return _CONVERTS.search(PurePosixPath(next(files, "")).stem) is not None


def is_at(frame: Frame, word: str) -> bool:
    """Whether a frame is in a function, in a file or folder, or both with a colon."""
    path, _, function = word.rpartition(":")
    if not path and ("/" in word or word.endswith(".py")):
        path, function = word, ""
    if function and frame.function.rpartition(".")[2] != function:
        return False
    file = "/" + frame.path
    return (
        f"/{path}" in file
        if path.endswith("/")
        else file.endswith(f"/{path}" * bool(path))
    )


def is_general(frame: Frame) -> bool:
    """Whether a frame lies in Python's own files or a library that every job uses."""
    return _GENERAL.search(frame.path) is not None


def is_own(frame: Frame) -> bool:
    """Whether a frame lies in the program's own code, not in a library."""
    return not (_LIBRARY.search(frame.path) or _CALLER.search(frame.path))


def is_of_engine(frame: Frame) -> bool:
    """Whether a frame lies in the code of an engine for rollouts."""
    return _ENGINES_OWN.search(frame.path) is not None


def in_library(raised: Raised) -> bool:
    """Whether a library's code raised it, as far as its frames tell."""
    files = [frame.path for frame in raised.frames if not _CALLER.search(frame.path)]
    return not files or _LIBRARY.search(files[-1]) is not None


def own_words(raised: Raised) -> bool:
    """Whether the program's own code raised it by ``raise`` or ``assert``."""
    return not in_library(raised) and any(
        _RAISES.match(frame.code) and not _CALLER.search(frame.path)
        for frame in raised.frames[-1:]
    )


def _imports(raised: Raised) -> bool:
    """Whether a program's own start failed while its modules were imported."""
    names = [frame.function for frame in raised.frames]
    first = itertools.takewhile(lambda f: _IMPORTING.search(f.function), raised.frames)
    modules = [frame for frame in first if frame.function == "<module>"]
    if len(modules) > 1 and all(_IMPORTS.match(frame.code) for frame in modules[:-1]):
        return True  # a module's own lines may call anything
    return bool(names) and (
        all(_IMPORTING.search(name) for name in names)
        and set(names) != {"__getattr__"}  # a wrapped model looks for an attribute
        and (len(names) > 1 or _OF_IMPORT.search(raised.type) is not None)
    )


def _creates(raised: Raised) -> bool:
    """Whether a trainer or a Ray actor was being constructed, which no step does."""
    task = _TASK.search(raised.message)
    return (task is not None and task[2] == "__init__") or any(
        _name(frame) == "__init__" and "trainer" in PurePosixPath(frame.path).stem
        for frame in raised.frames
    )


def _by_table(chain: Chain, role: str, last: str, possible: tuple[str, ...]) -> str:
    """The phase of the first known framework function, from the innermost frame out.

    Only ``possible`` phases count.
    """
    for one in chain:
        for frame in reversed(one.frames):
            if _OF_DATA.search(frame.path):
                continue
            name = _name(frame)
            phase = log_phases.raised_in(f"{PurePosixPath(frame.path).name}:{name}")
            if name == _WAKES and any(map(_syncs, one.frames)):
                phase = "weight-sync"
            if phase not in possible or (phase == "config" and is_of_engine(frame)):
                continue
            if phase in log_phases.STARTS and any(map(_of_teacher, one.frames)):
                return "teacher-init" if phase in _LOADS else phase
            if phase == "training-step" and _of_teacher(frame):
                return "teacher"
            return _whose(phase, name, one, role, last)
    return ""


def _syncs(frame: Frame) -> bool:
    return log_phases.raised_in(_name(frame)) == "weight-sync"


def _by_name(frame: Frame, of: Raised, role: str, last: str) -> str:
    """The phase that the words of a function's name refer to."""
    name = _name(frame)
    return _whose(phase_words.of_name(name, begun=_begun(last)), name, of, role, last)


def _by_call(frame: Frame, of: Raised, role: str, last: str) -> str:
    """The phase that a frame's line of code refers to."""
    exists = _begun(last) or _TASK.search(of.message) is not None
    phase = _calls(frame.code, begun=_begun(last), exists=exists)
    return _whose(phase, frame.code, of, role, last)


def _begun(last: str) -> bool:
    """Whether steps had begun, by the phase that was marked last."""
    return last not in {"", "unknown", *log_phases.STARTS}


def _whose(phase: str, name: str, of: Raised, role: str, last: str) -> str:
    """``teacher`` for log-probabilities that a function asks of one, else the phase."""
    if phase != "training-step" or not _LOG_PROBS.search(name):
        return phase
    told = (of.message, *(frame.code for frame in of.frames))
    asks = any("teacher" in text.lower() for text in told)
    return "teacher" if asks or "teacher" in (role, last) else phase


def _calls(code: str, *, begun: bool, exists: bool) -> str:
    """The phase that a line of code implies by what it calls and creates.

    ``exists``: whether a Ray actor that it asks had started.
    """
    if _TAKES_APART.search(code):
        return ""
    if _SETS.match(code):
        return "config"
    if "ray.init(" in code:
        return "ray-init"
    if remote := _REMOTE.search(code):
        return _asked(remote[1], begun=begun, exists=exists)
    called = re.search(r"\w+$", code.partition("(")[0])
    phase = log_phases.raised_in(called[0] if called else "")
    return phase or phase_words.of_code(code, begun=begun)


def _asked(target: str, *, begun: bool, exists: bool) -> str:
    """The phase of what a driver asks of a Ray actor; its start if it is created."""
    owner, _, method = target.rpartition(".")
    found = next((role for role in _ROLES if role[2].search(owner or method)), None)
    start, work = (found[0] or "actor-init", found[1]) if found else ("", "")
    if method[:1].isupper():
        return start or "actor-init"
    phase = log_phases.raised_in(method) or phase_words.of_name(method, begun=begun)
    return phase or (work if exists else start)


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
    every = [frame for one in chain for frame in one.frames]
    if not (
        any(_ENGINE.search(one.process) for one in chain)
        or any(_OF_ENGINE.search(frame.path) for frame in every)
    ):
        return ""
    names = [*map(_name, every)]
    return "generation" if begun or any(map(_ANSWERS.search, names)) else "rollout-init"


def _of_module(chain: Chain) -> str:
    """``training-step`` if a torch module was called, for want of anything else."""
    called = any(_name(frame) == "_call_impl" for one in chain for frame in one.frames)
    return "training-step" if called else ""


def _name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


def _role_of(chain: Chain) -> tuple[str, str]:
    """The role's start phase if that failed, else the phase of the role's work."""
    for one in chain:
        task = _TASK.search(one.message)
        name = phase_words.with_synonyms(task[1] if task else one.process)
        found = next((role for role in _ROLES if name and role[2].search(name)), None)
        if found is None:
            continue
        own = (each.function for each in one.frames if "/ray/" not in each.path)
        method = (task[2] if task else next(own, "")).rpartition(".")[2]
        phase = log_phases.raised_in(method) or phase_words.of_name(method)
        starts = _INITS.search(method) and phase in {"", *log_phases.STARTS}
        return (found[0], "") if starts else ("", found[1])
    return "", ""


def _by_loose_name(chain: Chain) -> str:
    """What the names of the program's own functions mention, without a verb."""
    names = (
        _name(frame)
        for one in chain
        for frame in reversed(one.frames)
        if not _LIBRARY.search(frame.path) and not is_general(frame)
    )
    return _first(phase_words.of_file(name) for name in names if name != "forward")


def _by_file(chain: Chain) -> str:
    """What the names of the program's own files imply, else those of libraries."""
    files = [
        frame.path
        for one in chain
        for frame in reversed(one.frames)
        if frame.function != "<module>" and not is_general(frame)
    ]
    files.sort(key=lambda file: _LIBRARY.search(file) is not None)
    return _first(phase_words.of_file(PurePosixPath(file).stem) for file in files)
