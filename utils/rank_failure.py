"""When one rank fails, every rank ends, and says why.

A rank that fails writes its error into the store of the process group; a thread of every other rank looks there, so
that a rank that waits in a collective ends too. The first error written is the one that all of them name.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from utils.collective_record import write_record
from utils.errors import FAILED_STATUS, USAGE_STATUS, NonFiniteLossError, UsageError, one_line

if TYPE_CHECKING:
    from torch.distributed import Store

FIRST_FAILURE, LEFT = "first_failure", "left"  # keys of the store: the error, and the number of ranks that know it
POLL_SECONDS = 0.5
FAREWELL_SECONDS = 10  # at most, for ranks that are slow to notice


class FailureListener:
    """Watches for the failure of other ranks. store: a connection of its own: the process group's may be waiting."""

    def __init__(self, store: "Store", rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.leaving = threading.Event()
        self.ending = threading.Lock()  # of this process: whoever takes it speaks for the rank, and ends it
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; Python must not exit while it uses the store."""
        self.leaving.set()
        self.thread.join(timeout)

    def end_this_rank(self, error: BaseException, shutdown: Callable[[], None]) -> NoReturn:
        """Say why, to people and to the other ranks, and end without waiting for them."""
        status = USAGE_STATUS if isinstance(error, UsageError) else FAILED_STATUS
        expected = isinstance(error, UsageError | NonFiniteLossError | KeyboardInterrupt)
        text = one_line(f"{error if expected else f'{type(error).__name__}: {error}'}")
        message = f"rank {self.rank}: {text}"
        self.ending.acquire()
        if not expected:
            write_record(message)
        try:
            first = self.store.compare_set(FIRST_FAILURE, "", f"{status} {message}").decode()
        except RuntimeError:  # the store lives in rank 0, which is gone
            first = f"{status} the loss of rank 0"
        if first == f"{status} {message}":
            print(f"error: {message}", file=sys.stderr, flush=True)
            if not expected:
                traceback.print_exc()
            self._wait_for_others()
            shutdown()
            exit_at_once(status)
        self._end_because_of(first, text)

    def _end_because_of(self, first: str, own: str = "") -> NoReturn:
        """End this rank after another. own: its own error; where that is the same, all is said."""
        status, message = first.split(" ", 1)
        if int(status) == FAILED_STATUS:
            write_record(f"because of {message}")
        if message.partition(": ")[2] != own:
            print(f"error: rank {self.rank} ends because of {message}", file=sys.stderr, flush=True)
        if self.rank == 0:
            self._wait_for_others()
        else:
            with contextlib.suppress(RuntimeError):
                self.store.add(LEFT, 1)
        exit_at_once(int(status))

    def _wait_for_others(self) -> None:
        """Wait until the others know the error: they read it from the store, which lives in rank 0."""
        others = self.world_size - (1 if self.rank == 0 else 2)  # rank 0 is the last to go
        end = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(RuntimeError):
            while self.store.add(LEFT, 0) < others and time.monotonic() < end:
                time.sleep(POLL_SECONDS / 10)
            self.store.add(LEFT, 1)

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: the collectives will notice
            while not self.leaving.wait(POLL_SECONDS):
                if self.store.check([FIRST_FAILURE]):
                    first = self.store.get(FIRST_FAILURE).decode()
                    if not first.split(" ", 1)[1].startswith(f"rank {self.rank}:"):
                        time.sleep(2 * POLL_SECONDS)  # an error of its own comes first
                        self.ending.acquire()
                        self._end_because_of(first)
                    return


def end_with_launcher(rank: int) -> None:
    """End this process when torchrun, which started it, is gone; whoever starts the run again finds no old ranks."""
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1)
        print(f"error: rank {rank} ends because torchrun has been killed", file=sys.stderr, flush=True)
        exit_at_once(FAILED_STATUS)

    threading.Thread(target=watch, daemon=True, name="end with torchrun").start()


def exit_at_once(status: int) -> NoReturn:
    """End this process without waiting for other ranks, which may be waiting for this one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or full
            stream.flush()
    os._exit(status)
