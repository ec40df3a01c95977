"""Which Ray is already running here, and what should a Ray of our own start with?"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd.workload.env_findings import Finding, Note
from pytest_gkd.workload.env_variables import RAY_DIRECTORY_BYTES

AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Raylet:
    """One running raylet: its process, its user and the address of its cluster."""

    pid: int
    user: str
    address: str


def read_raylets(own_pids: frozenset[int]) -> list[Raylet]:
    """Raylets on this machine that are not of this run."""
    raylets = []
    for process in psutil.process_iter(["name", "username", "cmdline"]):
        if process.info["name"] != "raylet" or process.pid in own_pids:
            continue
        words = process.info["cmdline"] or ()
        found = [w.partition("=")[2] for w in words if w.startswith("--gcs-address=")]
        user = process.info["username"] or ""
        raylets.append(Raylet(process.pid, user, found[0] if found else "unknown"))
    return raylets


def judge_raylets(raylets: list[Raylet], user: str) -> list[Finding | Note]:
    """A Ray of one's own that still runs is joined by ray.init(address="auto") and
    by jobs that find it through its files; one of another user holds ports."""
    return [
        Note(
            "ray.running",
            f"a Ray is already running here: raylet pid {raylet.pid}, user "
            f"{raylet.user}, address {raylet.address}"
            + (
                "; a job started now may join it, with the environment it has."
                if raylet.user == user
                else "."
            ),
        )
        for raylet in raylets
    ]


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a Ray of our own: as it is, but nothing is sent out, and no
    token is written to the home directory (Ray makes ~/.ray/auth_token otherwise)."""
    child = dict(environ)
    child["RAY_USAGE_STATS_ENABLED"] = "0"
    if not any(name in child for name in AUTH):
        child["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return child


def make_directory(run_dir: Path) -> Path:
    """A private directory for Ray, short enough for the sockets below it."""
    place = run_dir / "ray"
    if len(os.fsencode(place)) > RAY_DIRECTORY_BYTES:
        place = Path(tempfile.mkdtemp(prefix="gkd-ray-", dir="/tmp"))
    place.mkdir(exist_ok=True)
    return place


def keep_logs(directory: Path, target: Path) -> None:
    """Copy what Ray's own processes logged: the reason is in there when it fails."""
    logs = directory / "session_latest" / "logs"
    if logs.is_dir():
        shutil.copytree(logs, target, dirs_exist_ok=True)
