"""Starts the Ray of the layout ray, prints what it listens on, and ends it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageContext
from pytest_gkd.workload.layouts.ray_layout import RayLayout

with tempfile.TemporaryDirectory(prefix="r") as temporary:
    gkd = StageContext(Settings(), Path(temporary), Path(temporary))
    config: Any = SimpleNamespace(settings=gkd.settings)
    layout = RayLayout(config, gkd)
    layout.connect()
    here = psutil.Process()
    found = [
        (process.name(), connection.laddr.ip)
        for process in (here, *here.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    mode = os.environ.get("RAY_AUTH_MODE")
    print("\n" + json.dumps({"listening": found, "auth": mode}))
    layout.close()
sys.stdout.flush()
os._exit(0)
