"""Packed arrays, which `scale_factor` and `add_offset` turn into values: they are refused, not guessed."""

from typing import Any

import numpy as np

from utils.errors import UsageError

NEUTRAL_PACKING = {"scale_factor": 1.0, "add_offset": 0.0}  # of the CF conventions
UNPACK = "write its values (ncpdq -U IN OUT; xarray: open_dataset(IN).drop_encoding().to_netcdf(OUT))"


def read_packing(array: Any) -> dict[str, float]:
    """{attribute: value} of what turns the stored numbers into values; a neutral factor or offset is none."""
    found = {}
    for name, neutral in NEUTRAL_PACKING.items():
        attribute = array.attrs.get(name, neutral)
        value = float(np.asarray(attribute).item())
        if value != neutral:
            found[name] = value
    return found


def check_unpacked(array: Any, where: str) -> None:
    """Raise UsageError where an array is packed. where: the file and the array, as the start of the message."""
    packing = read_packing(array)
    if packing:
        told = ", ".join(f"{name} {value:g}" for name, value in packing.items())
        raise UsageError(f"{where} is packed as {array.dtype} ({told}): {UNPACK}")
