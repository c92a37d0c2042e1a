"""Ranks that come and go: a run goes on with those that are there, and trains as before on the same batches.

torchrun --nnodes 2:4 starts all ranks again when a node is lost or has come; a Slurm job may come back on fewer nodes.
Data parallelism shrinks and grows, every other dimension keeps its size. The batch stays: where fewer ranks share it,
each accumulates more micro-batches that are no larger than at first. Ranks that cannot share it wait.
"""

import os
import re
from pathlib import Path

from utils.errors import NotEnoughRanksError, UsageError
from utils.schema import Config
from utils.yaml_files import read_mappings

RANGE = re.compile(r"--nnodes[= ](\d+):(\d+)")


def is_range_of_nodes() -> bool:
    """Tell whether torchrun, which started this process, was given a smallest and a largest number of nodes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
    except OSError:  # no Linux
        command = ""
    # torchrun takes its options from variables too.
    by_variable = os.environ.get("PET_NNODES", "")
    words = command.split("\0")
    found = RANGE.search(f"{' '.join(words)} --nnodes={by_variable}")
    return found is not None and found[1] != found[2]


def fitting_ranks(config: Config, world_size: int) -> int:
    """The most of the ranks that share the batch equally. Raises NotEnoughRanksError where they are too few."""
    smallest = config.smallest_layout.world_size
    replicas = world_size // smallest
    if replicas == 0:
        raise NotEnoughRanksError(
            f"{world_size} ranks are there, and the model is split over {smallest}: repeat the command when more are"
        )
    # One replica always fits.
    pieces = config.global_batch_size // config.gradient_accumulation
    while pieces % replicas and replicas > 1:
        replicas -= 1
    return replicas * smallest


def fit(config: Config, world_size: int) -> dict[str, int]:
    """Keys of the config that follow from the ranks that are there: micro_batch_size, gradient_accumulation.

    A micro-batch is at most as large as that of the first start, which the folder of the run remembers. Raises
    UsageError for a batch that is given for each device, and NotEnoughRanksError.
    """
    if config.local_batch_size is not None:
        raise UsageError("where ranks come and go the whole batch stays: give global_batch_size, not local_batch_size")
    replicas = fitting_ranks(config, world_size) // config.smallest_layout.world_size
    own_samples = config.global_batch_size // replicas
    most = config.micro_batch_size or _micro_batch_of_before(config) or own_samples // config.gradient_accumulation
    count = config.gradient_accumulation
    while count < own_samples and (own_samples % count or own_samples // count > most):
        count += 1
    return {"micro_batch_size": max(1, most), "gradient_accumulation": count}


def _micro_batch_of_before(config: Config) -> int | None:
    """The micro_batch_size in the folder of this run; None where there is none yet."""
    path = Path(config.expdir) / config.config / config.run_num / "config.yaml"
    if not path.exists():
        return None
    return read_mappings(path, "configs").get(config.config, {}).get("micro_batch_size")
