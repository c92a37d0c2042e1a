"""Train with one rank whose data come late: a straggler, for `python -m tools.timeline` to find.

torchrun --nproc_per_node 2 -m docs.examples.slow_rank --config=quick --profile ranks
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import train
from utils import comm, connection
from utils.data_loader import Batch, DataLoader

SLOW_RANK, SECONDS = 1, float(os.environ.get("LATE_SECONDS", "0.05"))

on_time = DataLoader._batches


def late(loader: DataLoader, *args: Any) -> Iterator[Batch]:
    """The batches of a loader; on one rank each comes late."""
    for batch in on_time(loader, *args):
        time.sleep(SECONDS if comm.rank() == SLOW_RANK else 0)
        yield batch


DataLoader._batches = late  # type: ignore
if __name__ == "__main__":
    connection.run_ranks(train.main)
