"""Arrays as a YearFile shows them: small ones in memory, and frames that are read when they are sliced."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class HeldArray:
    """An array in memory with attributes, as a file has them."""

    def __init__(
        self,
        values: np.ndarray,
        attrs: dict[str, Any] | None = None,
    ):
        self.values = values
        self.attrs = attrs or {}
        self.shape = values.shape
        self.dtype = values.dtype
        self.ndim = values.ndim

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.values[key]


class LazyArray:
    """A small array that is read when it is sliced for the first time, and stays in memory.

    load: gives its values. The other arguments are attributes, as a file has them.
    """

    def __init__(
        self,
        load: Callable[[], np.ndarray],
        shape: tuple[int, ...],
        dtype: np.dtype,
        attrs: dict[str, Any],
    ):
        self.load = load
        self.shape = shape
        self.dtype = dtype
        self.attrs = attrs
        self.ndim = len(shape)
        self.values: np.ndarray | None = None

    def __getitem__(self, key: Any) -> np.ndarray:
        if self.values is None:  # two threads may both read it, and get the same
            self.values = self.load()
        return self.values[key]


class Frames:
    """The frames of a YearFile as an array (T, C, H, W) float32: a slice of it reads them. attrs: of what it stores."""

    def __init__(self, year: Any, attrs: Mapping[str, Any] | None = None):
        self.year = year
        self.shape = year.shape
        self.dtype = np.dtype(np.float32)
        self.ndim = len(self.shape)
        # As if all of it were in memory, by which others choose how much to read at a time.
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)
        self.attrs = dict(attrs or {})

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
