"""A teacher behind HTTP: POST ids, get the top log-probabilities of each position."""

import json
import logging
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

logging.basicConfig(level=logging.INFO, format="[teacher] %(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("teacher")
count = 0


def topk(ids, k=8):
    with torch.no_grad():
        found = model(torch.tensor(ids)).logits.log_softmax(-1).topk(k, -1)
    return {"ids": found.indices.tolist(), "logprobs": found.values.tolist()}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        global count
        count += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        start = time.time()
        answer = json.dumps(topk(body["ids"])).encode()
        log.info("request %d: %d sequences in %.2f s", count, len(body["ids"]), time.time() - start)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *what):
        pass


log.info("loading teacher from %s", sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
log.info("teacher server is ready on port %s", sys.argv[2])
server.serve_forever()
