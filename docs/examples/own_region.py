"""A file as a user may have it: three variables of a region on 24 latitudes, every three hours.

    python -m docs.examples.own_region region.nc

A wave runs eastward over 24 x 40 points west of Europe. Temperature is packed into integers of four bytes, and rows run
from the north. era5.yaml does not know the height of waves.
"""

from collections.abc import Sequence

import numpy as np
import xarray

from utils.errors import ArgumentParser, int_in_range, reported_as_usage_error, run_main

HEIGHT = 24
WIDTH = 40
NORTH = 55.0
WEST = -10.0
STEP = 0.5  # degrees
HOURS = 3
FIELD = ("time", "latitude", "longitude")
PACKED = {"dtype": "i4", "scale_factor": 1e-4, "add_offset": 280.0, "_FillValue": -(2**31)}


def region(frames: int = 40) -> xarray.Dataset:
    """t2m (K), u10 (m s-1) and swh (m): (frames, 24, 40) float32 each, with their coordinates."""
    t, y, x = np.ogrid[:frames, :HEIGHT, :WIDTH]
    phase = 2 * np.pi * (x / 20 - t / 16)
    wave = np.sin(phase) * np.cos(2 * np.pi * y / HEIGHT)
    noise = np.random.default_rng(0).standard_normal(wave.shape)
    wave = wave + 0.1 * noise
    fields = {
        "t2m": (285 + 5 * wave, "K"),
        "u10": (4 * wave, "m s-1"),
        "swh": (2 + 0.5 * wave, "m"),
    }
    variables = {}
    for name, (values, units) in fields.items():
        variables[name] = FIELD, values.astype(np.float32), {"units": units}
    first = np.datetime64("2019-12-30", "ns")
    coordinates = {
        "time": first + np.timedelta64(HOURS, "h") * np.arange(frames),
        "latitude": NORTH - STEP * np.arange(HEIGHT),
        "longitude": WEST + STEP * np.arange(WIDTH),
    }
    return xarray.Dataset(variables, coordinates)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = ArgumentParser(prog="python -m docs.examples.own_region", description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="NetCDF to write")
    parser.add_argument("--frames", type=int_in_range(1, 100_000), default=240, help="(%(default)s)")
    options = parser.parse_args(argv)
    with reported_as_usage_error(OSError, options.file):
        region(options.frames).to_netcdf(options.file, engine="h5netcdf", encoding={"t2m": PACKED})


if __name__ == "__main__":
    run_main(main)
