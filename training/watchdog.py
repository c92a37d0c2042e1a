"""Ends a run that makes no progress: after a desynchronised collective, a dead file system, a deadlock."""

import faulthandler
import logging
import sys
import threading
import time
from pathlib import Path

from utils import comm
from utils.errors import FAILED_STATUS
from utils.rank_failure import exit_at_once, record_in, write_record

log = logging.getLogger(__name__)


class Watchdog:
    """Within `with watchdog:`, ends this process when `timeout` seconds pass without a `beat`.

    When nine tenths of it are over, the stacks of all threads go to stacks-rank<N>.txt in `folder`, and the last
    collectives to collectives-rank<N>.json: every rank has a watchdog, and all have written before the first of them
    ends, or NCCL ends it after its own time-out.
    """

    def __init__(self, timeout: float, folder: Path):
        self.timeout, self.folder = timeout, folder
        self.warning = 0.9 * min(timeout, comm.patience())
        self.ended = threading.Event()
        record_in(folder)

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
        noted, stacks = 0.0, self.folder / f"stacks-rank{comm.rank()}.txt"
        while not self.ended.wait(min(1.0, self.warning / 40)):
            beat, stuck = self.last, time.monotonic() - self.last
            if stuck > self.warning and noted != beat:
                noted = beat
                write_record("")
                with open(stacks, "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                log.info("No step finished within %.0f s; for the reason: python -m tools.hang %s", stuck, self.folder)
            if stuck > self.timeout:
                print(
                    f"error: rank {comm.rank()}: no step finished within {self.timeout} s (watchdog_timeout); "
                    f"the stacks of all threads are in {stacks}",
                    file=sys.stderr,
                    flush=True,
                )
                exit_at_once(FAILED_STATUS)
