"""How the chunks of a Zarr array lie in its store: their names, their shape, and what undoes their compression.

All of it is in the array's metadata, as the specifications of Zarr 2 and 3 have them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec

# Codecs of numcodecs that decode what they encoded without being told how.
SELF_DESCRIBING = ("zstd", "blosc", "gzip", "zlib", "lz4", "bz2", "lzma")
INDEX_CODECS = (["bytes"], ["bytes", "crc32c"])  # of a shard's index
CHECKSUM_BYTES = 4
Coords = tuple[int, ...]


class Part(NamedTuple):
    """The part of a selection that lies in one chunk."""

    coords: Coords  # of the chunk in the grid of chunks
    inside: tuple[slice, ...]  # the chunk
    target: tuple[slice, ...]  # the selection


class Shards(NamedTuple):
    """Objects that hold several chunks each, and an index of where these begin."""

    shape: tuple[int, ...]
    index_at_end: bool
    has_checksum: bool  # of the index


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of one array.

    shape: of the array. chunk: shape of a chunk. dtype: of the numbers in it. codecs: what undoes its compression, in
    this order; None: only zarr can. path, prefix, separator: of the names of objects. shards: None without them.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    codecs: list[Codec] | None
    path: str
    prefix: str
    separator: str
    shards: Shards | None = None

    @property
    def object_shape(self) -> tuple[int, ...]:
        """Shape of the part of the array that one object of the store holds: a shard, or a chunk."""
        return self.shards.shape if self.shards else self.chunk

    @property
    def chunks_in_object(self) -> tuple[int, ...]:
        """The grid of chunks in a shard; a single one without shards."""
        counts = []
        for whole, part in zip(self.object_shape, self.chunk, strict=True):
            counts.append(whole // part)
        return tuple(counts)

    @property
    def index_bytes(self) -> int:
        """Length of a shard's index: offset and length of each chunk, 8 bytes each."""
        length = 16 * math.prod(self.chunks_in_object)
        if self.shards and self.shards.has_checksum:
            length += CHECKSUM_BYTES
        return length

    def key(self, coords: Coords) -> str:
        """The name of the object at these coordinates in the grid of objects."""
        # c/7/0/0/0 in format 3, 7.0.0.0 in format 2.
        numbers = self.separator.join(map(str, coords))
        return f"{self.path}/{self.prefix}{numbers}"

    def wanted_chunks(self, wanted: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """For each axis the numbers of the chunks that hold its wanted indices, in order; None stands for all."""
        numbers = []
        for indices, length, chunk in zip(wanted, self.shape, self.chunk, strict=True):
            if indices is None:
                numbers.append(np.arange(math.ceil(length / chunk)))
            else:
                numbers.append(np.unique(indices // chunk))
        return numbers

    def locate(self, coords: Coords) -> tuple[Coords, Coords]:
        """(coordinates of the object that holds a chunk, those of the chunk in it)."""
        # Without shards an object is a chunk, and the second are zeros.
        outer = []
        inner = []
        for number, count in zip(coords, self.chunks_in_object, strict=True):
            outer.append(number // count)
            inner.append(number % count)
        return tuple(outer), tuple(inner)

    def chunks_inside(
        self,
        coords: Coords,
        chunks: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Of these chunks (numbers along each axis) those in the object at `coords`, by their numbers in it."""
        inside = []
        for number, numbers, count in zip(coords, chunks, self.chunks_in_object, strict=True):
            is_inside = numbers // count == number
            inside.append(numbers[is_inside] % count)
        return inside

    def parts(self, selection: Sequence[slice]) -> list[Part]:
        """The parts of a selection (one slice for each dimension), chunk by chunk."""
        by_dimension = []
        for wanted, size in zip(selection, self.chunk, strict=True):
            by_dimension.append(_pieces(wanted, size))
        # Every combination of a piece along each dimension is a part of a chunk.
        parts = []
        for pieces in itertools.product(*by_dimension):
            coords, inside, target = zip(*pieces, strict=True)
            parts.append(Part(coords, inside, target))
        return parts


def _pieces(wanted: slice, size: int) -> list[tuple[int, slice, slice]]:
    """(number of the chunk, part of the chunk, part of the selection) along one dimension of chunks of this size."""
    pieces = []
    first = wanted.start // size
    stop = math.ceil(wanted.stop / size)
    for number in range(first, stop):
        start = number * size
        begin = max(wanted.start, start)
        end = min(wanted.stop, start + size)
        inside = slice(begin - start, end - start)
        target = slice(begin - wanted.start, end - wanted.start)
        pieces.append((number, inside, target))
    return pieces


def chunk_layout(array: zarr.Array) -> ChunkLayout:
    """The layout of an array. Raises ValueError for a shard whose index is stored in another way than zarr's usual."""
    metadata: dict[str, Any] = dict(array.metadata.to_dict())
    if array.metadata.zarr_format == 2:
        return _layout_of_format_2(array, metadata)
    return _layout_of_format_3(array, metadata)


def _layout_of_format_2(array: zarr.Array, metadata: dict[str, Any]) -> ChunkLayout:
    compressor = metadata["compressor"]
    names = [] if compressor is None else [compressor["id"]]
    # Columns first, or numbers that are not themselves in the chunk: zarr knows what to do.
    is_plain = metadata["order"] == "C" and not metadata["filters"]
    codecs = _codecs(names) if is_plain else None
    separator = metadata.get("dimension_separator", ".")
    return ChunkLayout(array.shape, array.chunks, array.dtype, codecs, array.path, "", separator)


def _layout_of_format_3(array: zarr.Array, metadata: dict[str, Any]) -> ChunkLayout:
    # How objects are named: as is usual in format 3, or as in format 2.
    encoding = metadata["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    prefix = f"c{separator}" if is_default else ""
    codecs = metadata["codecs"]
    shards = None
    first, *others = codecs
    if first["name"] == "sharding_indexed":
        if others:
            raise ValueError("its shards are compressed once more as a whole: write them without")
        shards = _shards(array, first["configuration"])
        first, *others = first["configuration"]["codecs"]
    # The first codec makes bytes of an array. What comes before or in its place changes the array: zarr undoes that.
    undo = None
    dtype = array.dtype
    if first["name"] == "bytes":
        undo = _codecs([codec["name"] for codec in others])
        endian = first.get("configuration", {}).get("endian", "little")
        is_big = endian == "big"
        dtype = dtype.newbyteorder(">" if is_big else "<")
    return ChunkLayout(array.shape, array.chunks, dtype, undo, array.path, prefix, separator, shards)


def _shards(array: zarr.Array, configuration: dict[str, Any]) -> Shards:
    # The index must be read before any chunk, so its own encoding has to be known.
    names = [codec["name"] for codec in configuration["index_codecs"]]
    if names not in INDEX_CODECS or array.shards is None:
        raise ValueError(f"its shards have an index in {', '.join(names)}: write it with zarr's usual index_codecs")
    at_end = configuration.get("index_location", "end") == "end"
    return Shards(array.shards, at_end, "crc32c" in names)


def _codecs(names: list[str]) -> list[Codec] | None:
    """The codecs that undo those of these names, the last one first; None where zarr must do it."""
    # Their settings matter only to whoever encodes.
    if any(name not in SELF_DESCRIBING for name in names):
        return None
    return [numcodecs.get_codec({"id": name}) for name in reversed(names)]
