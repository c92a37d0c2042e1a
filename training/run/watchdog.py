"""Ends a run that makes no progress: after a desynchronised collective, a dead file system, a deadlock."""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils import comm
from utils.device import on_this_device
from utils.errors import FAILED_STATUS
from utils.rank_failure import exit_at_once, record_in, write_record

log = logging.getLogger(__name__)
# Options that set a limit.
WHOLE = "watchdog_timeout"
COMM = "comm_timeout"


class Watchdog:
    """Within `with watchdog:`, ends this process when `timeout` seconds pass without a `beat`.

    When nine tenths of it are over, the stacks of all threads go to stacks-rank<N>.txt in `folder`, and the last
    collectives to collectives-rank<N>.json: every rank has a watchdog, and all have written before the first of them
    ends, or NCCL ends it after its own time-out. Where NCCL has none, with CUDA graphs over several ranks, what runs in
    `with watchdog.within(comm_timeout):` may take no longer than that.
    """

    def __init__(self, timeout: float, folder: Path):
        self.timeout = timeout
        self.folder = folder
        self.limit: float = timeout  # of what runs now
        self.option = WHOLE
        # Records are written before any rank ends, by this watchdog or by NCCL's own time-out.
        self.warning = 0.9 * min(timeout, comm.timeout_seconds())
        self.ended = threading.Event()
        # A rank that fails in another way writes its collectives here too.
        record_in(folder)

    def __enter__(self) -> "Watchdog":
        self.beat()
        threading.Thread(target=on_this_device(self._watch), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()

    def beat(self) -> None:
        """Note that a step has finished."""
        self.last = time.monotonic()

    @contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """Inside, a step may take so many seconds, if that is less than the timeout; None: no other limit."""
        # The limit of the whole run is shorter, and holds already.
        if seconds is None or seconds >= self.timeout:
            yield
            return
        self.beat()
        self.limit = seconds
        self.option = COMM
        try:
            yield
        finally:
            self.limit = self.timeout
            self.option = WHOLE

    def _watch(self) -> None:
        noted = 0.0
        stacks = self.folder / f"stacks-rank{comm.rank()}.txt"
        while not self.ended.wait(min(1.0, self.warning / 40)):
            beat = self.last
            stuck = time.monotonic() - self.last
            # One set of stacks is enough for each stuck step.
            if stuck > self.warning and noted != beat:
                noted = beat
                write_record("")
                with open(stacks, "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                log.info("No step finished within %.0f s; for the reason: python -m tools.hang %s", stuck, self.folder)
            # Nothing can be cleaned up: other threads may hold any lock.
            if stuck > self.limit:
                print(
                    f"error: rank {comm.rank()}: no step finished within {self.limit} s ({self.option}); "
                    f"the stacks of all threads are in {stacks}",
                    file=sys.stderr,
                    flush=True,
                )
                exit_at_once(FAILED_STATUS)
