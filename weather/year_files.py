"""Write a data set: year files split into train, valid and test, and the statistics of the training years.

    OUT/{train,valid,test}/YYYY.h5   fields [time, channel, lat, lon] float32, 6-hourly from 1 January 00 UTC,
                                     with latitude, longitude, time, channel and channel_units
    OUT/stats/global_means.npy       (1, C, 1, 1) float32, of the training years only
    OUT/stats/global_stds.npy        (1, C, 1, 1) float32, of the training years only
    OUT/stats/time_means.npy         (1, C, H, W) float32, the climatology of the training years
    OUT/stats/change_stds.npy        (1, C, 1, 1) float32, of the change from one training frame to the next
    OUT/stats/quantiles.npy          (3, C, H, W) float32, of each point over 100 training frames or more

data_set_writer.py writes them; sample_data.py and prepare_era5.py supply the frames.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from utils.errors import ArgumentParser, UsageError, int_in_range, run_main
from weather.convert.data_set_writer import SPLITS
from weather.convert.training_statistics import write_statistics
from weather.fields.grid import frame_times, year_frames
from weather.sources.remote_store import RemoteOptions, add_remote_options
from weather.years.dataset import FieldDataset
from weather.years.year_reader import data_path, open_year, parse_years, year_paths


def year_file_parser(
    module: str,
    doc: str,
    train: str,
    valid: str,
    test: str,
    days: str,
) -> ArgumentParser:
    """A parser with the options that every command that makes year files has; the texts are their defaults."""
    parser = ArgumentParser(prog=f"python -m {module}", description=doc.partition("\n")[0])
    # Defaults are texts, which argparse reads like words of the command line.
    option = parser.add_argument
    default = "(default: %(default)s)"
    option("--train_years", type=parse_years, default=train, help=f"such as 1979-1982,1985 {default}")
    option("--valid_years", type=parse_years, default=valid, help=default)
    option("--test_years", type=parse_years, default=test, help=default)
    option("--days", type=_days, default=days, help=f"of each year, from 1 January, or 'all' {default}")
    return parser


def year_dates(out: Path | str, splits: Sequence[Iterable[int]], days: int) -> dict[Path, np.ndarray]:
    """{year file: the dates of its six-hourly frames}, each in the folder of its split.

    splits: the years of SPLITS. days: of each year, 0 for all. Raises UsageError for a year in two splits.
    """
    dates = {}
    for year, split in _split_years(splits).items():
        frames = 4 * days or year_frames(year)
        path = Path(out) / split / f"{year:04d}.h5"
        dates[path] = frame_times(year, 0, frames)
    return dates


def main(argv: Sequence[str] | None = None) -> None:
    """Write the statistics of year files that were made elsewhere: python -m weather.year_files TRAIN_FOLDER OUT."""
    parser = ArgumentParser(prog="python -m weather.year_files", description="Statistics of the training years.")
    parser.add_argument("train", help="folder of the training years, or a store: gs://BUCKET/STORE.zarr#1979-2015")
    parser.add_argument("out", type=Path, help="folder of the statistics (.npy); files that are there stay")
    which = "hold every frame against the ranges of its channels, or none (%(default)s)"
    parser.add_argument("--check_data", choices=("all", "off"), default="all", help=which)
    add_remote_options(parser)
    options = parser.parse_args(argv)
    remote = RemoteOptions(options.cache_to, options.cache_gib, options.retry_seconds)
    folder = data_path(options.train, remote)
    paths = year_paths(folder)
    if not paths:
        raise UsageError(f"{options.train}: holds no .h5, .nc or .zarr")
    with closing(open_year(paths[0])) as first:
        _, channels, *img_size = first.shape
    with closing(FieldDataset(options.train, channels, img_size, remote=remote)) as dataset:  # which compares the years
        for note in dataset.notes():
            print(note)
    for path in write_statistics(paths, options.out, options.check_data == "all"):
        print(path)


def _days(text):
    return 0 if text == "all" else int_in_range(1, 365)(text)


def _split_years(years_of_splits: Sequence[Iterable[int]]) -> dict[int, str]:
    """{year: split}. Raises UsageError for a year in two splits, and if there is no training year."""
    years: dict[int, str] = {}
    for split, values in zip(SPLITS, years_of_splits, strict=True):
        for year in values:
            if year in years:
                raise UsageError(f"year {year} is in {years[year]} and in {split}: the test would leak")
            years[year] = split
    # Statistics are of the training years, so there must be some.
    if "train" not in years.values():
        raise UsageError("no training year")
    return years


if __name__ == "__main__":
    run_main(main)
