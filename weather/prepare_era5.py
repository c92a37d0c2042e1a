"""Turn ERA5 from Zarr stores, NetCDF or GRIB files into year files for training.

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

from utils.errors import int_in_range, run_main
from weather.fields.grid import frame_times
from weather.sources.data import Era5
from weather.year_files import YearFileWriter, year_file_parser

VERSION = 1  # of the conversion; another version makes other values
TITLE = "ERA5 for training"
SOURCE = (
    "ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049), the channels of FourCastNet "
    "(Pathak et al. 2022, arXiv:2202.11214). Contains modified Copernicus Climate Change Service information."
)


def prepare_era5(
    sources: Iterable[Path | str],
    out: Path | str,
    train_years: Iterable[int] = range(1979, 2016),
    valid_years: Iterable[int] = (2016, 2017),
    test_years: Iterable[int] = (2018,),
    days: int = 0,
    coarsen: int = 1,
) -> int:
    """Write ERA5 from `sources` (Zarr stores, NetCDF and GRIB files) to the folder `out`, and print a summary line.

    train_years, valid_years, test_years, days: as for YearFileWriter, which keeps the files that are there already.
    coarsen: side of the square blocks of points that are averaged.
    Returns the number of year files written. Raises UsageError for sources or settings that cannot be used, other data
    in `out` and too little disk space, before anything is written; for an unphysical value when it is read.
    """
    era5 = Era5(sources, coarsen)
    # What the values depend on is stored with them: other settings are other data.
    corners = [float(axis[place]) for axis in era5.grid for place in (0, -1)]
    settings: dict[str, Any] = {
        "version": VERSION,
        "days": days,
        "relative_humidity_derived": era5.derived,
        "img_size": [len(axis) for axis in era5.grid],
        "corners": corners,
    }
    # A GRIB file is several stores of one address.
    addresses = dict.fromkeys(store.address for store in era5.stores)
    attributes = {"source": SOURCE, "made_from": " ".join(addresses)}
    splits = train_years, valid_years, test_years
    writer = YearFileWriter(out, splits, days, era5.grid, settings, TITLE, attributes)

    if writer.missing:
        # Look for all that will be read before anything is written.
        times = [frame_times(year, 0, frames) for year, frames in writer.missing_years().items()]
        era5.check(np.concatenate(times))
        _announce(era5)

    def read_frames(year: int, first: int, count: int) -> np.ndarray:
        return era5.frames(frame_times(year, first, count))

    return writer.make(read_frames)


def _announce(era5: Era5) -> None:
    """Print what is derived, and how much memory is used beside that of the frames."""
    if era5.derived:
        print("relative humidity: derived from specific humidity and temperature")
    kept = era5.kept_bytes()
    if kept:
        size = f"{kept / 1e9:.1f} GB" if kept > 1e8 else f"{kept / 1e6:.1f} MB"
        print(f"chunks hold several frames: keeps up to {size} of decoded chunks")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = year_file_parser("weather.prepare_era5", __doc__, "1979-2015", "2016-2017", "2018", "all")
    option = parser.add_argument
    option("sources", metavar="SOURCE", nargs="+", help="Zarr store (folder or URL), NetCDF or GRIB file")
    option("--out", default="data/era5", help="folder (default: %(default)s)")
    coarsen = "average over N x N points: 2 turns 721 x 1440 points into 360 x 720"
    option("--coarsen", type=int_in_range(1, 10_000), default=1, metavar="N", help=coarsen)
    prepare_era5(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main, resumes=True)
