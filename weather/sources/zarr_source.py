"""Zarr stores as sources, format 2 or 3, on this machine or remote; chunks that were never written are not data.

Zarr gives the fill value for a chunk that is not there. That a job died before it wrote the chunk shows nowhere, so
the chunks are looked for: on this machine before anything is converted, in remote stores when they are read.
"""

from pathlib import Path

import xarray
import zarr
from zarr.abc.store import ByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore

from utils.errors import UsageError
from weather.sources.chunk_reader import ChunkReader
from weather.sources.chunk_sources import LocalChunks
from weather.sources.file_formats import ZARR_METADATA, describe_point_list
from weather.sources.remote_store import RemoteObjects, RemoteOptions
from weather.sources.remote_zarr import RemoteZarrStore
from weather.sources.source import Selection, Source
from weather.sources.zarr_layout import chunk_layout


class WrittenChunks(LocalStore):
    """A store in a folder, in which a chunk that is not there is an error, for the arrays named in `guarded`."""

    def __init__(self, folder: str):
        super().__init__(folder, read_only=True)
        self.guarded: set[str] = set()

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of a key. Raises UsageError if they are a chunk that was never written."""
        value = await super().get(key, prototype or default_buffer_prototype(), byte_range)
        # A key is the name of an array and the place of a chunk: u10/c/0/0 or u10/0.0.
        array, _, rest = key.partition("/")
        is_guarded = array in self.guarded and rest not in ZARR_METADATA
        if value is None and is_guarded:
            raise UsageError(f"{self.root}: chunk {rest} of {array} was never written: the store was not finished")
        return value


def open_zarr_source(address: str, opened_store: ZarrStore | None = None) -> Source:
    """The Source of a store or a group in it: a folder, or an address such as gs://... of the public buckets.

    opened_store: the store as zarr reads it, if somebody opened it already.
    """
    is_remote = "://" in address
    local = None if is_remote else WrittenChunks(address)
    store = opened_store or local
    if store is None:
        objects = RemoteObjects(address, RemoteOptions())
        store = RemoteZarrStore(objects)
    # Consolidated metadata may be older than the store. A remote store is slow to list, or cannot be listed.
    consolidated = None if is_remote else False
    group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
    arrays = dict(group.arrays())
    is_else = describe_point_list({name: array.shape for name, array in arrays.items()})
    if is_else:
        raise UsageError(f"{address}: {is_else}")
    opened = xarray.open_zarr(
        store,
        chunks=None,
        decode_cf=False,
        consolidated=consolidated,
    )

    # Zeros that are values, and arrays whose missing chunks would be read as values.
    variables = {}
    for key, variable in opened.variables.items():
        name = str(key)
        array = arrays[name]
        variables[name] = _without_default_fill(variable, array)
        # Coordinates and single numbers of 0 are often not stored. NaN is found among the values.
        is_field = variable.ndim >= 3
        is_nan = array.fill_value != array.fill_value
        if local is not None and is_field and not is_nan:
            local.guarded.add(name)

    def check(name: str, selection: Selection) -> None:
        try:
            layout = chunk_layout(arrays[name])
        except ValueError:  # shards with an index that only zarr can read are taken to be whole
            return
        # For each axis the indices that will be read.
        wanted = [selection.get(str(dimension)) for dimension in variables[name].dims]
        ChunkReader(layout, LocalChunks(Path(address)), address).check_written(name, wanted)

    def find_groups() -> list[str]:
        holders = set()
        # A group is the folder of an array, at any depth.
        for name, member in group.members(max_depth=None):
            folder, _, _ = name.rpartition("/")
            if folder and isinstance(member, zarr.Array):
                holders.add(f"{address}/{folder}")
        return sorted(holders)

    # Remote stores are not listed: what is missing is noticed when it is read.
    if is_remote:
        return Source(address, variables, find_groups=find_groups)
    return Source(address, variables, check, find_groups)


def _without_default_fill(variable: xarray.Variable, array: zarr.Array) -> xarray.Variable:
    """The variable, whose zeros are values if 0 is only the fill value that zarr gives every array of format 2.

    Packed values are others: whoever packs them chooses a fill value.
    """
    is_packed = "scale_factor" in variable.attrs or "add_offset" in variable.attrs
    is_default = array.metadata.zarr_format == 2 and array.fill_value == 0
    if is_default and not is_packed:
        variable.attrs.pop("_FillValue", None)
    return variable
