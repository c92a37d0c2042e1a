"""How the chunks of a Zarr array lie in its store: their names, their shape, and what undoes their compression.

All of it is in the array's metadata, as the specifications of Zarr 2 and 3 have them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numcodecs
import numpy as np
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
    this order; None: only zarr can. path: of the array. encode: coordinates of an object to its name below the path.
    shards: None without them.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    codecs: list[Codec] | None
    path: str
    encode: Callable[[Coords], str]
    shards: Shards | None = None

    @property
    def chunks_in_object(self) -> tuple[int, ...]:
        """The grid of chunks in a shard; a single one without shards."""
        shape = self.shards.shape if self.shards else self.chunk
        return tuple(whole // part for whole, part in zip(shape, self.chunk, strict=True))

    @property
    def index_range(self) -> tuple[int, int]:
        """(first byte, length) of a shard's index: offset and length of each chunk. -5: fifth last."""
        assert self.shards is not None  # who asks for an index knows that there is one
        length = 16 * math.prod(self.chunks_in_object) + CHECKSUM_BYTES * self.shards.has_checksum
        return -length if self.shards.index_at_end else 0, length

    def key(self, coords: Coords) -> str:
        """The name of the object at these coordinates in the grid of objects."""
        # c/7/0/0/0 in format 3, 7.0.0.0 in format 2.
        return f"{self.path}/{self.encode(coords)}"

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


def chunk_layout(array: Any) -> ChunkLayout:
    """The layout of an array of zarr. Raises ValueError for shards whose index is stored in an unusual way."""
    shards = None
    dtype = array.dtype
    if array.metadata.zarr_format == 2:
        is_plain = array.metadata.order == "C"  # else columns come first
        names = [codec.codec_id for codec in array.compressors]
    else:
        shards = _shards(array)
        # What makes bytes of an array. Others than the usual one change it.
        serializer = array.serializer.to_dict()
        is_plain = serializer["name"] == "bytes"
        configuration = serializer.get("configuration", {})
        is_big = configuration.get("endian") == "big"
        if is_plain:
            dtype = dtype.newbyteorder(">" if is_big else "<")
        names = [codec.to_dict()["name"] for codec in array.compressors]
    # What changes an array before it becomes bytes is undone by zarr.
    codecs = _codecs(names) if is_plain and not array.filters else None
    return ChunkLayout(array.shape, array.chunks, dtype, codecs, array.path, array.metadata.encode_chunk_key, shards)


def _shards(array: Any) -> Shards | None:
    sharding, *others = array.metadata.to_dict()["codecs"]
    if sharding["name"] != "sharding_indexed":
        return None
    if others:
        raise ValueError("its shards are compressed once more as a whole: write them without")
    # The index must be read before any chunk, so its own encoding has to be known.
    configuration = sharding["configuration"]
    names = [codec["name"] for codec in configuration["index_codecs"]]
    if names not in INDEX_CODECS:
        raise ValueError(f"its shards have an index in {', '.join(names)}: write it with zarr's usual index_codecs")
    at_end = configuration.get("index_location", "end") == "end"
    return Shards(array.shards, at_end, "crc32c" in names)


def _codecs(names: list[str]) -> list[Codec] | None:
    """The codecs that undo those of these names, the last one first; None where zarr must do it."""
    # Their settings matter only to whoever encodes.
    if any(name not in SELF_DESCRIBING for name in names):
        return None
    return [numcodecs.get_codec({"id": name}) for name in reversed(names)]
