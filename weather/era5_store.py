"""One Zarr store or NetCDF file of ERA5, in the names, units and grids of others: weather/era5.yaml has them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from utils.errors import UsageError, first_line, reading
from weather.channels import ERA5, QUANTITIES

DIMENSIONS: dict[str, tuple[list[str], int]] = ERA5["dimensions"]  # {ours: (theirs, most values)}


OTHER_FORMATS = {  # by the first bytes of a file
    b"PK\x03\x04": "it is a zip archive: unpack it and give the files inside",
    b"GRIB": "it is GRIB: download it as NetCDF, or convert it (cdo -f nc4 copy)",
}


def relative_humidity(q: np.ndarray, t: np.ndarray, pressure: float) -> np.ndarray:
    """Relative humidity (%) as ERA5 defines it, from specific humidity (kg kg-1), temperature (K), pressure (Pa).

    The vapour pressure is divided by its saturation value: over water above 0 degrees C, over ice below -23 degrees C,
    and over a mixture between them, which is quadratic in temperature (ECMWF 2016, IFS Documentation CY41R2, Part IV:
    Physical Processes, chapter 7). Saturation follows Tetens' formula with the parameters given there (Buck 1981;
    Alduchov and Eskridge 1996).
    """
    triple, ice_only, ratio = 273.16, 250.16, 287.0597 / 461.5250  # K, K, gas constants of dry air and vapour
    water = 611.21 * np.exp(17.502 * (t - triple) / (t - 32.19))
    ice = 611.21 * np.exp(22.587 * (t - triple) / (t + 0.7))
    part = np.clip((t - ice_only) / (triple - ice_only), 0, 1) ** 2
    vapour = pressure * q / (ratio + (1 - ratio) * q)
    return 100 * vapour / (part * water + (1 - part) * ice)


class Store:
    """One Zarr store or NetCDF file: a global grid, rows from the north, columns from Greenwich eastward.

    Attributes: address; times, a pandas index of T dates; levels, a list in hPa; latitude (H,) and longitude (W,) in
    degrees. Raises UsageError if the store cannot be opened or has no such grid.
    """

    def __init__(self, address: str):
        self.address = address
        with reading(f"{address}: its coordinates"):
            self._place(_open(address))

    def _place(self, data: xarray.Dataset) -> None:
        """Find the dimensions, and turn the grid as it is promised."""
        address = self.address
        found = {ours: next((n for n in names if n in data.dims), None) for ours, (names, _) in DIMENSIONS.items()}
        for ours, name in found.items():
            names, most = DIMENSIONS[ours]
            if name is None and ours != "level":
                raise UsageError(f"{address}: has no dimension {' or '.join(names)}: it has {[*data.dims]}")
            if name is not None and not 1 <= data.sizes[name] <= most:
                raise UsageError(f"{address}: {name} has {data.sizes[name]} values, not 1 to {most}")
        data = data.rename({name: ours for ours, name in found.items() if name and name != ours})
        self.times, self.levels = data.indexes["time"], []
        if self.times.dtype.kind != "M":
            raise UsageError(f"{address}: {found['time']} is not in dates of the standard calendar")
        if not (self.times.is_monotonic_increasing and self.times.is_unique):
            raise UsageError(f"{address}: its times do not increase")
        if "level" in data.dims:
            factor, _ = self._conversion("its pressure levels have", units_of(data["level"]) or "hPa", "hPa")
            self.levels = [round(factor * level, 5) for level in data["level"].values.tolist()]
        if data["latitude"][0] < data["latitude"][-1]:
            data = data.isel(latitude=slice(None, None, -1))
        self.data, self.latitude = data, data["latitude"].values.astype(np.float64).round(5)
        longitude = data["longitude"].values.astype(np.float64).round(5) % 360
        self.first_column = int(np.argmin(longitude))  # Greenwich, or the first column east of it
        self.longitude = np.roll(longitude, -self.first_column)
        self._check_grid()

    def variable(self, quantity: str, level: float | None = None) -> xarray.DataArray | None:
        """The variable that holds a quantity (at a level in hPa), not read yet; None if there is none."""
        for name in QUANTITIES[quantity].names:
            variable = self.data.get(name)
            if variable is not None and (level is None or ("level" in variable.dims and level in self.levels)):
                return variable
        return None

    def holds(self, quantity: str, level: float | None = None) -> bool:
        """Tell whether it holds a quantity (at a level in hPa). Raises UsageError for other units or dimensions."""
        variable = self.variable(quantity, level)
        if variable is None:
            return False
        self.conversion(quantity, variable)
        if others := {dim: size for dim, size in variable.sizes.items() if dim not in DIMENSIONS and size > 1}:
            raise UsageError(f"{self.address}: {variable.name} has also the dimensions {others}: select one of each")
        return True

    def read(self, quantity: str, levels: Sequence[float | None], frames: np.ndarray) -> np.ndarray:
        """(T, L, H, W) float32 in ERA5's units, at levels ([None]: surface) and indices of times. Raises UsageError."""
        variable = self.variable(quantity, levels[0])
        assert variable is not None  # callers ask only for what the store holds
        factor, offset = self.conversion(quantity, variable)
        part: dict[Any, Any] = {"time": _as_slice(frames)}
        order = ["time", "latitude", "longitude"]
        if levels != [None]:
            part["level"] = [self.levels.index(level) for level in levels if level is not None]
            order.insert(1, "level")
        part |= dict.fromkeys(set(variable.dims) - set(order), 0)  # of length 1
        with reading(f"{self.address}: {variable.name}"):
            values = variable.isel(part).transpose(*order).values
            if (factor, offset) != (1, 0):
                values = values * float(factor) + offset
            values = np.roll(values.astype(np.float32, copy=False), -self.first_column, axis=-1)
        return values if "level" in order else values[:, None]

    def conversion(self, quantity: str, variable: xarray.DataArray) -> tuple[float, float]:
        """(factor, offset) from a variable's units to ERA5's. Raises UsageError for unknown units.

        A variable without units is taken to be in ERA5's (regridded WeatherBench2 stores give none), except relative
        humidity, which may be a fraction or a percentage.
        """
        theirs = units_of(variable)
        if not theirs and quantity != "r":
            return 1, 0
        return self._conversion(f"{variable.name} has", theirs, QUANTITIES[quantity].units)

    def _conversion(self, subject: str, theirs: str, ours: str) -> tuple[float, float]:
        known = {spelling.lower(): conversion for spelling, conversion in ERA5["units"][ours].items()}
        if theirs.lower() not in known:
            listed = ", ".join(ERA5["units"][ours])
            raise UsageError(f"{self.address}: {subject} unknown units '{theirs}' (known: {listed})")
        return known[theirs.lower()]

    def _check_grid(self) -> None:
        latitude, longitude, width = self.latitude, self.longitude, len(self.longitude)
        whole_circle = np.allclose(longitude, longitude[0] + 360 / width * np.arange(width), atol=1e-3)
        if width < 2 or not whole_circle or longitude[0] >= 360 / width:
            raise UsageError(f"{self.address}: its {width} longitudes do not go once around the globe in equal steps")
        steps = -np.diff(latitude)
        falling = len(steps) > 0 and steps.min() > 0  # nor are they, where one is NaN
        if not (falling and abs(latitude).max() <= 90 and np.ptp(latitude) + 2 * steps.max() >= 180):
            raise UsageError(f"{self.address}: its {len(latitude)} latitudes do not go from pole to pole")


