"""Ranks for tests: gloo processes that live as long as the test session, and functions sent to them.

    def gathered(values):                       # at module level, so that it can be sent
        return comm.global_mean(torch.tensor(values))

    def test_...(ranks):
        results = ranks(2, gathered, [1.0, 2.0])  # what each of 2 ranks returned, in order

A rank that raises, or does not answer in time, fails the test with the rank's traceback.
"""

import atexit
import datetime
import os
import pickle
import socket
import sys
import time
import traceback
from functools import cache
from itertools import count
from multiprocessing.connection import wait

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import forked

PATIENCE_SECONDS = 120
MOST_THREADS = 250  # groups of gloo leave some behind
NAME = "rank of the tests"


class Workers:
    """Starts processes as they are asked for; a call uses the first ones, joined in a process group of that size.

    Process groups are formed by way of one store in this process, each under a name of its own: a store for each of
    them would be waited for half a second by the ranks that ask before it is there.
    """

    def __init__(self):
        self.processes, self.pipes = [], []
        self.size = 0  # of the process group that they form now
        self.store, self.names = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), count(1)
        atexit.register(self.close)

    def __call__(self, world_size, function, *args, timeout=PATIENCE_SECONDS, **kwargs):
        """Run function(*args, **kwargs) on every rank; returns the list of results."""
        if self.processes and psutil.Process(self.processes[0].pid).num_threads() > MOST_THREADS:
            self.close()
        self._start(world_size)
        name = next(self.names) if world_size != self.size else None
        called = list(range(world_size))
        for rank, pipe in enumerate(self.pipes):
            if rank in called:
                pipe.send_bytes(pickle.dumps((name, world_size, function, args, kwargs)))
            elif name and rank < self.size:  # leaves the group that is given up
                pipe.send_bytes(pickle.dumps((name, 1, None, (), {})))
                called.append(rank)
        self.size = world_size
        answers, problems = {}, []
        deadline = time.monotonic() + timeout
        while len(answers) < len(called):
            ready = wait([self.pipes[r] for r in called if r not in answers], max(0, deadline - time.monotonic()))
            if not ready:
                problems += [f"rank {rank} gave no answer" for rank in called if rank not in answers]
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                answers[rank], problem = _receive(pipe)
                if problem:
                    problems.append(f"rank {rank}: {problem}")
                    deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it in a collective
        if problems:
            self.close()  # the next test gets fresh ones
            raise AssertionError("\n".join(problems))
        return [answers[rank] for rank in range(world_size)]

    def _start(self, count):
        context = forked.context()
        while len(self.processes) < count:
            ours, theirs = context.Pipe()
            number = len(self.processes)
            serve = {"target": _serve, "args": (number, theirs, self.store.port)}
            process = context.Process(**serve, name=f"{NAME} {number}", daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes, self.size = [], [], 0


def _receive(pipe):
    try:
        done, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "its process has ended"
    return (value, None) if done else (None, value)


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def leave_groups():
    """End all process groups but that of all ranks: each has threads of its own, which add up over the tests."""
    if not dist.is_initialized():
        return
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if groups:
        dist.barrier()  # nobody may still wait for what this rank sends
        for name in ("utils.comm", "distributed.shard.spec", "tests.support.shard_parity"):
            if name in sys.modules:
                sys.modules[name]._meshes.clear()
        for group in groups:
            dist.destroy_process_group(group)
        _clear_sharding_prop_cache()  # DTensor would remember them


def share_device():
    """All groups of gloo use one device of a process: the loop of each wakes a hundred times a second."""
    group, make = dist.ProcessGroupGloo, dist.ProcessGroupGloo.__init__

    @cache
    def device(interface):
        return group.create_device(interface=interface) if interface else group.create_default_device()

    def init(self, store, rank, size, timeout, **newer):
        if any(newer.values()):  # arguments of newer torch, which only its own constructor knows
            return make(self, store, rank, size, timeout, **newer)
        options = group._Options()
        options._devices, options._timeout = [device(os.environ.get("GLOO_SOCKET_IFNAME"))], timeout
        return make(self, store, rank, size, options)

    group.__init__ = init


def _serve(rank, pipe, port):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_device()
    patience = datetime.timedelta(seconds=PATIENCE_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    while True:
        try:
            name, world_size, function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if name:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    _clear_sharding_prop_cache()  # DTensor would remember the old group
                if world_size > 1:
                    own = dist.PrefixStore(str(name), store)
                    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=patience)
            torch.manual_seed(0)
            if attention := sys.modules.get("distributed.shard.rules.attention"):
                attention.set_attention_method("gather")  # whatever the test before chose
            answer = True, function(*args, **kwargs) if function else None
            leave_groups()
        except BaseException:
            answer = False, traceback.format_exc()
        if "torch._dynamo" in sys.modules:  # what one test compiled counts against the next one's limit of recompiles
            torch._dynamo.reset()
        pipe.send_bytes(pickle.dumps(answer))
