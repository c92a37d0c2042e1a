"""Processes of one machine that call functions together, and the ranks of a benchmark, which also train together."""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist

from training.step.determinism import prepare_environment
from utils import comm, connection
from utils.errors import UsageError
from utils.layout import Layout
from utils.rank_failure import exit_at_once
from utils.schema import Config

# What torch, its allocators and the system say, in lower case.
OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)
FAREWELL_SECONDS = 1  # for other ranks to say something too, once one has failed


class RankError(UsageError):
    """A rank failed in a way that nobody expected."""


class NoAnswer(RankError):
    """A rank gave no answer in time."""


class OutOfMemory(RankError):
    """A rank had not enough memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory has run out, on any device."""
    if isinstance(error, MemoryError):
        return True
    # The error of a GPU is a RuntimeError too, and that of a CPU has no class of its own.
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY)


class RanksFailed(Exception):
    """Ranks raised an error, have ended, or gave no answer in time. failures: {rank: its error}."""

    def __init__(self, failures: dict[int, Exception]):
        super().__init__(failures)
        self.failures = failures


class Process:
    """A process of a Pool, as functions that run there see it.

    kept: what they leave for one another. device: of a rank of training.
    """

    def __init__(self, number: int = 0, pipe: Any = None, device: Any = None):
        self.number = number
        self.pipe = pipe
        self.device = device
        self.kept: dict[Any, Any] = {}

    def answer(self, value: Any) -> None:
        """Send what a function has returned, or an error."""
        with suppress(OSError):  # the parent is gone
            self.pipe.send_bytes(pickle.dumps(value))

    def serve(self) -> None:
        """Call functions as they come. The parent ends it whatever happens; and it ends itself after the parent."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well
        threading.Thread(target=_end_after_the_parent, daemon=True).start()
        while True:
            try:
                function, args = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, ConnectionError):
                exit_at_once(0)
            # Whatever a function raises is its answer: the parent tells it, and ends this process.
            try:
                value = function(self, *args)
            except BaseException as error:
                value = error
                if is_out_of_memory(error):
                    value = OutOfMemory(f"rank {self.number} has no memory left: {error}")
                elif not isinstance(error, UsageError):
                    value = RankError(f"rank {self.number} failed: {type(error).__name__}: {error}")
                # A traceback cannot be pickled, so a note carries its text.
                value.add_note(traceback.format_exc())
            self.answer(value)


class Pool(AbstractContextManager):
    """Processes that are started as they are asked for. Leaving the context ends them.

    context: of multiprocessing. daemon: False where a process may start others.
    """

    def __init__(self, context: Any = None, daemon: bool = True, name: str = "rank"):
        self.context = context or multiprocessing.get_context("spawn")
        self.daemon = daemon
        self.name = name
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def call(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 1e6,
    ) -> list[Any]:
        """[function(process, *args) of the first `size` processes]; it is sent by its name.

        timeout: seconds for all. Raises RanksFailed; the processes, of which some may wait for one another, are ended.
        """
        try:
            while len(self.processes) < size:
                self._start_process()
            for pipe in self.pipes[:size]:
                with suppress(OSError):  # a rank that is gone shows by its missing answer
                    pipe.send_bytes(pickle.dumps((function, args)))
            answers = self._answers(size, time.monotonic() + timeout)
            failures = _failures(size, answers)
            if failures:
                raise RanksFailed(failures)
        except BaseException:
            self.end()
            raise
        return [answers[rank] for rank in range(size)]

    def _start_process(self) -> None:
        """Start one more process, with a pipe to it."""
        number = len(self.processes)
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=Process(number, theirs).serve,
            daemon=self.daemon,
            name=f"{self.name} {number}",
        )
        process.start()
        theirs.close()  # or the end of the process would not close the pipe
        self.processes.append(process)
        self.pipes.append(ours)

    def _answers(self, size: int, end: float) -> dict[int, Any]:
        """{rank: its answer} until the time `end`, or soon after the first error."""
        answers: dict[int, Any] = {}
        processes = self.processes  # another thread may end them, and leave the pool without any
        waiting = dict(zip(self.pipes, range(size), strict=False))  # {pipe: rank}
        while waiting:
            seconds_left = max(0, end - time.monotonic())
            ready = wait(list(waiting), seconds_left)
            if not ready:
                break
            for pipe in cast(list[Connection], ready):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # the end of the process, be it in the middle of an answer
                    # The pipe may close before the process has its exit code.
                    processes[rank].join(1)
                    answers[rank] = _ended(f"rank {rank} of {size}", processes[rank].exitcode)
                # The first error ends the wait for ranks that may never answer.
                if isinstance(answers[rank], Exception):
                    end = min(end, time.monotonic() + FAREWELL_SECONDS)
        return answers

    def end(self) -> None:
        """End all processes."""
        processes = self.processes
        self.processes = []
        self.pipes = []
        for process in processes:
            process.kill()  # they may wait for one another
        for process in processes:
            process.join()

    def __exit__(self, *_: object) -> None:
        self.end()


def _ended(who: str, status: int | None) -> RankError:
    """Why a process has ended without an answer, by its exit code (that of multiprocessing)."""
    # The system kills what lacks memory.
    if status == -signal.SIGKILL:
        return OutOfMemory(f"{who} has ended (out of memory?)")
    if status is None:
        return RankError(f"{who} has closed its connection")
    if status < 0:
        return RankError(f"{who} has ended by signal {-status}")
    return RankError(f"{who} has ended itself with status {status}, without an answer")


def _failures(size: int, answers: dict[int, Any]) -> dict[int, Exception]:
    """{rank: its error}; where no rank has one, of the ranks that gave no answer."""
    failures: dict[int, Exception] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, Exception):
            failures[rank] = answer
    if failures:
        return failures
    # Only here is silence an error by itself: beside a rank that failed, others may just have waited for it.
    return {rank: NoAnswer("no answer") for rank in range(size) if rank not in answers}


def _end_after_the_parent() -> None:
    # A parent that is killed cannot end its processes, which would wait for one another for ever.
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(0)


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
