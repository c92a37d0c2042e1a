"""Make sample data: years of a small idealised atmosphere, in the layout and with the channels of ERA5 files.

    python -m weather.sample_data                                  # data/quick: 7 years of 60 days on 32 x 64
    python -m weather.sample_data data/big --img_size 360 720 --days all

weather/year_files.py describes the files; the command can be interrupted and repeated.
weather/sample/atmosphere.py describes the dynamics and their sources, SOURCE those of the channels.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from utils.errors import int_in_range, reported_as_usage_error, run_main
from weather.checks.data_check import blocks
from weather.convert.data_set_writer import DataSetWriter
from weather.fields.channels import CHANNELS
from weather.fields.grid import Grid, latitudes, longitudes, years_of
from weather.sample.atmosphere import Atmosphere
from weather.year_files import year_dates, year_file_parser

VERSION = 1  # of the atmosphere; another version makes other data
TITLE = "Sample data: idealised atmosphere"
SOURCE = (
    "Random Rossby-Haurwitz waves (Haurwitz 1940, J. Marine Res. 3, 254-267; Williamson et al. 1992, "
    "J. Comput. Phys. 102, 211-224) on the channels of FourCastNet (Pathak et al. 2022, arXiv:2202.11214) "
    "as in ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049). Not observations."
)


def make_sample_data(
    out: Path | str,
    img_size: Sequence[int] = (32, 64),
    train_years: Iterable[int] = range(1979, 1984),
    valid_years: Iterable[int] = (1984,),
    test_years: Iterable[int] = (1985,),
    days: int = 60,
    seed: int = 0,
) -> int:
    """Write sample data to the folder `out`, and print a summary line.

    img_size: (H, W). seed: of the atmosphere. train_years, valid_years, test_years, days: as of year_dates.
    Files that are there already stay.
    Returns the number of year files written. Raises UsageError for bad settings, a year in two splits, other data in
    `out` or too little disk space, before anything is written; and if `out` cannot be written.
    """
    # All that the values depend on stands in the files, so that other data are told from these.
    grid = Grid(latitudes(img_size[0]), longitudes(img_size[1]))
    settings = {"version": VERSION, "img_size": list(img_size), "days": days, "seed": seed}
    attributes = {"source": SOURCE, "seed": seed}
    dates = year_dates(out, (train_years, valid_years, test_years), days)
    # Settings are checked, and disk space too, before the atmosphere is computed.
    writer = DataSetWriter(Path(out), dates, CHANNELS, grid, settings, TITLE, attributes)
    with reported_as_usage_error(ValueError, "sample data"):
        atmosphere = Atmosphere(img_size, seed)

    def read_frames(dates: np.ndarray) -> Iterator[np.ndarray]:
        # The dates of a file are those of a year, from its first on.
        year = int(years_of(dates)[0])
        for first, count in blocks(len(dates), len(CHANNELS), *img_size):
            yield atmosphere.frames(year, first, count)

    return writer.write(read_frames, {"orography": ("m", atmosphere.orography)})


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    parser = year_file_parser("weather.sample_data", __doc__, "1979-1983", "1984", "1985", "60")
    option = parser.add_argument
    option("out", metavar="OUT", nargs="?", default="data/quick", help="folder (default: %(default)s)")
    points = int_in_range(1, 65_536)
    seed = int_in_range(0, 2**31 - 1)
    option("--img_size", type=points, nargs=2, default=(32, 64), metavar=("H", "W"), help="grid points")
    option("--seed", type=seed, default=0)
    options = parser.parse_args(argv)
    make_sample_data(**vars(options))


if __name__ == "__main__":
    run_main(main, resumes=True)
