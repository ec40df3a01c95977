"""Who is told of a watched job's verdict: by a command, a webhook, or what --on-stuck
says; and how a stuck command is ended."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from pathlib import Path

import pytest
from watch_helpers import python, until, watch

from pytest_gkd.watch import notify
from pytest_gkd.watch.samples import STUCK, Verdict

STANDS = """
import time
for step in range(3):
    print({'loss': 1.0, 'step': step}, flush=True)
def save_checkpoint():
    time.sleep(1000)
save_checkpoint()
"""
WAITS = (
    "import pathlib, sys\n    for _ in range(300):\n"
    "        if pathlib.Path('go').exists(): return\n        time.sleep(0.5)\n"
    "    sys.exit('nobody answered')"
)
SOON = ("--no-status", "--look-after=2", "--stuck-after=2")


def test_a_stuck_command_is_ended_where_that_is_asked_for(tmp_path: Path) -> None:
    options = [*SOON, "--on-stuck=end", "--notify=command:env > told"]
    done = watch(tmp_path, *python(STANDS), options=options)
    said = done.stderr.decode()
    assert done.returncode == 90
    assert "gkd: stuck for " in said
    assert "is in save_checkpoint (<string>:6)" in said
    assert "--on-stuck=end: ending the command (SIGTERM)" in said
    told = (tmp_path / "told").read_text()
    assert "GKD_VERDICT=stuck\n" in told
    assert "GKD_PHASE=checkpoint\n" in told
    assert "\nGKD_WHO=" in told
    (report,) = (tmp_path / "watch").glob("*/stuck-*")
    kept = {path.name for path in report.iterdir()}
    assert {"report.txt", "report.json", "tree.txt", "stacks"} <= kept
    found = json.loads((report / "report.json").read_text())
    (process,) = found["processes"]
    assert "is in save_checkpoint (<string>:6)" in process["does"]
    page = (report / "report.html").read_text("utf-8")
    assert "save_checkpoint (&lt;string&gt;:6)</code>" in page
    assert re.search(r"<li><span>[^<]*is in save_checkpoint", page)
    assert (found["verdict"], found["phase"]) == ("stuck", "checkpoint")


def test_a_command_may_answer_a_standstill_with_its_report(tmp_path: Path) -> None:
    line = 'command:cp "$GKD_REPORT/report.txt" answer; touch go'
    text = STANDS.replace("time.sleep(1000)", WAITS)
    done = watch(tmp_path, *python(text), options=[*SOON, f"--on-stuck={line}"])
    assert done.returncode == 0
    assert "stuck for " in (tmp_path / "answer").read_text()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("exit 3", "exit 3: ended with 3"),
        ("echo no such channel >&2; exit 4", "ended with 4: no such channel"),
    ],
)
def test_a_command_that_fails_is_told(line: str, problem: str) -> None:
    said: list[str] = []
    notify.tell((f"command:{line}",), Verdict(STUCK), "text", said.append)
    until(lambda: said, "nothing was said")
    assert said[0].startswith("--notify: ")
    assert problem in said[0]


def test_an_answer_that_fails_is_told_by_its_own_option(tmp_path: Path) -> None:
    text = STANDS.replace("time.sleep(1000)", WAITS)
    options = [*SOON, "--on-stuck=command:touch go; exit 5"]
    said = watch(tmp_path, *python(text), options=options).stderr.decode()
    assert "gkd: --on-stuck: touch go; exit 5: ended with 5" in said
    assert "--notify" not in said


def test_a_webhook_gets_json_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[dict[str, str]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            got.append(json.loads(self.rfile.read(size)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        said: list[str] = []
        verdict = Verdict(STUCK, phase="teacher", who="rank 3 (pid 7)")
        secret = "token=hf_" + "a" * 30
        url = f"http://127.0.0.1:{server.server_port}/hook"  # plain, in this test alone
        notify.tell((url,), verdict, f"stuck {secret}", said.append)
        until(lambda: got or said, "nothing came")
        assert not said
        assert got[0]["verdict"] == "stuck"
        assert (got[0]["phase"], got[0]["who"]) == ("teacher", "rank 3 (pid 7)")
        assert "aaaa" not in got[0]["text"]
    finally:
        server.shutdown()


def test_a_webhook_that_does_not_answer_is_told_without_its_path() -> None:
    said: list[str] = []
    notify.tell(
        ("https://127.0.0.1:9/services/T0/secret",), Verdict(STUCK), "x", said.append
    )
    until(lambda: said, "nothing was said")
    assert said[0].startswith("--notify: https://127.0.0.1:9/...: ")
    assert "secret" not in said[0]


def test_of_an_error_that_no_rule_knows_its_place_is_told_too(tmp_path: Path) -> None:
    text = "class MoonError(Exception): ...\ndef rise():\n    raise MoonError('dark')\n"
    program = tmp_path / "moon.py"
    program.write_text(f"{text}rise()\n")
    done = watch(tmp_path, sys.executable, str(program))
    saw = re.findall(r"saw   (.*)", done.stderr.decode())
    assert saw[0] == "MoonError: dark"
    assert saw[1].endswith("/moon.py:3 in rise: raise MoonError('dark')")
