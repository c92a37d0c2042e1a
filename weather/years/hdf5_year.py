"""A year in an HDF5 file, which NetCDF 4 files are too.

Contiguous fields are read straight from the file, at an offset; HDF5 reads all else (chunks, compression).
"""

import contextlib
import os
from pathlib import Path

import h5py
import numpy as np
from xarray.backends import DummyFileManager

from utils.errors import UsageError, reading
from utils.files import check_file
from weather.sources.chunk_sources import fill
from weather.sources.hdf5 import check_filters, check_format, check_written, open_hdf5, read_variables
from weather.years.year_data import DATASET, NAMES, YearFile


class Hdf5Year(YearFile):
    """A year in an HDF5 file."""

    def __init__(self, path: Path):
        self.path = path
        check_file(path)
        check_format(path)
        with contextlib.ExitStack() as opened, reading(f"{path}: HDF5 (truncated or damaged?)"):
            file = opened.enter_context(open_hdf5(path))
            self.arrays = read_variables(DummyFileManager(file), file)
            _check_names(file, path)
            self._check_fields()
            self.fields = file[DATASET]
            self.shape = self.fields.shape
            check_written(self.fields, f"{path}: '{DATASET}'")
            check_filters(self.fields, f"{path}: '{DATASET}'")
            # By the type in the file: h5py calls bfloat16 float32 too, which is what HDF5 gives of it.
            plain = self.fields.id.get_type().equal(h5py.h5t.IEEE_F32LE)
            self.start: int | None = self.fields.id.get_offset() if plain else None  # None: not one contiguous piece
            self.descriptor = os.open(self.fields.file.filename, os.O_RDONLY)  # a link may lead to another file
            opened.callback(os.close, self.descriptor)
            self.size = os.fstat(self.descriptor).st_size
            self.reads_parts = self.start is not None
            self.opened = opened.pop_all()

    def close(self) -> None:
        """Close the file."""
        self.opened.close()

    def _read(
        self,
        frame: int,
        out: np.ndarray,
        rows: slice,
        columns: slice,
    ) -> None:
        _, all_channels, height, width = self.shape
        frames, channels, h, w = out.shape
        if self.start is None or w < width:
            self.fields.read_direct(out, np.s_[frame : frame + frames, :channels, rows, columns])
            if os.fstat(self.descriptor).st_size < self.size:  # HDF5 reads zeros beyond the end
                raise EOFError("the file was truncated")
            return
        plane = 4 * height * width
        start = self.start + frame * all_channels * plane
        if (channels, h) == (all_channels, height):  # frames lie side by side: one piece
            fill(self.descriptor, start, out.data.cast("B"))
            return
        # Each field's rows are one piece, at the same place in its plane.
        first_row = 4 * rows.start * width
        for t, c in np.ndindex(frames, channels):
            field = start + (t * all_channels + c) * plane
            fill(self.descriptor, field + first_row, out[t, c].data.cast("B"))


def _check_names(file: h5py.File, path: Path) -> None:
    """Raise UsageError where a name of what is read is no array."""
    for name, item in file.items():
        if name.lower() not in NAMES or isinstance(item, h5py.Dataset):
            continue
        if item is not None:
            raise UsageError(f"{path}: '{name}' cannot be read: it is a group, and no array")
        raise UsageError(
            f"{path}: its `{name}` is a link to something that is not there: bring that back to its place, or copy it "
            "into the file"
        )
