"""Which Ray already runs here, and what our own Ray should start with."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd.processes import manifest
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.variables import RAY_DIRECTORY_BYTES

SOCKET_OPTION = "--raylet_socket_name="
# A head node answers in milliseconds; a firewall that drops packets never does.
ANSWER_S = 1.0
# Frameworks whose jobs start with ray.init().
FRAMEWORKS = ("verl", "openrlhf", "lightrft", "nemo-rl", "slime")
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Raylet:
    """One running raylet: its process, its user and its cluster's address."""

    pid: int
    user: str
    address: str


def read_raylets(own: Iterable[Path]) -> list[Raylet]:
    """Raylets on this machine, except those whose files are below ``own``."""
    raylets = []
    for process in psutil.process_iter(["name", "username", "cmdline"]):
        words = process.info["cmdline"] or ()
        sockets = [w.partition("=")[2] for w in words if w.startswith(SOCKET_OPTION)]
        ours = any(Path(s).is_relative_to(place) for s in sockets for place in own)
        if process.info["name"] != "raylet" or ours:
            continue
        found = (w.partition("=")[2] for w in words if w.startswith("--gcs-address="))
        user = process.info["username"] or ""
        raylets.append(Raylet(process.pid, user, next(found, "unknown")))
    return raylets


def judge_raylets(raylets: list[Raylet], user: str) -> list[StageFault | Note]:
    """A leftover Ray of the user's own is joined by ray.init(address="auto") and by
    jobs that find it through its files; another user's occupies ports."""
    joined = "; a job started now may join it, with the environment it has. ray stop "
    joined += "ends it"
    return [
        Note(
            "ray.running",
            f"a Ray is already running here: raylet pid {raylet.pid}, user "
            f"{raylet.user}, address {raylet.address}"
            f"{joined if raylet.user == user else ''}.",
        )
        for raylet in raylets
    ]


def judge_clusters(
    environ: Mapping[str, str], temporary: Path, *, needed: bool
) -> list[StageFault | Note]:
    """A dead cluster that ray.init() without an address would try to join.

    ray.init() follows RAY_ADDRESS, else the file that ``ray start`` left, and tries for
    minutes (Ray 2.60, _private/services.py, get_ray_address_from_environment; measured:
    more than 100 s). ``temporary`` is the user's directory for such files. Only a note
    if no Ray is ``needed`` and no variable asks for that cluster.
    """
    place = Path(environ.get("RAY_TMPDIR") or temporary) / "ray" / "ray_current_cluster"
    address, source = environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS"
    if not address:
        source = str(place)
        try:
            address = place.read_text().strip()
        except OSError:
            return []
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return []
    error = unanswered(host.strip("[]"), int(port))
    if not error:
        return []
    text = f"{source} names the Ray cluster {address}, where nobody answers ({error}): "
    text += "a job's ray.init() would try to join it for minutes."
    facts = {"address": address, "source": source}
    if source != "RAY_ADDRESS":
        facts["file"] = source
        if not needed:
            return [Note("ray.gone", text)]
    return [StageFault("ray.connection", text, facts, ((source, None, address),))]


def unanswered(host: str, port: int) -> str:
    """Why no connection to a port succeeds within ``ANSWER_S``; empty if one does."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What our own Ray needs in its environment, and in its driver's.

    Nothing is sent out. It listens on the loopback interface only: Ray uses 127.0.0.1
    as its node address if clusters are disabled, by a variable that it also reads on
    Linux (ray_constants.ENABLE_RAY_CLUSTER, seen in Ray 2.40 and 2.60); an address
    given to ray.init() is replaced by one that others can reach. Clients need a token,
    in releases that support them, unless ``environ`` says how to authenticate. The
    token is given here, since Ray would write one to ~/.ray/auth_token.
    """
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if not any(name in environ for name in AUTH):
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return own


def directory(run_dir: Path) -> Path:
    """Where a run's Ray keeps its files: short enough for the sockets below it."""
    place = run_dir / "ray"
    fits = len(os.fsencode(place)) <= RAY_DIRECTORY_BYTES
    return place if fits else manifest.ray_folder(run_dir)


def make_directory(run_dir: Path) -> Path:
    """Create that directory, accessible to this user only."""
    place = directory(run_dir)
    place.mkdir(mode=0o700)
    return place


def keep_logs(directory: Path, target: Path) -> None:
    """Copy the logs of Ray's own processes: they hold the reason when it fails."""
    logs = directory / "session_latest" / "logs"
    if logs.is_dir():
        shutil.copytree(logs, target, dirs_exist_ok=True)
