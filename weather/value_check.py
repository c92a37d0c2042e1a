"""Tell weather from what was never written, is in other units, or lies in another order: by the range of each channel.

era5.yaml has the ranges, by quantity and level. They are wide: an atmosphere stays far inside them, and most mistakes
do not (zeros, fill values, heights in place of geopotential, degrees Celsius, levels in reverse).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weather.channels import ERA5, QUANTITIES, value_range

FILL_VALUE = 1e15  # nothing in ERA5's units is as large; NetCDF's default fill value is 9.97e36, CMIP's 1e20
TOLERATED_SHARE = 0.1  # of the points of a frame outside the range: noise of compression or of a model
Key = tuple[str, float | None]  # (quantity, level in hPa): weather.channels.channel_key


@dataclass(frozen=True)
class Problem:
    """The first value that is no weather: its place in the array, and what is wrong, as the end of a sentence."""

    frame: int
    channel: int
    row: int
    column: int
    text: str  # "is NaN", "is 5500, outside 42000 to 67000 m2 s-2: a height in m?"


class ValueCheck:
    """Checks frames of some channels.

    keys: (quantity, level) of each channel. strict: a single value outside its range is a problem; else only one that
    is outside by more than the range's width, or a tenth of the points of a frame.
    """

    def __init__(self, keys: Sequence[Key], strict: bool = False):
        self.keys, self.strict = keys, strict
        ranges = np.array([value_range(*key) for key in keys], np.float64)
        self.lowest, self.highest = ranges.T  # (C,)
        self.least_highest = np.array([ERA5["least_highest"].get(quantity, -np.inf) for quantity, _ in keys])
        self.known = np.array([quantity in QUANTITIES for quantity, _ in keys])

    def find(self, frames: np.ndarray) -> Problem | None:
        """The first problem of frames (T, C, H, W), None where there is none."""
        points = frames.reshape(*frames.shape[:2], -1)
        low, high = points.min(-1), points.max(-1)  # (T, C), NaN where a point is
        sound = (low >= self.lowest) & (high <= self.highest) & (high >= self.least_highest)
        sound &= (low > -FILL_VALUE) & (high < FILL_VALUE)  # false for NaN
        constant = low == high
        suspicious = ~sound | (constant & (self.known | constant.all(1, keepdims=True)))
        for frame in np.flatnonzero(suspicious.any(1)):
            # A value out of its range says more than one that is the same everywhere.
            channels = np.argsort(sound[frame], stable=True)
            for channel in channels[suspicious[frame, channels]]:
                found = self._explain(frames[frame, channel], channel)
                if found is not None:
                    (row, column), text = found
                    return Problem(int(frame), int(channel), int(row), int(column), text)
        return None

    def _explain(self, field: np.ndarray, channel: int) -> tuple[np.ndarray, str] | None:
        """((row, column), text) of the problem of a field (H, W); None where it is within what is tolerated."""
        lowest, highest = self.lowest[channel], self.highest[channel]
        quantity, level = self.keys[channel]
        units = QUANTITIES[quantity].units if quantity in QUANTITIES else ""

        not_finite = ~np.isfinite(field)
        if not_finite.any():
            place = np.argwhere(not_finite)[0]
            value = field[tuple(place)]
            return place, "is NaN" if np.isnan(value) else f"is {value}"

        filled = np.abs(field) >= FILL_VALUE
        if filled.any():
            place = np.argwhere(filled)[0]
            return place, f"is {field[tuple(place)]:g}, a fill value: was it never written?"

        outside = (field < lowest) | (field > highest)
        if outside.any() and not self._is_tolerated(field, outside, channel):
            place = np.argwhere(outside)[0]
            value = field[tuple(place)]
            hint = looks_like(quantity, level, float(np.median(field)))
            return place, f"is {value:g}, outside {lowest:g} to {highest:g} {units}{hint}"

        first = np.zeros(2, int)
        if field.min() == field.max():
            hint = ": was it written to the end?" if field[0, 0] == 0 else ": did something fail to write it?"
            return first, f"is {field[0, 0]:g}, and so is every point of this frame{hint}"
        if field.max() < self.least_highest[channel]:
            hint = looks_like(quantity, level, float(field.max()))
            return first, f"is {field[0, 0]:g}, and nowhere above {field.max():g} {units}{hint}"
        return None

    def _is_tolerated(self, field: np.ndarray, outside: np.ndarray, channel: int) -> bool:
        if self.strict:
            return False
        lowest, highest = self.lowest[channel], self.highest[channel]
        width = highest - lowest
        is_near = field.min() >= lowest - width and field.max() <= highest + width
        return bool(is_near and outside.mean() < TOLERATED_SHARE)


def looks_like(quantity: str, level: float | None, value: float) -> str:
    """A guess at what a value outside the range of a quantity is, as the end of a message; '' where there is none."""
    if value == 0:
        return ": was it written to the end?"
    if quantity not in QUANTITIES:
        return ""
    lowest, highest = value_range(quantity, level)
    for units, (factor, offset) in ERA5["units"][QUANTITIES[quantity].units].items():
        is_other = (factor, offset) != (1, 0)
        if is_other and lowest <= factor * value + offset <= highest:
            what = {"z": "a height in m", "r": "a fraction"}.get(quantity, f"in {units}")
            return f": {what}?"
    for other, (low, high) in ERA5["level_ranges"].get(quantity, {}).items():
        if level is not None and other != level and low <= value <= high:
            return f": of another level, such as {other} hPa?"
    return ""
