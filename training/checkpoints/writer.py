"""Writes the tensors of a checkpoint as torch.distributed.checkpoint asks for it, which is imported with this."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoints.files import SUFFIX, write_shards


class ShardWriter(StorageWriter):
    """For dcp.save: makes `folder`, writes each rank's tensors into one file, then calls complete(files) on rank 0.

    files: {name: bytes and hash}. The tensors must be on the CPU.
    torch's HuggingFaceStorageWriter writes the same format, but first puts the whole file together in memory, and holds
    the interpreter lock, without which training cannot go on, while it does.
    """

    def __init__(
        self,
        folder: Path,
        complete: Callable[[dict[str, Any]], None],
    ):
        super().__init__()
        self.folder = folder
        self.complete = complete

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Make the folder empty, on one rank."""
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by an interrupted write
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks, each with the name of its file."""
        named = []
        for rank, plan in enumerate(plans):
            name = f"shard-{rank:05d}{SUFFIX}"
            named.append(dataclasses.replace(plan, storage_data=name))
        return named

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. Raises ValueError for two shards of one tensor, and for anything else."""
        tensors, offsets = shards_of(plan, planner)
        path = self.folder / plan.storage_data
        results = []
        # A rank that holds nothing writes no file.
        if tensors:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            written = write_shards(path, contiguous, offsets)
            index = MetadataIndex(path.name)
            results.append(WriteResult(index, written["bytes"], written))
        # torch waits for a future, although the writing is over.
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written; called on one rank."""
        files = {}
        for of_rank in results:
            for result in of_rank:
                files[result.index.fqn] = result.storage_data
        # All files are there: now the marker may be written.
        self.complete(files)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""
        pass

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: Any) -> bool:
        """Any will do: the folder is given to the constructor."""
        return True


def shards_of(
    plan: SavePlan,
    planner: SavePlanner,
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """{name: shard} of all that a rank writes, and {name: where it begins in the whole tensor}.

    Raises ValueError for two shards of one tensor, and for what no file can hold.
    """
    tensors = {}
    offsets = {}
    for item in plan.items:
        name = item.index.fqn
        stored = item.tensor_data  # of the whole tensor, and of this shard
        tensor = planner.resolve_data(item)
        # Only tensors go into such a file.
        if stored is None or not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: is no tensor, and nothing else can be written")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(f"{name}: is a {type(tensor).__name__}, and only plain tensors can be written")
        shard = stored.chunk
        # A rank may have no row of a tensor that has some: there is nothing to write.
        is_without_a_row = 0 in shard.sizes and 0 not in stored.size
        if is_without_a_row:
            continue
        # The format knows one shard of a tensor in a file.
        if name in tensors:
            raise ValueError(f"{name}: one rank holds two shards of it")
        tensors[name] = tensor.detach()
        offsets[name] = list(shard.offsets)
    return tensors, offsets
