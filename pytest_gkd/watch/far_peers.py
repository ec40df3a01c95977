"""Whether a server on another machine, for which a process waits, can still be reached.

A kernel accepts connections for a server that is busy, so that no answer to one proves
a hole in the network or a machine that is gone. No byte is sent.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from concurrent import futures

from pytest_gkd.processes import procfs
from pytest_gkd.watch import job_links, waiting, waits
from pytest_gkd.watch.samples import ProcessSample

CONNECT_S = 3.0
MOST = 16
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


def unanswered(processes: Sequence[ProcessSample]) -> tuple[str, ...]:
    """A sentence for each process that waits for what cannot be reached any more.

    Only if all that it may wait for is on other machines and none of that answers; a
    refusal is an answer, of the machine at least.
    """
    clients = [one for one in processes if _asks(one) and _is_here(one.pid)]
    if not clients:
        return ()
    known = job_links.known(clients)
    far = {
        one.label: [peer.address for peer in peers]
        for one in clients
        if (peers := waits.awaited_peers(one, known))
        and all(peer.is_far for peer in peers)
    }
    addresses = sorted({each for some in far.values() for each in some})[:MOST]
    with futures.ThreadPoolExecutor(MOST) as pool:
        why = dict(zip(addresses, pool.map(why_lost, addresses), strict=True))
    return tuple(
        f"{who} waits for {', '.join(some)}, which cannot be reached any more: "
        f"{why[some[0]]}"
        for who, some in far.items()
        if all(why.get(each) for each in some)
    )


def _asks(one: ProcessSample) -> bool:
    main = next((thread for thread in one.threads if thread.is_main), None)
    wait = waiting.of(main) if main else None
    return wait is not None and wait.kind in ("http", "socket")


def _is_here(pid: int) -> bool:
    """Whether it has the same network as this process: no container's of its own."""
    own = procfs.link(os.getpid(), "ns/net")
    return bool(own) and procfs.link(pid, "ns/net") == own


def why_lost(address: str) -> str:
    """Why nothing answers there; empty if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except TimeoutError:
        return f"no answer to a connection within {CONNECT_S:.0f} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno in _NO_WAY else ""
    return ""
