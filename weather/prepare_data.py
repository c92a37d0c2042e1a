"""Turn NetCDF, GRIB or Zarr of your own into data for training: any variables, any region, any time step.

    python -m weather.prepare_data region.nc --variables t2m u10 z:500 --out data/region
    python -m weather.prepare_data months/*.nc --variables rain=tp sst --valid_from 2019-01-01 --test_from 2020-01-01

    OUT/{train,valid,test}/1990-2015.h5   fields [time, channel, lat, lon] float32, rows from the north, in one file
                                          for each split, from its first year to its last
    OUT/stats/*.npy                       of the training dates alone
    OUT/config.yaml                       what train.py has to know of them

Variables that era5.yaml knows, by any of their names, get our name and units, and must be within their range. The
others keep their own. The command can be repeated: what is whole stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.config import read_named_config
from utils.errors import ArgumentParser, UsageError, float_in_range, int_in_range, run_main
from utils.files import whole_file
from utils.yaml_files import yaml
from weather.convert.data_set_writer import SPLITS, convert
from weather.fields.grid import Grid, years_of
from weather.fields.requests import parse_requests
from weather.fields.time_axis import show
from weather.sources.data import SourceData
from weather.years.dataset import FieldDataset

VERSION = 1  # of the conversion; another version makes other values
TITLE = "Own data for training"
SHARES = (80.0, 10.0, 10.0)  # percent of the dates
FEWEST = 2  # frames that make a sample
NAME = "own"  # of the config
BASE = "quick"  # of config/ViT.yaml, whose model and optimizer these data begin with
FORECAST = {"train_data_path": "train", "valid_data_path": "valid", "inf_data_path": "test"}
STATISTICS = {"global_means_path": "global_means", "global_stds_path": "global_stds", "time_means_path": "time_means"}


def prepare_data(
    sources: Iterable[Path | str],
    variables: Iterable[str],
    out: Path | str,
    shares: Sequence[float] = SHARES,
    valid_from: np.datetime64 | None = None,
    test_from: np.datetime64 | None = None,
    coarsen: int = 1,
) -> int:
    """Write the channels `variables` of `sources` (NetCDF and GRIB files, Zarr stores) to the folder `out`.

    variables: as parse_requests takes them. shares: of the dates in train, valid and test, one after the other.
    valid_from, test_from: the first dates of valid and test in their place. coarsen: side of the square blocks of
    points that are averaged.
    Returns the number of files written. Raises UsageError for sources or settings that cannot be used, other data in
    `out` and too little disk space, before anything is written; for values that are no data when they are read.
    """
    # Which channels, of which sources, at which dates.
    requests = parse_requests(variables)
    data = SourceData(sources, requests, coarsen)
    split = split_dates(data.dates, shares, valid_from, test_from)
    dates = _name_files(Path(out), split)

    parts = [[show(part[0]), show(part[-1]), len(part)] for part in split.values()]
    settings: dict[str, Any] = {
        "version": VERSION,
        "variables": [[request.name, request.variable, request.level] for request in requests],
        "units": [channel.units for channel in data.channels],
        "splits": parts,
    }
    # Files first, then what train.py and people have to know of them.
    made = convert(data, dates, Path(out), settings, TITLE, {})
    _describe(Path(out), data, split)
    write_own_config(Path(out), data.grid, [channel.name for channel in data.channels])
    return made


def split_dates(
    dates: np.ndarray,
    shares: Sequence[float],
    valid_from: np.datetime64 | None,
    test_from: np.datetime64 | None,
) -> dict[str, np.ndarray]:
    """{split: its dates}, one after the other. Raises UsageError for dates that are too few, or given backwards.

    shares: of SPLITS. valid_from, test_from: in their place, the first dates of the second and of the third.
    """
    if valid_from is None and test_from is None:
        # Shares need not add up to 100.
        ends = np.cumsum(shares) / np.sum(shares) * len(dates)
        places = ends[:-1].round().astype(int)
    elif valid_from is None or test_from is None:
        raise UsageError("--valid_from and --test_from belong together: give both, or --shares")
    elif valid_from >= test_from:  # which would train on what it is tested on
        raise UsageError(f"--valid_from {show(valid_from)} is not before --test_from {show(test_from)}")
    else:
        places = np.searchsorted(dates, [valid_from, test_from])
    parts = np.split(dates, places)
    split = dict(zip(SPLITS, parts, strict=True))
    # A sample is a frame and a later one.
    for name, part in split.items():
        if len(part) < FEWEST:
            raise UsageError(
                f"{name} would have {len(part)} of the {len(dates)} dates, {show(dates[0])} to {show(dates[-1])}, "
                f"and a sample takes {FEWEST} frames: give more files, or other --shares, --valid_from and --test_from"
            )
    return split


def _name_files(out: Path, split: Mapping[str, np.ndarray]) -> dict[Path, np.ndarray]:
    """{file: its dates}: one file for each split, so that no sample is lost between two files."""
    files = {}
    for name, dates in split.items():
        years = years_of(dates[[0, -1]])
        first, last = years.tolist()
        # The name is read as years elsewhere, so it says no more.
        stem = f"{first:04d}" if first == last else f"{first:04d}-{last:04d}"
        files[out / name / f"{stem}.h5"] = dates
    return files


def _describe(out: Path, data: SourceData, split: Mapping[str, np.ndarray]) -> None:
    """Print the channels, the grid and the splits, and what the trainer will assume of them."""
    named = []
    for channel in data.channels:
        units = f" ({channel.units})" if channel.units else ""
        named.append(f"{channel.name}{units}")
    print(f"channels: {', '.join(named)}")
    latitude, longitude = data.grid
    kind = "the globe" if data.grid.is_global else "a region"
    print(
        f"grid: {len(latitude)} x {len(longitude)} points of {kind}, latitude {latitude[0]:g} to {latitude[-1]:g}, "
        f"longitude {longitude[0]:g} to {longitude[-1]:g}"
    )
    for name, dates in split.items():
        print(f"{name}: {len(dates)} dates, {show(dates[0])} to {show(dates[-1])}")
    # What a run will note of these files is said now.
    img_size = [len(latitude), len(longitude)]
    for name in SPLITS:
        dataset = FieldDataset(out / name, len(data.channels), img_size)
        for note in dataset.notes():
            print(note)
        dataset.close()


def write_own_config(out: Path, grid: Grid, channels: Sequence[str]) -> None:
    """Write OUT/config.yaml, unless it is there, and print the command that trains with it."""
    settings = read_named_config("config/ViT.yaml", BASE)
    patch = settings["patch_size"]
    # Rows and columns that do not fill a patch are left out, at the south and the east.
    points = [len(axis) for axis in grid]
    img_size = [max(patch, size // patch * patch) for size in points]
    settings |= {"img_size": img_size, "n_in_channels": len(channels), "n_out_channels": len(channels)}
    settings |= {key: str(out / split) for key, split in FORECAST.items()}
    settings |= {key: str(out / "stats" / f"{name}.npy") for key, name in STATISTICS.items()}
    path = out / "config.yaml"
    if not path.exists():
        with whole_file(path) as part, open(part, "w") as file:
            file.write(f"# Made by weather.prepare_data: {', '.join(channels)}. Change what you like.\n")
            yaml().dump({NAME: settings}, file)
    if img_size != points:
        print(f"img_size {img_size}: patches of {patch} x {patch} points do not fill {points}")
    print(f"train with: python train.py --yaml_config {path} --config {NAME}")


def _date(text: str) -> np.datetime64:
    try:
        return np.datetime64(text, "s")
    except ValueError:
        raise UsageError(f"date '{text}': write 2019-01-01 or 2019-01-01T06") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = ArgumentParser(prog="python -m weather.prepare_data", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("sources", metavar="SOURCE", nargs="+", help="NetCDF or GRIB file, Zarr store (folder or URL)")
    names = "names in the file, with levels, or with a name of yours: t2m z:500,850 rain=tp"
    option("--variables", metavar="NAME", nargs="+", required=True, help=names)
    option("--out", required=True, help="folder")
    share = float_in_range(0.1, 1e6)
    three = ("TRAIN", "VALID", "TEST")
    parts = "of the dates, one part after the other (80 10 10)"
    option("--shares", type=share, nargs=3, default=SHARES, metavar=three, help=parts)
    option("--valid_from", type=_date, metavar="DATE", help="first date of the validation, in place of --shares")
    option("--test_from", type=_date, metavar="DATE", help="first date of the test")
    coarsen = "average over N x N points"
    option("--coarsen", type=int_in_range(1, 10_000), default=1, metavar="N", help=coarsen)
    prepare_data(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main, resumes=True)
