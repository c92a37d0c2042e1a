"""The range of values that attributes state: valid_range, or valid_min and valid_max (CF 2.5 and 8.1).

Whoever wrote the file takes all other values for missing; xarray and h5py read them as values. A packed value is
scale_factor * stored + add_offset.
"""

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

RANGE_NAMES = ("valid_range", "valid_min", "valid_max")
ROUNDING = 1e-6  # of the larger bound


def find_stated_range(attributes: Mapping[str, Any], dtype: np.dtype) -> tuple[float, float]:
    """(lowest, highest) unpacked value that attributes state; infinite where they say nothing, or no numbers.

    dtype: of the stored numbers. Of packed values the bounds are stored ones, unless they have a type that the stored
    numbers do not (CF, 8.1).
    """
    lowest = _numbers(attributes.get("valid_min"), 1)
    highest = _numbers(attributes.get("valid_max"), 1)
    both = _numbers(attributes.get("valid_range"), 2)
    if both is not None:
        lowest = both[:1]
        highest = both[1:]
    low = -np.inf if lowest is None else _unpack(lowest, attributes, dtype)
    high = np.inf if highest is None else _unpack(highest, attributes, dtype)
    # A factor may be negative.
    is_reversed = lowest is not None and highest is not None and low > high
    return (high, low) if is_reversed else (low, high)


def widen_by_rounding(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds that a value in single precision is within, if it is one of the bounds."""
    lowest, highest = bounds
    finite = [abs(bound) for bound in bounds if np.isfinite(bound)]
    rounding = ROUNDING * max(finite, default=0.0)
    return lowest - rounding, highest + rounding


def name_range(attributes: Mapping[str, Any]) -> list[str]:
    """The names of the attributes that state a range."""
    return [name for name in RANGE_NAMES if name in attributes]


def _numbers(stated: Any, count: int) -> np.ndarray | None:
    """An attribute as `count` numbers of their type; None where it is nothing of the kind."""
    if stated is None or isinstance(stated, h5py.Empty):
        return None
    numbers = np.asarray(stated).reshape(-1)
    is_numeric = numbers.dtype.kind in "iuf"
    return numbers if is_numeric and len(numbers) == count else None


def _unpack(bound: np.ndarray, attributes: Mapping[str, Any], dtype: np.dtype) -> float:
    """A bound as an unpacked value."""
    is_stored_kind = dtype.kind in "iu" and bound.dtype.kind in "iu"
    if not is_stored_kind:
        return float(bound[0])
    # Bytes without a sign are stored, and bounded, as bytes with one.
    stored_bytes = dtype.itemsize
    if attributes.get("_Unsigned") == "true" and bound[0] < 0:
        bound = bound.astype(f"i{stored_bytes}").view(f"u{stored_bytes}")
    factor = float(attributes.get("scale_factor", 1.0))
    offset = float(attributes.get("add_offset", 0.0))
    return float(bound[0]) * factor + offset
