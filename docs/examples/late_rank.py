"""A rank that comes late, and a watchdog that notices: what a run that hangs leaves behind.

torchrun --nproc_per_node 3 -m docs.examples.late_rank logs/late
"""

import sys
import time
from pathlib import Path

import torch

from training.run.watchdog import Watchdog
from utils import comm, connection
from utils.layout import Layout

STEPS, LATE_AT, LATE_RANK = 5, 3, 1


def read_batch(step: int) -> torch.Tensor:
    """One row per sample, (4, 8); on one rank the file system does not answer."""
    if step == LATE_AT and comm.rank() == LATE_RANK:
        time.sleep(3600)
    return torch.full((4, 8), float(step))


def main() -> None:
    """Train a weight in data parallel, until nobody waits any longer."""
    device = connection.connect("cpu")
    comm.build_mesh(device, Layout(comm.world_size()))
    weight = torch.zeros(8)
    with Watchdog(timeout=4, folder=Path(sys.argv[1])) as watchdog:
        for step in range(STEPS):
            gradient = read_batch(step).mean(0)  # (8,)
            weight -= comm.all_reduce(gradient) / comm.world_size()
            watchdog.beat()


if __name__ == "__main__":
    connection.run_ranks(main)
