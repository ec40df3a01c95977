"""Collects answers of an OpenAI-compatible server for distillation."""

import argparse
import asyncio
import json
import logging
import sys

import aiohttp
from tqdm import tqdm

logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s")
log = logging.getLogger("collect")
parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8011")
parser.add_argument("--model", default="student")
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--count", type=int, default=48)
parser.add_argument("--parallel", type=int, default=8)
parser.add_argument("--max-tokens", type=int, default=16)
parser.add_argument("--timeout", type=float, default=10)
parser.add_argument("--retries", type=int, default=3)
parser.add_argument("--wait", type=int, default=60)
args = parser.parse_args()


async def wait_ready(session):
    for attempt in range(args.wait):
        try:
            async with session.get(args.url + "/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError as error:
            if attempt % 5 == 0:
                log.info("Waiting for server at %s (%s)", args.url, error)
        await asyncio.sleep(1)
    raise TimeoutError(f"server at {args.url} was not ready after {args.wait} s")


async def ask(session, messages):
    body = {"model": args.model, "messages": messages, "max_tokens": args.max_tokens, "logprobs": True}
    for attempt in range(1, args.retries + 1):
        try:
            async with session.post(args.url + "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                return (await answer.json())["choices"][0]
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            log.warning("request failed (attempt %d of %d): %r", attempt, args.retries, error)
            if attempt == args.retries:
                raise
            await asyncio.sleep(0.5 * attempt)


async def main():
    rows = [json.loads(line) for line in open(args.data)][: args.count]
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await wait_ready(session)
        log.info("server is ready, %d prompts", len(rows))
        bar = tqdm(total=len(rows), desc="collect", file=sys.stderr)
        with open("collected.jsonl", "w") as out:
            for at in range(0, len(rows), args.parallel):
                part = rows[at : at + args.parallel]
                for choice in await asyncio.gather(*(ask(session, row["prompt"]) for row in part)):
                    out.write(json.dumps(choice) + "\n")
                    bar.update(1)
        bar.close()
    log.info("collected %d answers", len(rows))


if __name__ == "__main__":
    asyncio.run(main())
