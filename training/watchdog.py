"""Ends a run that makes no progress: after a desynchronised collective, a dead file system, a deadlock."""

import faulthandler
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from utils import comm
from utils.errors import FAILED_STATUS
from utils.rank_failure import exit_at_once


class Watchdog:
    """Within `with watchdog:`, ends this process when `timeout` seconds pass without a `beat`.

    The stacks of all threads go to stacks-rank<N>.txt in `folder` first. Every rank has its own watchdog: the one that
    is stuck and those that wait for it all leave their stacks.
    """

    def __init__(self, timeout: float, folder: Path):
        self.timeout, self.folder = timeout, folder
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.beat()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()

    def beat(self) -> None:
        """Note that a step has finished."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.last > self.timeout:
                self._end()

    def _end(self) -> NoReturn:
        path = self.folder / f"stacks-rank{comm.rank()}.txt"
        with open(path, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"error: rank {comm.rank()}: no step finished within {self.timeout} s (watchdog_timeout); "
            f"the stacks of all threads are in {path}",
            file=sys.stderr,
        )
        exit_at_once(FAILED_STATUS)
