"""The tensor files of a checkpoint: safetensors, one for each rank, written by torch.distributed.checkpoint.

Format: https://huggingface.co/docs/safetensors. A file holds at most one shard of a tensor; where the shard begins in
the whole tensor stands in the file's metadata as torch's HuggingFaceStorageReader reads it.
"""

import dataclasses
import hashlib
import json
import os
import shutil

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class ShardWriter(StorageWriter):
    """For dcp.save: makes `folder`, writes each rank's tensors into one file, then calls complete(files) on rank 0.

    files: {name: bytes and SHA-256}. The tensors must be on the CPU.
    torch's HuggingFaceStorageWriter writes the same format, but first puts the whole file together in memory, and holds
    the interpreter lock, without which training cannot go on, while it does.
    """

    def __init__(self, folder, complete):
        super().__init__()
        self.folder, self.complete = folder, complete

    def set_up_storage_writer(self, is_coordinator, *_args, **_kwargs):
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by an interrupted write
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        names = (f"shard-{rank:05d}.safetensors" for rank in range(len(plans)))
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan, planner):
        tensors, offsets = {}, {}
        for item in plan.items:
            name, shard = item.index.fqn, item.tensor_data.chunk
            if 0 in shard.sizes and 0 not in item.tensor_data.size:
                continue  # this rank is left without a row
            if name in tensors:
                raise ValueError(f"{name}: one rank holds two shards of it")
            tensors[name] = planner.resolve_data(item).detach().contiguous()
            offsets[name] = {"saved_offsets": list(shard.offsets)}
        path, results = self.folder / plan.storage_data, []
        if tensors:
            write_safetensors(path, tensors, {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
            written = describe(path)
            results.append(WriteResult(MetadataIndex(path.name), written["bytes"], written))
        done = Future()
        done.set_result(results)
        return done

    def finish(self, metadata, results):
        self.complete({result.index.fqn: result.storage_data for of_rank in results for result in of_rank})

    def reset(self, checkpoint_id=None):
        pass

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id):
        return True


def write_safetensors(path, tensors, metadata):
    """Write CPU tensors {name: tensor} and metadata {name: text} to a file. Raises OSError where the disk refuses."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # says in text what the system said
        raise OSError(str(error)) from None
    path.chmod(mode)  # save_file lets nobody but the owner read


def describe(path):
    """Size and SHA-256 of a file, of what is safely on disk. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}
