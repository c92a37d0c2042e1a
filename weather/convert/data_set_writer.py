"""Write the files of a data set: frames split into train, valid and test, and the statistics of the training.

A file gets its name when it is complete, and stores the settings it was made with. Making the same data set again
therefore writes only the missing files. year_files.py and prepare_data.py say which files there are.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from utils.errors import UsageError, first_line
from utils.files import whole_file
from weather.convert.climate_quantiles import FILE, LEAST_FRAMES, QUANTILES
from weather.convert.training_statistics import STATS, write_statistics
from weather.fields.channels import Channel
from weather.fields.grid import Grid
from weather.sources.data import SourceData
from weather.sources.hdf5 import is_hdf5, make_hdf5, open_hdf5
from weather.years.year_data import describe_axes

SPLITS = ("train", "valid", "test")
Constant = Mapping[str, tuple[str, np.ndarray]]
Frames = Callable[[np.ndarray], Iterable[np.ndarray]]  # dates (T,) of one file: all frames, some (t, C, H, W) at a time


class DataSetWriter:
    """The files of one data set: the constructor checks the settings, `write` writes.

    out: folder. dates: {file: the dates of its frames, (T,) datetime64[s]}, each in the folder of its split.
    channels, grid: of all frames. settings: everything else that the values depend on (JSON).
    title: identifies the kind of data. attributes: for every file. Files of other data or settings are never touched.
    Raises UsageError for other data in `out` or too little disk space.
    """

    def __init__(
        self,
        out: Path,
        dates: Mapping[Path, np.ndarray],
        channels: Sequence[Channel],
        grid: Grid,
        settings: dict[str, Any],
        title: str,
        attributes: dict[str, Any],
    ):
        self.out = out
        self.dates = dates
        self.channels = channels
        self.grid = grid
        self.settings = settings
        self.attributes = {"title": title, **attributes}
        # Few frames have no quantiles worth the name.
        self.stats = [self.out / "stats" / f"{name}.npy" for name in STATS]
        of_training = [len(dates) for path, dates in self.dates.items() if path.parent.name == "train"]
        if sum(of_training) >= LEAST_FRAMES:
            self.stats.append(self.out / "stats" / FILE)

        # What is there already must be of this data set, or nothing is touched.
        there: list[Path] = []
        for split in SPLITS:
            there += (self.out / split).glob("*.h5")
        for path in sorted(there):
            if path not in self.dates or _read_origin(path) != (title, settings):
                raise UsageError(f"{path}: is other data, or of other settings: choose another folder")
        self.missing = [path for path in self.dates if not path.exists()]
        has_no_file = len(self.missing) == len(self.dates)
        if has_no_file and any(path.exists() for path in self.stats):
            raise UsageError(f"{self.out / 'stats'} holds statistics of other data: choose another folder")
        self._check_disk()

    def _check_disk(self) -> None:
        """Raise UsageError where the disk is too small for the files that are missing."""
        parents = [self.out, *self.out.absolute().parents]
        folder = next(parent for parent in parents if parent.exists())
        # The climatology is as large as a frame, and so is each quantile.
        has_quantiles = any(path.name == FILE for path in self.stats)
        images = 1 + len(QUANTILES) if has_quantiles else 1
        frames = self._missing_frames() + images
        need = self._frame_bytes() * frames
        free = shutil.disk_usage(folder).free
        if need > free:
            raise UsageError(f"{self.out}: needs {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")

    def _frame_bytes(self) -> int:
        return 4 * len(self.channels) * len(self.grid.latitude) * len(self.grid.longitude)

    def _missing_frames(self) -> int:
        return sum(len(self.dates[path]) for path in self.missing)

    def write(self, read_frames: Frames, constant: Constant | None = None) -> int:
        """Write the missing files and print a summary line; returns the number of files written.

        read_frames(dates) gives the frames at the dates of one file, (t, C, H, W) for as many of them as fit in memory.
        constant: fields that do not change with time, for every file: {name: (units, (H, W) values)}.
        Raises OSError if `out` cannot be written.
        """
        # Files that are whole stay: a second call only completes the set.
        described = self._write(read_frames, constant or {})
        files = [*self.dates, *self.stats]
        size = sum(path.stat().st_size for path in files)
        # What a second call has found complete is said, since it does nothing.
        news = "complete, nothing to do" if described and not self.missing else f"{len(self.missing)} made"
        frames = sum(len(dates) for dates in self.dates.values())
        print(f"{self.out}: {len(self.dates)} files ({news}), {frames} frames, {size / 1e6:.1f} MB")
        return len(self.missing)

    def _write(self, read_frames: Frames, constant: Constant) -> bool:
        """Write the missing files and statistics; returns whether the statistics were there already."""
        # New training data change the statistics.
        if any(path.parent.name == "train" for path in self.missing):
            for path in self.stats:
                path.unlink(missing_ok=True)  # they describe other training data than there are from here on
        with tqdm(total=self._missing_frames(), unit="frame", disable=None) as progress:
            for path in self.missing:
                # A file gets its name when all of it is on disk.
                size = self._frame_bytes() * len(self.dates[path])
                with whole_file(path) as part, make_hdf5(part, size) as file:
                    fields = self._describe(file, self.dates[path], constant)
                    first = 0
                    for frames in read_frames(self.dates[path]):
                        fields[first : first + len(frames)] = frames
                        first += len(frames)
                        progress.update(len(frames))
        described = all(path.exists() for path in self.stats)
        if not described:
            training = [path for path in self.dates if path.parent.name == "train"]
            write_statistics(training, self.out / "stats")
        return described

    def _describe(
        self,
        file: h5py.File,
        dates: np.ndarray,
        constant: Constant,
    ) -> h5py.Dataset:
        """Write everything but the fields into a file; returns the empty dataset of the fields."""
        scales = describe_axes(dates, self.channels, self.grid)
        shape = [len(values) for values, _ in scales.values()]
        fields = file.create_dataset("fields", shape, "f4")

        # Each axis of the fields has its coordinates as a scale, by which other programs know it.
        for axis, (name, (values, units)) in enumerate(scales.items()):
            file[name] = values
            if units:
                file[name].attrs["units"] = units
            file[name].make_scale(name)
            fields.dims[axis].attach_scale(file[name])
        file["channel_units"] = [channel.units for channel in self.channels]
        file["channel_units"].dims[0].attach_scale(file["channel"])
        # Fields that do not change have no axis of time.
        for name, (units, values) in constant.items():
            file[name] = values.astype(np.float32)
            file[name].attrs["units"] = units
            for axis, scale in enumerate(("latitude", "longitude")):
                file[name].dims[axis].attach_scale(file[scale])
        file.attrs.update({**self.attributes, "settings": json.dumps(self.settings)})
        return fields


def convert(
    data: SourceData,
    dates: Mapping[Path, np.ndarray],
    out: Path,
    settings: dict[str, Any],
    title: str,
    attributes: dict[str, Any],
) -> int:
    """Write frames of sources to the files of a data set; returns the number of files written.

    Arguments as of DataSetWriter. Raises UsageError, as that does, before anything is written; for values that are no
    data when they are read.
    """
    # What the values depend on is stored with them: other settings are other data.
    corners = [float(axis[place]) for axis in data.grid for place in (0, -1)]
    settings = settings | {"img_size": [len(axis) for axis in data.grid], "corners": corners}
    # A GRIB file is several stores of one address.
    addresses = dict.fromkeys(store.address for store in data.stores)
    made_from = {"made_from": " ".join(addresses)}
    writer = DataSetWriter(out, dates, data.channels, data.grid, settings, title, attributes | made_from)
    # Look for all that will be read before anything is written.
    if writer.missing:
        missing = [dates[path] for path in writer.missing]
        data.check(np.concatenate(missing))
        data.announce()

    def read_frames(dates: np.ndarray) -> Iterator[np.ndarray]:
        for part in data.blocks(dates):
            yield data.frames(part)

    return writer.write(read_frames)


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
