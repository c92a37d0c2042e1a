"""Processes of one machine that compute together: the ranks of a benchmark."""

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Self, cast

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
    """What ranks measure: a config in a layout, and its name in a table. Compared by identity, since it is a key.

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
    """Whether an exception says that memory has run out, on any device."""
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


class Team:
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
        try:
            return self._answers()
        except UsageError as error:  # maybe from a rank that waited for one without memory
            if any(map(_ran_out, self.processes, self.pipes)):
                raise OutOfMemory(str(error)) from None
            raise

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            asked = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in cast(list[Connection], wait(asked)):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise UsageError(f"rank {rank} of {self.size} has ended (out of memory?)") from None
                if isinstance(answers[rank], Exception):
                    raise answers[rank]
        return [answers[rank] for rank in range(self.size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None:
            for pipe in self.pipes:
                pipe.send(None)
        for process in self.processes:
            if kind is None:
                process.join(LEAVE_SECONDS)
            process.kill()  # they may wait for one another
        for process in self.processes:
            process.join()


def _ran_out(process: SpawnProcess, pipe: Connection) -> bool:
    """Whether a rank reports a lack of memory, or the system has killed it."""
    try:
        while pipe.poll(0.2):
            if isinstance(pipe.recv(), OutOfMemory):
                return True
    except (EOFError, ConnectionError):
        process.join(1)
    return process.exitcode == -signal.SIGKILL


class Teams:
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

    def __enter__(self) -> Self:
        return self

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
