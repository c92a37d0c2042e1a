"""Quantiles of each point's own climate over the training years: thresholds of the events that a Brier score is of.

That a point is warmer than its own 0.9 quantile is equally rare everywhere, where one threshold for a whole map would
ask whether it lies in the tropics (Hamill and Juras 2006, doi:10.1256/qj.06.25).
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.checks.statistics import read_kinds
from weather.years.year_reader import StorePath, open_year

QUANTILES = (0.1, 0.5, 0.9)
FILE = "quantiles.npy"  # beside the other statistics
REMEDY = ": move it away, and make it anew"
MOST_FRAMES = 400  # weather lasts for days: frames in between would say little more
LEAST_FRAMES = 100  # so that ten of them lie beyond the outer quantiles
BAND_BYTES = 256e6  # of all frames, held in memory at a time


def climate_quantiles(paths: Sequence[Path | StorePath]) -> np.ndarray | None:
    """QUANTILES of each point over frames of the year files `paths`: (Q, C, H, W) float32; None for too few frames.

    At most MOST_FRAMES frames are taken, spread evenly over all years, of all seasons and hours alike; at least
    LEAST_FRAMES must be there. Quantiles between two values are interpolated linearly.
    """
    with ExitStack() as stack:
        years = [stack.enter_context(closing(open_year(path))) for path in paths]
        places: list[tuple[int, int]] = []  # (number of the year, frame in it) of every frame
        for number, year in enumerate(years):
            places += [(number, frame) for frame in range(year.shape[0])]
        if len(places) < LEAST_FRAMES:
            return None
        count = min(MOST_FRAMES, len(places))
        chosen = np.linspace(0, len(places) - 1, count).round().astype(int)

        # All frames of a whole image may not fit in memory, so the quantiles come by bands of rows.
        _, channels, height, width = years[0].shape
        row_bytes = 4 * count * channels * width
        band_rows = max(1, int(BAND_BYTES // row_bytes))
        quantiles = np.empty((len(QUANTILES), channels, height, width), np.float32)
        for first in range(0, height, band_rows):
            rows = slice(first, min(height, first + band_rows))
            band = np.empty((count, channels, rows.stop - first, width), np.float32)
            for index, out in zip(chosen, band, strict=True):
                number, frame = places[index]
                years[number].read(frame, out[None], rows, slice(0, width))
            quantiles[:, :, rows] = np.quantile(band, QUANTILES, axis=0)
    return quantiles


def read_quantiles(stds_path: Path | str, channels: int, img_size: Sequence[int]) -> np.ndarray | None:
    """The result of climate_quantiles from its file, of the first channels of an image (H, W); None without a file.

    stds_path: of the statistics, beside which the file lies. Raises UsageError for a file that holds something else.
    """
    path = Path(stds_path).with_name(FILE)
    if not path.exists():
        return None
    quantiles = read_kinds(path, (len(QUANTILES), channels, *img_size), REMEDY)
    # In another order each score would stand under the name of another quantile.
    steps = np.diff(quantiles, axis=0)
    if (steps < 0).any():
        raise UsageError(f"{path}: its quantiles do not grow from one to the next{REMEDY}")
    return quantiles
