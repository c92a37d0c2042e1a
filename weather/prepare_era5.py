"""Turn ERA5 from Zarr stores or NetCDF files into year files for training.

    python -m weather.prepare_era5 STORE.zarr --out data/era5 --coarsen 2
    python -m weather.prepare_era5 single-levels-*.nc pressure-levels-*.nc --train_years 1979-2015

Reads what WeatherBench2, ARCO-ERA5 and the Copernicus Climate Data Store provide (era5_store.py knows their names
and units) and writes the layout of weather/year_files.py: the 20 channels, 6-hourly instants, rows from the north,
columns from Greenwich eastward, and the statistics of the training years. It can be stopped and repeated. Relative
humidity that no source gives with its units is derived from specific humidity and temperature.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import ArgumentParser, UsageError, run_main
from weather.channels import CHANNELS
from weather.era5_store import QUANTITIES, Store, channel_key, relative_humidity, units_of
from weather.grid import Grid
from weather.year_files import YearFileWriter, parse_days, parse_years

VERSION = 1  # of the conversion; another version makes other values
TITLE = "ERA5 for training"
SOURCE = (
    "ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049), the channels of FourCastNet "
    "(Pathak et al. 2022, arXiv:2202.11214). Contains modified Copernicus Climate Change Service information."
)


class Era5:
    """Stores read together: each holds some variables at some times. Where several hold the same, the first is read.

    addresses: of Zarr stores and NetCDF files. block: average over blocks of so many points in each direction;
    rows left over at the south pole are dropped.
    Attributes: latitude (H,), longitude (W,) in degrees, averaged too; derived: relative humidity is derived.
    Raises UsageError where the stores do not fit together.
    """

    def __init__(self, addresses: Iterable[Path | str], block: int = 1):
        self.stores, self.block = [Store(str(address)) for address in addresses], block
        first = self.stores[0]
        self.points = len(first.latitude), len(first.longitude)
        for store in self.stores:
            if not (_equal(store.latitude, first.latitude) and _equal(store.longitude, first.longitude)):
                raise UsageError(f"{store.address}: its grid is not that of {first.address}")
        if block < 1 or self.points[1] % block or self.points[0] < block:
            raise UsageError(f"coarsen {block}: must divide the {self.points[1]} longitudes of {first.address}")
        self.latitude, self.longitude = (block_means(x, block, -1) for x in (first.latitude, first.longitude))

        humidity = [store.variable("r") for store in self.stores]
        self.derived = not any(variable is not None and units_of(variable) for variable in humidity)
        self.keys = [channel_key(channel.name) for channel in CHANNELS]
        needed: dict[str, list[int | None]] = {}  # quantity: its levels
        for name, level in self.keys:
            for quantity in ("q", "t") if name == "r" and self.derived else (name,):
                needed.setdefault(quantity, []).append(level)
        self.needed = {quantity: list(dict.fromkeys(levels)) for quantity, levels in needed.items()}

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError where a variable, a level or one of `times` (datetime64[s]) is in no store."""
        for quantity, levels in self.needed.items():
            for level in levels:
                holders = self._holders(quantity, level)
                missing = times[np.max([store.find(times) for store in holders], axis=0) < 0]
                if len(missing):
                    held = np.concatenate([store.times for store in holders])
                    hours = np.unique((held - held.astype("datetime64[D]")) / np.timedelta64(1, "h"))
                    lacking = ", ".join(f"{hour:02d}" for hour in (0, 6, 12, 18) if hour not in hours)
                    why = f": no source has {lacking} UTC, every 6 hours from 00 UTC are needed" if lacking else ""
                    raise UsageError(f"{_describe(quantity, level)}: {_minute(missing[0])} is missing{why}")

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, which were checked. Raises UsageError for unsound values."""
        fields: dict[tuple[str, int | None], np.ndarray] = {}
        for quantity, levels in self.needed.items():
            values = self._read(quantity, levels, times)
            _check_values(quantity, levels, times, values)
            fields |= {(quantity, level): values[:, i] for i, level in enumerate(levels)}  # (T, h, w)
        out = np.empty((len(times), len(CHANNELS), len(self.latitude), len(self.longitude)), np.float32)
        for channel, (name, level) in enumerate(self.keys):
            if name == "r" and level and self.derived:
                field = relative_humidity(fields["q", level], fields["t", level], 100 * level)
            else:
                field = fields[name, level]
            out[:, channel] = block_means(block_means(field, self.block, -1), self.block, -2)
        return out

    def _holders(self, quantity: str, level: int | None) -> list[Store]:
        """The stores that hold a quantity at a level, checked. Raises UsageError where there is none."""
        holders = [store for store in self.stores if store.variable(quantity, level) is not None]
        if not holders:
            having = [store for store in self.stores if level and store.variable(quantity) is not None]
            levels = ", ".join(f"{lev:g}" for lev in sorted({lev for store in having for lev in store.levels}))
            found = f" (found at {levels or 'no level'})" if having else ""
            reason = " to derive relative humidity from, and none gives r or relative_humidity with its units"
            raise UsageError(f"no source holds {_describe(quantity, level)}{found}{reason if quantity == 'q' else ''}")
        for store in holders:
            store.check(quantity, level)
        return holders

    def _read(self, quantity: str, levels: Sequence[int | None], times: np.ndarray) -> np.ndarray:
        """(T, L, h, w) on the stores' points, each value from the first store that holds it."""
        out = np.empty((len(times), len(levels), *self.points), np.float32)
        todo = np.ones((len(times), len(levels)), bool)
        for store in self.stores:
            here = [i for i, level in enumerate(levels) if store.variable(quantity, level) is not None]
            frames = store.find(times)
            rows = np.flatnonzero((frames >= 0) & todo[:, here].any(1))
            if len(rows):
                values = store.read(quantity, [levels[i] for i in here], frames[rows])
                for k, i in enumerate(here):
                    wanted = todo[rows, i]
                    out[rows[wanted], i] = values[wanted, k]
                    todo[rows, i] = False
        return out


