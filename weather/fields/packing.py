"""Packed arrays, which `scale_factor` and `add_offset` turn into values: they are refused, not guessed."""

import base64
import contextlib
import struct
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from utils.errors import UsageError

NEUTRAL_PACKING = {"scale_factor": 1.0, "add_offset": 0.0}  # of the CF conventions
MISSING_ATTRIBUTES = ("_FillValue", "missing_value")
UNPACK = "write its values (ncpdq -U IN OUT; xarray: open_dataset(IN).drop_encoding().to_netcdf(OUT))"


def read_packing(array: Any) -> dict[str, Any]:
    """{attribute: value} of what turns the stored numbers into values; a neutral factor or offset is none."""
    found: dict[str, Any] = {}
    for name, neutral in NEUTRAL_PACKING.items():
        # The attribute may be an array of one number.
        attribute = array.attrs.get(name, neutral)
        if isinstance(attribute, h5py.Empty):  # an attribute without a value
            continue
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
        stated = attributes.get(name)
        if stated is None or isinstance(stated, h5py.Empty):
            continue
        with contextlib.suppress(ValueError):  # of another kind: NaN and fill numbers are found without it
            found.append(_as_number(stated))
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
