"""The files of a checkpoint: tensors as safetensors, one file for each rank, and the completion marker.

Format: https://huggingface.co/docs/safetensors. A file holds at most one shard of a tensor; where the shard begins in
the whole tensor stands in the file's metadata as torch's HuggingFaceStorageReader reads it. The marker says what a
checkpoint is of, and which files with which content belong to it.
"""

import contextlib
import hashlib
import json
import math
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from utils import agreement, comm
from utils.config import check_config
from utils.errors import UsageError, first_line
from utils.schema import Config

SUFFIX = ".safetensors"
# Names of hashes in a marker. XXH3 finds garbled bytes as surely as SHA-256, which earlier versions wrote, and takes a
# tenth of its time. Neither guards against someone who rewrites a checkpoint: the marker lies beside the files.
HASHES: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
HASH = "xxh3_128"  # of new checkpoints
READ_BYTES = 2**20  # what stays in a processor's cache between reading and hashing


def write_shards(
    path: Path,
    tensors: dict[str, Tensor],
    offsets: dict[str, list[int]],
) -> dict[str, Any]:
    """Write shards, contiguous tensors on the CPU, and where they begin. Returns and raises as write_safetensors."""
    # torch's reader finds the places of shards under this key.
    places = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"}
    return write_safetensors(path, tensors, metadata)


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def write_safetensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
) -> dict[str, Any]:
    """Write contiguous CPU tensors {name: tensor} and metadata {name: text} to a file, and see it safely on disk.

    Returns size and XXH3 of what was to be written. The hash is that of the tensors in memory, and the file is not read
    back: what a disk or its driver garbles is found when the file is next read, by its hash. (The writer of the
    safetensors library tells no hash, refuses weights that share memory in part, and hides the number of an error.)
    Raises OSError where the disk refuses, ValueError for a dtype that the format does not have.
    """
    # Large numbers first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    # The header names type, shape and place of every tensor.
    header: dict[str, Any] = {"__metadata__": metadata}
    contents: list[bytes | memoryview] = []
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: {tensor.dtype} cannot be written to a safetensors file")
        begin = end
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        contents.append(bytes_of(tensor))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight bytes
    length = len(text).to_bytes(8, "little")
    computed = HASHES[HASH]()
    with open(path, "wb") as file:
        for content in [length + text, *contents]:
            computed.update(content)
            file.write(content)
        # The content must be on the disk before the marker says so.
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return {"bytes": size, HASH: computed.hexdigest()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which is not copied."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def describe(path: Path, algorithm: str = HASH) -> dict[str, Any]:
    """Size and hash of a file as it is. algorithm: of HASHES. Raises OSError where it cannot be read."""
    computed = HASHES[algorithm]()
    # One buffer serves all reads, and nothing is copied.
    part = memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while True:
            count = file.readinto(part)
            if not count:
                break
            computed.update(part[:count])
        size = os.fstat(file.fileno()).st_size
    return {"bytes": size, algorithm: computed.hexdigest()}


MARKER = "complete.json"
Marker = dict[str, Any]  # of MARKER


class CheckpointError(Exception):
    """A checkpoint folder that is half written or damaged."""


def read_marker(folder: Path) -> Marker:
    """The marker of a checkpoint. Raises CheckpointError where it is missing or damaged."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        # The marker holds a hash of itself, without this entry.
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
            is_comparable = loss is not None and math.isfinite(loss)
            losses[folder] = loss if is_comparable else math.inf
    return losses


def config_of(marker: Marker, where: str) -> Config:
    """The Config that a checkpoint was trained with. Raises UsageError, beginning with `where`, for none."""
    # The settings hold the name of their config too.
    settings = dict(marker["config"] or {})
    return check_config(settings, str(settings.pop("config", "")), where)


def verify(folder: Path) -> Marker:
    """The marker of a checkpoint all of whose files are as they were written; raises CheckpointError otherwise.

    Raises UsageError for tensors that the marker does not list: a reader would take them for the checkpoint's own.
    """
    marker = read_marker(folder)
    for name, written in marker["files"].items():
        check_content(folder, name, written)
    # Files that nobody wrote for this checkpoint are no part of it.
    refuse_unlisted(folder, marker)
    return marker


def check_content(folder: Path, name: str, written: dict[str, Any]) -> None:
    """Raise CheckpointError where a file of a checkpoint is not as it was written, which the marker says."""
    try:
        algorithm = next((name for name in HASHES if name in written), HASH)
        is_whole = describe(folder / name, algorithm) == written
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}") from None
    if not is_whole:
        raise CheckpointError(f"checkpoint {folder}: {name} is damaged (size or hash differs)")


def check_sizes(folder: Path, marker: Marker) -> None:
    """Raise CheckpointError where a file of a checkpoint is missing, or is not as long as it was written."""
    for name, written in marker["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}") from None
        if size != written["bytes"]:
            raise CheckpointError(f"checkpoint {folder}: {name} is damaged (size or hash differs)")


def refuse_unlisted(folder: Path, marker: Marker) -> None:
    """Raise UsageError for tensors in a checkpoint's folder that its marker does not list."""
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in marker["files"]:
            raise UsageError(f"checkpoint {folder}: {path.name} is not one of its files ({MARKER}): take it away")


def verify_together(folder: Path) -> Marker:
    """The same as `verify`, called by all ranks together: each hashes its share of the files, and all agree.

    A rank takes the file of its own number, which it reads next if the layout is still the same. Raises what verify
    raises, on every rank, and UsageError where rank 0 sees a file that another rank does not.
    """

    def marker_of_files() -> Marker:
        marker = read_marker(folder)
        check_sizes(folder, marker)
        return marker

    # Rank 0 reads the marker; the sizes are cheap, and the hashes are shared out.
    marker = agreement.on_main(marker_of_files)
    files = list(marker["files"].items())
    share = files[comm.rank() :: comm.world_size()]
    # Every rank raises the same error, the first one.
    for error in comm.gather(damage_of(folder, share)):
        if error is not None:
            raise error
    agreement.on_main(lambda: refuse_unlisted(folder, marker))
    return marker


def damage_of(
    folder: Path,
    files: Iterable[tuple[str, dict[str, Any]]],
) -> CheckpointError | UsageError | None:
    """The first thing that is wrong with some files, (name, as written) each, that rank 0 sees; None if all is well."""
    for name, written in files:
        if not (folder / name).exists():  # no damage: another checkpoint, or none, would be taken for the newest
            where = f"rank {comm.rank()} on {socket.gethostname()}"
            return UsageError(f"checkpoint {folder}: {where} does not see {name}, which rank 0 sees: share the folder")
        try:
            check_content(folder, name, written)
        except CheckpointError as error:
            return error
    return None


def digest(marker: Marker) -> str:
    """The SHA-256 of a marker, which stands in it."""
    return hashlib.sha256(json.dumps(marker).encode()).hexdigest()
