"""Write a data set: year files split into train, valid and test, and the statistics of the training years.

    OUT/{train,valid,test}/YYYY.h5   fields [time, channel, lat, lon] float32, 6-hourly from 1 January 00 UTC,
                                     with latitude, longitude, time, channel and channel_units
    OUT/stats/global_means.npy       (1, C, 1, 1) float32, of the training years only
    OUT/stats/global_stds.npy        (1, C, 1, 1) float32, of the training years only
    OUT/stats/time_means.npy         (1, C, H, W) float32, the climatology of the training years
    OUT/stats/change_stds.npy        (1, C, 1, 1) float32, of the change from one training frame to the next
    OUT/stats/quantiles.npy          (3, C, H, W) float32, of each point over 100 training frames or more

A file gets its name when it is complete, and stores the settings it was made with. Making the same data set again
therefore writes only the missing files. sample_data.py and prepare_era5.py supply the frames.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from utils.errors import ArgumentParser, UsageError, first_line, int_in_range, run_main
from utils.files import whole_file
from weather.channels import CHANNELS
from weather.climate_quantiles import FILE, LEAST_FRAMES, QUANTILES, climate_quantiles
from weather.dataset import FieldDataset
from weather.grid import Grid, frame_times, year_frames
from weather.hdf5_file import is_hdf5, open_hdf5
from weather.remote_store import RemoteOptions, add_remote_options
from weather.store_path import StorePath, data_path, parse_years
from weather.training_statistics import chunks, training_statistics
from weather.year_reader import open_year, year_paths

SPLITS = ("train", "valid", "test")
STATS = ("global_means", "global_stds", "time_means", "change_stds")
Constant = Mapping[str, tuple[str, np.ndarray]]
FrameReader = Callable[[int, int, int], np.ndarray]  # (year, first, count): frames (count, C, H, W)


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


class YearFileWriter:
    """The year files of one data set: the constructor checks the settings, `make` writes.

    out: folder. splits: the years of SPLITS. days: of each year, 0 for all.
    grid: of all frames. settings: everything else that the values depend on (JSON).
    title: identifies the kind of data. attributes: for every file. Files of other data or settings are never touched.
    Raises UsageError for bad settings, a year in two splits, other data in `out` or too little disk space.
    """

    def __init__(
        self,
        out: Path | str,
        splits: Sequence[Iterable[int]],
        days: int,
        grid: Grid,
        settings: dict[str, Any],
        title: str,
        attributes: dict[str, Any],
    ):
        self.out = Path(out)
        self.grid = grid
        self.settings = settings
        self.attributes = {"title": title, **attributes}
        self.frames: dict[Path, int] = {}  # frames of each year file
        for year, split in _split_years(splits).items():
            path = self.out / split / f"{year:04d}.h5"
            self.frames[path] = 4 * days or year_frames(year)
        self.stats = [self.out / "stats" / f"{name}.npy" for name in STATS]
        of_training = [count for path, count in self.frames.items() if path.parent.name == "train"]
        if sum(of_training) >= LEAST_FRAMES:
            self.stats.append(self.out / "stats" / FILE)

        # What is there already must be of this data set, or nothing is touched.
        there: list[Path] = []
        for split in SPLITS:
            there += (self.out / split).glob("*.h5")
        for path in sorted(there):
            if path not in self.frames or _read_origin(path) != (title, settings):
                raise UsageError(f"{path}: is other data, or of other settings: choose another folder")
        self.missing = [path for path in self.frames if not path.exists()]
        has_no_year = len(self.missing) == len(self.frames)
        if has_no_year and any(path.exists() for path in self.stats):
            raise UsageError(f"{self.out / 'stats'} holds statistics of other data: choose another folder")
        self._check_disk()

    def _check_disk(self) -> None:
        """Raise UsageError where the disk is too small for the files that are missing."""
        parents = [self.out, *self.out.absolute().parents]
        folder = next(parent for parent in parents if parent.exists())
        frame_bytes = 4 * len(CHANNELS) * len(self.grid.latitude) * len(self.grid.longitude)
        # The climatology is as large as a frame, and so is each quantile.
        has_quantiles = any(path.name == FILE for path in self.stats)
        images = 1 + len(QUANTILES) if has_quantiles else 1
        frames = sum(self.missing_years().values()) + images
        need = frame_bytes * frames
        free = shutil.disk_usage(folder).free
        if need > free:
            raise UsageError(f"{self.out}: needs {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")

    def missing_years(self) -> dict[int, int]:
        """{year: number of frames} of the year files that `make` will write."""
        return {int(path.stem): self.frames[path] for path in self.missing}

    def make(self, read_frames: FrameReader, constant: Constant | None = None) -> int:
        """Write the missing files and print a summary line; returns the number of year files written.

        read_frames(year, first, count) returns frames (count, C, H, W), `first` counted from 1 January.
        constant: fields that do not change with time, for every file: {name: (units, (H, W) values)}.
        Raises OSError if `out` cannot be written.
        """
        # Files that are whole stay: a second call only completes the set.
        described = self._write(read_frames, constant or {})
        files = [*self.frames, *self.stats]
        size = sum(path.stat().st_size for path in files)
        news = "complete, nothing to do" if described and not self.missing else f"{len(self.missing)} made"
        frames = sum(self.frames.values())
        print(f"{self.out}: {len(self.frames)} files ({news}), {frames} frames, {size / 1e6:.1f} MB")
        return len(self.missing)

    def _write(self, read_frames: FrameReader, constant: Constant) -> bool:
        """Write the missing year files and statistics; returns whether the statistics were there already."""
        # New training years change the statistics.
        if any(path.parent.name == "train" for path in self.missing):
            for path in self.stats:
                path.unlink(missing_ok=True)  # they describe other training years than there are from here on
        total = sum(self.missing_years().values())
        with tqdm(total=total, unit="frame", disable=None) as progress:
            for path in self.missing:
                year = int(path.stem)
                # A file gets its name when all of it is on disk.
                with whole_file(path) as part, open_hdf5(part, "w") as file:
                    fields = self._describe(file, year, self.frames[path], constant)
                    # Not all frames of a year fit in memory at once.
                    for first, count in chunks(fields):
                        fields[first : first + count] = read_frames(year, first, count)
                        progress.update(count)
        described = all(path.exists() for path in self.stats)
        if not described:
            training_years = [path for path in self.frames if path.parent.name == "train"]
            write_statistics(training_years, self.out / "stats")
        return described

    def _describe(
        self,
        file: h5py.File,
        year: int,
        frames: int,
        constant: Constant,
    ) -> h5py.Dataset:
        """Write everything but the fields into a year file; returns the empty dataset of the fields."""
        latitude, longitude = self.grid
        dates = frame_times(year, 0, frames)
        hours = dates.astype("datetime64[h]").astype(np.float64)
        scales: dict[str, tuple[Sequence[Any] | np.ndarray, str | None]] = {
            "time": (hours, "hours since 1970-01-01"),
            "channel": ([channel.name for channel in CHANNELS], None),
            "latitude": (latitude, "degrees_north"),
            "longitude": (longitude, "degrees_east"),
        }
        shape = [len(values) for values, _ in scales.values()]
        fields = file.create_dataset("fields", shape, "f4")

        # Each axis of the fields has its coordinates as a scale, by which other programs know it.
        for axis, (name, (values, units)) in enumerate(scales.items()):
            file[name] = values
            if units:
                file[name].attrs["units"] = units
            file[name].make_scale(name)
            fields.dims[axis].attach_scale(file[name])
        file["channel_units"] = [channel.units for channel in CHANNELS]
        file["channel_units"].dims[0].attach_scale(file["channel"])
        # Fields that do not change have no axis of time.
        for name, (units, values) in constant.items():
            file[name] = values.astype(np.float32)
            file[name].attrs["units"] = units
            for axis, scale in enumerate(("latitude", "longitude")):
                file[name].dims[axis].attach_scale(file[scale])
        file.attrs.update({**self.attributes, "settings": json.dumps(self.settings)})
        return fields


def write_statistics(
    years: Sequence[Path | StorePath],
    folder: Path,
    checks_values: bool = True,
) -> list[Path]:
    """Write those statistics of year files that are not in a folder yet; returns their files.

    checks_values: whether frames are held against the ranges of their channels.
    """
    # One pass over the years gives all statistics.
    values = training_statistics(years, checks_values)
    written = []
    for name, value in zip(STATS, values, strict=True):
        path = folder / f"{name}.npy"
        if path.exists():
            continue
        _save(path, value)
        written.append(path)
    path = folder / FILE
    quantiles = None if path.exists() else climate_quantiles(years)
    if quantiles is not None:
        _save(path, quantiles)
        written.append(path)
    return written


def _save(path: Path, values: np.ndarray) -> None:
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, values)


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


def _read_origin(path):
    """The title and settings that a year file was made with, None if it has none.

    Raises UsageError for a file that cannot be read: it may be one of these, and whole.
    """
    try:
        if not is_hdf5(path):
            return None, None
        with open_hdf5(path) as file:
            # Files of others have no such attributes.
            title = file.attrs.get("title")
            settings = file.attrs.get("settings")
    except OSError as error:
        cause = first_line(error)
        raise UsageError(f"{path}: cannot be read: {cause}: move it away, and it is made again") from error
    try:
        return title, json.loads(settings)
    except (ValueError, TypeError):
        return title, None


if __name__ == "__main__":
    run_main(main)
