"""Finds the directory that a model's name refers to: a path, or a cached hub id."""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytest_gkd import hub_cache
from pytest_gkd.clock import monotonic
from pytest_gkd.hub_cache import is_hub_id
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.deadline import begun

# For the hub's first answer. A name server that gives none costs 5 s (resolv.conf(5)).
REACH_S = 12.0
PORTS = {"http": 80, "https": 443}  # else a SOCKS proxy's (RFC 1928)


@dataclass(frozen=True)
class Located:
    """A model directory; ``from_hub`` if it is in the hub's local cache."""

    directory: Path
    from_hub: bool


def locate(name: str, origin: str) -> Located | None:
    """The directory of ``name``: itself, or its snapshot in the hub's local cache.

    None for a hub id that is not in the cache, and for a URL (``s3://…``). Raises
    StageFault ``checkpoint.missing`` for a path that does not exist, and
    ``env.hub-unreachable`` for an uncached hub id while ``HF_HUB_OFFLINE`` is set.
    """
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            with os.scandir(path):  # raises where is_dir does not
                path.joinpath("config.json").exists()
            return Located(path, from_hub=False)
        exists = path.exists()
    except PermissionError as error:
        raise paths.denied(path, origin, error) from error
    if exists:
        what = "is a file; expected a model directory with config.json"
        raise paths.fault("checkpoint.missing", path, origin, what)
    if "://" in name or is_of_modelscope():
        return None
    snapshot = hub_cache.snapshot(name, os.environ) if is_hub_id(name) else None
    if snapshot is not None:
        return Located(snapshot, from_hub=True)
    if not is_hub_id(name) or ("/" in name and path.parent.is_dir()):
        # The loaders might ask the hub for it; the user meant the directory here.
        raise paths.missing("checkpoint.missing", path, origin, "a model directory")
    if is_offline():
        problem = (
            "is neither a directory here nor in the hub's cache "
            f"{hub_cache.models(os.environ)}, and HF_HUB_OFFLINE forbids asking the hub"
        )
        raise unreachable(name, origin, problem)
    return None


def reach_hub(name: str, origin: str) -> None:
    """Check that the hub, or the proxy to it, accepts a connection, unless offline.

    For ``name``, which only the hub knows; URLs (``s3://…``) and ModelScope are
    skipped. The loaders themselves try for 23 s before they give up. Raises StageFault
    ``env.hub-unreachable``.
    """
    if is_offline() or is_of_modelscope() or "://" in name:
        return
    hub = urllib.parse.urlsplit(
        os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    )
    proxy = ""
    if not urllib.request.proxy_bypass(hub.netloc):
        proxies = urllib.request.getproxies()
        proxy = proxies.get(hub.scheme) or proxies.get("all", "")
    asked, what = hub, f"the hub {hub.geturl()}"
    if proxy:
        asked = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        what += f" by way of the proxy {asked.hostname}"
    port = asked.port or PORTS.get(asked.scheme, 1080)
    problem = refused_connection(asked.hostname or "", port)
    if problem:
        problem = f"is not here, and {what} cannot be reached: {problem}"
        raise unreachable(name, origin, problem)


def refused_connection(host: str, port: int) -> str:
    """Why no connection succeeds within REACH_S; empty if one does.

    In threads, since the resolver has no timeout of ours, and to all of a name's
    addresses at once: if IPv6 leads nowhere, IPv4 answers.
    """
    until = monotonic() + REACH_S

    def connect(address: str) -> None:
        socket.create_connection((address, port), REACH_S).close()

    def connections() -> list[Future[None]]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = {str(one[4][0]) for one in found}
        return [begun(partial(connect, address), address) for address in addresses]

    resolved = begun(connections, host)
    try:
        problem = ""
        calls = resolved.result(REACH_S)
        for call in as_completed(calls, max(0.0, until - monotonic())):
            problem = str(call.exception() or "")
            if not problem:
                break
    except TimeoutError:
        return f"no answer in {REACH_S:g} s"
    except (OSError, UnicodeError) as error:  # of the resolver
        return str(error)
    return problem


def is_of_modelscope() -> bool:
    """Whether vLLM asks ModelScope, not the hub (vllm, envs.py)."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")


def unreachable(name: str, origin: str, problem: str) -> StageFault:
    """The fault for ``name``, which only the hub knows; ``problem`` follows it."""
    cache = str(hub_cache.models(os.environ))
    return paths.fault("env.hub-unreachable", name, origin, problem, hub_cache=cache)


def is_offline() -> bool:
    """Whether the loaders are forbidden to ask the hub."""
    return any(
        os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
