"""What the attributes of an array say of its values: how they are packed, which are missing, what their range is.

A packed value is scale_factor * stored + add_offset. In year files packing is refused, not guessed; xarray unpacks the
values of sources. Whoever states a range (valid_range, or valid_min and valid_max; CF 2.5 and 8.1) takes all other
values for missing; xarray and h5py read them as values.
"""

import base64
import contextlib
import struct
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import xarray

from utils.errors import UsageError

NEUTRAL_PACKING = {"scale_factor": 1.0, "add_offset": 0.0}  # of the CF conventions
MISSING_ATTRIBUTES = ("_FillValue", "missing_value")
UNPACK = "write its values (ncpdq -U IN OUT; xarray: open_dataset(IN).drop_encoding().to_netcdf(OUT))"
RANGE_NAMES = ("valid_range", "valid_min", "valid_max")
ROUNDING = 1e-6  # of the larger bound


def read_packing(array: Any) -> dict[str, Any]:
    """{attribute: value} of what turns the stored numbers into values; a neutral factor or offset is none."""
    found: dict[str, Any] = {}
    for name, neutral in NEUTRAL_PACKING.items():
        # The attribute may be an array of one number.
        attribute = array.attrs.get(name, neutral)
        try:
            value = float(np.asarray(attribute).item())
        except ValueError:  # several numbers, or a text
            value = attribute
        if value is attribute or value != neutral:
            found[name] = value
    return found


def check_unpacked(array: Any, where: str) -> None:
    """Raise UsageError where an array is packed. where: the file and the array, as the start of the message."""
    packing = read_packing(array)
    if packing:
        told = ", ".join(f"{name} {_shortly(value)}" for name, value in packing.items())
        raise UsageError(f"{where} is packed as {array.dtype} ({told}): {UNPACK}")


def _shortly(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_missing_values(attributes: Mapping[str, Any]) -> list[float]:
    """The numbers that a file writes where it has nothing, as its attributes state them; NaN and 0 are none.

    Zero is the usual fill value of Zarr and HDF5, and may be a value.

    In Zarr 3, xarray writes a number as the text of its 8 bytes in base64.
    """
    found = []
    for name in MISSING_ATTRIBUTES:
        with contextlib.suppress(ValueError):  # of another kind: NaN and fill numbers are found without it
            found.append(_as_number(attributes.get(name, np.nan)))
    return [value for value in found if not np.isnan(value) and value != 0]


def _as_number(stated: Any) -> float:
    try:
        return float(np.asarray(stated).item())
    except ValueError:
        # A number of 8 bytes in base64, or something else.
        decoded = base64.b64decode(stated, validate=True)
        if len(decoded) != 8:
            return np.nan
        (value,) = struct.unpack("<d", decoded)
        return value


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
    stated = find_stated_range(variable.attrs, variable.dtype)
    lowest, highest = stated
    # Unpacking in single precision misses a bound by a rounding.
    lowest_read, highest_read = widen_by_rounding(stated)
    is_outside = (values < lowest_read) | (values > highest_read)
    if not is_outside.any():
        return
    names = [name for name in RANGE_NAMES if name in variable.attrs]
    first = values[is_outside][0]
    raise UsageError(
        f"{address}: {name}, from {since} on: {is_outside.sum()} values are outside of {' and '.join(names)}, "
        f"{lowest:g} to {highest:g}, the first is {first:g}: by these attributes they are missing. Fill them first "
        "(xarray: where, interpolate_na), or take the attributes off where the values are right (ncatted -a "
        f"{names[0]},{name},d,, {address})"
    )
