"""Write the year files of a data set as Zarr stores of one chunk a frame, without compression or with it.

python -m docs.examples.zarr_years data/quick data/quick_zarr
"""

import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xarray

from utils.errors import ArgumentParser, UsageError, reading, reported_as_usage_error, run_main
from weather.sources.hdf5 import WITHOUT_LOCKS
from weather.years.year_data import DATASET
from weather.years.year_reader import year_paths

CHUNK_BYTES = 64e6  # of frames held in memory while a store is written


def write_store(source: Path, store: Path, zarr_format: int, compressed: bool) -> None:
    """Write a year file as a store with one chunk a frame. It has its name when it is whole."""
    part = store.with_name(store.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with (
        reported_as_usage_error(OSError, str(store)),
        reading(str(source)),
        warnings.catch_warnings(category=UserWarning, action="ignore"),  # text in format 3 has no specification yet
        xarray.open_dataset(
            source,
            engine="h5netcdf",
            driver_kwds=WITHOUT_LOCKS,
            decode_times=False,
            mask_and_scale=False,
        ) as year,
    ):
        frames, *frame = year[DATASET].shape
        chunks: dict[str, Any] = {"chunks": (1, *frame)}
        if not compressed:
            chunks["compressors"] = None
        # A year may be larger than memory, so that it is written some frames at a time.
        step = max(1, int(CHUNK_BYTES / 4 / math.prod(frame)))
        for first in range(0, frames, step):
            some = year.isel(time=slice(first, first + step)).load().drop_encoding()
            more: Any = {"append_dim": "time"}
            if first == 0:
                more = {"mode": "w", "encoding": {DATASET: chunks}}
            some.to_zarr(part, zarr_format=zarr_format, consolidated=False, **more)
        part.rename(store)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: every year file in the folders of a data set as a store, and the statistics as they are."""
    parser = ArgumentParser(description="Write year files as Zarr stores.")
    parser.add_argument("source", type=Path, help="folder with train, valid, test and stats")
    parser.add_argument("out", type=Path, help="such a folder of stores; what is there stays")
    parser.add_argument("--zarr_format", type=int, choices=(2, 3), default=2, help="(default: %(default)s)")
    parser.add_argument("--compressed", action="store_true", help="with zarr's usual compression")
    options = parser.parse_args(argv)
    years = []
    for folder in sorted(options.source.glob("*/")):
        years += [path for path in year_paths(folder) if path.suffix != ".zarr"]
    if not years:
        raise UsageError(f"{options.source}: its folders hold no year files")
    for path in years:
        store = options.out / path.parent.name / f"{path.stem}.zarr"
        if not store.exists():
            store.parent.mkdir(parents=True, exist_ok=True)
            write_store(path, store, options.zarr_format, options.compressed)
            print(store)
    statistics = options.source / "stats"
    copied = options.out / "stats"
    if statistics.is_dir() and not copied.exists():
        shutil.copytree(statistics, copied)


if __name__ == "__main__":
    run_main(main)
