"""Pictures of an ensemble: a plume at a point, a map of its spread, the ranks of the truth."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from training.forecasting.pictures import FIELD, draw_map
from weather.fields.grid import Grid


def ensemble_figure(
    members: np.ndarray,
    truth: np.ndarray,
    point: tuple[int, int],
    spread: np.ndarray,
    histogram: Sequence[float],
    leads: Sequence[int],
    grid: Grid,
    title: str,
    units: str,
) -> Figure:
    """Members and truth by lead time at a point, the spread of members at the last lead time, and ranks there.

    members: (L, M), truth: (L,), at a row and column. spread: (H, W). All are in physical units. histogram: share of
    each rank of the truth, M + 1 of them. leads: hours.
    """
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    plume, spread_map, ranks = figure.subplots(1, 3)
    figure.suptitle(title)
    row, column = point
    latitude, longitude = grid

    # The map: standard deviation of the members at the end.
    style = {"cmap": FIELD, "vmin": 0.0, "vmax": float(np.percentile(spread, 99.5)) or 1.0}
    image = draw_map(spread_map, spread, grid, style)
    figure.colorbar(image, ax=spread_map, label=units)
    spread_map.set_title(f"spread at +{leads[-1]} h")
    spread_map.plot(longitude[column], latitude[row], "r+")

    # The plume: every member is a line.
    plume.plot(leads, members, color="tab:blue", linewidth=0.8)
    plume.plot(leads, members.mean(1), color="tab:blue", linewidth=2.5, label="mean of the members")
    plume.plot(leads, truth, "k--", label="truth")
    plume.set(title=f"members at {latitude[row]:.0f} N, {longitude[column]:.0f} E", xlabel="lead time (hours)")
    plume.set_ylabel(units)
    plume.legend(fontsize="small")

    # The ranks: flat where the truth may be any member.
    ranks.bar(range(len(histogram)), histogram)
    ranks.axhline(1 / len(histogram), color="k", linestyle="--")
    ranks.set(title=f"rank of the truth at +{leads[-1]} h, all starts", xlabel="members below it", ylabel="share")
    return figure


def blur_figure(
    curves: Mapping[str, Mapping[str, np.ndarray]],
    wavelengths: np.ndarray,
    lead: int,
    units: Mapping[str, str],
) -> Figure:
    """Power by wavelength of several forecasts side by side, a column for each channel, and below relative to truth.

    curves: {channel: {name: (K,)}}, the first one is of truth. wavelengths: (K,), km. lead: hours.
    """
    figure = Figure(figsize=(3.2 * len(curves), 5.2), layout="constrained")
    panels = figure.subplots(2, len(curves), sharex=True, squeeze=False)
    for (above, below), (channel, powers) in zip(panels.T, curves.items(), strict=True):
        truth = next(iter(powers.values()))
        for name, power in powers.items():
            style = "k--" if power is truth else "-"
            above.plot(wavelengths, power, style, label=name)
            # Where the truth has no power the ratio stays NaN, and nothing is drawn.
            not_known = np.full_like(power, np.nan)
            ratio = np.divide(power, truth, out=not_known, where=truth > 0)
            below.plot(wavelengths, ratio, style)
        above.set(
            title=f"{channel} at +{lead} h", ylabel=f"power (({units[channel]})$^2$ m)", xscale="log", yscale="log"
        )
        below.set(ylabel="relative to truth", ylim=(0, 2))
    panels[0][0].invert_xaxis()  # all panels share this axis
    panels[0][0].legend(fontsize="small")
    figure.supxlabel("zonal wavelength (km)", fontsize="medium")
    return figure
