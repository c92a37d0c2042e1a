"""A remote store as zarr and xarray read it: by requests that are retried, and by way of the node's cache.

zarr and xarray read coordinates, and fields in the names of others. What they cannot decode they report without the
name of the object, and long after it was kept. So each object is decoded once when it comes, as the metadata of its
array says, and metadata must be metadata. Arrays that zarr does not decode are checked where they are decoded.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from utils.errors import UsageError
from weather.sources.chunk_reader import check_blosc, parse_index
from weather.sources.chunk_sources import Place
from weather.sources.file_formats import ZARR_METADATA
from weather.sources.remote_store import UNLISTED, RemoteObjects
from weather.sources.zarr_layout import chunk_layout

Document = dict[str, Any]  # metadata of an array or a group, as JSON has them
# What a document must have to be one, by its name. Attributes may be anything.
NEEDED = {
    "zarr.json": "zarr_format",
    ".zarray": "zarr_format",
    ".zgroup": "zarr_format",
    ".zmetadata": "metadata",
}
ATTRIBUTES = ".zattrs"
SHARDED = "sharding_indexed"
# Chunks of what has time, latitude and longitude: three numbers or more. A coordinate's chunk may be its fill value.
FIELD_CHUNK = re.compile(r"(.*?)/(?:c/)?(\d+(?:[./]\d+){2,})")


class AnswerCheck:
    """Checks the objects of one store; it learns of arrays from the metadata that pass by."""

    def __init__(self) -> None:
        self.arrays: dict[str, Document] = {}  # by path

    def __call__(self, place: Place, content: memoryview) -> None:
        """Raise an exception, of zarr or of a codec, for bytes that cannot be those at a place."""
        folder, _, name = place.key.rpartition("/")
        if name in NEEDED or name == ATTRIBUTES:
            self._learn(folder, name, _parse_document(name, content))
            return
        # u10/c/0/0 belongs to u10.
        while folder and folder not in self.arrays:
            folder = folder.rpartition("/")[0]
        if folder in self.arrays:
            name = place.key.removeprefix(folder)
            inside = place._replace(key=name.lstrip("/"))
            _check_chunk(self.arrays[folder], inside, content)

    def _learn(self, folder: str, name: str, document: Document) -> None:
        # Metadata in one piece hold the documents of many arrays, by their paths below the folder.
        several: dict[str, Document] = {}
        if name == ".zmetadata":
            for path, inner in document["metadata"].items():
                if path.endswith("/.zarray"):
                    several[path.removesuffix("/.zarray")] = inner
        elif name == "zarr.json":
            consolidated = document.get("consolidated_metadata") or {}
            several = dict(consolidated.get("metadata", {}))
        for path, inner in several.items():
            self.arrays[f"{folder}/{path}".strip("/")] = inner
        if "shape" in document:
            self.arrays[folder] = document


def _parse_document(name: str, content: memoryview) -> Document:
    document = json.loads(bytes(content))
    needed = NEEDED.get(name)
    is_good = isinstance(document, dict) and (needed is None or needed in document)
    if not is_good:
        raise ValueError(f"{len(content)} bytes, which are no {name}")
    return document


def _check_chunk(array: Document, place: Place, content: memoryview) -> None:
    """Raise an exception for bytes that are no chunk of an array, no part of its shards, and no index of one.

    place: below the folder of the array.
    """
    if place.length is None:
        _decode(array, place.key, content)
        return
    try:
        layout = chunk_layout(_open(array, {}))
    except ValueError:  # shards with an index that only zarr can read
        return
    if layout.shards is None:
        return
    codec = array["codecs"][0]
    sharding = codec["configuration"]
    if (place.first, place.length) == layout.index_range:
        parse_index(bytes(content), layout, place.key)
    elif sharding["codecs"][0]["name"] != SHARDED:
        grid = {"name": "regular", "configuration": {"chunk_shape": sharding["chunk_shape"]}}
        _decode({**array, "chunk_grid": grid, "codecs": sharding["codecs"]}, place.key, content)


def _open(array: Document, chunks: dict[str, memoryview]) -> zarr.Array:
    """An array that has these chunks alone, by their names."""
    name = ".zarray" if array["zarr_format"] == 2 else "zarr.json"
    buffer = default_buffer_prototype().buffer
    objects = {}
    for key, content in {name: json.dumps(array).encode(), **chunks}.items():
        objects[key] = buffer.from_bytes(bytes(content))
    store = MemoryStore(objects)
    return zarr.open_array(store, mode="r", zarr_format=array["zarr_format"])


def _decode(array: Document, key: str, content: memoryview) -> None:
    """Decode one chunk by zarr."""
    opened = _open(array, {key: content})
    # The last codec has a name in format 3, and an id in format 2.
    *_, last = array.get("codecs") or [array["compressor"] or {}]
    name = last.get("name") or last.get("id", "")
    if name.endswith("blosc"):
        check_blosc(content)
    numbers = [int(number) for number in re.findall(r"\d+", key)]
    block = tuple(numbers[: opened.ndim])  # a single value has the number 0 in format 2
    try:
        _ = opened.get_block_selection(block) if block else opened[...]
    except Exception as error:
        raise ValueError(f"{len(content)} bytes, which are no chunk: {error}") from error


class RemoteZarrStore(Store):
    """A store of zarr over RemoteObjects; nothing can be written.

    zarr takes a chunk that is missing for one of fill values: here it is refused, by its name. denied: what the server
    refused to give of the metadata, '' for nothing: some answer so for what does not exist.
    """

    supports_writes = False
    supports_deletes = False

    def __init__(self, objects: RemoteObjects):
        super().__init__(read_only=True)
        self.objects = objects
        self.denied = ""
        self.check = AnswerCheck()

    @property
    def supports_listing(self) -> bool:
        """Whether the names in the store can be had."""
        return not self.objects.address.startswith(UNLISTED)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of an object, None where there is none. Raises UsageError for a chunk of fields that is missing."""
        loop = asyncio.get_running_loop()
        place = _place(key, byte_range)
        fetch = partial(self.objects.fetch, place, check=partial(self.check, place))
        # A request waits in a thread of its own, so that zarr's loop can begin the next ones.
        try:
            data = await loop.run_in_executor(self.objects.pool, fetch)
        except FileNotFoundError:
            # zarr looks for metadata of both of its formats: that some are not there says nothing.
            chunk = FIELD_CHUNK.fullmatch(key)
            if chunk is None:
                return None
            what = f"chunk {chunk[2]} of '{chunk[1]}' was never written: the store was not finished"
            raise UsageError(f"{self.objects.address}: {what}") from None
        except UsageError as error:
            is_metadata = key.rpartition("/")[2] in ZARR_METADATA
            if not is_metadata:
                raise
            # Whoever opens the store tells, if nothing else is found.
            self.denied = self.denied or str(error)
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(bytes(data))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """The bytes of several objects, requested at once."""
        requests = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*requests))

    async def exists(self, key: str) -> bool:
        """Tell whether there is an object."""
        return await self.get(key) is not None

    async def list(self) -> AsyncIterator[str]:
        """The names of all objects."""
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The names of all objects below a folder."""
        # zarr asks for names only where supports_listing is true.
        for name in sorted(await asyncio.to_thread(self.objects.names, prefix) or ()):
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names in a folder, without those in its folders."""
        for name in await asyncio.to_thread(self.objects.children, prefix):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Nothing can be written."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Nothing can be removed."""
        self._check_writable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteZarrStore) and other.objects is self.objects

    def __hash__(self) -> int:
        return hash(self.objects.address)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a remote store is opened anew in another process")


def _place(key: str, byte_range: ByteRequest | None) -> Place:
    """The place of some bytes of an object, as zarr asks for them."""
    if isinstance(byte_range, RangeByteRequest):
        return Place(key, byte_range.start, byte_range.end - byte_range.start)
    if isinstance(byte_range, OffsetByteRequest):
        return Place(key, byte_range.offset)
    # The last bytes, whatever the length: where a shard has its index.
    if isinstance(byte_range, SuffixByteRequest):
        return Place(key, -byte_range.suffix, byte_range.suffix)
    return Place(key)
