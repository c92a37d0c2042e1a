"""Samples on disk: pairs of frames from year files in the ERA5 tutorial layout.

A file holds the dataset `fields` [time, channel, lat, lon] in float32, and may hold `latitude`, `longitude`,
`channel` and `channel_units`. A sample is the frame at t and the frame dt steps later in the same file. Both frames are
read directly into the caller's buffer. If HDF5 stores each frame as one piece, plain reads at known offsets do this;
they release Python's lock, so threads read in parallel. Otherwise HDF5 itself reads. Frames stored as one piece can
also be mapped: the caller sees them in the page cache, without a copy.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from utils.errors import UsageError
from weather.channels import CHANNELS
from weather.grid import Grid, latitudes, longitudes

DATASET = "fields"


class YearFile:
    """One open file. `read` fills buffers from it."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = h5py.File(path, "r", locking=False)  # parallel file systems may lack locks
        except OSError as error:
            raise UsageError(f"{path}: cannot be read as HDF5 (truncated or damaged?): {error}") from None
        fields = self.file.get(DATASET)
        if not isinstance(fields, h5py.Dataset) or fields.ndim != 4 or fields.dtype.kind != "f":
            found = f"has {fields.dtype} {fields.shape}" if isinstance(fields, h5py.Dataset) else "has none"
            self.file.close()
            raise UsageError(f"{path}: expected a dataset '{DATASET}' [time, channel, lat, lon] of floats; it {found}")
        self.fields, self.shape = fields, fields.shape
        linked = h5py.h5o.get_info(fields.id).fileno != h5py.h5o.get_info(self.file.id).fileno
        self.frame_offsets = None if linked else frame_offsets(fields)  # they would be offsets in another file
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        self.map = None
        offsets = self.frame_offsets
        if offsets is not None and not (offsets % 4).any() and (np.diff(offsets) > 0).all():
            self.map = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file and its map."""
        if self.map is not None:
            self.map.close()
        os.close(self.descriptor)
        self.file.close()

    @contextlib.contextmanager
    def mapped(self, frame: int, later: int, channels: int, rows: slice, columns: slice) -> Iterator[np.ndarray]:
        """Two frames, first C channels, a window of points, as a read-only array over the file itself, (2, C, h, w).

        A context manager. Raises UsageError if the file has become shorter; if that happens inside the block, SIGBUS
        ends the process. Raises ValueError if the file is not mapped, because its frames are not stored as one piece.
        """
        if self.map is None or self.frame_offsets is None:
            raise ValueError(f"{self.path}: has no map, its frames must be read")
        if os.fstat(self.descriptor).st_size < self.size:
            raise UsageError(f"{self.path}: ends before frame {later}: the file was truncated")
        _, _, height, width = self.shape
        starts = [int(self.frame_offsets[f]) for f in (frame, later)]
        strides = (starts[1] - starts[0], 4 * height * width, 4 * width, 4)
        frames = np.ndarray((2, channels, height, width), "<f4", self.map, starts[0], strides)
        window = frames[:, :, rows, columns]
        if window.shape == frames.shape:
            self._advise(mmap.MADV_WILLNEED, starts, channels)  # read what is not in the page cache in one go
        yield window
        self._advise(mmap.MADV_DONTNEED, starts, channels)  # mapped pages would count as memory of this process

    def _advise(self, advice, starts, channels):
        for start in starts:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(advice, page, start - page + 4 * channels * math.prod(self.shape[2:]))

    def read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        """Fill `out`, contiguous (T, C, h, w), with T frames from `frame` on: first C channels, a window of points."""
        _, all_channels, height, width = self.shape
        frames, channels, h, w = out.shape
        if self.frame_offsets is None or w < width:
            self._read_by_hdf5(frame, out, rows, columns)
        elif h < height:
            for i in range(frames):
                for c in range(channels):
                    self._read_at(frame + i, c, rows.start, out[i, c])
        elif channels == all_channels and self._adjacent(frame, frames):
            self._read_at(frame, 0, 0, out)
        else:
            for i in range(frames):
                self._read_at(frame + i, 0, 0, out[i])

    def _adjacent(self, frame, count):
        """Whether `count` frames from `frame` on are stored one after the other."""
        span = self.frame_offsets[frame + count - 1] - self.frame_offsets[frame]
        return span == (count - 1) * 4 * math.prod(self.shape[1:])

    def _read_by_hdf5(self, frame, out, rows, columns):
        window = np.s_[frame : frame + out.shape[0], : out.shape[1], rows, columns]
        try:
            self.fields.read_direct(out, window)
        except OSError as error:
            raise UsageError(f"{self.path}: frame {frame} cannot be read (damaged?): {error}") from None
        if os.fstat(self.descriptor).st_size < self.size:  # HDF5 reads zeros beyond the end
            raise UsageError(f"{self.path}: became shorter while it was read: the file was truncated")

    def _read_at(self, frame, channel, row, out):
        """Read one contiguous piece that begins at a row of a channel of a frame."""
        position = int(self.frame_offsets[frame]) + 4 * self.shape[3] * (row + self.shape[2] * channel)
        count = os.preadv(self.descriptor, [out], position)
        if count < out.nbytes:  # rare: further reads fetch the rest
            view = memoryview(out).cast("B")[count:]
            while view:
                position += count
                count = os.preadv(self.descriptor, [view], position)
                if count == 0:
                    raise UsageError(f"{self.path}: ends before frame {frame}: the file was truncated")
                view = view[count:]


def frame_offsets(fields: h5py.Dataset) -> np.ndarray | None:
    """The offset of each frame of an HDF5 dataset in its file, (T,); None if a frame is not stored as one plain piece.

    A frame is one piece if the dataset is contiguous, or chunked by whole frames without compression.
    """
    if fields.dtype != np.dtype("<f4") or fields.external is not None or fields.is_virtual:
        return None
    start = fields.id.get_offset()
    if start is not None:
        return start + 4 * math.prod(fields.shape[1:]) * np.arange(len(fields))
    if fields.chunks != (1, *fields.shape[1:]) or fields.id.get_create_plist().get_nfilters():
        return None
    offsets = np.zeros(len(fields), np.int64)
    fields.id.chunk_iter(lambda chunk: offsets.__setitem__(chunk.chunk_offset[0], chunk.byte_offset))
    return offsets if offsets.all() else None  # a chunk that was never written has no offset


class FieldDataset:
    """All samples of a folder, in the order of the file names.

    folder: holds *.h5 files, one for each year; they may differ in length.
    channels: how many channels to read, from the first. img_size: (H, W), the first rows and columns of the files.
    dt: steps from input to target. limit: use only this many samples, from the first.
    rows, columns: read only this part of the image (slices of [0, H) and of [0, W)).
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
    ):
        self.folder, self.channels, self.dt = Path(folder), channels, dt
        self.rows = rows or slice(0, img_size[0])
        self.columns = columns or slice(0, img_size[1])
        self.files = []
        try:
            for path in self._find_files(img_size):
                self.files.append(YearFile(path))
                self._check_shape(self.files[-1], img_size)
        except UsageError:
            self.close()
            raise
        lengths = [file.shape[0] - dt for file in self.files]
        self.first_sample = np.concatenate([[0], np.cumsum(lengths)])
        total = int(self.first_sample[-1])
        self.num_samples = min(total, limit or total)
        self._read_description(img_size)

    def __len__(self):
        return self.num_samples

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one sample: (2, C, h, w), the input frame and the target frame."""
        return 2, self.channels, self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def mappable(self) -> bool:
        """Whether all files are mapped, so that `mapped` can be used."""
        return all(file.map is not None for file in self.files)

    def read(self, index: int, out: np.ndarray) -> None:
        """Read sample `index` into `out`, a contiguous float32 numpy array of self.shape."""
        file, frame = self._locate(index)
        if self.dt == 1:
            file.read(frame, out, self.rows, self.columns)  # often adjacent on disk: one read
        else:
            file.read(frame, out[:1], self.rows, self.columns)
            file.read(frame + self.dt, out[1:], self.rows, self.columns)

    def mapped(self, index: int) -> AbstractContextManager[np.ndarray]:
        """Sample `index` in the mapped file, as a context manager of an array of self.shape: see YearFile.mapped."""
        file, frame = self._locate(index)
        return file.mapped(frame, frame + self.dt, self.channels, self.rows, self.columns)

    def _locate(self, index: int) -> tuple[YearFile, int]:
        number = int(np.searchsorted(self.first_sample, index, side="right")) - 1
        return self.files[number], int(index - self.first_sample[number])

    def close(self) -> None:
        """Close all files."""
        while self.files:
            self.files.pop().close()

    def _find_files(self, img_size):
        height, width = img_size
        paths = sorted(self.folder.glob("*.h5"))
        if not paths:
            problem = "holds no .h5 file" if self.folder.is_dir() else "no such data folder"
            remedy = f"python -m weather.sample_data {self.folder.parent} --img_size {height} {width}"
            message = f"{problem}; make sample data with `{remedy}`, or point the config to yours"
            raise UsageError(f"{self.folder}: {message}")
        return paths

    def _check_shape(self, file, img_size):
        frames, channels, height, width = file.shape
        if channels < self.channels:
            raise UsageError(f"{file.path}: has {channels} channels, {self.channels} were asked for")
        if height < img_size[0] or width < img_size[1]:
            raise UsageError(f"{file.path}: has {height} x {width} points, img_size asks for {list(img_size)}")
        if (height, width) != self.files[0].shape[2:]:
            raise UsageError(f"{file.path}: has {height} x {width} points, unlike {self.files[0].path}")
        if frames <= self.dt:
            raise UsageError(f"{file.path}: has {frames} frames, dt {self.dt} needs at least {self.dt + 1}")

    def _read_description(self, img_size):
        """Take names, units and coordinates of the whole image from the first file, or ERA5's if it has none."""
        file = self.files[0].file

        def read(name, length, otherwise):
            values = file[name].asstr()[:] if name.startswith("channel") and name in file else file.get(name)
            return (np.asarray(values) if values is not None else np.asarray(otherwise))[:length]

        height, width = self.files[0].shape[2:]
        era5_names = [c.name for c in CHANNELS] + [f"channel{i}" for i in range(len(CHANNELS), self.channels)]
        era5_units = [c.units for c in CHANNELS] + [""] * max(0, self.channels - len(CHANNELS))
        self.channel_names = [str(name) for name in read("channel", self.channels, era5_names)]
        self.channel_units = [str(unit) for unit in read("channel_units", self.channels, era5_units)]
        latitude = read("latitude", img_size[0], latitudes(height))
        self.grid = Grid(latitude, read("longitude", img_size[1], longitudes(width)))


