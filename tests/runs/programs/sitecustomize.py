"""Breaks a run where JOB_BREAK says, without an edit of the program.

JOB_BREAK is ``MODULE:FUNCTION@CALL#RANK=HOW``, several of them apart by `` && ``.
CALL is a number or ``3-5`` or ``3+``, RANK may be left out. The file ``held`` appears
when it happens. HOW is a way to stand still (stop, fifo, lock, queue, socket, flock,
sleep, spin, join), ``slow:SECONDS``, ``skip``, ``die``, ``exit:STATUS``, ``say:TEXT``,
``run:CODE``, ``raise:EXPRESSION``, or an expression that replaces the ``args`` or the
``result``. JOB_DUMP prints the stacks of who stands still, after so many seconds.
"""

import faulthandler
import fcntl
import functools
import importlib.abc
import importlib.util
import os
import queue
import signal
import socket
import sys
import threading
import time


def stand_still(how):
    if "JOB_DUMP" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["JOB_DUMP"]))
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1e6)
    elif how == "fifo":
        path = f"fifo.{os.getpid()}"
        os.mkfifo(path)
        open(path, "wb")
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif how == "queue":
        queue.Queue().get()
    elif how == "socket":
        quiet = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(quiet.getsockname()).recv(1)
    elif how == "flock":
        held, wanted = open("cache.lock", "w"), open("cache.lock", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        fcntl.flock(wanted, fcntl.LOCK_EX)
    elif how == "join":
        worker = threading.Thread(target=threading.Event().wait, daemon=True)
        worker.start()
        worker.join()
    elif how == "spin":
        while True:
            pass
    else:
        assert how == "sleep", how
        time.sleep(1e6)


def act(how, original, args, kwargs):
    kind, _, value = how.partition(":")
    open("held", "w").close()
    known = {"os": os, "args": args, "kwargs": kwargs, "sys": sys, "time": time}
    if kind == "slow":
        time.sleep(float(value))
    elif kind == "skip":
        return None
    elif kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(int(value))
    elif kind == "say":
        sys.stderr.write(value.replace("\\n", "\n") + "\n")
    elif kind == "run":
        exec(value, known)
    elif kind == "raise":
        raise eval(value, known)
    elif kind == "args":
        args = eval(value, known)
    elif kind == "result":
        return eval(value, {**known, "result": original(*args, **kwargs)})
    else:
        stand_still(kind)
    return original(*args, **kwargs)


def broken(original, calls, rank, how):
    first, _, last = calls.partition("-")
    low = int(first.rstrip("+"))
    high = 10**9 if first.endswith("+") else int(last or low)
    count = 0

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        meant = rank in ("", os.environ.get("RANK", "0"))
        if meant and low <= count <= high:
            return act(how, original, args, kwargs)
        return original(*args, **kwargs)

    # Stacks show the function by its name: faulthandler the one, py-spy the other.
    wrapped.__code__ = wrapped.__code__.replace(
        co_name=original.__name__, co_qualname=original.__qualname__
    )
    return wrapped


def patch(module):
    for function, calls, rank, how in BREAKS.get(module.__name__, ()):
        owner, path = module, function.split(".")
        for one in path[:-1]:
            owner = getattr(owner, one)
        instead = broken(getattr(owner, path[-1]), calls, rank, how)
        static = isinstance(vars(owner).get(path[-1]), staticmethod)
        setattr(owner, path[-1], staticmethod(instead) if static else instead)


class Finder(importlib.abc.MetaPathFinder):
    busy = False

    def find_spec(self, name, path, target=None):
        if name not in BREAKS or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


BREAKS = {}
for one in filter(None, os.environ.get("JOB_BREAK", "").split(" && ")):
    where, _, how = one.partition("=")
    module, _, rest = where.partition(":")
    function, _, call = rest.partition("@")
    calls, _, rank = call.partition("#")
    BREAKS.setdefault(module, []).append((function, calls or "1", rank, how))
for name in BREAKS:
    if name in sys.modules:
        patch(sys.modules[name])
sys.meta_path.insert(0, Finder())
