"""A year of data in a Zarr store, format 2 or 3, on a file system.

The array `fields` [time, channel, lat, lon] has one chunk a frame. Without compression a chunk is a file that holds the
frame, and is read and mapped as such; zarr decodes all else. Other chunks are read too, with a warning that says what
a sample costs: stores of others come in many chunks, and to try one must not take a copy of terabytes.
"""

import contextlib
import itertools
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from utils.errors import UsageError, reading
from weather.year_data import DATASET, YearFile

try:
    import zarr
except ImportError as error:
    raise UsageError(f"a Zarr store needs the package zarr ({error}): pip install -r requirements-era5.txt") from None

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text


class ZarrYear(YearFile):
    """A year in a Zarr store."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise UsageError(f"{path}: {'is not a folder' if path.exists() else 'no such store'}")
        with reading(f"{path}: Zarr"):
            group = zarr.open_group(path, mode="r", use_consolidated=False)  # which may be older than the store
            self.arrays = dict(group.arrays())
            fields = self.arrays.get(DATASET)
            if fields is None or fields.ndim != 4 or fields.dtype.kind != "f" or fields.shards:
                actual = f"has {fields.dtype} {fields.shape}" if fields is not None else "has none"
                actual += ", in shards: write it without" if fields is not None and fields.shards else ""
                raise UsageError(
                    f"{path}: expected an array '{DATASET}' [time, channel, lat, lon] of floats; it {actual}"
                )
            self.fields, self.shape = fields, fields.shape
            self.plain = self.mappable = self._is_plain()
            sizes = [self._chunk_size(key) for key in itertools.product(*map(range, fields.cdata_shape))]
        frame = 4 * math.prod(self.shape[1:])
        if missing := sum(size != frame if self.plain else not size for size in sizes):
            what = f"{missing} of {len(sizes)} chunks of '{DATASET}' were"
            raise UsageError(f"{path}: {what} never written, or not whole: the store was not finished")
        self.size = sum(sizes)
        if fields.chunks != (1, *self.shape[1:]):
            reads = math.prod(fields.cdata_shape[1:])
            self.warning = (
                f"{path}: chunks {fields.chunks} are not one a frame: for a frame of {frame / 1e6:.1f} MB "
                f"{reads * 4 * math.prod(fields.chunks) / 1e6:.1f} MB are read, in {reads} pieces"
            )

    def close(self) -> None:
        """Nothing is held open."""

    @contextlib.contextmanager
    def _piece(self, frame: int) -> Iterator[tuple[int, int]]:
        descriptor = os.open(self._chunk((frame, 0, 0, 0)), os.O_RDONLY)
        try:
            yield descriptor, 0
        finally:
            os.close(descriptor)

    def _read_by_library(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        first, last = (number // self.fields.chunks[0] for number in (frame, frame + len(out) - 1))
        if not all(self._chunk_size((number, 0, 0, 0)) for number in range(first, last + 1)):  # zarr would fill it
            raise UsageError(f"{self.path}: frame {frame}: its chunk is gone")
        window = slice(frame, frame + len(out)), slice(0, out.shape[1]), rows, columns
        out[:] = self.fields[window]

    def _is_plain(self):
        codecs = self.fields.compressors, self.fields.filters, self.fields.order
        big = getattr(getattr(self.fields.serializer, "endian", None), "value", "little") == "big"
        whole = self.fields.chunks == (1, *self.shape[1:])
        return whole and codecs == ((), (), "C") and self.fields.dtype == np.dtype("<f4") and not big

    def _chunk(self, number: tuple[int, ...]) -> Path:
        return self.path / DATASET / self.fields.metadata.encode_chunk_key(number)

    def _chunk_size(self, number):
        try:
            return self._chunk(number).stat().st_size
        except FileNotFoundError:
            return 0