class Statistics(NamedTuple):
    """Statistics of each channel over the training years, in physical units, float32."""

    means: np.ndarray  # (C, 1, 1)
    stds: np.ndarray  # (C, 1, 1)
    time_means: np.ndarray  # (C, H, W), the climatology


def load_statistics(
    global_means_path: Path | str,
    global_stds_path: Path | str,
    time_means_path: Path | str,
    channels: int,
    img_size: Sequence[int],
) -> Statistics:
    """Read the statistics of the first `channels` channels from three .npy files, the climatology on (H, W) points.

    Raises UsageError if a file is missing, has another shape, or holds values that cannot be used.
    """
    stds = read_statistics(global_stds_path, channels)
    if (stds <= 0).any():
        raise UsageError(f"{global_stds_path}: holds standard deviations that are not positive")
    climatology = read_statistics(time_means_path, channels, img_size)
    return Statistics(read_statistics(global_means_path, channels), stds, climatology)


def read_statistics(path: Path | str, channels: int, img_size: Sequence[int] | None = None) -> np.ndarray:
    """Statistics of each channel from a .npy file: float32 (C, 1, 1), or (C, H, W) if img_size is given.

    Raises UsageError if the file is missing, has another shape, or holds values that are not finite.
    """
    height, width = img_size or (1, 1)
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path}: cannot be read as .npy statistics: {error}") from None
    enough = values.ndim == 4 and values.shape[0] == 1 and values.shape[1] >= channels
    if not enough or values.shape[2] < height or values.shape[3] < width:
        raise UsageError(f"{path}: expected shape (1, {channels}, {height}, {width}), found {values.shape}")
    values = np.ascontiguousarray(values[0, :channels, :height, :width], dtype=np.float32)
    if not np.isfinite(values).all():
        raise UsageError(f"{path}: holds values that are not finite")
    return values
