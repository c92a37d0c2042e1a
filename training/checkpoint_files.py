"""The files of a checkpoint: tensors as safetensors, one file for each rank, and the completion marker.

Format: https://huggingface.co/docs/safetensors. A file holds at most one shard of a tensor; where the shard begins in
the whole tensor stands in the file's metadata as torch's HuggingFaceStorageReader reads it. The marker says what a
checkpoint is of, and which files with which content belong to it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from utils.config import check_config
from utils.errors import UsageError, first_line
from utils.schema import Config

SUFFIX = ".safetensors"


class ShardWriter(StorageWriter):
    """For dcp.save: makes `folder`, writes each rank's tensors into one file, then calls complete(files) on rank 0.

    files: {name: bytes and SHA-256}. The tensors must be on the CPU.
    torch's HuggingFaceStorageWriter writes the same format, but first puts the whole file together in memory, and holds
    the interpreter lock, without which training cannot go on, while it does.
    """

    def __init__(self, folder: Path, complete: Callable[[dict[str, Any]], None]):
        super().__init__()
        self.folder, self.complete = folder, complete

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
        names = (f"shard-{rank:05d}{SUFFIX}" for rank in range(len(plans)))
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. Raises ValueError for two shards of one tensor, and for anything else."""
        tensors, offsets = shards_of(plan, planner)
        path, results = self.folder / plan.storage_data, []
        if tensors:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_shards(path, contiguous, offsets)
            written = describe(path)
            results.append(WriteResult(MetadataIndex(path.name), written["bytes"], written))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written; called on one rank."""
        self.complete({result.index.fqn: result.storage_data for of_rank in results for result in of_rank})

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""
        pass

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: Any) -> bool:
        """Any will do: the folder is given to the constructor."""
        return True


def shards_of(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """{name: shard} of all that a rank writes, and {name: where it begins in the whole tensor}.

    Raises ValueError for two shards of one tensor, and for what no file can hold.
    """
    tensors, offsets = {}, {}
    for item in plan.items:
        name, stored, tensor = item.index.fqn, item.tensor_data, planner.resolve_data(item)
        if stored is None or not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: is no tensor, and nothing else can be written")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(f"{name}: is a {type(tensor).__name__}, and only plain tensors can be written")
        shard = stored.chunk
        is_without_a_row = 0 in shard.sizes and 0 not in stored.size
        if is_without_a_row:
            continue
        if name in tensors:
            raise ValueError(f"{name}: one rank holds two shards of it")
        tensors[name] = tensor.detach()
        offsets[name] = list(shard.offsets)
    return tensors, offsets


def write_shards(path: Path, tensors: dict[str, Tensor], offsets: dict[str, list[int]]) -> None:
    """Write shards, contiguous tensors on the CPU, and where they begin. Raises OSError where the disk refuses."""
    places = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    write_safetensors(path, tensors, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write CPU tensors {name: tensor} and metadata {name: text} to a file. Raises OSError where the disk refuses."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # says in text what the system said
        raise OSError(str(error)) from None
    path.chmod(mode)  # save_file lets nobody but the owner read


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, of what is safely on disk. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return {"bytes": size, "sha256": digest}


MARKER = "complete.json"
Marker = dict[str, Any]  # of MARKER


class CheckpointError(Exception):
    """A checkpoint folder that is half written or damaged."""


def read_marker(folder: Path) -> Marker:
    """The marker of a checkpoint. Raises CheckpointError where it is missing or damaged."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        if marker.pop("sha256") != digest(marker):
            raise ValueError("it is damaged (SHA-256 differs)")
        return marker
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: was not written to its end") from None
    except Exception as error:  # whatever another program or a bad disk has left there
        raise CheckpointError(f"checkpoint {folder}: {MARKER} cannot be read: {first_line(error)}") from None


def read_losses(folders: Iterable[Path]) -> dict[Path, float]:
    """The val_loss of each checkpoint whose marker can be read; infinity where it has none, or none to compare."""
    losses = {}
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            loss = read_marker(folder)["val_loss"]
            losses[folder] = math.inf if loss is None or not math.isfinite(loss) else loss
    return losses


def config_of(marker: Marker, where: str) -> Config:
    """The Config that a checkpoint was trained with. Raises UsageError, beginning with `where`, for none."""
    settings = dict(marker["config"] or {})
    return check_config(settings, str(settings.pop("config", "")), where)


def verify(folder: Path) -> Marker:
    """The marker of a checkpoint all of whose files are as they were written; raises CheckpointError otherwise.

    Raises UsageError for tensors that the marker does not list: a reader would take them for the checkpoint's own.
    """
    marker = read_marker(folder)
    for name, written in marker["files"].items():
        try:
            if describe(folder / name) != written:
                raise CheckpointError(f"checkpoint {folder}: {name} is damaged (size or SHA-256 differs)")
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}") from None
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in marker["files"]:
            raise UsageError(f"checkpoint {folder}: {path.name} is not one of its files ({MARKER}): take it away")
    return marker


def digest(marker: Marker) -> str:
    """The SHA-256 of a marker, which stands in it."""
    return hashlib.sha256(json.dumps(marker).encode()).hexdigest()
