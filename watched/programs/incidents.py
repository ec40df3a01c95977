"""What can happen to a job, called by sitecustomize.py (``JOB_BREAK``).

As a program, ``python incidents.py PORT SECONDS``, it is a hub that gives a file of
SECONDS MB, one a second.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer


def download(port):
    """Weights from a slow hub: bytes come, nothing is printed."""
    urllib.request.urlopen(f"http://127.0.0.1:{port}").read()


def burn(seconds):
    """Work on the CPU that lasts."""
    import torch

    end, square = time.time() + seconds, torch.rand(256, 256)
    while time.time() < end:
        square = (square @ square).softmax(-1)


def compile_for(seconds):
    """torch.compile, one network after another: mostly a C++ compiler that runs."""
    import torch

    end, width = time.time() + seconds, 8
    while time.time() < end:
        width += 8
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(12)]
        torch.compile(torch.nn.Sequential(*layers), dynamic=False)(torch.rand(2, width)).sum().backward()


def write_slowly(path, seconds):
    """A checkpoint onto a slow disk: some MB a second reach it."""
    with open(path, "wb") as stream:
        for _ in range(seconds):
            stream.write(os.urandom(1 << 20))
            stream.flush()
            os.fsync(stream.fileno())
            time.sleep(1)


def fill_pipe():
    """Give 1 MB to a process that does not read it."""
    reader = subprocess.Popen(["sleep", "1000000"], stdin=subprocess.PIPE)
    reader.stdin.write(bytes(1 << 20))


def signal_children(name, number):
    """Send a signal to the child processes whose command has this name in it."""
    import psutil

    for _ in range(50):  # one run in four saw none at once; why is not known
        children = psutil.Process().children(True)
        found = [one for one in children if name in " ".join(one.cmdline())]
        if found:
            break
        time.sleep(0.1)
    assert found, f"no child process is called {name}"
    for one in found:
        one.send_signal(signal.Signals[number])


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for _ in range(int(sys.argv[2])):
            self.wfile.write(bytes(1 << 20))
            time.sleep(1)


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Hub).serve_forever()
