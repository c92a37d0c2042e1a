"""Tell weather from what was never written, is in other units, or lies in another order: by the range of each channel.

era5.yaml has the ranges, by quantity and level. They are wide: an atmosphere stays far inside them, and most mistakes
do not (zeros, fill values, heights in place of geopotential, degrees Celsius, levels in reverse).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weather.fields.attributes import widen_by_rounding
from weather.fields.channels import ERA5, QUANTITIES, bare_units, find_conversion, value_range

# Nothing in ERA5's units is as large. NetCDF's default fill value is 9.97e36, that of CMIP 1e20.
FILL_VALUE = 1e15
# Noise of a compression or of a model puts fewer points of a frame outside the range.
TOLERATED_SHARE = 0.1
UNFINISHED = ": was it written to the end?"
# Numbers that stand for "nothing here" in files of others, also where a range holds them.
FILL_NUMBERS = (
    -32768,
    -32767,
    -9999,
    -999.9,
    -999,
    -99.99,
    -99,
    9999,
    99999,
    999999,
)
FILL_SHARE = 0.01  # of the points of a frame, from which on such a number is no coincidence
# Weather is nowhere exactly 0 over so much of the globe, except what may be dry: humidity.
ZERO_SHARE = 0.2
DRY_ZERO_SHARE = 0.5
DRY = ("r", "q")
DRY_LEVEL = 300  # hPa
Key = tuple[str, float | None]  # (quantity, level in hPa): weather.fields.channels.channel_key


@dataclass(frozen=True)
class Problem:
    """The first value that is no weather: its place in the array, and what is wrong, as the end of a sentence."""

    frame: int
    channel: int
    row: int
    column: int
    text: str  # "is NaN", "is 5500, outside 42000 to 67000 m2 s-2: a height in m?"
    others: int = 0  # further channels of the same frame with values out of their range


@dataclass(frozen=True)
class Bounds:
    """What the values of one channel may be, in the units that they are in."""

    key: Key
    units: str
    lowest: float
    highest: float
    least_highest: float  # every frame has somewhere at least this much


class ValueCheck:
    """Checks frames of some channels.

    keys: (quantity, level) of each channel. strict: a single value outside its range is a problem; else only one that
    is outside by more than the range's width, or a tenth of the points of a frame.
    units: of each channel, where they may be others than ERA5's. Without them, or with "", they are ERA5's; channels in
    units that era5.yaml does not know have no range. missing_values: what the file itself writes where it has nothing.
    stated_range: (lowest, highest) value that the file says is no missing one, in any channel.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        strict: bool = False,
        units: Sequence[str] = (),
        missing_values: Sequence[float] = (),
        stated_range: tuple[float, float] = (-np.inf, np.inf),
    ):
        self.strict = strict
        self.stated_range = stated_range
        self.lowest_stated, self.highest_stated = widen_by_rounding(stated_range)
        # No units mean ERA5's.
        stated = units or [""] * len(keys)
        self.bounds = [find_bounds(key, theirs) for key, theirs in zip(keys, stated, strict=True)]
        # The same as arrays (C,), so that a frame without a problem costs two passes over its values.
        self.lowest = np.array([max(bounds.lowest, self.lowest_stated) for bounds in self.bounds])
        self.highest = np.array([min(bounds.highest, self.highest_stated) for bounds in self.bounds])
        self.least_highest = np.array([bounds.least_highest for bounds in self.bounds])
        self.is_known = np.array([quantity in QUANTITIES for quantity, _ in keys])
        self.zero_share = np.array([most_zeros(quantity) for quantity, _ in keys])
        # What stands for nothing: in any channel what the file says, in known ones what others write too.
        self.missing_values = np.array(missing_values, np.float32)
        self.fill_numbers = np.array([*FILL_NUMBERS, *missing_values], np.float32)

    def find(self, frames: np.ndarray) -> Problem | None:
        """The first problem of frames (T, C, H, W), None where there is none."""
        # Rows and columns do not matter for the extremes.
        points = frames.reshape(*frames.shape[:2], -1)
        low = points.min(-1)  # (T, C), NaN where a point is
        high = points.max(-1)

        # Comparisons with NaN are false.
        is_in_range = (low >= self.lowest) & (high <= self.highest)
        is_in_range &= high >= self.least_highest
        is_in_range &= (low > -FILL_VALUE) & (high < FILL_VALUE)
        # A channel that nobody knows may be constant, a whole frame may not.
        is_constant = low == high
        is_constant &= self.is_known | is_constant.all(1, keepdims=True)
        is_suspicious = ~is_in_range | is_constant | self._has_fill_values(points, low, high)

        for frame in np.flatnonzero(is_suspicious.any(1)):
            # A value out of its range says more than one that is the same everywhere.
            channels = np.argsort(is_in_range[frame], stable=True)
            for channel in channels[is_suspicious[frame, channels]]:
                found = self._explain(frames[frame, channel], channel)
                if found is not None:
                    (row, column), text = found
                    out_of_range = int((~is_in_range[frame]).sum())
                    others = max(0, out_of_range - 1)
                    return Problem(int(frame), int(channel), row, column, text, others)
        return None

    def _has_fill_values(
        self,
        points: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> np.ndarray:
        """Whether a channel has many points that are a fill number, or, if it is known, exactly 0: (T, C) bool.

        points: (T, C, N). low, high: their extremes (T, C), one of which a fill number nearly always is.
        """
        zeros = 1 - np.count_nonzero(points, axis=-1) / points.shape[-1]
        is_filled = (zeros > self.zero_share) & self.is_known
        is_candidate = np.isin(low, self.fill_numbers) | np.isin(high, self.fill_numbers)
        is_candidate &= self.is_known
        is_candidate |= len(self.missing_values) > 0  # which may lie anywhere
        for frame, channel in np.argwhere(is_candidate):
            share = self._fill_points(points[frame, channel], channel).mean()
            is_filled[frame, channel] |= share > FILL_SHARE
        return is_filled

    def _fill_points(self, values: np.ndarray, channel: int) -> np.ndarray:
        """Which values of a channel are fill numbers, bool."""
        numbers = self.fill_numbers if self.is_known[channel] else self.missing_values
        return np.isin(values, numbers)

    def _explain(
        self,
        field: np.ndarray,
        channel: int,
    ) -> tuple[tuple[int, int], str] | None:
        """((row, column), text) of the problem of a field (H, W); None where it is within what is tolerated."""
        bounds = self.bounds[channel]
        is_finite = np.isfinite(field)
        if not is_finite.all():
            place = _first(~is_finite)
            value = field[place]
            return place, "is NaN" if np.isnan(value) else f"is {value}"

        is_filled = np.abs(field) >= FILL_VALUE
        if is_filled.any():
            place = _first(is_filled)
            return place, f"is {field[place]:g}, a fill value: was it never written?"

        is_missing = (field < self.lowest_stated) | (field > self.highest_stated)
        if is_missing.any():
            place = _first(is_missing)
            stated = "{:g} to {:g}".format(*self.stated_range)
            hint = "by the valid range of fields it is missing: fill it, or take the attribute off"
            return place, f"is {field[place]:g}, outside {stated}: {hint}"

        is_outside = (field < bounds.lowest) | (field > bounds.highest)
        if is_outside.any() and not self._is_tolerated(field, is_outside, bounds):
            place = _first(is_outside)
            expected = f"{bounds.lowest:g} to {bounds.highest:g} {bounds.units}"
            hint = guess_cause(bounds.key, float(np.median(field)))
            return place, f"is {field[place]:g}, outside {expected}{hint}"

        is_fill = self._fill_points(field, channel)
        if is_fill.mean() > FILL_SHARE:
            place = _first(is_fill)
            share = f"{is_fill.mean():.0%} of this frame"
            return place, f"is {field[place]:g}, as {share} are, which looks like a fill value: was it never written?"
        is_zero = field == 0
        if not is_zero.all() and is_zero.mean() > most_zeros(bounds.key[0]):
            return _first(is_zero), f"is 0, as {is_zero.mean():.0%} of this frame are{UNFINISHED}"

        value = field[0, 0]
        highest = field.max()
        if field.min() == highest:
            hint = UNFINISHED if value == 0 else ": did something fail to write it?"
            return (0, 0), f"is {value:g}, and so is every point of this frame{hint}"
        if highest < bounds.least_highest:
            hint = guess_cause(bounds.key, float(highest))
            return (0, 0), f"is {value:g}, and nowhere above {highest:g} {bounds.units}{hint}"
        return None

    def _is_tolerated(self, field: np.ndarray, is_outside: np.ndarray, bounds: Bounds) -> bool:
        """Tell whether the points outside the range are the noise of a model or of a compression."""
        if self.strict:
            return False
        values = field[is_outside]
        lowest = values.min()
        highest = values.max()
        # Noise never repeats a number, and is never exactly 0: those are fill values.
        is_one_value = len(values) > 1 and lowest == highest
        if is_one_value or (values == 0).any():
            return False
        width = bounds.highest - bounds.lowest
        is_near = lowest >= bounds.lowest - width and highest <= bounds.highest + width
        return bool(is_near and is_outside.mean() < TOLERATED_SHARE)


def most_zeros(quantity: str) -> float:
    """The largest share of zeros that a frame of a quantity may have."""
    if quantity not in QUANTITIES:
        return 1.0
    return DRY_ZERO_SHARE if quantity in DRY else ZERO_SHARE


def find_bounds(key: Key, units: str = "") -> Bounds:
    """The Bounds of a channel in the units that it states; "" are ERA5's. They are infinite where nothing is known."""
    quantity, level = key
    lowest, highest = value_range(quantity, level)
    stated = bare_units(units)
    if quantity not in QUANTITIES:
        return Bounds(key, stated, lowest, highest, -np.inf)

    of_era5 = QUANTITIES[quantity].units
    conversion = find_conversion(stated, of_era5) if stated else (1, 0)
    if conversion is None:
        return Bounds(key, stated, -np.inf, np.inf, -np.inf)
    factor, offset = conversion
    # High up the air is dry, and its relative humidity may be nowhere above it.
    is_dry_level = level is not None and level < DRY_LEVEL
    least = -np.inf if is_dry_level else ERA5["least_highest"].get(quantity, -np.inf)
    bounds = [(value - offset) / factor for value in (lowest, highest, least)]
    return Bounds(key, stated or of_era5, *bounds)


def guess_cause(key: Key, value: float) -> str:
    """What a value outside the range of its channel may be, as the end of a message; '' where nothing fits."""
    quantity, level = key
    if value == 0:
        return UNFINISHED
    if quantity not in QUANTITIES:
        return ""

    lowest, highest = value_range(quantity, level)
    names = {"z": "a height in m", "r": "a fraction"}
    for units, (factor, offset) in ERA5["units"][QUANTITIES[quantity].units].items():
        is_conversion = (factor, offset) != (1, 0)
        converted = factor * value + offset
        if is_conversion and lowest <= converted <= highest:
            return f": {names.get(quantity, f'in {units}')}?"

    for other, (low, high) in ERA5["level_ranges"].get(quantity, {}).items():
        is_other = level is not None and other != level
        if is_other and low <= value <= high:
            return f": of another level, such as {other} hPa?"
    return ""


def _first(is_bad: np.ndarray) -> tuple[int, int]:
    """(row, column) of the first true point of (H, W)."""
    row, column = np.argwhere(is_bad)[0]
    return int(row), int(column)
