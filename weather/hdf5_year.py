"""A year in an HDF5 file, which NetCDF 4 files are too.

If HDF5 stores each frame as one piece, contiguous or as a chunk without compression, it is read and mapped as that.
"""

import contextlib
import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import h5py
import numpy as np

from utils.errors import UsageError, reading
from utils.files import check_file
from weather.year_data import DATASET, YearFile


class Hdf5Year(YearFile):
    """A year in an HDF5 file."""

    def __init__(self, path: Path):
        self.path = path
        check_file(path)
        with contextlib.ExitStack() as opened, reading(f"{path}: HDF5 (truncated or damaged?)"):
            self.file = opened.enter_context(h5py.File(path, "r", locking=False))  # not all file systems have locks
            fields = self.file.get(DATASET)
            if not isinstance(fields, h5py.Dataset) or fields.ndim != 4 or fields.dtype.kind != "f":
                actual = f"has {fields.dtype} {fields.shape}" if isinstance(fields, h5py.Dataset) else "has none"
                raise UsageError(
                    f"{path}: expected a dataset '{DATASET}' [time, channel, lat, lon] of floats; it {actual}"
                )
            if unwritten := _never_written(fields):
                raise UsageError(f"{path}: {unwritten} of '{DATASET}' never written: the file was not finished")
            self.fields, self.shape = fields, fields.shape
            self.arrays = {name: array for name, array in self.file.items() if not _only_a_dimension(array)}
            linked = h5py.h5o.get_info(fields.id).fileno != h5py.h5o.get_info(self.file.id).fileno
            self.frame_offsets = None if linked else frame_offsets(fields)  # they would be offsets in another file
            self.descriptor = os.open(path, os.O_RDONLY)
            opened.callback(os.close, self.descriptor)
            self.size = os.fstat(self.descriptor).st_size
            self.plain = self.frame_offsets is not None
            self.mappable = self.frame_offsets is not None and not (self.frame_offsets % 4).any()
            self.opened = opened.pop_all()

    def close(self) -> None:
        """Close the file."""
        self.opened.close()

    def _piece(self, frame: int) -> AbstractContextManager[tuple[int, int]]:
        if os.fstat(self.descriptor).st_size < self.size:
            raise UsageError(f"{self.path}: ends before frame {frame}: the file was truncated")
        assert self.frame_offsets is not None
        return nullcontext((self.descriptor, int(self.frame_offsets[frame])))

    def _adjacent(self, frame: int, count: int) -> bool:
        assert self.frame_offsets is not None
        span = self.frame_offsets[frame + count - 1] - self.frame_offsets[frame]
        return span == (count - 1) * 4 * math.prod(self.shape[1:])

    def _read_by_library(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        window = np.s_[frame : frame + out.shape[0], : out.shape[1], rows, columns]
        self.fields.read_direct(out, window)
        if os.fstat(self.descriptor).st_size < self.size:  # HDF5 reads zeros beyond the end
            raise UsageError(f"{self.path}: became shorter while it was read: the file was truncated")


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


def _only_a_dimension(array):
    """Tell whether this is the placeholder that NetCDF writes for a dimension without values."""
    name = array.attrs.get("NAME", b"") if isinstance(array, h5py.Dataset) else b""
    return isinstance(name, bytes) and name.startswith(b"This is a netCDF dimension")
