"""Processes of one machine that call functions together: ranks of benchmarks, exercises and tests."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from utils.errors import UsageError
from utils.rank_failure import exit_at_once

OUT_OF_MEMORY = "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"
FAREWELL_SECONDS = 1  # for other ranks to say something too, once one has failed


class RankError(UsageError):
    """A rank failed in a way that nobody expected."""


class NoAnswer(RankError):
    """A rank gave no answer in time."""


class OutOfMemory(RankError):
    """A rank had not enough memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory has run out, on any device."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)
    )


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
        self.number, self.pipe, self.device = number, pipe, device
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
            try:
                value = function(self, *args)
            except BaseException as error:
                value = error
                if is_out_of_memory(error):
                    value = OutOfMemory(f"rank {self.number} has no memory left: {error}")
                elif not isinstance(error, UsageError):
                    value = RankError(f"rank {self.number} failed: {type(error).__name__}: {error}")
                value.add_note(traceback.format_exc())
            self.answer(value)


class Pool(AbstractContextManager):
    """Processes that are started as they are asked for. Leaving the context ends them.

    context: of multiprocessing. daemon: False where a process may start others.
    """

    def __init__(self, context: Any = None, daemon: bool = True, name: str = "rank"):
        self.context, self.daemon, self.name = context or multiprocessing.get_context("spawn"), daemon, name
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def call(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 1e6) -> list[Any]:
        """[function(process, *args) of the first `size` processes]; it is sent by its name.

        timeout: seconds for all. Raises RanksFailed; the processes, of which some may wait for one another, are ended.
        """
        try:
            while (number := len(self.processes)) < size:
                ours, theirs = self.context.Pipe()
                serve = Process(number, theirs).serve
                process = self.context.Process(target=serve, daemon=self.daemon, name=f"{self.name} {number}")
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            for pipe in self.pipes[:size]:
                with suppress(OSError):  # a rank that is gone shows by its missing answer
                    pipe.send_bytes(pickle.dumps((function, args)))
            answers = self._answers(size, time.monotonic() + timeout)
            failures = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, Exception)}
            if not failures:
                failures = {rank: NoAnswer("no answer") for rank in range(size) if rank not in answers}
            if failures:
                raise RanksFailed(failures)
        except BaseException:
            self.end()
            raise
        return [answers[rank] for rank in range(size)]

    def _answers(self, size: int, end: float) -> dict[int, Any]:
        """{rank: its answer} until the time `end`, or soon after the first error."""
        answers: dict[int, Any] = {}
        waiting = dict(zip(self.pipes, range(size), strict=False))
        while waiting and (ready := wait(list(waiting), max(0, end - time.monotonic()))):
            for pipe in cast(list[Connection], ready):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(1)
                    killed = self.processes[rank].exitcode == -signal.SIGKILL  # by the system, which lacked memory
                    kind = OutOfMemory if killed else RankError
                    answers[rank] = kind(f"rank {rank} of {size} has ended (out of memory?)")
                if isinstance(answers[rank], Exception):
                    end = min(end, time.monotonic() + FAREWELL_SECONDS)
        return answers

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()  # they may wait for one another
        for process in self.processes:
            process.join()
        self.processes, self.pipes = [], []

    def __exit__(self, *_: object) -> None:
        self.end()


def _end_after_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(0)
