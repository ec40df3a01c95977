"""Prepares prompts in worker processes; needs nothing but Python."""

import argparse
import json
import logging
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

logging.basicConfig(
    level=logging.INFO,
    format="%(asctime)s | %(levelname)-7s | %(processName)s | %(message)s",
)
log = logging.getLogger("prepare")
parser = argparse.ArgumentParser()
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--output", default="prepared.jsonl")
parser.add_argument("--workers", type=int, default=3)
parser.add_argument("--chunk", type=int, default=24)
args = parser.parse_args()


def prepare(number, rows):
    random.seed(number)
    time.sleep(0.2 + random.random() / 2)
    done = [{"id": f"{number}-{at}", "text": row["prompt"][-1]["content"].strip()} for at, row in enumerate(rows)]
    log.info("chunk %d: %d rows, %d characters", number, len(done), sum(len(one["text"]) for one in done))
    return done


def main():
    rows = [json.loads(line) for line in open(args.data)]
    chunks = [rows[at : at + args.chunk] for at in range(0, len(rows), args.chunk)]
    log.info("%d rows in %d chunks, %d workers", len(rows), len(chunks), args.workers)
    start = time.time()
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool, open(args.output, "w") as out:
        futures = [pool.submit(prepare, number, part) for number, part in enumerate(chunks)]
        for done, future in enumerate(as_completed(futures), 1):
            for row in future.result():
                out.write(json.dumps(row) + "\n")
            log.info("progress %d/%d", done, len(chunks))
    log.info("wrote %s in %.1f s", args.output, time.time() - start)


if __name__ == "__main__":
    main()
