"""What of a stack tells something: not an interpreter's start, nor idle helpers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_gkd.diagnosis.stack_dump import Frame, Thread
from pytest_gkd.processes.stacks import in_library

MOST_NAME = 60  # C++ names with their template arguments are longer than a screen
# Frames on the way that every thread, event loop or module has, as file:function.
_PLUMBING = re.compile(
    r"(?:.*/)?(?:threading\.py:(?:Thread\.)?(?:_bootstrap(?:_inner)?|run)"
    r"|(?:<frozen )?runpy(?:\.py|>):\w+|<string>:<module>|<frozen importlib\.\w+>:.*"
    r"|multiprocessing/(?:spawn|process|popen_\w+|forkserver|context)\.py:.*"
    r"|asyncio/(?:runners|base_events|events)\.py:.*|uvloop/.*"
    r"|contextlib\.py:.*inner|functools\.py:.*|_contextlib\.py:.*decorate_context"
    r"|torch/nn/modules/module\.py:(?:Module\.)?_(?:wrapped_)?call_impl"
    r"|torch/utils/_contextlib\.py:.*decorate_context"
    r"|torch/distributed/c10d_logger\.py:.*wrapper"
    r"|torch/distributed/elastic/metrics/api\.py:.*wrapper"
    r"|torch/distributed/elastic/multiprocessing/errors/__init__\.py:.*wrapper"
    r"|ray/_private/(?:auto_init_hook|client_mode_hook)\.py:.*"
    r"|ray/_private/(?:workers/default_worker\.py:<module>|worker\.py:\S*main_loop"
    r"|function_manager\.py:.*)|ray/util/tracing/.*)"
)
# What a process of multiprocessing's begins with.
_BEGINS = re.compile(r"(?:.*/)?multiprocessing/process\.py:(?:\w+\.)?_bootstrap")
# Libraries that wait for a program, which is what is looked for.
_MACHINERY = re.compile(
    r"(?:.*/(?:site|dist)-packages/)?(?:torch|ray|vllm|deepspeed|zmq|requests|urllib3"
    r"|httpx|httpcore|openai|aiohttp|grpc|uvloop)/"
)
_INTERPRETER = ("module.c", "module.c.h", "socketmodule.c", "_posixsubprocess.c")
# Of C and C++: addresses, the interpreter itself and what binds it to libraries.
_BINDING = re.compile(
    r"0x[\da-fA-F]+$|pybind11::|_?Py[A-Z_]|_?py[a-z]*_|cfunction_|method_|function_code"
    r"|lock_PyThread|rlock_acquire|thread_run$|vectorcall|slot_tp_|type_call|object_"
    r"|__libc_start|_start$|start_thread|clone3?$|main$|torch::PythonArgParser"
    r"|THPFunction|THPVariable|builtin_|classmethod|partial_call|context_run"
    r"|time_sleep$|std::condition_variable|pthread_cond_|boost::|ray::"
)
LOCK = re.compile(r"PyThread_acquire_lock|lock_acquire|PyMutex_Lock|_PyMutex_LockTimed")
# Threads that only wait for work, by a function that is in them, as file:function.
_IDLE = re.compile(
    r"(?:.*/)?(?:concurrent/futures/(?:thread\.py:_worker|process\.py:.*)"
    r"|multiprocessing/(?:pool\.py:.*|queues\.py:.*_feed|resource_sharer\.py:.*"
    r"|managers\.py:.*)|tqdm/_monitor\.py:.*|_monitor\.py:(?:TMonitor\.)?run"
    r"|torch/_inductor/(?:compile_worker|async_compile)\S*:.*"
    r"|torch/utils/data/_utils/pin_memory\.py:.*"
    r"|ray/_private/(?:worker|log_monitor|utils|import_thread)\.py:"
    r"(?:print_\w+|listen_\w+|\w*logs?\w*|_run|run)"
    r"|ray/_private/(?:gc_collect_manager|process_watcher)\.py:.*"
    r"|vllm/v1/engine/core(?:_client)?\.py:\S*(?:process_(?:in|out)put_sockets"
    r"|monitor\w*|run_engine_stats_update_task)|vllm/usage/.*"
    r"|wandb/.*|sentry_sdk/.*|debugpy/.*|_pydevd\S*|logging/handlers\.py:.*_monitor"
    r"|pytest_gkd/\S*|torch/distributed/elastic/(?:timer/|rendezvous/utils\.py:)\S*|watchdog/observers/\S*)"
)
_WAITS = re.compile(
    r"(?:\w+\.)*(?:wait|get|select|poll|epoll|_wait_for_tstate_lock|recv\w*|accept|"
    r"sleep|_worker|_recv|readline|read)"
)


def begun(thread: Thread) -> tuple[Frame, ...]:
    """The frames without those that a fork took over from its parent."""
    start = 0
    for number, frame in enumerate(thread.frames):
        if _BEGINS.fullmatch(place(frame)):
            start = number
    return thread.frames[start:]


def own(thread: Thread) -> tuple[Frame, ...]:
    """The frames that tell something, the outermost first.

    Python's innermost frame stays whatever it is. Of native frames those inside of it
    stay, without the interpreter's own. Empty where the thread is an idle helper.
    """
    frames = begun(thread)
    python, inside = split(frames)
    if not thread.is_main and _is_idle(python):
        return ()
    told = [frame for frame in python[:-1] if not _PLUMBING.fullmatch(place(frame))]
    short = [
        Frame(one.file, 0, _without_arguments(one.function))
        for one in inside
        if not _BINDING.match(one.function) and not one.file.endswith(_INTERPRETER)
    ]
    return (*told, *python[-1:], *short)


def split(frames: Sequence[Frame]) -> tuple[list[Frame], list[Frame]]:
    """Python's frames, and the native ones inside of the innermost of these."""
    python = [frame for frame in frames if not frame.is_native]
    last = max((i for i, one in enumerate(frames) if not one.is_native), default=-1)
    return python, list(frames[last + 1 :])


def is_lock(thread: Thread) -> bool:
    """Whether the thread waits for a lock of Python's that its own code acquires.

    Told by the native frames; a queue's, an event's and a join's locks are not meant.
    """
    python, inside = split(thread.frames)
    if not python or in_library(python[-1]):
        return False
    return any(LOCK.search(one.function) for one in inside)


def place(frame: Frame) -> str:
    """``file:function``, as the tables of functions name them."""
    return f"{frame.file}:{frame.function}"


def last_own(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program, else of a library, else of Python's own."""
    python = [frame for frame in reversed(frames) if not frame.is_native]
    other = [frame for frame in python if not in_library(frame)]
    mine = [frame for frame in other if not _MACHINERY.match(frame.file)]
    return next(iter([*mine, *other, *python]), None)


def _is_idle(python: Sequence[Frame]) -> bool:
    if any(_IDLE.fullmatch(place(frame)) for frame in python):
        others = [f for f in python if not in_library(f)]
        return all(_IDLE.fullmatch(place(f)) or _is_wait(f) for f in others)
    told = [frame for frame in python if not _PLUMBING.fullmatch(place(frame))]
    return bool(python) and all(in_library(f) and _is_wait(f) for f in told)


def _is_wait(frame: Frame) -> bool:
    return bool(_WAITS.fullmatch(frame.function))


def _without_arguments(function: str) -> str:
    """A C++ name without its template arguments."""
    while (short := re.sub(r"<[^<>]*>", "", function)) != function:
        function = short
    function = function.partition("<")[0]
    return function if len(function) <= MOST_NAME else function[: MOST_NAME - 1] + "…"
