"""Asks a local Ray without GPUs for one, and prints what is found to be wrong."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import ray

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.layouts import ray_layout

with tempfile.TemporaryDirectory(prefix="r") as temporary:
    ray.init(
        address="local",
        num_cpus=3,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=temporary,
    )
    ray_layout.place(ray_layout.bundles(gpus=0, tensor_parallel_size=1), 30.0)
    try:
        ray_layout.place(ray_layout.bundles(gpus=1, tensor_parallel_size=1), 30.0)
    except StageFault as fault:
        print("\n" + json.dumps({"cause": fault.cause, "message": fault.message}))
    ray.shutdown()
sys.stdout.flush()
os._exit(0)
