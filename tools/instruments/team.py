"""Processes of one machine that compute together: the ranks of a benchmark."""

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

import torch

from utils import comm
from utils.errors import UsageError
from utils.layout import Layout
from utils.rank_failure import exit_at_once
from utils.schema import Config

LEAVE_SECONDS = 10  # for a rank to end by itself
OUT_OF_MEMORY = "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"


@dataclass(frozen=True, eq=False)
class Case:
    """A case to measure: a config in a layout, and its name in a table. Compared by identity, since it is a key.

    training: False for forward passes alone.
    """

    name: str
    config: Config
    layout: Layout
    training: bool = True

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.world_size


class OutOfMemory(UsageError):
    """A rank had not enough memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory has run out, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)
    )


class Rank:
    """One rank, in its own process. kept: what the functions called on it leave for one another."""

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: dict[Any, Any] = {}
        self.meshes: dict[Layout, Any] = {}

    def use_mesh(self, layout: Layout) -> None:
        """Make the groups of a Layout those of this process."""
        if layout not in self.meshes:
            comm.build_mesh(self.device, layout)
            self.meshes[layout] = comm.swap_meshes({})
        comm.swap_meshes(self.meshes[layout])


class Team(AbstractContextManager):
    """`size` ranks, each of which waits for functions to call. Leaving its context ends the processes.

    config: names the device, and how long ranks wait for one another.
    whole_machine: a rank may start processes and use every core; else it has one thread on a CPU.
    Raises UsageError, here and in `call`, where a rank fails or is gone, OutOfMemory where it lacked memory.
    """

    def __init__(self, size: int, config: Config, whole_machine: bool = False):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.size = size
        self.processes: list[SpawnProcess] = []
        self.pipes: list[Connection] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank, args=(theirs, rank, size, port, config, whole_machine), daemon=not whole_machine
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            self._answers()  # they are connected
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """[function(rank, *args) of every rank], each given its Rank; the function is sent by its name."""
        for pipe in self.pipes:
            with suppress(OSError):  # a rank that is gone shows by its missing answer
                pipe.send((function, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = dict(zip(self.pipes, range(self.size), strict=True))
        while waiting:
            for pipe in cast(list[Connection], wait(list(waiting))):
                rank = waiting.pop(pipe)
                answers[rank] = self._received(rank)
                if isinstance(answers[rank], UsageError):  # maybe of a rank that waited for one without memory
                    others = [self._received(other) for pipe, other in waiting.items() if pipe.poll(0.2)]
                    raise next((error for error in others if isinstance(error, OutOfMemory)), answers[rank])
        return [answers[rank] for rank in range(self.size)]

    def _received(self, rank: int) -> Any:
        """The answer of a rank, or its error. One that the system has killed lacked memory."""
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(1)
            kind = OutOfMemory if self.processes[rank].exitcode == -signal.SIGKILL else UsageError
            return kind(f"rank {rank} of {self.size} has ended (out of memory?)")

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None:
            for pipe in self.pipes:
                with suppress(OSError):  # the rank is gone
                    pipe.send(None)
        for process in self.processes:
            if kind is None:
                process.join(LEAVE_SECONDS)
            process.kill()  # they may wait for one another
        for process in self.processes:
            process.join()


class Teams(AbstractContextManager):
    """Teams by their size, each started by its first call. Leaving the context ends the processes."""

    def __init__(self, config: Config):
        self.config = config
        self.running: dict[int, Team] = {}

    def call(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As Team.call, on `size` ranks. After an error these ranks are gone; the next call starts new ones."""
        if size not in self.running:
            self.running[size] = Team(size, self.config)
        try:
            return self.running[size].call(function, *args)
        except BaseException as error:
            self.running.pop(size).__exit__(type(error))  # some wait for one that has given up
            raise

    def __exit__(self, *error: Any) -> None:
        for team in self.running.values():
            team.__exit__(*error)


def _run_rank(pipe: Connection, rank: int, size: int, port: int, config: Config, whole_machine: bool) -> None:
    """In the child. The parent ends it whatever happens to other ranks, and it ends itself after the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well
    threading.Thread(target=_end_after_the_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        device = comm.init(config.device, config.comm_timeout)
        if device.type == "cpu" and not whole_machine:
            torch.set_num_threads(1)
        own = Rank(device)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            function, args = request
            pipe.send(function(own, *args))
        own.kept.clear()
        return comm.shutdown()
    except (EOFError, ConnectionError):  # the parent is gone, or another rank, which the parent notices
        pass
    except Exception as error:
        if is_out_of_memory(error):
            error = OutOfMemory(f"rank {rank} of {size} has no memory left: {error}")
        elif not isinstance(error, UsageError):
            traceback.print_exc()
            error = UsageError(f"rank {rank} of {size} failed: {type(error).__name__}: {error}")
        with suppress(OSError):
            pipe.send(error)
    exit_at_once(0)


def _end_after_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    exit_at_once(0)
