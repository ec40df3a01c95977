"""A teacher behind HTTP for loop.py, which fails or is slow at some requests."""

import argparse
import json
import logging
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import steps
import torch

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--late", type=float, default=0)
parser.add_argument("--refuse-every", type=int, default=10**9)
parser.add_argument("--status", type=int, default=503)
parser.add_argument("--stop-at", type=int, default=10**9)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="[teacher] %(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("teacher")
count = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        global count
        count += 1
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["ids"]
        if count >= args.stop_at:
            open("held", "w").close()
            time.sleep(1e6)
        if count % args.refuse_every == 0:
            log.error("request %d refused: too many requests in the queue", count)
            return self.send_error(args.status)
        with torch.no_grad():
            answer = json.dumps({"logits": teacher(torch.tensor(ids)).tolist()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)


time.sleep(args.late)
teacher = steps.build_teacher(32)
log.info("teacher is ready on port %d", args.port)
ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
