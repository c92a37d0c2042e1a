"""Reads windows of an array in chunks, straight into the caller's buffer, in several threads at a time.

A chunk that is wanted whole is read, or decoded, where it is wanted; of any other one the wanted part is copied.
Reading a file and decoding zstd and blosc release Python's lock.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import google_crc32c
import numpy as np
from numcodecs import Blosc

from utils.errors import UsageError, first_line
from weather.sources.chunk_sources import ChunkSource, LocalChunks, Place, ThreadBuffers
from weather.sources.zarr_layout import CHECKSUM_BYTES, ChunkLayout, Coords, Part

NEVER_WRITTEN = 2**64 - 1  # offset and length, in a shard's index, of a chunk that is not there
LONGEST_OBJECT = 2**50  # bytes, which no shard has
BLOSC_HEADER = 16  # bytes, of which the last four are the length of header and content
MARK = b"\x5a\xa5\xc0\x7f"  # a NaN that nobody writes


class ChunkReader:
    """The chunks of an array in a store. store: its path, for messages."""

    def __init__(self, layout: ChunkLayout, source: ChunkSource, store: object):
        self.layout = layout
        self.source = source
        self.store = store
        self.buffers = ThreadBuffers()
        self.indexes: dict[Coords, np.ndarray] = {}  # of the shards that were read, (*chunks, 2): offset, length

    def check_written(self, name: str, wanted: Sequence[np.ndarray | None] | None = None) -> None:
        """Raise UsageError where chunks were never written, as far as names of objects and their indexes tell.

        name: of the array. wanted: for each axis the indices that will be read, None for all; chunks without any of
        them do not count.
        """
        # A store that cannot be listed shows what it lacks when it is read.
        names = self.source.names(self.layout.path)
        if names is None:
            return
        # Numbers of the wanted chunks along each axis, and of the objects that hold them.
        chunks = self.layout.wanted_chunks(wanted or [None] * len(self.layout.shape))
        objects = []
        for numbers, count in zip(chunks, self.layout.chunks_in_object, strict=True):
            objects.append(np.unique(numbers // count).tolist())

        missing = 0
        for coords in itertools.product(*objects):
            is_there = self.layout.key(coords) in names
            if not self.layout.shards:
                missing += not is_there
                continue
            inside = self.layout.chunks_inside(coords, chunks)
            if not is_there:
                missing += math.prod(len(numbers) for numbers in inside)
            elif isinstance(self.source, LocalChunks):
                # The index of a shard has a row for each chunk that it could hold.
                offsets = self._index(coords)[..., 0]
                needed = offsets[np.ix_(*inside)]
                missing += int((needed == NEVER_WRITTEN).sum())
        if missing:
            raise UsageError(f"{self.store}: {missing} chunks of {name} were never written: the store was not finished")

    def read(self, selection: Sequence[slice], out: np.ndarray) -> None:
        """Fill `out`, contiguous, with a selection (a slice for each dimension). Raises UsageError for a missing chunk.

        The layout's codecs are known.
        """
        parts = self.layout.parts(selection)
        is_stored_as_it_is = not self.layout.codecs
        if is_stored_as_it_is and isinstance(self.source, LocalChunks):
            for part in parts:
                self._read_stored(self.source, part, out[part.target])
            return
        # All are asked for before the first is decoded: of a store that is elsewhere, they are on their way at once.
        # Bytes that cannot be decoded are no chunk: a source may ask for them again.
        places = [self._place(part.coords) for part in parts]
        uses = [partial(self._decode, part, out[part.target]) for part in parts]
        done = self.source.read_all(places, uses)
        for part in parts:
            try:
                next(done)
            except FileNotFoundError:
                raise self._never_written(part.coords) from None

    def _read_stored(self, source: LocalChunks, part: Part, target: np.ndarray) -> None:
        """Fill a target with its part of a chunk that is stored as it is, piece by piece: each one read."""
        place = self._place(part.coords)
        chunk = self.layout.chunk
        columns = part.inside[-1]
        width = chunk[-1]
        has_whole_rows = columns == slice(0, width)
        # Behind the last dimension that is wanted in part, all lies side by side: (time, channel) for a band of rows.
        last_cut = 0
        for dimension, wanted in enumerate(part.inside[:-1]):
            if wanted != slice(0, chunk[dimension]):
                last_cut = dimension
        for index in np.ndindex(target.shape[:last_cut]):
            piece = target[index]  # (..., w)
            position = place.first + self._offset(part.inside, index)
            is_direct = has_whole_rows and self._is_as_stored(piece)
            rows = piece if is_direct else self._buffer((*piece.shape[:-1], width))
            try:
                source.read_into(place.key, position, _bytes_of(rows))
            except FileNotFoundError:
                raise self._never_written(part.coords) from None
            if not is_direct:
                piece[...] = rows[..., columns]

    def _offset(self, inside: tuple[slice, ...], index: Coords) -> int:
        """The position in a chunk, in bytes, of the first whole row of a part, `index` steps along its first axes."""
        first = [wanted.start for wanted in inside[:-1]]
        for dimension, steps in enumerate(index):
            first[dimension] += steps
        # Number of values in front of it, in C order.
        values = np.ravel_multi_index((*first, 0), self.layout.chunk)
        return self.layout.dtype.itemsize * int(values)

    def _is_as_stored(self, target: np.ndarray) -> bool:
        """Tell whether the bytes of a chunk can be put where they are wanted."""
        return target.dtype == self.layout.dtype and target.flags.c_contiguous

    def _decode(self, part: Part, target: np.ndarray, payload: memoryview) -> None:
        """Fill a target with its part of an encoded chunk. Raises ValueError, naming the chunk, for what is none."""
        # A chunk at the end of the array is stored whole, and only its first part is in the array.
        is_whole = target.shape == self.layout.chunk
        is_direct = is_whole and self._is_as_stored(target)
        chunk = target if is_direct else self._buffer(self.layout.chunk)
        try:
            self._decode_into(payload, chunk)
        except Exception as error:  # each codec has its own
            name = ".".join(map(str, part.coords))
            what = f"{len(payload)} bytes, which are no chunk of {chunk.nbytes}"
            raise ValueError(f"chunk {name} of '{self.layout.path}' has {what}: {first_line(error)}") from error
        if not is_direct:
            target[...] = chunk[part.inside]

    def _decode_into(self, payload: memoryview, chunk: np.ndarray) -> None:
        """Decode a whole chunk. Raises ValueError for another number of values, and what codecs raise."""
        out = _bytes_of(chunk)
        codecs = self.layout.codecs or []
        # Not compressed, and from a source that gives whole objects.
        if not codecs:
            if len(payload) != len(out):
                raise ValueError("it is stored as it is, and has another length")
            out[:] = payload
            return
        if isinstance(codecs[0], Blosc):
            check_blosc(payload)
        for codec in codecs[:-1]:
            payload = codec.decode(payload)
        # A codec does not say how much it wrote: a chunk that holds too little leaves the mark.
        mark = MARK[-len(out) :]
        out[-len(mark) :] = mark
        codecs[-1].decode(payload, out=out)
        if out[-len(mark) :] == mark:
            raise ValueError("it holds fewer values")

    def _buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array for numbers as they are stored, valid until the thread asks again."""
        length = self.layout.dtype.itemsize * math.prod(shape)
        memory = self.buffers.take("decoded", length)
        return np.frombuffer(memory, self.layout.dtype).reshape(shape)

    def _place(self, coords: Coords) -> Place:
        """Where a chunk lies. Raises UsageError for one that is missing in its shard."""
        outer, inner = self.layout.locate(coords)
        if not self.layout.shards:
            return Place(self.layout.key(outer))
        try:
            index = self._index(outer)
        except FileNotFoundError:
            raise self._never_written(coords) from None
        offset, length = index[inner].tolist()
        if offset == NEVER_WRITTEN:
            raise self._never_written(coords)
        return Place(self.layout.key(outer), offset, length)

    def _index(self, coords: Coords) -> np.ndarray:
        """The index of a shard, (*chunks, 2) uint64. Raises FileNotFoundError, and ValueError for a damaged one."""
        if coords in self.indexes:
            return self.indexes[coords]
        key = self.layout.key(coords)

        def keep(data: memoryview) -> None:
            self.indexes[coords] = parse_index(bytes(data), self.layout, key)

        place = Place(key, *self.layout.index_range)
        next(self.source.read_all([place], [keep]))
        return self.indexes[coords]

    def _never_written(self, coords: Coords) -> UsageError:
        name = ".".join(map(str, coords))
        what = f"chunk {name} of '{self.layout.path}' was never written: the store was not finished"
        return UsageError(f"{self.store}: {what}")


def parse_index(data: bytes, layout: ChunkLayout, key: str) -> np.ndarray:
    """The index of a shard, (*chunks, 2) uint64: offset and length. Raises ValueError for bytes that are none."""
    if layout.shards and layout.shards.has_checksum:
        stored = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
        data = data[:-CHECKSUM_BYTES]
        if google_crc32c.value(data) != stored:
            raise ValueError(f"the index of shard {key} is damaged")
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    # Without a checksum, any text would be an index of enormous numbers.
    is_written = (pairs != NEVER_WRITTEN).any(1)
    written = pairs[is_written]
    if (written >= LONGEST_OBJECT).any() or (written[:, 1] == 0).any():
        raise ValueError(f"the index of shard {key} is damaged")
    return pairs.reshape(*layout.chunks_in_object, 2)


def check_blosc(payload: bytes | memoryview) -> None:
    """Raise ValueError where bytes are fewer than the header of blosc says: the library would read beyond their end."""
    stated = int.from_bytes(payload[BLOSC_HEADER - 4 : BLOSC_HEADER], "little")
    if len(payload) < max(stated, BLOSC_HEADER):
        raise ValueError(f"blosc's header says {stated} bytes")


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
