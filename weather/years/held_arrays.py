"""Arrays as a YearFile shows them: small ones as variables, and frames that are read when they are sliced."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing


class WholeArray(BackendArray):
    """An array for a Variable, which is read whole. load: gives its values."""

    def __init__(self, load: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: np.dtype):
        self.load = load
        self.shape = shape
        self.dtype = dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, support, lambda part: self.load()[part])


def lazy_variable(
    dims: Sequence[str],
    load: Callable[[], np.ndarray],
    shape: tuple[int, ...],
    dtype: np.dtype,
    attrs: Mapping[str, Any],
) -> xarray.Variable:
    """A variable that is read when its values are asked for, and stays in memory. load: gives all of them."""
    lazy = indexing.LazilyIndexedArray(WholeArray(load, shape, dtype))
    return xarray.Variable(dims, indexing.MemoryCachedArray(lazy), dict(attrs))


class Frames:
    """The frames of a YearFile as an array (T, C, H, W) float32: a slice of it reads them."""

    def __init__(self, year: Any):
        self.year = year
        self.shape = year.shape
        self.dtype = np.dtype(np.float32)
        self.ndim = len(self.shape)
        # As if all of it were in memory, by which others choose how much to read at a time.
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        first, *others = keys
        # Whatever the first key is, numpy says which frames it means.
        wanted = np.arange(self.shape[0])[first]
        begin = 0
        end = 0
        if wanted.size:
            begin = int(wanted.min())
            end = int(wanted.max()) + 1
        # One read from the first of these frames to the last, all channels and points: (N, C, H, W).
        _, channels, height, width = self.shape
        block = np.empty((end - begin, channels, height, width), self.dtype)
        if wanted.size:
            self.year.read(begin, block, slice(0, height), slice(0, width))
        return block[(wanted - begin, *others)]
