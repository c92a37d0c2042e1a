"""The ranks of a benchmark: processes of one machine that are connected and train together."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from tools.instruments.pool import OutOfMemory, Pool, Process, RankError, RanksFailed
from training.step.determinism import prepare_environment
from utils import comm, connection
from utils.layout import Layout
from utils.schema import Config


@dataclass(frozen=True, eq=False)
class Case:
    """A case to measure: a config in a layout, and its name in a table. Compared by identity, since it is a key.

    script, words: the training script and its options that give the config, where it was made so.
    """

    name: str
    config: Config
    layout: Layout
    script: str = ""
    words: Sequence[str] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.world_size


def use_mesh(rank: Process, layout: Layout) -> None:
    """On a rank: make the groups of a Layout those of this process."""
    # Making groups takes messages, and a process may come back to a layout: its groups are kept.
    if layout not in rank.kept:
        comm.build_mesh(rank.device, layout)
        # build_mesh makes the groups those of this process, from where they are taken.
        rank.kept[layout] = comm.swap_meshes({})
    comm.swap_meshes(rank.kept[layout])


class Teams(AbstractContextManager):
    """Teams of ranks by their size, each started by its first call. Leaving the context ends the processes.

    config: names the device, and how long ranks wait for one another. whole_machine: a rank may start processes and use
    every core; else it has one thread on a CPU. patience: seconds for the answers to a call. context: of
    multiprocessing. tells: whether the traceback of a rank is printed. many_meshes: ranks come to many meshes, and
    their groups share a device.
    """

    def __init__(
        self,
        config: Config,
        whole_machine: bool = False,
        patience: float = 1e6,
        context: Any = None,
        tells: bool = True,
        many_meshes: bool = False,
    ):
        self.config = config
        self.whole_machine = whole_machine
        self.patience = patience
        self.context = context
        self.tells = tells
        self.many_meshes = many_meshes
        self.running: dict[int, Pool] = {}  # {ranks: their pool}

    def call(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
    ) -> list[Any]:
        """[function(rank, *args) of `size` ranks], each given its Process; the function is sent by its name.

        Raises UsageError where a rank fails or is gone, OutOfMemory where one lacked memory. These ranks are ended
        then; the next call starts new ones.
        """
        try:
            if size not in self.running:
                # A daemon may not start processes of its own, such as workers that read data.
                pool = Pool(self.context, daemon=not self.whole_machine)
                self.running[size] = pool
                if self.many_meshes:
                    pool.call(size, _share_device)
                pool.call(size, _join, size, _free_port(), self.config, self.whole_machine)
            return self.running[size].call(size, function, *args, timeout=self.patience)
        except RanksFailed as failed:
            # A call that fails has ended the processes of its pool.
            self.running.pop(size)
            failures = list(failed.failures.values())
            # A rank without memory lets others fail that wait for it, so that its error is the one to tell.
            without_memory = [error for error in failures if isinstance(error, OutOfMemory)]
            told = (without_memory or failures)[0]
            if isinstance(told, RankError) and self.tells:
                print(*getattr(told, "__notes__", []), file=sys.stderr, end="")  # where it was raised
            raise told from None

    def end(self, size: int) -> None:
        """End the team of this size; the next call starts a new one."""
        if size in self.running:
            self.running.pop(size).end()

    def __exit__(self, *_: object) -> None:
        for pool in list(self.running.values()):  # a call in another thread may take its own away
            pool.end()


def _share_device(_: Process) -> None:
    """In a process that is no rank yet: let its groups have one device."""
    share_gloo_device()


def _free_port() -> int:
    """A port of this machine that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # the system chooses a port in place of 0
        return free.getsockname()[1]


def _join(
    process: Process,
    size: int,
    port: int,
    config: Config,
    whole_machine: bool,
) -> None:
    """In a process: become a rank of `size`."""
    # The variables that torchrun would set.
    rank = str(process.number)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    prepare_environment(config)
    process.device = connection.connect(config.device, config.comm_timeout)
    # Ranks that share the cores of a machine would otherwise wait for one another's threads.
    if process.device.type == "cpu" and not whole_machine:
        torch.set_num_threads(1)


def share_gloo_device() -> None:
    """From now on the groups of gloo that this process makes have one device together.

    torch gives each group a device of its own, and each device has a thread that wakes a hundred times a second. Ranks
    of a training have some twenty groups, which costs nothing that one could measure. Ranks that many layouts use in
    turn have hundreds, and their threads take the cores from those that compute.
    """
    group: Any = dist.ProcessGroupGloo
    make = group.__init__

    @cache
    def device(interface: str | None) -> Any:
        return group.create_device(interface=interface) if interface else group.create_default_device()

    def init(self: Any, store: Any, rank: int, size: int, timeout: Any, **newer: Any) -> None:
        if any(newer.values()):  # arguments of newer torch, which only its own constructor knows
            return make(self, store, rank, size, timeout, **newer)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        options = group._Options()
        options._devices = [device(interface)]
        options._timeout = timeout
        return make(self, store, rank, size, options)

    group.__init__ = init
