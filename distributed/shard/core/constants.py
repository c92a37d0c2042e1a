"""Constant tensors of indices: their values, which all ranks know, and what was planned with them.

A graph is a pair of tensors of whole numbers, mostly buffers, and the same on every rank. Its numbers tell each rank,
without a message, which rows it needs of which other one. They are read once for each tensor, and again when torch
counts a change in place. A change through `.data` or numpy, which torch does not count, is not seen.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from utils.torch_private import storage_id

INTEGERS = torch.int64, torch.int32


class Index:
    """The values of a constant tensor of indices, (rows, ...), and what was planned with them."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.plans: dict[tuple, Any] = {}  # kept as long as the tensor

    def rows(self, size: int, lowest: int | None = None) -> np.ndarray:
        """The values as numbers of rows of a dimension of this size. lowest: by default -size, counted from the end.

        Raises IndexError for others.
        """
        lowest = -size if lowest is None else lowest
        low = self.values.min(initial=0)
        high = self.values.max(initial=-1)
        if low < lowest or high >= size:
            wrong = low if low < lowest else high
            raise IndexError(f"index {wrong} is out of bounds for a dimension of size {size}")
        return self.values % max(size, 1)


class _Seen(NamedTuple):
    tensor: weakref.ref  # the indices, or the tensor that they are a view of
    versions: dict[tuple, tuple[int, Index]]  # {view: (version, Index)}


_seen: dict[int, _Seen] = {}  # by id of the tensor


def constant(index: Any) -> Index | None:
    """The Index of a plain tensor of whole numbers; None for anything else, and in compiled code, which has no values.

    Values are read again once torch counts another version of the tensor, and plans stay where they are as before.
    """
    if is_dynamo_compiling() or not isinstance(index, Tensor) or hasattr(index, "spec"):
        return None
    if index.dtype not in INTEGERS or index.dim() == 0:
        return None
    if index.is_inference():  # it has no version
        values = read(index)
        return None if values is None else Index(values)
    tensor = index if index._base is None else index._base
    seen = _seen.get(id(tensor))
    if seen is None or seen.tensor() is not tensor:
        number = id(tensor)
        seen = _seen[number] = _Seen(weakref.ref(tensor, lambda _: _seen.pop(number, None)), {})
    view = (storage_id(index), index.storage_offset(), index.shape, index.stride())
    version, known = seen.versions.get(view, (-1, None))
    if version == index._version:
        return known
    values = read(index)
    if values is None:
        return None
    if known is None or not np.array_equal(values, known.values):
        known = Index(values)
    seen.versions[view] = index._version, known
    return known


def read(index: Tensor) -> np.ndarray | None:
    """The values of a tensor, for which the host waits for the device; None where they are not known."""
    return index.detach().cpu().numpy().astype(np.int64)


def row_numbers(index: Tensor, dim: int, shape: Sequence[int]) -> Tensor | None:
    """The one-dimensional tensor of which `index` repeats the numbers along all dimensions but dim, as expand() does.

    None for another index, and for one that has not the given shape beside dim.
    """
    if type(index) is not Tensor or index.dim() != len(shape):
        return None
    for d, size in enumerate(index.shape):
        repeats = size == shape[d] and (index.stride(d) == 0 or size == 1)
        if d != dim and not repeats:
            return None
        if d != dim and size == 0:
            return None
    for d in reversed(range(index.dim())):
        index = index if d == dim else index.select(d, 0)
    return index
