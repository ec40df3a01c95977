"""Raises in one of many ways, for the logs in tests/tracebacks.

python raises.py WAY > WAY.log 2>&1        (elastic: torchrun --nproc-per-node 2)
"""

import asyncio
import concurrent.futures
import json
import logging
import multiprocessing
import sys
import threading


def read_config(path):
    with open(path) as stream:
        return json.load(stream)


def convert(path):
    try:
        return read_config(path)
    except OSError as error:
        raise ValueError(f"cannot convert the checkpoint {path}") from error


def during():
    try:
        {}["model"]
    except KeyError:
        convert("/nowhere/config.json")


def update_actor(batch):
    return batch["log_probs"]


def chain():
    during()


def group():
    async def sample(number):
        await asyncio.sleep(0)
        if number:
            raise TimeoutError(f"no answer for prompt {number}")
        update_actor({})

    async def rollouts():
        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(sample(number))

    asyncio.run(rollouts())


def pool():
    with multiprocessing.Pool(2) as workers:
        workers.map(update_actor, [{}])


def executor():
    with concurrent.futures.ProcessPoolExecutor(1) as workers:
        workers.submit(convert, "/nowhere/config.json").result()


def logged():
    logging.basicConfig(
        format="%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"
    )
    try:
        update_actor({})
    except KeyError:
        logging.exception("the step failed")
    print("going on")


def threads():
    thread = threading.Thread(target=update_actor, args=({},))
    thread.start()
    thread.join()


def boxed():
    from rich.console import Console
    from rich.traceback import install

    install(console=Console(width=44, stderr=True))
    convert("/nowhere/config.json")


def lines():
    raise ValueError("two lines:\n  first: a\nsecond: b\n\nand a last one")


def loader():
    import torch

    rows = [{"prompt": "a"}, {}]

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, place):
            return rows[place]["prompt"]

    for _ in torch.utils.data.DataLoader(Rows(), num_workers=1):
        pass


def elastic():
    import os

    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        torch.distributed.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            convert("/nowhere/config.json")
        torch.distributed.barrier()

    main()


def ray_actors():
    import ray

    ray.init(num_cpus=2, include_dashboard=False)

    @ray.remote
    class WorkerDict:
        def update_actor(self, batch):
            try:
                return update_actor(batch)
            except KeyError as error:
                raise RuntimeError("the actor's update failed") from error

    @ray.remote
    def fit():
        worker = WorkerDict.remote()
        return ray.get(worker.update_actor.remote({}))

    ray.get(fit.remote())


def ray_killed():
    import os

    import ray

    ray.init(num_cpus=2, include_dashboard=False)

    @ray.remote
    class WorkerDict:
        def update_actor(self):
            os.kill(os.getpid(), 9)

    ray.get(WorkerDict.remote().update_actor.remote())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
