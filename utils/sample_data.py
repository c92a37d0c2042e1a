"""Make sample data: years of a small idealised atmosphere, in the layout and with the channels of ERA5 files.

    python -m utils.sample_data                                  # data/quick: 7 years of 60 days on 32 x 64
    python -m utils.sample_data data/big --img_size 360 720 --days all

    OUT/{train,valid,test}/YYYY.h5   fields [time, channel, lat, lon] float32, 6-hourly from 1 January 00 UTC
    OUT/stats/global_means.npy       (1, 20, 1, 1) float32, of the training years only; so global_stds.npy
    OUT/stats/time_means.npy         (1, 20, H, W) float32, the climatology of the training years

A file appears under its name when it is whole, so the command can be stopped and repeated. The dynamics and
their sources are in utils/atmosphere.py (Rossby et al. 1939; Haurwitz 1940; Williamson et al. 1992). The
channels are those of FourCastNet (Pathak et al. 2022, arXiv:2202.11214), with the names and units of ERA5
(Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049).
"""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from utils.atmosphere import Atmosphere, latitudes, longitudes, year_frames
from utils.channels import CHANNELS
from utils.errors import ArgumentParser, UsageError, run_main
from utils.files import whole_file

SPLITS = ("train", "valid", "test")
STATS = ("global_means", "global_stds", "time_means")
VERSION = 1  # of the atmosphere; another version makes other data
CHUNK_BYTES = 64e6  # held in memory at a time
SOURCE = (
    "Random Rossby-Haurwitz waves (Haurwitz 1940, J. Marine Res. 3, 254-267; Williamson et al. 1992, "
    "J. Comput. Phys. 102, 211-224) on the channels of FourCastNet (Pathak et al. 2022, arXiv:2202.11214) "
    "as in ERA5 (Hersbach et al. 2020, Q. J. R. Meteorol. Soc. 146, 1999-2049). Not observations."
)


def parse_years(text):
    """The years of '1979', '1979-1982' or '1979,1981-1983' as a tuple of ints. Raises UsageError."""
    years = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{4})(-(\d{4}))?", part.strip())
        if not match:
            raise UsageError(f"years '{text}': write 1979, 1979-1982 or 1979,1981-1983")
        first, last = int(match[1]), int(match[3] or match[1])
        if first > last:
            raise UsageError(f"years '{text}': {first} is after {last}")
        years += range(first, last + 1)
    return tuple(years)


def make_sample_data(
    out,
    img_size=(32, 64),
    train_years=range(1979, 1984),
    valid_years=(1984,),
    test_years=(1985,),
    days=60,
    seed=0,
    overwrite=False,
):
    """Write sample data to the folder `out`, keep what is there already with the same settings, print a line.

    img_size: (H, W). train_years, valid_years, test_years: iterables of int. days: of each year, 0 for all.
    overwrite: replace sample data made with other settings.
    Returns the number of year files written. Raises UsageError for bad settings, a year in two splits, other
    data in `out` or too little disk space, before anything is written; and where `out` cannot be written.
    """
    out, years = Path(out), {}
    for split, values in zip(SPLITS, (train_years, valid_years, test_years), strict=True):
        for year in values:
            _check_year(year, split, years)
            years[year] = split
    if "train" not in years.values():
        raise UsageError("no training year")
    if not 0 <= days <= 365:
        raise UsageError(f"days {days}: give 1 to 365, or 0 for whole calendar years")
    if seed < 0:
        raise UsageError(f"seed {seed}: must not be negative")
    settings = {"version": VERSION, "img_size": list(img_size), "days": days, "seed": seed}
    frames = {out / split / f"{year:04d}.h5": 4 * days or year_frames(year) for year, split in years.items()}
    try:
        return _make(out, frames, settings, overwrite)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error


def _check_year(year, split, years):
    if not 1 <= year <= 9999:
        raise UsageError(f"year {year}: must be 1 to 9999")
    if year in years:
        where = f"twice in {split}" if years[year] == split else f"in both {years[year]} and {split}"
        raise UsageError(f"year {year} is {where}: each year belongs to one split, else the test leaks")


def _make(out, frames, settings, overwrite):
    """Make the missing ones of `frames` ({path: number of frames}) and the statistics; returns how many."""
    stale = _stale_files(out, frames, settings, overwrite)
    missing = [path for path in frames if path in stale or not path.exists()]
    total = sum(frames[path] for path in missing)
    _check_space(out, total, settings["img_size"])
    try:
        atmosphere = Atmosphere(settings["img_size"], settings["seed"])
    except ValueError as error:
        raise UsageError(str(error)) from None

    stats = [out / "stats" / f"{name}.npy" for name in STATS]
    if len(missing) == len(frames) and not stale and any(path.exists() for path in stats):
        raise UsageError(f"{out / 'stats'} holds statistics of other data: choose another folder")
    if any(path.parent.name == "train" for path in [*missing, *stale]):
        for path in stats:
            path.unlink(missing_ok=True)  # from here on they would describe other training years
    for path in stale:
        path.unlink()
    with tqdm(total=total, unit="frame", disable=None) as progress:
        for path in missing:
            with whole_file(path) as part:
                _write_year(part, int(path.stem), frames[path], atmosphere, settings, progress)
    described = all(path.exists() for path in stats)
    if not described:
        train = [path for path in frames if path.parent.name == "train"]
        for path, value in zip(stats, training_statistics(train), strict=True):
            with whole_file(path) as part, open(part, "wb") as file:
                np.save(file, value)

    size = sum(path.stat().st_size for path in [*frames, *stats])
    news = "complete, nothing to do" if described and not missing else f"{len(missing)} made"
    print(f"{out}: {len(frames)} files ({news}), {sum(frames.values())} frames, {size / 1e6:.1f} MB")
    return len(missing)