def block_means(values: np.ndarray, block: int, axis: int) -> np.ndarray:
    """Averages along an axis over blocks of so many points; points left over at its end are dropped."""
    if block == 1:
        return values
    values = np.moveaxis(values, axis, -1)
    values = values[..., : values.shape[-1] // block * block].reshape(*values.shape[:-1], -1, block)
    return np.moveaxis(values.mean(-1), -1, axis)


def prepare_era5(
    sources: Iterable[Path | str],
    out: Path | str,
    train_years: Iterable[int] = range(1979, 2016),
    valid_years: Iterable[int] = (2016, 2017),
    test_years: Iterable[int] = (2018,),
    days: int = 0,
    coarsen: int = 1,
    overwrite: bool = False,
) -> int:
    """Write ERA5 from `sources` to the folder `out`, keep what is there already with the same settings, print a line.

    sources: Zarr stores and NetCDF files. train_years, valid_years, test_years: iterables of int. days: of each year,
    0 for all. coarsen: average over blocks of so many points in each direction. overwrite: replace year files that
    this command made with other settings.
    Returns the number of year files written. Raises UsageError for sources or settings that cannot be used, other data
    in `out` and too little disk space, before anything is written; for a value that is not sound when it is read.
    """
    era5 = Era5(sources, coarsen)
    grid = Grid(era5.latitude, era5.longitude)
    settings: dict[str, Any] = {"version": VERSION, "days": days, "relative_humidity_derived": era5.derived}
    settings |= {"img_size": [len(x) for x in grid], "corners": [float(x[i]) for x in grid for i in (0, -1)]}
    attributes = {"source": SOURCE, "made_from": " ".join(store.address for store in era5.stores)}
    splits = train_years, valid_years, test_years
    writer = YearFileWriter(out, *splits, days, grid, settings, TITLE, attributes, overwrite)

    if writer.missing:
        era5.check(np.concatenate([_times(year, 0, frames) for year, frames in writer.missing_years().items()]))
        if era5.derived:
            print("relative humidity: derived from specific humidity and temperature")
    return writer.make(lambda year, first, count: era5.frames(_times(year, first, count)))


def _times(year: int, first: int, count: int) -> np.ndarray:
    """The times of frames of a year, datetime64[s]."""
    return np.datetime64(datetime(year, 1, 1), "s") + 6 * np.timedelta64(3600, "s") * np.arange(first, first + count)


def _check_values(quantity: str, levels: Sequence[int | None], times: np.ndarray, values: np.ndarray) -> None:
    """Raises UsageError for a value that is NaN or that no atmosphere has (a fill value, other units)."""
    _, units, lowest, highest = QUANTITIES[quantity]
    sound = (values >= lowest) & (values <= highest)  # false for NaN
    if not sound.all():
        index = tuple(np.argwhere(~sound)[0])
        value, where = values[index], f"{_describe(quantity, levels[index[1]])}, {_minute(times[index[0]])}"
        what = "NaN" if np.isnan(value) else f"{value:g}, outside {lowest:g} to {highest:g} {units}"
        raise UsageError(f"{where}: row {index[2]} from the north, column {index[3]} is {what}")


def _describe(quantity: str, level: int | None) -> str:
    return " or ".join(QUANTITIES[quantity].names) + ("" if level is None else f" at {level} hPa")


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, atol=1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = ArgumentParser(prog="python -m weather.prepare_era5", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("sources", metavar="SOURCE", nargs="+", help="Zarr store (folder or URL) or NetCDF file")
    option("--out", default="data/era5", help="folder (default: %(default)s)")
    option("--train_years", type=parse_years, default="1979-2015", help="such as 1979-1982,1985 (default: %(default)s)")
    option("--valid_years", type=parse_years, default="2016-2017", help="(default: %(default)s)")
    option("--test_years", type=parse_years, default="2018", help="(default: %(default)s)")
    option(
        "--days", type=parse_days, default="all", help="of each year, from 1 January, or 'all' (default: %(default)s)"
    )
    option(
        "--coarsen", type=int, default=1, metavar="N", help="average over N x N points: 2 makes 721 x 1440 360 x 720"
    )
    option("--overwrite", action="store_true", help="replace year files made with other settings")
    prepare_era5(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
