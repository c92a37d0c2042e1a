"""A checkpoint tried out before the first step: what could not be saved or read ends the run before it costs a day.

All ranks plan the checkpoint as a real one, of the real tensors. Each rank then writes one number of every tensor into
a temporary file, under its name and in its type, and reads it back as a resumed run does. No whole tensor is copied.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoints.files import SUFFIX, write_shards
from training.checkpoints.writer import ShardWriter, shards_of
from utils.errors import UsageError, first_line


def rehearse(tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Try out a checkpoint of these tensors, on all ranks together; group: of them, on the CPU.

    Raises UsageError, on every rank, with the first thing that cannot be saved or read back.
    """
    try:
        dcp.save(tensors, storage_writer=RehearsalWriter(), process_group=group)
    except CheckpointException as error:  # wraps what went wrong on each rank; every rank gets it
        # The first rank's error stands for all.
        cause = error.failures[min(error.failures)][0]
        raise UsageError(
            f"this run could not be saved: {first_line(cause)}; what a checkpoint need not hold is left out of it by "
            "register_buffer(..., persistent=False)"
        ) from None


class RehearsalWriter(ShardWriter):
    """Plans a checkpoint, and writes and reads one number of each tensor in place of all."""

    def __init__(self) -> None:
        super().__init__(Path(), lambda _files: None)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is made."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and read this rank's stand-ins. Raises ValueError for what is not the same afterwards."""
        tensors, _ = shards_of(plan, planner)
        written = {name: stand_in(name, tensor) for name, tensor in tensors.items()}
        if written:
            check_round_trip(written)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def stand_in(name: str, tensor: Tensor) -> Tensor:
    """The first element of a tensor on the CPU, in a tensor of as many dimensions; none of a tensor without elements.

    Raises ValueError for a tensor that is not strided, which has no first element.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name}: is a {kind} tensor, and only dense ones can be written")
    # One element along every dimension, none where there is none.
    for dim in range(tensor.dim()):
        length = min(tensor.shape[dim], 1)
        tensor = tensor.narrow(dim, 0, length)
    alone = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return alone.copy_(tensor)


def check_round_trip(written: dict[str, Tensor]) -> None:
    """Write tensors to a file and read them back. Raises ValueError where that fails, or changes one."""
    # Reading goes into tensors of the same shapes, as in a resumed run.
    read = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    offsets = {name: [0] * tensor.dim() for name, tensor in written.items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_shards(Path(folder) / f"stand-ins{SUFFIX}", written, offsets)
            dcp.load(read, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
        except Exception as error:
            if len(written) > 1:
                for name, tensor in written.items():
                    check_round_trip({name: tensor})  # raises for the one that fails alone
            names = ", ".join(f"{name}: {_kind(tensor)}" for name, tensor in written.items())
            raise ValueError(f"{names} cannot be written and read back ({first_line(error)})") from error
    for name, tensor in written.items():
        if not _same(tensor, read[name]):
            raise ValueError(f"{name}: {_kind(tensor)} is not read back as it was written")


def _same(tensor, other):
    """Tell whether two tensors hold the same bytes; NaN is the same as NaN."""
    return torch.equal(_bytes(tensor), _bytes(other))


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def _kind(tensor):
    return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"
