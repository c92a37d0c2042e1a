"""A year in a Zarr store, format 2 or 3, on a file system: the array `fields` [time, channel, lat, lon].

A chunk a frame reads fastest. Any others are read too: for each frame, all chunks that it touches. The chunks are read
by weather/chunk_reader.py; zarr itself reads only what is encoded in an unusual way.
"""

import warnings
from pathlib import Path

import numpy as np

from utils.errors import UsageError, reading
from weather.year_data import DATASET, YearFile

try:
    import zarr

    from weather.chunk_reader import ChunkReader
    from weather.chunk_sources import LocalChunks
    from weather.zarr_layout import chunk_layout
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
            self.chunks = ChunkReader(chunk_layout(self.fields), LocalChunks(path), path)
            if missing := self.chunks.count_missing():
                raise UsageError(
                    f"{path}: {missing} chunks of '{DATASET}' were never written: the store was not finished"
                )
            self.shape, self.size = self.fields.shape, self.fields.nbytes_stored()

    def close(self) -> None:
        """Nothing is held open."""

    def _read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        selection = (slice(frame, frame + len(out)), slice(0, out.shape[1]), rows, columns)
        if self.chunks.layout.codecs is None:
            out[:] = self.fields[selection]
        else:
            self.chunks.read(selection, out)
