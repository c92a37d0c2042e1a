"""Samples on disk: frames from year files, and the statistics of their channels.

A sample is the frame at t, earlier ones if the model takes several, and the frames dt, 2 dt, ... later in the same
file. They are read directly into the caller's buffer.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UsageError, reported_as_usage_error
from utils.files import check_file
from weather.remote_store import RemoteOptions, is_address
from weather.store_path import data_path
from weather.year_data import YearFile, file_times
from weather.year_reader import open_year, year_paths


class FieldDataset:
    """All samples of a folder, in the order of the file names.

    folder: holds *.h5 or *.nc files or *.zarr stores, one for each year; they may differ in length. Or a store, also
    one that is elsewhere, and the years of it that are wanted: gs://BUCKET/STORE.zarr#1979-2015.
    channels: how many channels to read, from the first. img_size: (H, W), the first rows and columns of the files.
    dt: frames from one step of a forecast to the next. limit: use only this many samples, from the first.
    rows, columns: read only this part of the image (slices of [0, H) and of [0, W)).
    steps: the most of a forecast. inputs: frames before the first of these steps, dt apart, which a model takes.
    remote: how a store that is elsewhere is read.
    Raises UsageError if the folder or a file does not hold such data.
    """

    def __init__(
        self,
        folder: Path | str,
        channels: int,
        img_size: Sequence[int],
        dt: int = 1,
        limit: int | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
        steps: int = 1,
        inputs: int = 1,
        remote: RemoteOptions | None = None,
    ):
        self.folder, self.channels, self.dt, self.steps = data_path(folder, remote), channels, dt, steps
        self.inputs, self.span = inputs, (inputs - 1 + steps) * dt  # frames from the first of a sample to its last
        self.rows = rows or slice(0, img_size[0])
        self.columns = columns or slice(0, img_size[1])
        self.paths = year_paths(self.folder)
        if not self.paths and isinstance(self.folder, Path):
            problem = "holds no .h5, .nc or .zarr" if self.folder.is_dir() else "no such data folder"
            remedy = f"python -m weather.sample_data {self.folder.parent} --img_size {img_size[0]} {img_size[1]}"
            message = f"{problem}; make sample data with `{remedy}`, or point the config to yours"
            raise UsageError(f"{self.folder}: {message}")
        self.files: list[YearFile] = []
        try:
            self.open()
            for file in self.files:
                self._check_shape(file, img_size)
            self.described = [file.describe(channels, img_size) for file in self.files]
            self.description = self.described[0]  # of all files
            self.check_like(self)
        except UsageError:
            self.close()
            raise
        lengths = [file.shape[0] - self.span for file in self.files]
        self.first_sample = np.concatenate([[0], np.cumsum(lengths)])
        total = int(self.first_sample[-1])
        self.num_samples = min(total, limit or total)

    def __len__(self):
        return self.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"files": []}

    def open(self) -> None:
        """Open the files where they are not open: a data set travels to another process without them."""
        for path in self.paths[len(self.files) :]:
            self.files.append(open_year(path))

    @property
    def is_remote(self) -> bool:
        """Whether the connection to these data can be lost."""
        return is_address(str(self.folder))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one sample: (inputs + steps, C, h, w), the input frames, oldest first, and the target frames."""
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return self.inputs + self.steps, self.channels, height, width

    def read(self, index: int, out: np.ndarray) -> None:
        """Read sample `index` into `out`, a contiguous float32 numpy array of self.shape, or of its first frames."""
        number, frame = self._locate(index)
        parts = [out] if self.dt == 1 else np.split(out, len(out))  # frames side by side on disk: one read
        for later, part in enumerate(parts):
            self.files[number].read(frame + later * self.dt, part, self.rows, self.columns)

    @cached_property
    def times(self) -> list[np.ndarray]:
        """The dates of the frames of each file, (T,) datetime64[s]."""
        return [file_times(file) for file in self.files]

    def dates(self, indices: Sequence[int] | np.ndarray, steps: int) -> np.ndarray:
        """The dates of the frames from which `steps` steps start, (len(indices), steps) datetime64[s], in UTC."""
        located = [self._locate(index) for index in indices]
        first, last = (self.inputs - 1) * self.dt, (self.inputs - 1 + steps) * self.dt
        return np.array([self.times[number][frame + first : frame + last : self.dt] for number, frame in located])

    def _locate(self, index: int) -> tuple[int, int]:
        """(number of the file, frame in it) of the first frame of a sample."""
        number = int(np.searchsorted(self.first_sample, index, side="right")) - 1
        return number, int(index - self.first_sample[number])

    def check_like(self, other: "FieldDataset") -> None:
        """Raise UsageError where channels, units or points of a file are not those of another dataset."""
        for file, description in zip(self.files, self.described, strict=True):
            if difference := description.difference(other.description):
                raise UsageError(f"{file.path}: {difference}, as in {other.files[0].path}")

    def check_finite(self, index: int) -> None:
        """Raise UsageError, naming file, frame and channel, where a sample has a value that is not finite."""
        sample = np.empty(self.shape, np.float32)
        self.read(index, sample)
        bad = np.argwhere(~np.isfinite(sample).all((2, 3)))
        if len(bad):
            number, frame = self._locate(index)
            (later, channel), name = bad[0], self.description.names[bad[0][1]]
            value = sample[later, channel][~np.isfinite(sample[later, channel])][0]
            where = f"{self.files[number].path}: frame {frame + later * self.dt}"
            raise UsageError(f"{where}: channel {channel} ({name}) holds {value}")

    def listing(self) -> dict[str, str]:
        """{folder and name: frames and size} of the files, which ranks compare."""
        return {
            f"{self.folder.name}/{file.path.name}": f"{file.shape[0]} frames, {file.size} bytes" for file in self.files
        }

    def close(self) -> None:
        """Close all files."""
        while self.files:
            self.files.pop().close()

    def _check_shape(self, file, img_size):
        frames, channels, height, width = file.shape
        if channels < self.channels:
            raise UsageError(f"{file.path}: has {channels} channels, {self.channels} were asked for")
        if height < img_size[0] or width < img_size[1]:
            raise UsageError(f"{file.path}: has {height} x {width} points, img_size asks for {list(img_size)}")
        if frames <= self.span:
            steps = f" x {self.steps} steps of a rollout" if self.steps > 1 else ""
            inputs = f" with {self.inputs} input frames" if self.inputs > 1 else ""
            need = self.span + 1
            raise UsageError(f"{file.path}: has {frames} frames, dt {self.dt}{steps}{inputs} needs at least {need}")


