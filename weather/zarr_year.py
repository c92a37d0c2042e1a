"""A year in a Zarr store, format 2 or 3, on a file system: the array `fields` [time, channel, lat, lon].

A chunk a frame reads fastest. Any others are read too: for each frame, all chunks that it touches.
"""

import warnings
from pathlib import Path

import numpy as np

from utils.errors import UsageError, reading
from weather.year_data import DATASET, YearFile

try:
    import zarr
except ImportError as error:
    raise UsageError(f"a Zarr store needs the package zarr ({error}): pip install -r requirements-era5.txt") from None

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text


class ZarrYear(YearFile):
    """A year in a Zarr store."""

    def __init__(self, path: Path):
        self.path = path
        with reading(f"{path}: Zarr"):
            group = zarr.open_group(path, mode="r", use_consolidated=False)  # which may be older than the store
            self.arrays = dict(group.arrays())
            self.fields = self._checked(self.arrays.get(DATASET))
            if self.fields.shards:  # a chunk missing inside a shard would be read as the fill value
                raise UsageError(f"{path}: '{DATASET}' is in shards: write it without")
            if missing := self.fields.nchunks - self.fields.nchunks_initialized:
                raise UsageError(
                    f"{path}: {missing} chunks of '{DATASET}' were never written: the store was not finished"
                )
            self.shape, self.size = self.fields.shape, self.fields.nbytes_stored()

    def close(self) -> None:
        """Nothing is held open."""

    def _read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        out[:] = self.fields[frame : frame + len(out), : out.shape[1], rows, columns]