def units_of(variable: xarray.DataArray) -> str:
    """The units that a variable states, powers without ** and ^ ('m s-1'); '' if it states none."""
    return str(variable.attrs.get("units", "")).replace("**", "").replace("^", "").strip()


def _open(address: str) -> xarray.Dataset:
    """The xarray.Dataset of a Zarr store or NetCDF file. Its values are read later (chunks=None: without dask)."""
    remote = "://" in address
    if not remote and not Path(address).exists():
        raise UsageError(f"{address}: no such file or folder")
    try:
        if remote or Path(address).is_dir():
            options = {"token": "anon"} if address.startswith("gs://") else None  # the public buckets
            with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # metadata not consolidated: slower
                return xarray.open_zarr(address, chunks=None, storage_options=options)
        return xarray.open_dataset(address, chunks=None)
    except Exception as error:  # each format and file system has its own
        what = first_line(error)
        if not remote and Path(address).is_file():
            with open(address, "rb") as file:
                what = OTHER_FORMATS.get(file.read(4), what)
        raise UsageError(f"{address}: cannot be opened as Zarr or NetCDF: {what}") from error


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Increasing indices as a slice if their step is constant: stores read slices faster."""
    step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
    return slice(int(indices[0]), int(indices[-1]) + 1, step) if np.all(np.diff(indices) == step) else indices
