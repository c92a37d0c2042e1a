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
import socket
import sys
from itertools import count

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import forked
from tools.instruments.ranks import Pool, RanksFailed, share_gloo_device

PATIENCE_SECONDS = 120
MOST_THREADS = 250  # groups of gloo leave some behind
NAME = "rank of the tests"


class Workers:
    """A pool whose processes are started as they are asked for; a call joins the first ones in a group of that size.

    Process groups are formed by way of one store in this process, each under a name of its own: a store for each of
    them would be waited for half a second by the ranks that ask before it is there.
    """

    def __init__(self):
        self.pool = Pool(forked.context(), name=NAME)
        self.size = 0  # of the process group that they form now
        self.store, self.names = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), count(1)
        atexit.register(self.close)

    @property
    def processes(self):
        return self.pool.processes

    def __call__(self, world_size, function, *args, timeout=PATIENCE_SECONDS, **kwargs):
        """Run function(*args, **kwargs) on every rank; returns the list of results."""
        if self.processes and psutil.Process(self.processes[0].pid).num_threads() > MOST_THREADS:
            self.close()
        name = next(self.names) if world_size != self.size else None
        called = max(world_size, self.size) if name else world_size  # the others leave the group that is given up
        call = name, world_size, self.store.port, function, args, kwargs
        try:
            answers = self.pool.call(called, _run, *call, timeout=timeout)
        except RanksFailed as failed:
            self.size = 0  # the next test gets fresh processes
            problems = [f"rank {n}: {''.join(getattr(e, '__notes__', [str(e)]))}" for n, e in failed.failures.items()]
            raise AssertionError("\n".join(problems)) from None
        self.size = world_size
        return answers[:world_size]

    def close(self):
        self.pool.end()
        self.size = 0


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
        for name in ("utils.comm", "distributed.shard.core.spec", "tests.support.shard_parity"):
            if name in sys.modules:
                sys.modules[name]._meshes.clear()
        for group in groups:
            dist.destroy_process_group(group)
        _clear_sharding_prop_cache()  # DTensor would remember them


def _run(process, name, world_size, port, function, args, kwargs):
    """On a rank: leave the old process group where there is a new one, and call a function."""
    patience = datetime.timedelta(seconds=PATIENCE_SECONDS)
    if "store" not in process.kept:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        share_gloo_device()
        process.kept["store"] = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    if name:
        if dist.is_initialized():
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # DTensor would remember the old group
        if world_size > 1 and process.number < world_size:
            own = dist.PrefixStore(str(name), process.kept["store"])
            dist.init_process_group("gloo", store=own, rank=process.number, world_size=world_size, timeout=patience)
    torch.manual_seed(0)
    if shard_tensor := sys.modules.get("distributed.shard_tensor"):
        shard_tensor.set_attention_method("gather")  # whatever the test before chose
    answer = function(*args, **kwargs) if process.number < world_size else None
    leave_groups()
    if "torch._dynamo" in sys.modules:  # what one test compiled counts against the next one's limit of recompiles
        torch._dynamo.reset()
    return answer
