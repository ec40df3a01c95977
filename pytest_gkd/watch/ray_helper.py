"""Asks the other nodes of a Ray cluster what a job's processes do there.

A program of its own, as ``gkd`` never imports Ray: the job's Python runs it, so it
imports nothing of this package, and sends to each node what it is given as source text.
It joins the cluster as a driver of its own, and asks an actor on each other node, which
takes no resources and ends with it. It reads and writes a line of JSON each time, and
ends with its input, that is, with ``gkd``.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
import time
import zlib
from typing import Any

# Ray hands its driver's directory on to workers.
_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120
sys.path[:] = [one for one in sys.path if os.path.realpath(one) != _HERE]

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

MOST_NODES = 64
# Where a job has no process, one is looked for this often.
IDLE_EVERY_S = 30.0
AGAIN_S = 15.0  # after an actor has failed
END_S = 5.0


class gkd_watch:  # noqa: N801 - the title of its process, which people see
    """Runs the agent on one node; pickled by value, as nobody can import it there."""

    def __init__(self, packed: str, module: str) -> None:
        import importlib
        import importlib.util

        sources = json.loads(zlib.decompress(base64.b64decode(packed)))

        class Sent:
            """Finds and loads the modules that were sent."""

            @staticmethod
            def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
                if name not in sources:
                    return None
                inside = any(one.startswith(f"{name}.") for one in sources)
                return importlib.util.spec_from_loader(name, sent, is_package=inside)

            @staticmethod
            def create_module(spec):  # type: ignore[no-untyped-def]
                return None

            @staticmethod
            def exec_module(module):  # type: ignore[no-untyped-def]
                name = module.__name__
                code = compile(sources[name], f"<{name}>", "exec")
                exec(code, module.__dict__)  # noqa: S102

        sent: Any = Sent
        sys.meta_path.insert(0, sent)
        self._answer = importlib.import_module(module).start()

    def answer(self, text: str) -> tuple[int, str]:
        """How many processes of the job there are, and what is told, packed."""
        number, told = self._answer(text)
        return number, base64.b64encode(zlib.compress(told.encode())).decode()


class Nodes:
    """The cluster's other nodes, with an actor on each that was asked."""

    def __init__(self, begin: dict[str, Any]) -> None:
        self.begin = begin
        self.own = ray.get_runtime_context().get_node_id()
        self.kind = ray.remote(
            num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0
        )(gkd_watch)
        # Each by node.
        self.actors: dict[str, Any] = {}
        self.open: dict[str, Any] = {}  # what it has not answered yet
        self.holds: dict[str, int] = {}  # processes of the job
        self.asked: dict[str, float] = {}
        self.failed: dict[str, tuple[float, str]] = {}

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each other node: its name, and its answer or why there is none."""
        deadline = time.monotonic() + request["limit_s"]
        text = json.dumps({**request, "limit_s": 0.8 * request["limit_s"]})
        rows: list[dict[str, Any]] = []
        refs: dict[Any, dict[str, Any]] = {}
        alive = 0
        for node in ray.nodes():
            key = node["NodeID"]
            row = {
                "id": key,
                "address": node["NodeManagerAddress"],
                "host": node["NodeManagerHostname"],
                "alive": node["Alive"],
                "own": key == self.own,
                "answer": "",
                "why": "",
            }
            if not node["Alive"]:
                row["why"] = (
                    node.get("DeathReasonMessage") or "Ray says that it is gone"
                )
            elif not row["own"]:
                alive += 1
                if alive > MOST_NODES:
                    row["why"] = f"only the first {MOST_NODES} nodes are looked at"
                else:
                    self.send(key, row, text, request["look"], refs)
            rows.append(row)
        left_s = max(0.1, deadline - time.monotonic())
        if refs:
            ray.wait([*refs], num_returns=len(refs), timeout=left_s, fetch_local=True)
        for ref, row in refs.items():
            self.hear(ref, row, request["limit_s"])
        return rows

    def send(
        self,
        key: str,
        row: dict[str, Any],
        text: str,
        look: str,
        refs: dict[Any, dict[str, Any]],
    ) -> None:
        """Ask one node, unless it is idle, has failed lately, or has not answered."""
        now = time.monotonic()
        if key in self.open:
            done, _ = ray.wait([self.open[key]], timeout=0)
            if not done:
                row["why"] = "it has not answered an earlier question yet"
                return
            del self.open[key]
        if key in self.failed and now < self.failed[key][0] + AGAIN_S:
            row["why"] = self.failed[key][1]
            return
        idle = not self.holds.get(key)
        if look == "use" and idle and now < self.asked.get(key, 0.0) + IDLE_EVERY_S:
            row["why"] = "idle"
            return
        if key not in self.actors:
            strategy = NodeAffinitySchedulingStrategy(key, soft=False)
            kind = self.kind.options(scheduling_strategy=strategy)
            self.actors[key] = kind.remote(self.begin["sources"], self.begin["module"])
        self.asked[key] = now
        self.open[key] = self.actors[key].answer.remote(text)
        refs[self.open[key]] = row

    def hear(self, ref: Any, row: dict[str, Any], limit_s: float) -> None:
        """Put a node's answer into its row, or why there is none."""
        key = row["id"]
        done, _ = ray.wait([ref], timeout=0)
        if not done:
            row["why"] = f"no answer within {limit_s:.0f} s"
            return
        del self.open[key]
        try:
            self.holds[key], row["answer"] = ray.get(ref, timeout=5)
        except Exception as error:
            row["why"] = _reason(error)
            self.failed[key] = (time.monotonic(), row["why"])
            self.actors.pop(key, None)


def _reason(error: Exception) -> str:
    """Why an actor has not answered, in one line."""
    name = type(error).__name__
    if isinstance(error, ray.exceptions.RayActorError):  # an essay on every cause
        return f"Ray's actor there cannot be reached ({name})"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{name}: {(lines or [''])[-1].strip()}"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    begin = json.loads(sys.stdin.readline())
    requests: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        requests.put(None)
        time.sleep(END_S)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    ray.init(
        address=begin["address"],
        namespace="gkd-watch",
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=begin["node_ip"],
    )
    nodes = Nodes(begin)
    for request in iter(requests.get, None):
        rows = nodes.ask(request)
        out.write(json.dumps({"id": request["id"], "nodes": rows}) + "\n")
        out.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