class Statistics(NamedTuple):
    """Statistics of each channel over the training years, in physical units, float32."""

    means: np.ndarray  # (C, 1, 1)
    stds: np.ndarray  # (C, 1, 1)
    time_means: np.ndarray  # (C, H, W), the climatology


def read_statistics(path: Path | str, channels: int, img_size: Sequence[int] | None = None) -> np.ndarray:
    """Statistics of each channel from a .npy file: float32 (C, 1, 1), or (C, H, W) if img_size is given.

    Raises UsageError if the file is missing, has another shape, or holds values that are not finite.
    """
    height, width = img_size or (1, 1)
    check_file(path)
    # Whatever is raised: numpy's parser of a header lets much through.
    with reported_as_usage_error(Exception, f"{path}: cannot be read as .npy statistics"):
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may promise more than memory holds
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            raise ValueError("it holds no array of floats")
    enough = values.ndim == 4 and values.shape[0] == 1 and values.shape[1] >= channels
    if not enough or values.shape[2] < height or values.shape[3] < width:
        raise UsageError(f"{path}: expected shape (1, {channels}, {height}, {width}), found {values.shape}")
    values = np.array(values[0, :channels, :height, :width], np.float32)
    if not np.isfinite(values).all():
        raise UsageError(f"{path}: holds values that are not finite")
    return values


def positive_statistics(path: Path | str, channels: int) -> np.ndarray:
    """As read_statistics, of standard deviations, which must be positive."""
    values = read_statistics(path, channels)
    if (values <= 0).any():
        raise UsageError(f"{path}: holds standard deviations that are not positive")
    return values
