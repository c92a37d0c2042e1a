"""Tell whether bytes are the object of a Zarr store that was asked for, for arrays that zarr itself decodes.

zarr and xarray read coordinates, and fields in the names of others. What they cannot decode they report without the
name of the object, and long after it was kept. So each object is decoded once when it comes, as the metadata of its
array says, and metadata must be metadata.
"""

import json
import math
from typing import Any

import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from weather.sources.chunk_reader import check_blosc, parse_index
from weather.sources.chunk_sources import Place

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
PAIR_BYTES = 16  # of a shard's index, for each chunk


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
        array = self._array_of(folder)
        if array is not None:
            _check_chunk(array, place, content)

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

    def _array_of(self, folder: str) -> Document | None:
        """The metadata of the array that has an object in a folder: u10/c/0/0 belongs to u10."""
        while folder:
            if folder in self.arrays:
                return self.arrays[folder]
            folder = folder.rpartition("/")[0]
        return self.arrays.get("")


def _parse_document(name: str, content: memoryview) -> Document:
    document = json.loads(bytes(content))
    needed = NEEDED.get(name)
    is_good = isinstance(document, dict) and (needed is None or needed in document)
    if not is_good:
        raise ValueError(f"{len(content)} bytes, which are no {name}")
    return document


def _check_chunk(array: Document, place: Place, content: memoryview) -> None:
    """Raise an exception for bytes that are no chunk of an array, no part of its shards, and no index of one."""
    codecs = array.get("codecs") or []
    is_part = place.length is not None
    if not is_part:
        _decode(array, codecs, content)
        return
    if not codecs or codecs[0]["name"] != SHARDED:
        return
    sharding = codecs[0]["configuration"]
    inner = sharding["chunk_shape"]
    outer = array["chunk_grid"]["configuration"]["chunk_shape"]
    names = [codec["name"] for codec in sharding["index_codecs"]]
    has_checksum = "crc32c" in names
    chunks = math.prod(whole // part for whole, part in zip(outer, inner, strict=True))
    index_bytes = PAIR_BYTES * chunks + 4 * has_checksum
    at_end = sharding.get("index_location", "end") == "end"
    index_place = -index_bytes if at_end else 0
    if place.first == index_place and place.length == index_bytes:
        parse_index(bytes(content), has_checksum, place.key)
    elif sharding["codecs"][0]["name"] != SHARDED:
        grid = {"name": "regular", "configuration": {"chunk_shape": inner}}
        _decode({**array, "chunk_grid": grid}, sharding["codecs"], content)


def _decode(array: Document, codecs: list[Document], content: memoryview) -> None:
    """Decode one chunk by zarr, as an array of its own that has no other."""
    dimensions = len(array["shape"])
    single = {**array, "attributes": {}}
    if array["zarr_format"] == 2:
        compressor = array["compressor"] or {}
        is_blosc = compressor.get("id") == "blosc"
        single |= {"shape": array["chunks"], "dimension_separator": "."}
        document, key = ".zarray", ".".join(["0"] * dimensions) or "0"
    else:
        is_blosc = codecs[-1]["name"].endswith("blosc")
        chunk = array["chunk_grid"]["configuration"]["chunk_shape"]
        encoding = {"name": "default", "configuration": {"separator": "/"}}
        single |= {"shape": chunk, "chunk_key_encoding": encoding, "codecs": codecs, "dimension_names": None}
        document, key = "zarr.json", "/".join(["c"] + ["0"] * dimensions)
    if is_blosc:
        check_blosc(content)
    buffer = default_buffer_prototype().buffer
    objects = {
        document: buffer.from_bytes(json.dumps(single).encode()),
        key: buffer.from_bytes(bytes(content)),
    }
    try:
        zarr.open_array(MemoryStore(objects), mode="r", zarr_format=array["zarr_format"])[...]
    except Exception as error:
        raise ValueError(f"{len(content)} bytes, which are no chunk: {error}") from error