def _stale_files(out, frames, settings, overwrite):
    """Year files there that these settings would not make. Raises UsageError unless they may be replaced."""
    stale = []
    for path in sorted(path for split in SPLITS for path in (out / split).glob("*.h5")):
        found = _read_settings(path)
        if path in frames and found == settings:
            continue
        if found is None:
            raise UsageError(f"{path} is not sample data and is left alone: choose another folder")
        if not overwrite:
            why = "was made with other settings" if path in frames else "is not a year of this split"
            raise UsageError(f"{path} {why}: choose another folder, or replace it with --overwrite")
        stale.append(path)
    return stale


def _read_settings(path):
    """The settings a file was made with, or None where it is not sample data."""
    try:
        with h5py.File(path) as file:
            return json.loads(file.attrs["settings"])
    except (OSError, KeyError, ValueError, TypeError):
        return None


def _check_space(out, frames, img_size):
    """Raises UsageError where the disk of the folder `out` does not hold so many more frames."""
    folder = next(parent for parent in [out, *out.absolute().parents] if parent.exists())
    need, free = 4 * (frames + 1) * len(CHANNELS) * img_size[0] * img_size[1], shutil.disk_usage(folder).free
    if need > free:
        raise UsageError(f"{out}: needs {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")


def _write_year(path, year, frames, atmosphere, settings, progress):
    height, width = atmosphere.img_size
    start = datetime(year, 1, 1, tzinfo=UTC).timestamp() / 3600
    with h5py.File(path, "w") as file:
        scales = {
            "time": (start + 6 * np.arange(frames), {"units": "hours since 1970-01-01"}),
            "channel": ([channel.name for channel in CHANNELS], {}),
            "latitude": (latitudes(height), {"units": "degrees_north"}),
            "longitude": (longitudes(width), {"units": "degrees_east"}),
        }
        fields = file.create_dataset("fields", (frames, len(CHANNELS), height, width), "f4")
        for axis, (name, (values, attributes)) in enumerate(scales.items()):
            file[name] = values
            file[name].attrs.update(attributes)
            file[name].make_scale(name)
            fields.dims[axis].attach_scale(file[name])
        file["channel_units"] = [channel.units for channel in CHANNELS]
        file["channel_units"].dims[0].attach_scale(file["channel"])
        file.attrs.update(title="Sample data: idealised atmosphere", source=SOURCE, seed=settings["seed"])
        file.attrs["settings"] = json.dumps(settings)
        for first, count in _chunks(fields):
            fields[first : first + count] = atmosphere.frames(year, first, count)
            progress.update(count)


def _chunks(fields):
    """(first frame, number of frames) of parts of a dataset that fit in memory."""
    step = max(1, int(CHUNK_BYTES // (fields.nbytes / len(fields))))
    return [(first, min(step, len(fields) - first)) for first in range(0, len(fields), step)]


def training_statistics(paths):
    """Statistics of the year files `paths`, in one pass, added up in float64.

    Returns float32 global_means and global_stds, each (1, C, 1, 1), and time_means (1, C, H, W).
    """
    total = squares = count = 0
    for path in paths:
        with h5py.File(path) as file:
            for first, step in _chunks(file["fields"]):
                x = file["fields"][first : first + step].astype(np.float64)
                total, squares, count = total + x.sum(0), squares + np.square(x).sum((0, 2, 3)), count + step
    time_means = total / count  # (C, H, W)
    means = time_means.mean((1, 2))
    variances = squares / (count * time_means[0].size) - means**2
    arrays = means[None, :, None, None], np.sqrt(variances)[None, :, None, None], time_means[None]
    return [array.astype(np.float32) for array in arrays]


def main(argv=None):
    """Command line; raises UsageError for arguments that make no data."""
    summary = __doc__.partition("\n")[0]
    parser = ArgumentParser(prog="python -m utils.sample_data", description=summary)
    option = parser.add_argument
    option("out", metavar="OUT", nargs="?", default="data/quick", help="folder (default: %(default)s)")
    option("--img_size", type=int, nargs=2, default=(32, 64), metavar=("H", "W"), help="grid points")
    option("--train_years", default="1979-1983", help="1979, 1979-1982 or 1979,1981-1983")
    option("--valid_years", default="1984")
    option("--test_years", default="1985")
    option("--days", default="60", help="of each year, from 1 January, or 'all' (default: %(default)s)")
    option("--seed", type=int, default=0)
    option("--overwrite", action="store_true", help="replace sample data made with other settings")
    args = vars(parser.parse_args(argv))
    for name in ("train_years", "valid_years", "test_years"):
        args[name] = parse_years(args[name])
    if args["days"] != "all" and not args["days"].isdigit():
        raise UsageError(f"days '{args['days']}': give a number, or 'all' for whole calendar years")
    args["days"] = 0 if args["days"] == "all" else int(args["days"])
    make_sample_data(**args)


if __name__ == "__main__":
    run_main(main)
