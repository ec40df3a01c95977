"""Starts a vLLM server of the student and grades its answers over its API."""

import argparse
import json
import subprocess
import sys
import time

from openai import APIConnectionError, OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="student")
parser.add_argument("--name", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--port", type=int, default=8791)
parser.add_argument("--questions", type=int, default=10)
parser.add_argument("--max-tokens", type=int, default=12)
parser.add_argument("--patience", type=float, default=90)
parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[])
args = parser.parse_args()


def wait_for(client, server):
    begin = time.time()
    while time.time() - begin < args.patience:
        if server.poll() is not None:
            raise SystemExit(f"eval: the server ended with status {server.returncode} after {time.time() - begin:.0f} s")
        try:
            return [one.id for one in client.models.list()]
        except APIConnectionError:
            time.sleep(1)
    raise TimeoutError(f"eval: no server on port {args.port} after {args.patience:.0f} s")


def main():
    command = ["vllm", "serve", args.model, "--port", str(args.port), "--max-model-len", "160", "--dtype", "float32", "--enforce-eager", *args.serve]
    print("eval:", " ".join(command), flush=True)
    server = subprocess.Popen(command)
    client = OpenAI(base_url=f"http://127.0.0.1:{args.port}/v1", api_key="none", max_retries=0)
    try:
        print("eval: served models", wait_for(client, server), flush=True)
        rows = [json.loads(line) for line in open(args.data)][: args.questions]
        graded = []
        for number, row in enumerate(rows):
            answer = client.chat.completions.create(model=args.name, messages=row["prompt"], max_tokens=args.max_tokens, logprobs=True)
            text = answer.choices[0].message.content
            graded.append(len(set(text)) / (len(text) or 1))
            print(f"eval: {number + 1}/{len(rows)} grade {graded[-1]:.3f}", flush=True)
        print(f"eval: mean grade {sum(graded) / len(graded):.4f}", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
