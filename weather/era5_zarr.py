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
from zarr.storage import LocalStore, WrapperStore

from utils.errors import UsageError
from weather.era5_source import Selection, Source
from weather.remote_store import RemoteObjects, RemoteOptions
from weather.remote_zarr import RemoteZarrStore

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
NEVER_WRITTEN = 2**64 - 1  # offset and length of such a chunk in the index of a shard
INDEX_CODECS = (BytesCodec, Crc32cCodec)
CHECKSUM_BYTES = 4


class WrittenChunks(WrapperStore[ZarrStore]):
    """A store in which a chunk that is not there is an error, for the arrays named in `guarded`."""

    def __init__(self, store: ZarrStore, address: str = ""):
        super().__init__(store)
        self.address = address
        self.guarded: set[str] = set()

    async def get(
        self,
        key: str,
        prototype: Any,
        byte_range: Any = None,
    ) -> Any:
        """The bytes of a key. Raises UsageError if they are a chunk that was never written."""
        value = await super().get(key, prototype, byte_range)
        # A key is the name of an array and the place of a chunk: u10/c/0/0 or u10/0.0.
        array, _, rest = key.partition("/")
        is_guarded = array in self.guarded and rest not in METADATA
        if value is None and is_guarded:
            raise UsageError(f"{self.address}: chunk {rest} of {array} was never written: the store was not finished")
        return value


def open_zarr_source(address: str, opened_store: ZarrStore | None = None) -> Source:
    """The Source of a store or a group in it: a folder, or an address such as gs://... of the public buckets.

    opened_store: the store as zarr reads it, if somebody opened it already.
    """
    is_remote = "://" in address
    store = WrittenChunks(opened_store or _open_store(address), address)
    # Consolidated metadata may be older than the store. A remote store is slow to list, or cannot be listed.
    consolidated = None if is_remote else False
    opened = xarray.open_zarr(
        store,
        chunks=None,
        decode_cf=False,
        consolidated=consolidated,
    )
    group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
    arrays = dict(group.arrays())

    # Zeros that are values, and arrays whose missing chunks would be read as values.
    variables = {}
    for key, variable in opened.variables.items():
        name = str(key)
        array = arrays[name]
        variables[name] = _without_default_fill(variable, array)
        # Coordinates and single numbers of 0 are often not stored. NaN is found among the values.
        is_field = variable.ndim >= 3
        if is_field and not _is_nan(array.fill_value):
            store.guarded.add(name)

    def check(name: str, selection: Selection) -> None:
        # For each axis the indices that will be read.
        wanted = [selection.get(str(dimension)) for dimension in variables[name].dims]
        missing = count_missing_chunks(arrays[name], Path(address) / name, wanted)
        if missing:
            raise UsageError(f"{address}: {missing} chunks of {name} were never written: the store was not finished")

    def find_groups() -> list[str]:
        return _groups(group, address)

    # Remote stores are not listed: WrittenChunks notices what is missing.
    if is_remote:
        return Source(address, variables, find_groups=find_groups)
    return Source(address, variables, check, find_groups)


def _open_store(address: str) -> ZarrStore:
    if "://" not in address:
        return LocalStore(address, read_only=True)
    return RemoteZarrStore(RemoteObjects(address, RemoteOptions()))


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
    is_float = isinstance(value, (float, np.floating))
    return is_float and bool(np.isnan(value))


def _groups(group: zarr.Group, address: str) -> list[str]:
    """Addresses of the groups below this one that hold arrays."""
    holders = set()
    # A group is the folder of an array, at any depth.
    for name, member in group.members(max_depth=None):
        folder, _, _ = name.rpartition("/")
        if folder and isinstance(member, zarr.Array):
            holders.add(f"{address}/{folder}")
    return sorted(holders)


def count_missing_chunks(
    array: zarr.Array,
    folder: Path,
    wanted: Sequence[np.ndarray | None],
) -> int:
    """Number of chunks, also of chunks inside shards, that hold wanted values of an array and are not in its folder.

    wanted: for each axis the indices that will be read, None for all.
    """
    numbers = []  # of the wanted chunks along each axis
    for indices, length, chunk in zip(wanted, array.shape, array.chunks, strict=True):
        if indices is None:
            indices = np.arange(length)
        numbers.append(np.unique(indices // chunk))
    if array.shards:
        return _count_missing_in_shards(array, folder, numbers)
    # Without shards, each chunk is a file.
    missing = 0
    for place in itertools.product(*numbers):
        path = _chunk_path(array, folder, place)
        missing += not path.exists()
    return missing


def _count_missing_in_shards(
    array: zarr.Array,
    folder: Path,
    numbers: list[np.ndarray],
) -> int:
    """As count_missing_chunks, for the numbers of the wanted chunks along each axis."""
    assert array.shards is not None
    lengths = [shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)]  # in chunks
    shards = [np.unique(of_axis // length) for of_axis, length in zip(numbers, lengths, strict=True)]
    missing = 0
    for place in itertools.product(*shards):
        inside = []  # the wanted chunks of this shard, by their numbers in it
        for shard, of_axis, length in zip(place, numbers, lengths, strict=True):
            is_inside = of_axis // length == shard
            inside.append(of_axis[is_inside] % length)
        path = _chunk_path(array, folder, place)
        # Without its file, all chunks of a shard are missing.
        if not path.exists():
            missing += math.prod(len(of_axis) for of_axis in inside)
            continue
        # Else the index of the shard says which ones are.
        index = _read_shard_index(array, path, lengths)
        if index is not None:
            entries = index[np.ix_(*inside)]
            is_missing = (entries == NEVER_WRITTEN).all(axis=-1)
            missing += int(is_missing.sum())
    return missing


def _chunk_path(array: zarr.Array, folder: Path, place: Sequence[Any]) -> Path:
    numbers = tuple(int(number) for number in place)
    return folder / array.metadata.encode_chunk_key(numbers)


def _read_shard_index(
    array: zarr.Array,
    path: Path,
    lengths: list[int],
) -> np.ndarray | None:
    """(..., 2) offset and length in bytes of each chunk in a shard; None if its index is written in an unusual way.

    lengths: of a shard along each axis, in chunks.
    """
    [codec, *_] = getattr(array.metadata, "codecs", [None])
    if not isinstance(codec, ShardingCodec):
        return None
    is_usual = all(isinstance(part, INDEX_CODECS) for part in codec.index_codecs)
    if not is_usual:
        return None
    has_checksum = any(isinstance(part, Crc32cCodec) for part in codec.index_codecs)
    # The index has two numbers of 8 bytes for each chunk, and a checksum behind them.
    size = 8 * 2 * math.prod(lengths)
    with open(path, "rb") as file:
        if codec.index_location.value == "end":
            start = -(size + CHECKSUM_BYTES * has_checksum)
            file.seek(start, 2)
        index = np.frombuffer(file.read(size), "<u8")
    return index.reshape(*lengths, 2)
