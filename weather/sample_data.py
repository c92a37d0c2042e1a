"""Make sample data: years of a small idealised atmosphere, in the layout and with the channels of ERA5 files.

    python -m weather.sample_data                                  # data/quick: 7 years of 60 days on 32 x 64
    python -m weather.sample_data data/big --img_size 360 720 --days all

The files are laid out as weather/year_files.py says; the command can be stopped and repeated. The dynamics and their
sources are in weather/atmosphere.py (Rossby et al. 1939; Haurwitz 1940; Williamson et al. 1992). The channels are those
of FourCastNet (Pathak et al. 2022, arXiv:2202.11214), with the names and units of ERA5 (Hersbach et al. 2020, Q. J. R.
Meteorol. Soc. 146, 1999-2049).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.errors import ArgumentParser, UsageError, reported_as_usage_error, run_main
from weather.atmosphere import Atmosphere
from weather.grid import Grid, latitudes, longitudes
from weather.year_files import YearFileWriter, parse_days, parse_years

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
    overwrite: bool = False,
) -> int:
    """Write sample data to the folder `out`, keep what is there already with the same settings, print a line.

    img_size: (H, W). train_years, valid_years, test_years: iterables of int. days: of each year, 0 for all.
    overwrite: replace sample data made with other settings.
    Returns the number of year files written. Raises UsageError for bad settings, a year in two splits, other
    data in `out` or too little disk space, before anything is written; and where `out` cannot be written.
    """
    if seed < 0:
        raise UsageError(f"seed {seed}: must not be negative")
    writer = YearFileWriter(
        out,
        train_years,
        valid_years,
        test_years,
        days,
        grid=Grid(latitudes(img_size[0]), longitudes(img_size[1])),
        settings={"version": VERSION, "img_size": list(img_size), "days": days, "seed": seed},
        title=TITLE,
        attributes={"source": SOURCE, "seed": seed},
        overwrite=overwrite,
    )
    with reported_as_usage_error(ValueError, "sample data"):
        atmosphere = Atmosphere(img_size, seed)
    return writer.make(atmosphere.frames)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for arguments that make no data."""
    summary = __doc__.partition("\n")[0]
    parser = ArgumentParser(prog="python -m weather.sample_data", description=summary)
    option = parser.add_argument
    option("out", metavar="OUT", nargs="?", default="data/quick", help="folder (default: %(default)s)")
    option("--img_size", type=int, nargs=2, default=(32, 64), metavar=("H", "W"), help="grid points")
    option("--train_years", type=parse_years, default="1979-1983", help="such as 1979-1982,1985")
    option("--valid_years", type=parse_years, default="1984")
    option("--test_years", type=parse_years, default="1985")
    option(
        "--days", type=parse_days, default="60", help="of each year, from 1 January, or 'all' (default: %(default)s)"
    )
    option("--seed", type=int, default=0)
    option("--overwrite", action="store_true", help="replace sample data made with other settings")
    make_sample_data(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
