"""What a thread waits for, told by the functions that it is in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gkd.diagnosis.stack_dump import Frame, Thread
from pytest_gkd.processes.stacks import in_library
from pytest_gkd.watch import own_frames

COLLECTIVES = (
    r"all_reduce\w*|all_gather\w*|all_to_all\w*|reduce_scatter\w*|broadcast\w*|reduce"
    r"|gather\w*|scatter\w*|barrier|monitored_barrier|send|recv|batch_isend_irecv"
    r"|send_object_list|recv_object_list|wait_tensor|new_group|split_group"
    r"|allreduce\w*|allgather\w*|reducescatter\w*|destroy_process_group"
)
# The outermost function that is here tells. Each is file:function, then what it is
# called; {} is the function. Looked up in torch 2.13, Ray 2.60, vLLM 0.32, zmq 27.
_TABLE = (
    ("store", r"torch/distributed/(?:distributed_c10d\.py:(?:init_process_group|"
     r"_store_based_barrier)|rendezvous\.py:\w+)", "{}"),
    ("collective", rf"(?:torch/distributed/(?:distributed_c10d|_functional_collectives)"
     rf"|deepspeed/comm/(?:comm|torch))\.py:(?:\w+\.)?(?:{COLLECTIVES})", "{}"),
    ("collective", rf"ray/util/collective/collective\.py:(?:{COLLECTIVES})",
     "ray.util.collective's {}"),
    ("collective", rf"vllm/distributed/device_communicators/(?:pynccl|cuda_communicator"
     rf"|shm_object_storage)\.py:(?:\w+\.)?(?:{COLLECTIVES})", "vLLM's {}"),
    ("store", r"torch/distributed/(?:elastic/.*rendezvous/.*|elastic/utils/store\.py)"
     r":.*(?:next_rendezvous|barrier|synchronize|get_all).*", "the rendezvous"),
    ("ray", r"ray/(?:_private/worker\.py:(?:get|wait|Worker\.get_objects|get_objects)"
     r"|util/client/api\.py:_ClientAPI\.(?:get|wait))", "ray.get"),
    ("ray", r"ray/util/placement_group\.py:(?:\w+\.)?wait", "a placement group"),
    ("idle", r"ray/_private/(?:worker\.py:(?:Worker\.)?main_loop"
     r"|workers/default_worker\.py:<module>)", "a task"),
    ("engine", r"vllm/v1/engine/core_client\.py:(?:\w+\.)?(?:get_output|call_utility|"
     r"_call_utility)\w*", "{} of vLLM's engine"),
    ("engine", r"vllm/v1/engine/(?:utils|core_client)\.py:(?:\w+\.)?wait_for_engine\w*",
     "the start of vLLM's engine"),
    ("workers", r"vllm/v1/executor/multiproc_executor\.py:(?:\w+\.)?wait_for_ready",
     "the start of its workers"),
    ("idle", r"vllm/v1/engine/core\.py:(?:\w+\.)?_process_input_queue", "a request"),
    ("broadcast", r"vllm/distributed/device_communicators/shm_broadcast\.py:(?:\w+\.)?"
     r"(?:acquire_read|acquire_write|dequeue|enqueue|recv|wait_until_ready)",
     "vLLM's shared memory queue"),
    ("data", r"torch/utils/data/dataloader\.py:(?:\w+\.)?(?:_next_data|_try_get_data|"
     r"_get_data)", "its data loader"),
    ("idle", r"torch/utils/data/_utils/worker\.py:_worker_loop", "an index"),
    ("http", r"(?:requests/(?:api|sessions|adapters)|urllib3/(?:\S*/)?"
     r"(?:connectionpool|connection|response)|httpx/(?:_client|_transports/\w+)|httpcore/\S+"
     r"|http/client|urllib/request|openai/\S+)\.py:.*", "an HTTP answer"),
    ("socket", r"(?:zmq/\S+\.py:.*(?:recv|send|poll)\w*"
     r"|(?:multiprocessing/)?connection\.py:\S*(?:recv|poll|send|accept|wait)\w*"
     r"|grpc/\S*\.py:.*)", "a message ({})"),
    ("gpu", r"torch/cuda/(?:__init__|streams)\.py:(?:\w+\.)?(?:synchronize|wait)",
     "the GPU ({})"),
    ("children", r"(?:subprocess\.py:(?:Popen\.)?(?:wait|_wait|communicate|"
     r"_try_wait)|multiprocessing/process\.py:(?:\w+\.)?join"
     r"|torch/multiprocessing/spawn\.py:(?:\w+\.)?join|os\.py:waitpid)",
     "its child processes"),
    ("thread", r"threading\.py:(?:Thread\.)?join|threading\.py:_shutdown",
     "its other threads"),
    ("queue", r"(?:multiprocessing/)?queues?\.py:(?:\w+\.)?(?:get|put|join)",
     "a queue ({})"),
    ("event", r"threading\.py:(?:\w+\.)?wait|multiprocessing/synchronize\.py:.*wait\w*"
     r"|concurrent/futures/_base\.py:(?:\w+\.)?(?:result|wait)\w*", "an event"),
    ("socket", r"(?:socket|ssl)\.py:.*(?:read|recv|accept|connect|send|handshake)\w*",
     "a socket ({})"),
    ("loop", r"selectors\.py:(?:\w+\.)?select", "an event of its event loop"),
)  # fmt: skip
_LIBRARY_ROOT = r"(?:.*/(?:site-packages|dist-packages|lib/python[\d.]+)/)?"
_PYTHON = tuple(
    (kind, re.compile(_LIBRARY_ROOT + f"(?:{like})"), words)
    for kind, like, words in _TABLE
)
# Native functions, where no Python function tells.
_NATIVE = (
    ("collective", re.compile(r"c10d::(?:Work|ProcessGroup\w*|\w*Work)::|gloo::"),
     "a collective"),
    ("store", re.compile(r"c10d::\w*Store\w*::"), "the store"),
    ("gpu", re.compile(r"cu(?:da)?(?:Stream|Device|Event|Ctx)Synchronize|"
     r"stream_synchronize|_local_scalar_dense"), "the GPU"),
    ("socket", re.compile(r"zmq::|zmq_"), "a message"),
)  # fmt: skip
# Kernel calls that native frames show under these names.
_CALLS = re.compile(
    r"(?:__)?(?:libc_)?(read|write|writev|readv|pread|pwrite|fsync|fdatasync|flock|fcntl"
    r"|connect|accept|accept4|recv|recvfrom|recvmsg|send|sendto|sendmsg|poll|ppoll"
    r"|select|epoll_wait|open|open64|openat|wait4|waitpid|clock_nanosleep|nanosleep)"
    r"(?:64|_nocancel)?"
)


@dataclass(frozen=True)
class Wait:
    """What a thread waits for.

    ``kind`` is the first column of the table, ``lock``, or ``sleep``; ``operation``
    names it for people; ``at`` is the frame of the program that called it.
    """

    kind: str
    operation: str
    at: Frame | None = None


def of(thread: Thread) -> Wait | None:
    """What the thread waits for; None where nothing tells that it waits."""
    frames = own_frames.begun(thread)
    python, inside = own_frames.split(frames)
    for number, frame in enumerate(python):
        place = own_frames.place(frame)
        name = frame.function.rpartition(".")[2]
        for kind, like, words in _PYTHON:
            if not like.fullmatch(place):
                continue
            if kind == "idle" and not all(map(in_library, python[number + 1 :])):
                continue  # it is at work
            at = own_frames.last_own(python[:number])
            return Wait(kind, words.format(name), at)
    for kind, like, words in _NATIVE:
        if any(like.search(one.function) for one in inside):
            return Wait(kind, words, own_frames.last_own(python))
    if own_frames.is_lock(thread):
        return Wait("lock", "a lock", own_frames.last_own(python))
    if native_call(thread) in ("clock_nanosleep", "nanosleep"):
        return Wait("sleep", "time.sleep", own_frames.last_own(python))
    return None


def native_call(thread: Thread) -> str:
    """The kernel call that the innermost native frames show; empty where none does."""
    _, inside = own_frames.split(thread.frames)
    found = (_CALLS.fullmatch(frame.function) for frame in reversed(inside))
    return next((one[1] for one in found if one), "")
