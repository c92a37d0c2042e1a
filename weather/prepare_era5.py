"""Turn ERA5 from Zarr stores or NetCDF files into year files for training.

    python -m weather.prepare_era5 STORE.zarr --out data/era5 --coarsen 2
    python -m weather.prepare_era5 single-levels-*.nc pressure-levels-*.nc --train_years 1979-2015

The command reads what WeatherBench2, ARCO-ERA5 and the Copernicus Climate Data Store publish (era5.yaml has their names
and units). It writes the layout of weather/year_files.py: the 20 channels, 6-hourly instants, rows from the
north, columns from Greenwich eastward, and the statistics of the training years. It can be interrupted and repeated. If
no source gives relative humidity with its units, it is derived from specific humidity and temperature.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError, run_main, whole
from weather.channels import CHANNELS, QUANTITIES, channel_key
from weather.era5_store import Store, relative_humidity, units_of
from weather.grid import Grid, frame_times
from weather.year_files import YearFileWriter, year_file_parser

VERSION = 1  # of the conversion; another version makes other values
TITLE = "ERA5 for training"
SOURCE = (
    "ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049), the channels of FourCastNet "
    "(Pathak et al. 2022, arXiv:2202.11214). Contains modified Copernicus Climate Change Service information."
)


class Era5:
    """Several stores as one: each holds some variables at some times. The first store that holds a value is read.

    addresses: of Zarr stores and NetCDF files. block: side of the square blocks of points that are averaged; rows left
    over at the south pole are dropped.
    Attributes: grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError if the stores do not fit together.
    """

    def __init__(self, addresses: Iterable[Path | str], block: int = 1):
        self.stores, self.block = [Store(str(address)) for address in addresses], block
        first = self.stores[0]
        self.points = len(first.latitude), len(first.longitude)
        for store in self.stores:
            axes = (store.latitude, first.latitude), (store.longitude, first.longitude)
            if not all(len(own) == len(other) and np.allclose(own, other, atol=1e-3) for own, other in axes):
                raise UsageError(f"{store.address}: its grid is not that of {first.address}")
        if block < 1 or self.points[1] % block or self.points[0] < block:
            raise UsageError(f"coarsen {block}: must divide the {self.points[1]} longitudes of {first.address}")
        self.grid = Grid(*(block_means(x, block, -1) for x in (first.latitude, first.longitude)))

        humidity = [store.variable("r") for store in self.stores]
        self.derived = not any(variable is not None and units_of(variable) for variable in humidity)
        self.keys = [channel_key(channel.name) for channel in CHANNELS]
        self.needed: dict[str, list[int | None]] = {}  # quantity: its levels
        for name, level in self.keys:
            for quantity in ("q", "t") if name == "r" and self.derived else (name,):
                levels = self.needed.setdefault(quantity, [])
                levels += [level] * (level not in levels)

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no store holds a variable, a level or one of `times` (datetime64[s])."""
        for quantity, levels in self.needed.items():
            for level in levels:
                what, holders = _describe(quantity, level), [s for s in self.stores if s.holds(quantity, level)]
                if not holders:
                    raise UsageError(f"no source holds {what}")
                found = np.max([store.times.get_indexer(times) for store in holders], axis=0) >= 0  # -1: not there
                if not found.all():
                    first = _minute(times[~found][0])
                    raise UsageError(f"{what}: {first} is missing, needed are 00, 06, 12, 18 UTC")

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for unphysical values."""
        fields: dict[tuple[str, int | None], np.ndarray] = {}
        for quantity, levels in self.needed.items():
            values = self._read(quantity, levels, times)
            _check_values(quantity, levels, times, values)
            fields |= {(quantity, level): values[:, i] for i, level in enumerate(levels)}  # (T, h, w)
        out = np.empty((len(times), len(CHANNELS), *map(len, self.grid)), np.float32)
        for channel, (name, level) in enumerate(self.keys):
            if name == "r" and level and self.derived:
                field = relative_humidity(fields["q", level], fields["t", level], 100 * level)
            else:
                field = fields[name, level]
            out[:, channel] = block_means(block_means(field, self.block, -1), self.block, -2)
        return out

    def _read(self, quantity: str, levels: Sequence[int | None], times: np.ndarray) -> np.ndarray:
        """(T, L, h, w) on the points of the stores, each value from the first store that holds it."""
        out = np.empty((len(times), len(levels), *self.points), np.float32)
        todo = np.ones((len(times), len(levels)), bool)
        for store in self.stores:
            here = [i for i, level in enumerate(levels) if store.variable(quantity, level) is not None]
            frames = store.times.get_indexer(times)
            rows = np.flatnonzero((frames >= 0) & todo[:, here].any(1))
            if len(rows):
                values = store.read(quantity, [levels[i] for i in here], frames[rows])
                for k, i in enumerate(here):
                    wanted = todo[rows, i]
                    out[rows[wanted], i] = values[wanted, k]
                    todo[rows, i] = False
        return out


def block_means(values: np.ndarray, block: int, axis: int) -> np.ndarray:
    """Averages over blocks of `block` points along an axis; points left over at its end are dropped."""
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
) -> int:
    """Write ERA5 from `sources` (Zarr stores and NetCDF files) to the folder `out`, and print a summary line.

    train_years, valid_years, test_years, days: as for YearFileWriter, which keeps the files that are there already.
    coarsen: side of the square blocks of points that are averaged.
    Returns the number of year files written. Raises UsageError for sources or settings that cannot be used, other data
    in `out` and too little disk space, before anything is written; for an unphysical value when it is read.
    """
    era5 = Era5(sources, coarsen)
    settings: dict[str, Any] = {"version": VERSION, "days": days, "relative_humidity_derived": era5.derived}
    settings |= {"img_size": [len(x) for x in era5.grid], "corners": [float(x[i]) for x in era5.grid for i in (0, -1)]}
    attributes = {"source": SOURCE, "made_from": " ".join(store.address for store in era5.stores)}
    splits = train_years, valid_years, test_years
    writer = YearFileWriter(out, splits, days, era5.grid, settings, TITLE, attributes)

    if writer.missing:
        era5.check(np.concatenate([frame_times(year, 0, frames) for year, frames in writer.missing_years().items()]))
        if era5.derived:
            print("relative humidity: derived from specific humidity and temperature")
    return writer.make(lambda year, first, count: era5.frames(frame_times(year, first, count)))


def _check_values(quantity: str, levels: Sequence[int | None], times: np.ndarray, values: np.ndarray) -> None:
    """Raises UsageError for NaN and for a value outside the physical range (a fill value, other units)."""
    units, _, _, lowest, highest = QUANTITIES[quantity]
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


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = year_file_parser("weather.prepare_era5", __doc__, "1979-2015", "2016-2017", "2018", "all")
    option = parser.add_argument
    option("sources", metavar="SOURCE", nargs="+", help="Zarr store (folder or URL) or NetCDF file")
    option("--out", default="data/era5", help="folder (default: %(default)s)")
    coarsen = "average over N x N points: 2 turns 721 x 1440 points into 360 x 720"
    option("--coarsen", type=whole(1, 10_000), default=1, metavar="N", help=coarsen)
    prepare_era5(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
