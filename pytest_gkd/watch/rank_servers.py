"""What the servers inside a job's ranks on one machine answer: NCCL's and torch's.

NCCL's RAS threads: NCCL's user guide, "RAS", and src/ras/client_support.cc; torch's
debug server: torch/distributed/debug. Both listen on the machine alone that they run
on, so this also runs on a job's other nodes (see ``node_agent``). Nothing is signalled
or ended.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import re
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import NamedTuple

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.diagnosis import flight_records
from pytest_gkd.processes import background, procfs

MOST_BYTES = 64 << 20
RAS, DEBUG = "ncclras", "torch debug server"
RAS_PORT = 28028
DEBUG_PORT = 25999
PAGES = ("stacks", "fr_trace_json")
# A handler of each rank's own server: the debug server's page of it leaves out what has
# returned, which on a GPU is nearly all.
TORCHCOMMS = "torchcomms_fr_trace_json"
_RANK = re.compile(r"<h2>(Rank \d{1,7}): (http://[^\s<>/]+)/handler/fr_trace_json")
MOST_RANKS, AT_ONCE = 512, 16
ASK_S = 5.0
# Where a rank does not answer its RAS thread waits for it, src/ras/ras_internal.h:
# RAS_COLLECTIVE_LEG_TIMEOUT_SEC and _EXTRA_TIMEOUT_SEC.
RAS_S = 5.0 + 5.0 + 2.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Who listens on all interfaces is asked on the loopback; NCCL does on that which
# "localhost" means first, which may be ::1.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


class Listener(NamedTuple):
    """Who listens, and the address to ask."""

    pid: int
    host: str


class Answer(NamedTuple):
    """What a server of the job's has said, or why it has not."""

    address: str
    text: str = ""
    problem: str = ""


def ask(pids: Iterable[int]) -> dict[str, Answer]:
    """The answers of those servers that these processes run, by RAS and DEBUG."""
    pids = list(pids)
    ports = listening(pids)
    asked = {
        name: background.begin("gkd-rank-server", partial(answer, name, pids, ports))
        for name in (RAS, DEBUG)
    }
    return {name: told for name, one in asked.items() if (told := one.result())}


def answer(
    name: str, pids: Iterable[int], ports: Mapping[int, Listener]
) -> Answer | None:
    """What one of the servers says; None where these processes run none."""
    wanted = _ras_ports(pids) if name == RAS else [DEBUG_PORT]
    port = next((one for one in wanted if one in ports), None)
    if port is None:
        return None
    host = ports[port].host
    where = address(host, port)
    try:
        return Answer(where, (_ras if name == RAS else _debug)(host, port))
    except (OSError, http.client.HTTPException) as error:
        return Answer(where, problem=f"{where}: {type(error).__name__}: {error}")


def address(host: str, port: int) -> str:
    """``host:port``, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(pids: Iterable[int]) -> dict[int, Listener]:
    """The ports that processes listen on."""
    found: dict[int, Listener] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host, port = one.laddr
                    found.setdefault(port, Listener(pid, _ANY.get(host, host)))
    return found


def _ras_ports(pids: Iterable[int]) -> list[int]:
    told = (procfs.environ(pid).get("NCCL_RAS_ADDR", "") for pid in pids)
    ports = (one.rpartition(":")[2] for one in told)
    return [*(int(one) for one in ports if one.isdecimal()), RAS_PORT]


def _ras(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=ASK_S) as talk:
        talk.sendall(b"verbose status\n")
        talk.settimeout(RAS_S)
        told = b""
        with contextlib.suppress(TimeoutError):  # what has come tells something
            while len(told) < MOST_BYTES and (part := talk.recv(1 << 16)):
                told += part
    if not told:
        raise TimeoutError(f"no answer within {RAS_S:.0f} s")
    return told.decode("utf-8", "replace")


def _debug(host: str, port: int) -> str:
    url = f"http://{address(host, port)}"
    told = []
    failed: OSError | http.client.HTTPException | None = None
    for page in PAGES:
        try:
            told.append(f"{page}\n{_get(f'{url}/{page}')}")
        except (OSError, http.client.HTTPException) as error:
            failed = error  # a rank may answer for one page and not for another
    if failed and not told:
        raise failed
    ranks = _RANK.findall("".join(told))[:MOST_RANKS]
    return "\n\n".join([*told, *filter(None, _torchcomms(ranks))])


def _torchcomms(ranks: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What TorchComms has recorded in each rank, as the debug server shows the rest."""

    def of(rank: str, server: str) -> str:
        url = f"{server}/handler/{TORCHCOMMS}"
        try:
            record = flight_records.read(_get(url, data=b"").encode())
        except (OSError, http.client.HTTPException, ValueError):
            return ""  # such as from a rank that does not use it
        text = json.dumps(flight_records.counted(record))
        return f"<h2>{rank}: {url}</h2>\n<pre>{html.escape(text)}</pre>"

    until = monotonic() + 2 * ASK_S
    for first in range(0, len(ranks), AT_ONCE):
        some = ranks[first : first + AT_ONCE]
        asked = [background.begin("gkd-rank", partial(of, *one)) for one in some]
        for one in asked:
            with contextlib.suppress(futures.TimeoutError):  # Python 3.10's own
                yield one.result(max(0.0, until - monotonic()))


def _get(url: str, data: bytes | None = None) -> str:
    with DIRECT.open(url, data, timeout=ASK_S) as page:
        return str(page.read(MOST_BYTES).decode("utf-8", "replace"))
