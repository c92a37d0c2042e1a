"""Arrays as a YearFile shows them: small ones in memory, and frames that are read when they are sliced."""

from typing import Any

import numpy as np


class HeldArray:
    """An array in memory with attributes, as a file has them."""

    def __init__(self, values: np.ndarray, attrs: dict[str, Any] | None = None):
        self.values, self.attrs = values, attrs or {}
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.values[key]


class Frames:
    """The frames of a YearFile as an array (T, C, H, W) float32: a slice of it reads them."""

    def __init__(self, year: Any):
        self.year = year
        self.shape, self.dtype, self.ndim = year.shape, np.dtype(np.float32), 4
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape))
        self.attrs: dict[str, Any] = {}

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        first, *others = keys
        frames, channels, height, width = self.shape
        wanted = np.arange(frames)[first]
        indices = np.atleast_1d(wanted)
        if len(indices) == 0:
            return np.empty(self.shape, np.float32)[:0][(slice(None), *others)]
        begin, end = int(indices.min()), int(indices.max()) + 1
        block = np.empty((end - begin, channels, height, width), np.float32)
        self.year.read(begin, block, slice(0, height), slice(0, width))
        return block[(wanted - begin, *others)]
