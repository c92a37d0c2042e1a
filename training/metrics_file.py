"""The readings of a run as JSON lines, a file for each rank: metrics-rank<N>.jsonl in the run's folder."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from training.trackers import Tracker, Values, known
from utils import comm
from utils.files import check_file, whole_file

FILE_NAME = "metrics-rank{}.jsonl"
LARGEST = 1e300  # of a number in it


class MetricsFile(Tracker):
    """A line for every reading of this rank; lines of iterations after `iteration`, where the run goes on, are dropped.

    A line is with the system at once, whatever ends this process. Numbers that JSON does not have are null.
    """

    name = "metrics of this rank"

    def __init__(self, folder: Path, iteration: int, device: str):
        for path in folder.glob(FILE_NAME.format("*")):  # of more ranks, maybe, than there are now
            number = path.stem.removeprefix("metrics-rank")
            if number.isdecimal() and int(number) % comm.world_size() == comm.rank():
                lines = [json.dumps(record) + "\n" for record in read_metrics(path) if record["iteration"] <= iteration]
                with whole_file(path) as part:
                    part.write_text("".join(lines))
        self.device = device
        self.file = open(folder / FILE_NAME.format(comm.rank()), "ab", buffering=0)

    def tell(self, values: Values, iteration: int, figures: Mapping[str, Figure] | None = None) -> None:
        """Write a line."""
        record = {
            "iteration": iteration,
            "time": time.time(),
            "device": self.device,
            **dict.fromkeys(values),
            **known(values),
        }
        line, before = json.dumps(record).encode() + b"\n", self.file.tell()
        if self.file.write(line) < len(line):  # the disk is full: no part of a line stays
            self.file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The readings of a rank; what is no reading, as half a line, is left out. Raises UsageError without a file."""
    check_file(path)
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and _is_reading(**record):
                found.append(record)
    return found


def _is_reading(iteration=None, device="", **values):
    numbers = [value for value in values.values() if value is not None]
    kinds = isinstance(iteration, int) and isinstance(device, str) and all(isinstance(n, int | float) for n in numbers)
    return kinds and all(abs(n) <= LARGEST for n in (iteration, *numbers))
