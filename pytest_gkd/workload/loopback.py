"""Checks that this machine's processes can reach each other over loopback.

Ranks, engine processes and Ray's use it, on one machine and in one container. It is
down in a network namespace that nobody has set up (``unshare --net``, some sandboxes).
"""

from __future__ import annotations

import socket

import psutil

from pytest_gkd.stage_api import StageFault

HOST = "127.0.0.1"
CAUSE = "env.loopback-down"
ANSWER_S = 1.0
UP = "ip link set lo up"


def problem() -> str:
    """Why this machine cannot connect to itself; empty if it can."""
    try:
        with socket.create_server((HOST, 0)) as listener:
            socket.create_connection(listener.getsockname(), ANSWER_S).close()
    except OSError as error:
        why = str(error.strerror or error)
    else:
        return ""
    lo = psutil.net_if_stats().get("lo")
    if lo is None or not lo.isup:
        state = "is down" if lo else "is not there"
        return (
            f"the loopback interface (lo) {state}, over which the processes of one "
            f"machine talk to each other ({HOST}: {why}). Bring it up, as root and in "
            f"this network namespace: {UP}"
        )
    return (
        f"this machine cannot connect to itself ({HOST}: {why}), though its loopback "
        "interface (lo) is up; a firewall or an address that was removed: ip addr show "
        "lo"
    )


def require() -> None:
    """Raises StageFault ``env.loopback-down`` if there is a ``problem``."""
    text = problem()
    if text:
        raise StageFault(CAUSE, text)
