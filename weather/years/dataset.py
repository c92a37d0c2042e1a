"""Samples on disk: frames from year files.

A sample is the frame at t, earlier ones if the model takes several, and the frames dt, 2 dt, ... later in the same
file. They are read directly into the caller's buffer. Frames on both sides of a gap in time are no sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError
from weather.fields.stored_channels import NO_NAMES
from weather.fields.time_axis import FEW_FRAMES, TimeAxis, known_axis, read_time_axis, show_step
from weather.sources.remote_store import RemoteOptions, is_address
from weather.years.year_data import YearFile, file_times
from weather.years.year_reader import StorePath, data_path, open_year, year_paths


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
        self.folder = data_path(folder, remote)
        self.channels = channels
        self.dt = dt
        self.steps = steps
        self.inputs = inputs
        self.span = (inputs - 1 + steps) * dt  # frames from the first of a sample to its last
        # Without a part to read the whole image is read.
        self.rows = rows or slice(0, img_size[0])
        self.columns = columns or slice(0, img_size[1])
        self.paths: Sequence[Path | StorePath] = year_paths(self.folder)
        # A store says itself what it lacks; a folder without data gets a hint.
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
            told = [file.describe(channels, img_size) for file in self.files]
            self.described = [description for description, _ in told]
            self.description, self.assumptions = told[0]  # the other files are like the first
            # All files must be alike before anything else is taken from the first.
            self.check_like(self)
            self.axes = [read_time_axis(file) for file in self.files]
            self._share_steps()
            self._check_copies()
        except UsageError:
            self.close()
            raise
        self.starts = []  # of each file, the first frames of its samples
        for file, axis in zip(self.files, self.axes, strict=True):
            self.starts.append(self._sample_starts(file, axis))
        counts = [len(starts) for starts in self.starts]
        self.first_sample = np.concatenate([[0], np.cumsum(counts)])  # (files + 1,), among all samples
        # The limit leaves out the last samples.
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
        height = self.rows.stop - self.rows.start
        width = self.columns.stop - self.columns.start
        return self.inputs + self.steps, self.channels, height, width

    @property
    def step_seconds(self) -> int | None:
        """Seconds from one frame to the next, the same in all files; None where their dates are not known."""
        for axis in self.axes:
            if axis is not None:
                return axis.step
        return None

    @property
    def times(self) -> list[np.ndarray]:
        """The dates of the frames of each file, (T,) datetime64[s]. Raises UsageError where they are not known."""
        return [file_times(file) for file in self.files]

    def read(self, index: int, out: np.ndarray) -> None:
        """Read sample `index` into `out`, a contiguous float32 numpy array of self.shape, or of its first frames."""
        number, frame = self._locate(index)
        # Frames that lie side by side on disk are one read.
        parts = [out] if self.dt == 1 else np.split(out, len(out))
        file = self.files[number]
        for later, part in enumerate(parts):
            file.read(frame + later * self.dt, part, self.rows, self.columns)

    def dates(
        self,
        indices: Sequence[int] | np.ndarray,
        steps: int,
    ) -> np.ndarray:
        """The dates of the frames from which `steps` steps start, (len(indices), steps) datetime64[s], in UTC."""
        first = (self.inputs - 1) * self.dt  # the present frame, counted from the first of the sample
        last = first + steps * self.dt
        dates = []
        for index in indices:
            number, frame = self._locate(index)
            axis = known_axis(self.axes[number], self.paths[number])
            dates.append(axis.dates[frame + first : frame + last : self.dt])
        return np.array(dates)

    def _locate(self, index: int) -> tuple[int, int]:
        """(number of the file, frame in it) of the first frame of a sample."""
        # first_sample is sorted, so the file of a sample is found by bisection.
        number = int(np.searchsorted(self.first_sample, index, side="right")) - 1
        return number, int(self.starts[number][index - self.first_sample[number]])

    def used_frames(self) -> list[int]:
        """Of each file, the number of frames from its first to the last that a sample takes; 0 for a file beyond."""
        counts = []
        for starts, first in zip(self.starts, self.first_sample[:-1], strict=True):
            # The limit may end within this file, or before it.
            samples = min(len(starts), self.num_samples - int(first))
            if samples > 0:
                last_start = int(starts[samples - 1])
                counts.append(last_start + self.span + 1)
            else:
                counts.append(0)
        return counts

    def check_like(self, other: "FieldDataset") -> None:
        """Raise UsageError where channels, units or points of a file are not those of another dataset."""
        for file, description in zip(self.files, self.described, strict=True):
            difference = description.difference(other.description)
            if difference:
                raise UsageError(f"{file.path}: {difference}, as in {other.files[0].path}")

    def check_step_like(self, other: "FieldDataset") -> None:
        """Raise UsageError where the frames of another dataset are another time apart."""
        ours = self.step_seconds
        theirs = other.step_seconds
        if None not in (ours, theirs) and ours != theirs:
            raise UsageError(
                f"{self.folder}: its frames are {show_step(ours or 0)} apart, those of {other.folder} "
                f"{show_step(theirs or 0)}: a step of the model is dt {self.dt} of them"
            )

    def check_finite(self, index: int) -> None:
        """Raise UsageError, naming file, frame and channel, where a sample has a value that is not finite."""
        sample = np.empty(self.shape, np.float32)
        self.read(index, sample)
        is_bad = ~np.isfinite(sample).all((2, 3))  # (frames, C)
        bad = np.argwhere(is_bad)
        if len(bad):
            number, frame = self._locate(index)
            later, channel = bad[0]
            name = self.description.names[channel]
            field = sample[later, channel]
            value = field[~np.isfinite(field)][0]
            where = f"{self.files[number].path}: frame {frame + later * self.dt}"
            raise UsageError(f"{where}: channel {channel} ({name}) holds {value}")

    def listing(self) -> dict[str, str]:
        """{folder and name: frames and size} of the files, which ranks compare."""
        listing = {}
        for file in self.files:
            name = f"{self.folder.name}/{file.path.name}"
            listing[name] = f"{file.shape[0]} frames, {file.size} bytes"
        return listing

    def notes(self) -> list[str]:
        """What was assumed of these data, and what of them is left out, a line each."""
        notes = [*self.assumptions]
        # Names that were made up for lack of any are no unknown names.
        unknown = self.description.unknown_names()
        names_channels = not any(note.startswith(NO_NAMES) for note in notes)
        if unknown and names_channels:
            notes.append(f"channels of unknown names, whose units and range are not known: {', '.join(unknown)}")
        if any(axis is not None and axis.assumed for axis in self.axes):
            notes.append("has no time: frames are taken to be 6-hourly from 1 January of the year in a file's name")
        if None in self.axes:
            notes.append("has no time, and names that are no year: its dates, and gaps in them, are not known")
        for path, axis, starts in zip(self.paths, self.axes, self.starts, strict=True):
            gaps = axis.describe_gaps() if axis is not None else ""
            if gaps:
                notes.append(f"{path.name} has {gaps}: no sample crosses it, {len(starts)} are left")
        return [f"{self.folder}: {note}" for note in notes]

    def close(self) -> None:
        """Close all files."""
        while self.files:
            self.files.pop().close()

    def _check_shape(self, file: YearFile, img_size: Sequence[int]) -> None:
        frames, channels, height, width = file.shape
        if channels < self.channels:
            raise UsageError(f"{file.path}: has {channels} channels, {self.channels} were asked for")
        if height < img_size[0] or width < img_size[1]:
            raise UsageError(f"{file.path}: has {height} x {width} points, img_size asks for {list(img_size)}")
        if frames <= self.span:
            raise UsageError(f"{file.path}: has {frames} frames, {self._needed()}")

    def _needed(self) -> str:
        steps = f" x {self.steps} steps of a rollout" if self.steps > 1 else ""
        inputs = f" with {self.inputs} input frames" if self.inputs > 1 else ""
        return f"dt {self.dt}{steps}{inputs} needs at least {self.span + 1}"

    def _share_steps(self) -> None:
        """Give files of few frames the step of the others. Raises UsageError where two files differ in it."""
        pairs = zip(self.files, self.axes, strict=True)
        known = [(file, axis) for file, axis in pairs if axis is not None]
        if not known:
            return
        # Two frames have one distance, which may be a gap.
        telling = [(file, axis) for file, axis in known if file.shape[0] >= FEW_FRAMES]
        first_file, first_axis = (telling or known)[0]
        for file, axis in telling:
            if axis.step != first_axis.step:
                raise UsageError(
                    f"{file.path}: its frames are {show_step(axis.step)} apart, those of {first_file.path} "
                    f"{show_step(first_axis.step)}: put data of one time step into a folder"
                )
        # Short files take the step that the others tell.
        for number, short in enumerate(self.axes):
            if short is not None and len(short.dates) < FEW_FRAMES:
                self.axes[number] = replace(short, stated_step=first_axis.step)

    def _check_copies(self) -> None:
        """Raise UsageError where two files begin with the same date and the same field: one is a copy."""
        known: dict[Any, YearFile] = {}
        for file, axis in zip(self.files, self.axes, strict=True):
            if axis is None:
                continue
            earlier = known.setdefault((axis.dates[0], file.shape), file)
            # Members of an ensemble have the same dates, and other values.
            if earlier is file:
                continue
            if np.array_equal(_first_field(earlier), _first_field(file), equal_nan=True):
                raise UsageError(f"{file.path}: holds the frames of {earlier.path} once more: move one of them away")

    def _sample_starts(self, file: YearFile, axis: TimeAxis | None) -> np.ndarray:
        """The first frames of the samples of a file. Raises UsageError where gaps in time leave none."""
        if axis is None:
            return np.arange(file.shape[0] - self.span)
        # A sample never crosses a gap in time.
        starts = axis.sample_starts(self.span)
        may_have_none = len(axis.dates) < FEW_FRAMES
        if not len(starts) and not may_have_none:
            self.close()
            raise UsageError(f"{file.path}: has {axis.describe_gaps()}, and {self._needed()} frames without one")
        return starts


def _first_field(file: YearFile) -> np.ndarray:
    """The first channel of the first frame, (1, 1, H, W)."""
    _, _, height, width = file.shape
    field = np.empty((1, 1, height, width), np.float32)
    file.read(0, field, slice(0, height), slice(0, width))
    return field
