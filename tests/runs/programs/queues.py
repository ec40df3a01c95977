"""A sampler process fills a queue of tensors, a trainer process empties it."""

import argparse
import logging
import queue
import threading
import time

import torch
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("--method", default="spawn")
parser.add_argument("--samplers", type=int, default=2)
parser.add_argument("--batches", type=int, default=12)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--patience", type=float, default=20)
parser.add_argument("--port", type=int, default=0)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(processName)s[%(process)d] %(levelname)s: %(message)s", datefmt="%H:%M:%S")
log = logging.getLogger("queues")


def sample(number, out, stop, share):
    torch.manual_seed(number)
    made = 0
    while not stop.is_set() and made < share:
        made += 1
        time.sleep(0.1)
        out.put((number, torch.randint(0, 100, (4, 16))))
        log.info("sampler %d: batch %d is in the queue", number, made)
    out.put((number, None))
    stop.wait()


def train(source, lock, batches):
    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1, batches + 1):
        number, ids = source.get(timeout=args.patience)
        if ids is None:
            continue
        with lock:
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log.info("step %d, from sampler %d: loss %.4f", step, number, loss.item())
    return model


def beat(stop, lock):
    while not stop.wait(1):
        with lock:
            log.info("alive, %d threads", threading.active_count())


def main():
    context = mp.get_context(args.method)
    source, stop, lock = context.Queue(args.depth), context.Event(), threading.Lock()
    threading.Thread(target=beat, args=(stop, lock), daemon=True).start()
    share = args.batches // args.samplers
    workers = [context.Process(target=sample, args=(n, source, stop, share), name=f"sampler-{n}") for n in range(args.samplers)]
    for one in workers:
        one.start()
    log.info("%d samplers started by %s", len(workers), args.method)
    try:
        model = train(source, lock, args.batches)
    except queue.Empty:
        log.error("no batch came within %g s; samplers alive: %s", args.patience, [one.is_alive() for one in workers])
        raise
    finally:
        stop.set()
    for one in workers:
        one.join()
    torch.save(model.state_dict(), "queues.pt")
    log.info("saved queues.pt, exit codes %s", [one.exitcode for one in workers])


if __name__ == "__main__":
    main()
