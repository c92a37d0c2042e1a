"""Turn ERA5 from Zarr stores or NetCDF files into year files for training.

    python -m weather.prepare_era5 STORE.zarr --out data/era5 --coarsen 2
    python -m weather.prepare_era5 single-levels-*.nc pressure-levels-*.nc --train_years 1979-2015

The command reads what WeatherBench2, ARCO-ERA5 and the Copernicus Climate Data Store publish (era5.yaml has their names
and units). It writes the layout of weather/year_files.py: the 20 channels, 6-hourly instants, rows from the
north, columns from Greenwich eastward, and the statistics of the training years. It can be interrupted and repeated. If
no source gives relative humidity with its units, it is derived from specific humidity and temperature.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError, run_main, whole
from weather.channels import CHANNELS, channel_key
from weather.era5_axes import minute
from weather.era5_index import Index, describe
from weather.era5_store import Store, open_stores, relative_humidity
from weather.grid import Grid, frame_times
from weather.value_check import Key, ValueCheck
from weather.year_files import YearFileWriter, year_file_parser

VERSION = 1  # of the conversion; another version makes other values
TITLE = "ERA5 for training"
SOURCE = (
    "ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049), the channels of FourCastNet "
    "(Pathak et al. 2022, arXiv:2202.11214). Contains modified Copernicus Climate Change Service information."
)


class Era5:
    """Several stores as one: each holds some variables at some times. The first store that holds a value is read.

    addresses: of Zarr stores, NetCDF and GRIB files, or Stores that are open already. block: side of the square blocks
    of points that are averaged; rows left over at the south pole are dropped.
    Attributes: grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError if the stores do not fit together.
    """

    def __init__(self, addresses: Iterable[Path | str | Store], block: int = 1):
        self.block = block
        self.stores: list[Store] = []
        for address in addresses:
            self.stores += [address] if isinstance(address, Store) else open_stores(str(address))
        first = self.stores[0]
        width = len(first.longitude)
        self._check_grids()
        if block < 1 or width % block or len(first.latitude) < block:
            raise UsageError(f"coarsen {block}: must divide the {width} longitudes of {first.address}")
        self.grid = Grid(*(block_means(x, block, -1) for x in (first.latitude, first.longitude)))

        self.derived = not any(field.units for store in self.stores for field in store.fields.get("r", []))
        self.keys = [channel_key(channel.name) for channel in CHANNELS]
        self.needed: dict[str, list[int | None]] = {}  # quantity: its levels
        for name, level in self.keys:
            is_derived = name == "r" and self.derived
            for quantity in ("q", "t") if is_derived else (name,):
                levels = self.needed.setdefault(quantity, [])
                if level not in levels:
                    levels.append(level)

    def _check_grids(self) -> None:
        first = self.stores[0]
        for store in self.stores:
            axes = (store.latitude, first.latitude), (store.longitude, first.longitude)
            if not all(len(own) == len(other) and np.allclose(own, other, atol=1e-3) for own, other in axes):
                raise UsageError(f"{store.address}: its grid is not that of {first.address}")

    @cached_property
    def index(self) -> Index:
        """Where each quantity lies. Raises UsageError if no store holds a variable or a level."""
        return Index(self.stores, self.needed, self.derived)

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no store holds a variable, a level or one of `times` (datetime64[s]), or all of it."""
        self.index.check(times)

    def kept_bytes(self) -> int:
        """The most bytes of decoded frames that are kept, 0 where chunks hold one frame."""
        return self.index.kept_bytes()

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for unphysical values."""
        fields: dict[tuple[str, int | None], np.ndarray] = {}
        for quantity, levels in self.needed.items():
            values, sources = self.index.read(quantity, times)  # (T, L, h, w), (T, L)
            keys = [(quantity, level) for level in levels]
            self._check_values(keys, times, values, sources)
            fields |= {key: values[:, i] for i, key in enumerate(keys)}  # (T, h, w)
        out = np.empty((len(times), len(CHANNELS), *map(len, self.grid)), np.float32)
        for channel, (name, level) in enumerate(self.keys):
            if name == "r" and level and self.derived:
                field = relative_humidity(fields["q", level], fields["t", level], 100 * level)
                self._check_values([(name, level)], times, field[:, None])
            else:
                field = fields[name, level]
            out[:, channel] = block_means(block_means(field, self.block, -1), self.block, -2)
        return out

    def _check_values(
        self, keys: list[Key], times: np.ndarray, values: np.ndarray, sources: np.ndarray | None = None
    ) -> None:
        """Raises UsageError for values (T, L, h, w) that are no weather: source, quantity, date, place, what it is."""
        problem = ValueCheck(keys, strict=True).find(values)
        if problem is None:
            return
        quantity, level = keys[problem.channel]
        if sources is None:
            what = f"{describe(quantity, level)}, derived from specific humidity and temperature"
        else:
            store = self.stores[sources[problem.frame, problem.channel]]
            what = f"{store.address}: {describe(quantity, level)}"
        place = f"row {problem.row} from the north, column {problem.column}"
        raise UsageError(f"{what}, {minute(times[problem.frame])}: {place} {problem.text}")


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
    addresses = dict.fromkeys(store.address for store in era5.stores)
    attributes = {"source": SOURCE, "made_from": " ".join(addresses)}
    splits = train_years, valid_years, test_years
    writer = YearFileWriter(out, splits, days, era5.grid, settings, TITLE, attributes)

    if writer.missing:
        era5.check(np.concatenate([frame_times(year, 0, frames) for year, frames in writer.missing_years().items()]))
        if era5.derived:
            print("relative humidity: derived from specific humidity and temperature")
        if kept := era5.kept_bytes():
            print(f"chunks hold several frames: keeps up to {kept / 1e9:.2g} GB of decoded chunks")
    return writer.make(lambda year, first, count: era5.frames(frame_times(year, first, count)))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = year_file_parser("weather.prepare_era5", __doc__, "1979-2015", "2016-2017", "2018", "all")
    option = parser.add_argument
    option("sources", metavar="SOURCE", nargs="+", help="Zarr store (folder or URL), NetCDF or GRIB file")
    option("--out", default="data/era5", help="folder (default: %(default)s)")
    coarsen = "average over N x N points: 2 turns 721 x 1440 points into 360 x 720"
    option("--coarsen", type=whole(1, 10_000), default=1, metavar="N", help=coarsen)
    prepare_era5(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
