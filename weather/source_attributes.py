"""What the attributes of a source's variable say of its values, beyond what xarray makes of them (CF 2.5 and 8.1).

A packed value is scale_factor * stored + add_offset. valid_range, or valid_min and valid_max, are the values that mean
something: whoever wrote the file takes all others for missing. xarray reads them as values.
"""

from typing import Any

import numpy as np
import xarray

from utils.errors import UsageError
from weather.packing import NEUTRAL_PACKING

RANGE_NAMES = ("valid_range", "valid_min", "valid_max")
ROUNDING = 1e-6  # of the larger bound


def check_packing(variable: xarray.Variable, address: str, name: str) -> None:
    """Raise UsageError for a factor or an offset that is no number. address, name: of the variable."""
    for attribute in NEUTRAL_PACKING:
        stated = variable.attrs.get(attribute)
        if isinstance(stated, str | bytes):
            raise UsageError(
                f"{address}: {name}: {attribute} is the text {stated!r}, which is no number: write one (ncatted -a "
                f"{attribute},{name},o,d,NUMBER {address})"
            )


def check_stated_range(values: np.ndarray, variable: xarray.Variable, address: str, name: str, since: str) -> None:
    """Raise UsageError for values (T, L, H, W), unpacked, that are missing as the file states its range.

    address, name: of the variable; since: the first date. NaN is not looked at.
    """
    stated = find_stated_range(variable)
    if stated is None or np.isinf(stated).all():
        return
    lowest, highest = stated
    # Unpacking in single precision misses a bound by a rounding.
    finite = [abs(bound) for bound in stated if np.isfinite(bound)]
    rounding = ROUNDING * max(finite)
    is_outside = (values < lowest - rounding) | (values > highest + rounding)
    if not is_outside.any():
        return
    names = [attribute for attribute in RANGE_NAMES if attribute in variable.attrs]
    first = values[is_outside][0]
    raise UsageError(
        f"{address}: {name}, from {since} on: {is_outside.sum()} values are outside of {' and '.join(names)}, "
        f"{lowest:g} to {highest:g}, the first is {first:g}: by these attributes they are missing. Fill them first "
        "(xarray: where, interpolate_na), or take the attributes off where the values are right (ncatted -a "
        f"{names[0]},{name},d,, {address})"
    )


def find_stated_range(variable: xarray.Variable) -> tuple[float, float] | None:
    """(lowest, highest) unpacked value that a variable says it has; None where it says nothing, or no numbers.

    Of packed values the numbers are stored ones, unless they have a type that the stored numbers do not (CF, 8.1).
    """
    attributes = variable.attrs
    lowest = _numbers(attributes.get("valid_min"), 1)
    highest = _numbers(attributes.get("valid_max"), 1)
    both = _numbers(attributes.get("valid_range"), 2)
    if both is not None:
        lowest = both[:1]
        highest = both[1:]
    if lowest is None and highest is None:
        return None
    low = _unpack(lowest, variable)
    high = _unpack(highest, variable)
    # A factor may be negative.
    if low is not None and high is not None and low > high:
        low, high = high, low
    return (
        -np.inf if low is None else low,
        np.inf if high is None else high,
    )


def _numbers(stated: Any, count: int) -> np.ndarray | None:
    """An attribute as `count` numbers of their type; None where it is nothing of the kind."""
    if stated is None:
        return None
    numbers = np.asarray(stated).reshape(-1)
    is_numeric = numbers.dtype.kind in "iuf"
    return numbers if is_numeric and len(numbers) == count else None


def _unpack(bound: np.ndarray | None, variable: xarray.Variable) -> float | None:
    """A bound as an unpacked value."""
    if bound is None:
        return None
    attributes = variable.attrs
    is_stored_kind = variable.dtype.kind in "iu" and bound.dtype.kind in "iu"
    if not is_stored_kind:
        return float(bound[0])
    # Bytes without a sign are stored, and bounded, as bytes with one.
    stored_bytes = variable.dtype.itemsize
    if attributes.get("_Unsigned") == "true" and bound[0] < 0:
        bound = bound.astype(f"i{stored_bytes}").view(f"u{stored_bytes}")
    factor = float(attributes.get("scale_factor", 1.0))
    offset = float(attributes.get("add_offset", 0.0))
    return float(bound[0]) * factor + offset
