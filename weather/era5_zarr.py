"""Zarr stores as sources, format 2 or 3, on this machine or remote; chunks that were never written are not data.

Zarr gives the fill value for a chunk that is not there. That a job died before it wrote the chunk shows nowhere, so
the chunks are looked for: on this machine before anything is converted, in remote stores when they are read.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from utils.errors import UsageError
from weather.era5_source import Selection, Source

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
NO_CHUNK = 2**64 - 1  # offset and length, in the index of a shard, of a chunk that was never written
INDEX_CODECS = (BytesCodec, Crc32cCodec)


class WrittenChunks(WrapperStore[ZarrStore]):
    """A store in which a chunk that is not there is an error, for the arrays named in `guarded`."""

    def __init__(self, store: ZarrStore, address: str = ""):
        super().__init__(store)
        self.address = address
        self.guarded: set[str] = set()

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The bytes of a key. Raises UsageError if they are a chunk that was never written."""
        value = await super().get(key, prototype, byte_range)
        array, _, rest = key.rpartition("/") if "/c/" not in key else key.partition("/c/")
        if value is None and array in self.guarded and rest not in METADATA:
            raise UsageError(f"{self.address}: chunk {rest} of {array} was never written: the store was not finished")
        return value


def open_zarr_source(address: str) -> Source:
    """The Source of a store or a group in it: a folder, or an address such as gs://... of the public buckets."""
    remote = "://" in address
    store = WrittenChunks(_open_store(address), address)
    # Consolidated metadata may be older than the store. A remote store is slow to list, or cannot be listed.
    consolidated = None if remote else False
    opened = xarray.open_zarr(store, chunks=None, decode_cf=False, consolidated=consolidated)
    group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
    arrays = {name: group[name] for name in opened.variables}

    variables = {}
    for name, variable in opened.variables.items():
        variables[str(name)] = _without_default_fill(variable, arrays[name])
        is_field = variable.ndim >= 3  # single numbers and coordinates of 0 are often not stored
        if is_field and not _is_nan(arrays[name].fill_value):
            store.guarded.add(str(name))

    def check(name: str, selection: Selection) -> None:
        array, dimensions = arrays[name], variables[name].dims
        wanted = [selection.get(str(dimension)) for dimension in dimensions]
        if missing := count_missing_chunks(array, Path(address) / name, wanted):
            raise UsageError(f"{address}: {missing} chunks of {name} were never written: the store was not finished")

    if remote:
        return Source(address, variables)
    return Source(address, variables, check, _groups(group, address))


def _open_store(address: str) -> ZarrStore:
    if "://" not in address:
        return LocalStore(address, read_only=True)
    options = {"token": "anon"} if address.startswith("gs://") else None  # the public buckets
    return FsspecStore.from_url(address, storage_options=options, read_only=True)


def _without_default_fill(variable: xarray.Variable, array: zarr.Array) -> xarray.Variable:
    """The variable, whose zeros are values if 0 is only the fill value that zarr gives every array of format 2.

    Packed values are others: whoever packs them chooses a fill value.
    """
    is_packed = "scale_factor" in variable.attrs or "add_offset" in variable.attrs
    is_default = array.metadata.zarr_format == 2 and array.fill_value == 0
    if is_default and not is_packed:
        variable.attrs.pop("_FillValue", None)
    return variable


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


def _groups(group: zarr.Group, address: str) -> list[str]:
    """Addresses of the groups below this one that hold arrays."""
    members = dict(group.members(max_depth=None))
    holders = {name.rpartition("/")[0] for name, member in members.items() if isinstance(member, zarr.Array)}
    return [f"{address}/{name}" for name in sorted(holders)]


def count_missing_chunks(array: zarr.Array, folder: Path, wanted: Sequence[np.ndarray | None]) -> int:
    """Number of chunks, also of chunks inside shards, that hold wanted values of an array and are not in its folder.

    wanted: for each axis the indices that will be read, None for all.
    """
    per_axis = []  # the numbers of the wanted chunks along each axis
    for indices, length, chunk in zip(wanted, array.shape, array.chunks, strict=True):
        every = np.arange(math.ceil(length / chunk))
        per_axis.append(every if indices is None else np.unique(indices // chunk))
    if array.shards:
        return _count_missing_in_shards(array, folder, per_axis)
    missing = 0
    for place in itertools.product(*per_axis):
        key = array.metadata.encode_chunk_key(tuple(int(number) for number in place))
        missing += not (folder / key).exists()
    return missing


def _count_missing_in_shards(array: zarr.Array, folder: Path, per_axis: list[np.ndarray]) -> int:
    """As count_missing_chunks, for the numbers of the wanted chunks along each axis."""
    assert array.shards is not None
    per_shard = [shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)]
    shards = [np.unique(numbers // many) for numbers, many in zip(per_axis, per_shard, strict=True)]
    missing = 0
    for place in itertools.product(*shards):
        key = array.metadata.encode_chunk_key(tuple(int(number) for number in place))
        inside = []  # the wanted chunks of this shard, by their numbers in it
        for number, numbers, many in zip(place, per_axis, per_shard, strict=True):
            inside.append(numbers[numbers // many == number] % many)
        if not (folder / key).exists():
            missing += math.prod(len(numbers) for numbers in inside)
            continue
        index = _shard_index(array, folder / key, per_shard)
        if index is not None:
            missing += int((index[np.ix_(*inside)] == NO_CHUNK).all(-1).sum())
    return missing


def _shard_index(array: zarr.Array, path: Path, per_shard: list[int]) -> np.ndarray | None:
    """(..., 2) offset and length in bytes of each chunk in a shard; None if its index is written in an unusual way."""
    codec = array.metadata.codecs[0]
    if not isinstance(codec, ShardingCodec):
        return None
    if not all(isinstance(part, INDEX_CODECS) for part in codec.index_codecs):
        return None
    checksum = 4 if any(isinstance(part, Crc32cCodec) for part in codec.index_codecs) else 0
    count = 2 * math.prod(per_shard)
    with open(path, "rb") as file:
        if codec.index_location.value == "end":
            file.seek(-(8 * count + checksum), 2)
        numbers = np.frombuffer(file.read(8 * count), "<u8")
    return numbers.reshape(*per_shard, 2)
