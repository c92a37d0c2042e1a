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

from utils.errors import int_in_range, run_main
from weather.convert.data_set_writer import convert
from weather.sources.data import Era5
from weather.year_files import year_dates, year_file_parser

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

    train_years, valid_years, test_years, days: as of year_dates. Files that are there already stay.
    coarsen: side of the square blocks of points that are averaged.
    Returns the number of year files written. Raises UsageError for sources or settings that cannot be used, other data
    in `out` and too little disk space, before anything is written; for an unphysical value when it is read.
    """
    era5 = Era5(sources, coarsen)
    dates = year_dates(out, (train_years, valid_years, test_years), days)
    settings = {"version": VERSION, "days": days, "relative_humidity_derived": era5.derived}
    return convert(era5, dates, Path(out), settings, TITLE, {"source": SOURCE})


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
