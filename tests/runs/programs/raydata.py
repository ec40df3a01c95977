"""Ray Data prepares, Ray tasks score, one actor counts; no accelerator."""

import argparse
import json
import time

import ray

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--output", default="out/scored")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--retries", type=int, default=0)
parser.add_argument("--memory", type=float, default=0)
parser.add_argument("--resource", default="")
args = parser.parse_args()


def clean(row):
    return {"text": row["prompt"][-1]["content"].strip()}


def measure(batch):
    return {"text": batch["text"], "length": [len(one) for one in batch["text"]]}


@ray.remote(max_retries=args.retries)
def score(texts):
    return [sum(map(ord, one)) % 97 / 97 for one in texts]


@ray.remote
class Ledger:
    def __init__(self):
        self.total = 0.0

    def add(self, values):
        self.total += sum(values)
        return self.total


def main():
    rows = ray.data.from_items([json.loads(line) for line in open(args.data)])
    rows = rows.map(clean).map_batches(measure, batch_size=args.batch)
    print("rows:", rows.count(), flush=True)
    options = {"resources": {args.resource: 1}} if args.resource else {}
    ledger = Ledger.options(**options).remote()
    done = 0
    for batch in rows.iter_batches(batch_size=args.batch):
        total = ray.get(ledger.add.remote(score.options(memory=args.memory or None).remote(list(batch["text"]))))
        done += len(batch["text"])
        print(f"scored {done}, sum {total:.3f}", flush=True)
        time.sleep(0.2)
    rows.write_json(args.output)
    print("pipeline complete")


if __name__ == "__main__":
    ray.init(num_cpus=3, object_store_memory=100 * 1024 * 1024, include_dashboard=False)
    main()
