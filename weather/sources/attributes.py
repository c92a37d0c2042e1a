"""What the attributes of a source's variable say of its values, beyond what xarray makes of them (CF 2.5 and 8.1)."""

import numpy as np
import xarray

from utils.errors import UsageError
from weather.fields.packing import NEUTRAL_PACKING
from weather.fields.stated_range import find_stated_range, name_range, widen_by_rounding


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
    names = name_range(variable.attrs)
    first = values[is_outside][0]
    raise UsageError(
        f"{address}: {name}, from {since} on: {is_outside.sum()} values are outside of {' and '.join(names)}, "
        f"{lowest:g} to {highest:g}, the first is {first:g}: by these attributes they are missing. Fill them first "
        "(xarray: where, interpolate_na), or take the attributes off where the values are right (ncatted -a "
        f"{names[0]},{name},d,, {address})"
    )
