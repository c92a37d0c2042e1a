"""One year file of the ERA5 tutorial layout, open for reading.

A file holds the dataset `fields` [time, channel, lat, lon] in float32, and may hold `latitude`, `longitude`,
`channel` and `channel_units`. If HDF5 stores each frame as one piece, plain reads at known offsets fill the caller's
buffer; they release Python's lock, so threads read in parallel. Otherwise HDF5 itself reads. Frames stored as one piece
can also be mapped: the caller sees them in the page cache, without a copy.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from utils.errors import UsageError, reading
from utils.files import check_file
from weather.channels import CHANNELS
from weather.grid import Grid, latitudes, longitudes

DATASET = "fields"


class Description(NamedTuple):
    """What the numbers of a year file are."""

    names: list[str]  # of the channels
    units: list[str]
    grid: Grid

    def difference(self, other: "Description") -> str:
        """In words, the first thing in which another description differs; '' where they agree."""
        texts = {"channel": (self.names, other.names), "the unit of channel": (self.units, other.units)}
        for what, both in texts.items():
            for number, (mine, theirs) in enumerate(zip(*both, strict=True)):
                if mine != theirs:
                    return f"{what} {number} is '{mine}' and not '{theirs}'"
        for axis, x, y in zip(Grid._fields, self.grid, other.grid, strict=True):
            if not np.allclose(x, y, rtol=0, atol=1e-3):
                return f"{axis} is {x[0]:g} to {x[-1]:g} and not {y[0]:g} to {y[-1]:g}"
        return ""


class YearFile:
    """One open file. `read` fills buffers from it."""

    def __init__(self, path: Path):
        self.path = path
        check_file(path)
        with contextlib.ExitStack() as opened, reading(f"{path}: HDF5 (truncated or damaged?)"):
            self.file = opened.enter_context(
                h5py.File(path, "r", locking=False)
            )  # parallel file systems may lack locks
            fields = self.file.get(DATASET)
            if not isinstance(fields, h5py.Dataset) or fields.ndim != 4 or fields.dtype.kind != "f":
                found = f"has {fields.dtype} {fields.shape}" if isinstance(fields, h5py.Dataset) else "has none"
                raise UsageError(
                    f"{path}: expected a dataset '{DATASET}' [time, channel, lat, lon] of floats; it {found}"
                )
            if unwritten := _never_written(fields):
                raise UsageError(f"{path}: {unwritten} of '{DATASET}' never written: the file was not finished")
            self.fields, self.shape = fields, fields.shape
            linked = h5py.h5o.get_info(fields.id).fileno != h5py.h5o.get_info(self.file.id).fileno
            self.frame_offsets = None if linked else frame_offsets(fields)  # they would be offsets in another file
            self.descriptor = os.open(path, os.O_RDONLY)
            opened.callback(os.close, self.descriptor)
            self.size = os.fstat(self.descriptor).st_size
            self.map = None
            offsets = self.frame_offsets
            if offsets is not None and not (offsets % 4).any() and (np.diff(offsets) > 0).all():
                self.map = opened.enter_context(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))
            self.opened = opened.pop_all()

    def close(self) -> None:
        """Close the file and its map."""
        self.opened.close()

    def describe(self, channels: int, img_size: Sequence[int]) -> Description:
        """The Description of the first channels and of an image of img_size; what the file lacks is as in ERA5.

        Raises UsageError for names and coordinates that cannot be used.
        """
        height, width = self.shape[2:]
        names = [c.name for c in CHANNELS] + [f"channel{i}" for i in range(len(CHANNELS), channels)]
        units = [c.units for c in CHANNELS] + [""] * max(0, channels - len(CHANNELS))
        return Description(
            self._texts("channel", names)[:channels],
            self._texts("channel_units", units)[:channels],
            Grid(
                self._degrees("latitude", latitudes(height), 90)[: img_size[0]],
                self._degrees("longitude", longitudes(width), 360)[: img_size[1]],
            ),
        )

    def constant_field(self, name: str) -> np.ndarray:
        """A field that does not change with time, (H, W) float64. Raises UsageError where the file has none."""
        with reading(f"{self.path}: '{name}'"):
            field, shape = self.file.get(name), self.shape[2:]
            if isinstance(field, h5py.Dataset) and field.shape == shape and field.dtype.kind in "fiu":
                return np.asarray(field[:], np.float64)
            there = [key for key, value in self.file.items() if getattr(value, "shape", None) == shape]
        known = f"it has {', '.join(there)}" if there else "it has no such field"
        raise UsageError(f"{self.path}: no field '{name}' [lat, lon] of numbers; {known}")

    def _texts(self, name, otherwise):
        return self._stored(name, self.shape[1], lambda data: [str(text) for text in data.asstr()[:]], otherwise)

    def _degrees(self, name, otherwise, largest):
        values = self._stored(name, len(otherwise), lambda data: np.asarray(data[:], np.float64), otherwise)
        if not (np.abs(values) <= largest).all():  # nor NaN
            raise UsageError(f"{self.path}: '{name}' is not in degrees, -{largest} to {largest}")
        return values

    def _stored(self, name, length, read, otherwise):
        """What `read` makes of a dataset of so many values; `otherwise` where the file has none of that name."""
        with reading(f"{self.path}: '{name}'"):
            if name not in self.file:
                return otherwise
            if (shape := self.file[name].shape) != (length,):
                raise UsageError(f"{self.path}: '{name}' has shape {shape}, the fields need ({length},)")
            return read(self.file[name])

    @contextlib.contextmanager
    def mapped(self, frames: Sequence[int], channels: int, rows: slice, columns: slice) -> Iterator[list[np.ndarray]]:
        """Frames, first C channels, a window of points, as read-only arrays over the file itself, (1, C, h, w) each.

        A context manager. Raises UsageError if the file has become shorter; if that happens inside the block, SIGBUS
        ends the process. Raises ValueError if the file is not mapped, because its frames are not stored as one piece.
        """
        if self.map is None or self.frame_offsets is None:
            raise ValueError(f"{self.path}: has no map, its frames must be read")
        if os.fstat(self.descriptor).st_size < self.size:
            raise UsageError(f"{self.path}: ends before frame {frames[-1]}: the file was truncated")
        starts, shape = [int(self.frame_offsets[frame]) for frame in frames], (1, channels, *self.shape[2:])
        windows = [np.ndarray(shape, "<f4", self.map, start)[:, :, rows, columns] for start in starts]
        if windows[0].shape == shape:
            self._advise(mmap.MADV_WILLNEED, starts, channels)  # read what is not in the page cache in one go
        yield windows
        self._advise(mmap.MADV_DONTNEED, starts, channels)  # mapped pages would count as memory of this process

    def _advise(self, advice, starts, channels):
        for start in starts:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(advice, page, start - page + 4 * channels * math.prod(self.shape[2:]))

    def read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        """Fill `out`, contiguous (T, C, h, w), with T frames from `frame` on: first C channels, a window of points."""
        with reading(f"{self.path}: frame {frame}"):
            self._read(frame, out, rows, columns)

    def _read(self, frame, out, rows, columns):
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
        self.fields.read_direct(out, window)
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


def _never_written(fields):
    """In words, how much of an HDF5 dataset was never written, and would be read as zeros; '' where all was."""
    if fields.is_virtual or fields.external is not None or fields.size == 0:
        return ""
    if fields.chunks is None:
        return "" if fields.id.get_storage_size() else "all"
    total = math.prod(-(-n // c) for n, c in zip(fields.shape, fields.chunks, strict=True))
    missing = total - fields.id.get_num_chunks()
    return f"{missing} of {total} pieces" if missing else ""
