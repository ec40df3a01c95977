"""One side of a weight broadcast, told on standard input what to do, a line a case.

As ``send``: a case's name comes in, the rendezvous goes out, any line starts it. As
``receive``: a rendezvous comes in, "joined" goes out, then what arrived or the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import torch

from pytest_gkd.workload.sync import broadcast

INFOS: list[broadcast.Info] = [
    ("embedding", "float32", (64, 8)),
    ("norm", "bfloat16", (3,)),
    ("scalar", "float32", ()),
]


def tensors() -> list[tuple[str, Any]]:
    torch.manual_seed(0)
    return [(n, torch.randn(s).to(getattr(torch, d))) for n, d, s in INFOS]


def send(case: str) -> None:
    rendezvous, store = broadcast.open_rendezvous("gloo", 2, timeout_s=3.0)
    print(json.dumps(asdict(rendezvous)), flush=True)
    group = broadcast.join(rendezvous, 0, torch.device("cpu"), store)
    sys.stdin.readline()  # the receiver has joined too, which needs this side's store
    if case == "whole":
        broadcast.send(group, INFOS, tensors())
    elif case == "fewer tensors":
        with contextlib.suppress(RuntimeError):  # the receiver leaves
            broadcast.send(group, INFOS[:1], tensors())
    elif case == "short message":
        buffer = torch.zeros(2080, dtype=torch.uint8)
        group.broadcast(broadcast.bucket_header(buffer))
        group.broadcast(buffer[:1024])
    elif case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)


def receive(rendezvous: str) -> None:
    group = broadcast.join(
        broadcast.Rendezvous(**json.loads(rendezvous)), 1, torch.device("cpu")
    )
    print("joined", flush=True)
    try:
        found = dict(broadcast.receive(group, INFOS))
    except RuntimeError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    equal = all(torch.equal(found[name], tensor) for name, tensor in tensors())
    print(json.dumps({"equal": equal}), flush=True)


for line in sys.stdin:
    {"send": send, "receive": receive}[sys.argv[1]](line.strip())
