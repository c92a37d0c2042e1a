"""A year of data in a Zarr store, format 2 or 3, on a file system; and year files as such stores.

    python -m weather.zarr_year data/era5 data/era5_zarr

The array `fields` [time, channel, lat, lon] has one chunk a frame. Without compression a chunk is a file that holds the
frame, and is read and mapped as such; zarr decodes all else. Other chunks are read too, with a warning that says what
a sample costs: stores of others come in many chunks, and to try one must not take a copy of terabytes.
"""

import contextlib
import itertools
import math
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from utils.errors import ArgumentParser, UsageError, reading, reported_as_usage_error, run_main
from weather.year_data import DATASET, YearFile
from weather.year_reader import year_paths

try:
    import zarr
    from zarr.core.buffer import default_buffer_prototype
except ImportError as error:
    raise UsageError(f"a Zarr store needs the package zarr ({error}): pip install -r requirements-era5.txt") from None

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text
CHUNK_BYTES = 64e6  # of frames held in memory while a store is written


class ZarrYear(YearFile):
    """A year in a Zarr store."""

    def __init__(self, location: Path, path: Path):
        self.path, self.location = path, location
        if not location.is_dir():
            raise UsageError(f"{path}: {'is not a folder' if location.exists() else 'no such store'}")
        with reading(f"{path}: Zarr"):
            group = zarr.open_group(location, mode="r", use_consolidated=False)  # which may be older than the store
            self.arrays = dict(group.arrays())
            fields = self.arrays.get(DATASET)
            if fields is None or fields.ndim != 4 or fields.dtype.kind != "f" or fields.shards:
                found = f"has {fields.dtype} {fields.shape}" if fields is not None else "has none"
                found += ", in shards: write it without" if fields is not None and fields.shards else ""
                raise UsageError(
                    f"{path}: expected an array '{DATASET}' [time, channel, lat, lon] of floats; it {found}"
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
    def mapped(self, frames: Sequence[int], channels: int, rows: slice, columns: slice) -> Iterator[list[np.ndarray]]:
        """As YearFile says."""
        if not self.mappable:
            raise ValueError(f"{self.path}: has no map, its frames must be read")
        yield [self._map(frame)[:, :channels, rows, columns] for frame in frames]

    def _map(self, frame):
        with self._piece(frame) as (descriptor, _), reading(f"{self.path}: frame {frame}"):
            length = 4 * math.prod(self.shape[1:])
            whole = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)  # unmapped with the last array over it
        whole.madvise(mmap.MADV_WILLNEED)
        return np.ndarray((1, *self.shape[1:]), "<f4", whole)

    @contextlib.contextmanager
    def _piece(self, frame: int) -> Iterator[tuple[int, int]]:
        descriptor = os.open(self._chunk((frame, 0, 0, 0)), os.O_RDONLY)
        try:
            yield descriptor, 0
        finally:
            os.close(descriptor)

    def _adjacent(self, frame: int, count: int) -> bool:
        return count == 1

    def _read_by_library(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        first, last = (number // self.fields.chunks[0] for number in (frame, frame + len(out) - 1))
        if not all(self._chunk_size((number, 0, 0, 0)) for number in range(first, last + 1)):  # zarr would fill it
            raise UsageError(f"{self.path}: frame {frame}: its chunk is gone")
        window = slice(frame, frame + len(out)), slice(0, out.shape[1]), rows, columns
        if self.fields.dtype == out.dtype:
            self.fields.get_basic_selection(window, out=default_buffer_prototype().nd_buffer.from_numpy_array(out))
        else:
            out[:] = self.fields[window]

    @staticmethod
    def _strings(array: Any) -> list[str]:
        if array.dtype.kind not in "UTO":
            raise TypeError(f"{array.dtype} is not text")
        return [str(text) for text in array[:]]

    def _is_plain(self):
        codecs = self.fields.compressors, self.fields.filters, self.fields.order
        big = getattr(getattr(self.fields.serializer, "endian", None), "value", "little") == "big"
        whole = self.fields.chunks == (1, *self.shape[1:])
        return whole and codecs == ((), (), "C") and self.fields.dtype == np.dtype("<f4") and not big

    def _chunk(self, number: tuple[int, ...]) -> Path:
        return self.location / DATASET / self.fields.metadata.encode_chunk_key(number)

    def _chunk_size(self, number):
        try:
            return self._chunk(number).stat().st_size
        except FileNotFoundError:
            return 0


def write_store(source: Path, store: Path, zarr_format: int, compressed: bool) -> None:
    """Write a year file as a store with one chunk a frame. It has its name when it is whole."""
    part = store.with_name(store.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with (
        reported_as_usage_error(OSError, str(store)),
        reading(str(source)),
        xarray.open_dataset(source, engine="h5netcdf", decode_times=False, mask_and_scale=False) as year,
    ):
        frames, *frame = year[DATASET].shape
        encoding = {DATASET: {"chunks": (1, *frame)} | ({} if compressed else {"compressors": None})}
        step = max(1, int(CHUNK_BYTES / 4 / math.prod(frame)))
        for first in range(0, frames, step):
            some = year.isel(time=slice(first, first + step)).load().drop_encoding()
            more: Any = {"append_dim": "time"} if first else {"mode": "w", "encoding": encoding}
            some.to_zarr(part, zarr_format=zarr_format, consolidated=False, **more)
        part.rename(store)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: every year file in the folders of a data set as a store, and the statistics as they are."""
    parser = ArgumentParser(prog="python -m weather.zarr_year", description="Write year files as Zarr stores.")
    parser.add_argument("source", type=Path, help="folder with train, valid, test and stats")
    parser.add_argument("out", type=Path, help="such a folder of stores; what is there stays")
    parser.add_argument("--zarr_format", type=int, choices=(2, 3), default=2, help="(default: %(default)s)")
    parser.add_argument("--compressed", action="store_true", help="with zarr's usual compression")
    options = parser.parse_args(argv)
    years = [path for folder in sorted(options.source.glob("*/")) for path in year_paths(folder)]
    if not (years := [path for path in years if path.suffix != ".zarr"]):
        raise UsageError(f"{options.source}: its folders hold no year files")
    for path in years:
        store = options.out / path.parent.name / f"{path.stem}.zarr"
        if not store.exists():
            store.parent.mkdir(parents=True, exist_ok=True)
            write_store(path, store, options.zarr_format, options.compressed)
            print(store)
    if (options.source / "stats").is_dir() and not (options.out / "stats").exists():
        shutil.copytree(options.source / "stats", options.out / "stats")


if __name__ == "__main__":
    run_main(main)
