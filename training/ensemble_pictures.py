"""Pictures of an ensemble: a plume at a point, a map of its spread, the ranks of the truth."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from training.pictures import FIELD, draw_map
from weather.grid import Grid


def ensemble_figure(
    members: np.ndarray,
    truth: np.ndarray,
    histogram: Sequence[float],
    leads: Sequence[int],
    grid: Grid,
    title: str,
    units: str,
) -> Figure:
    """Members and truth by lead time where members differ most, their spread at the last lead time, and ranks there.

    members: (L, M, H, W), truth: (L, H, W), in physical units. histogram: share of each rank of the truth, M + 1 of
    them. leads: hours.
    """
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    plume, spread_map, ranks = figure.subplots(1, 3)
    figure.suptitle(title)

    # The map: standard deviation of the members at the end.
    spread = members[-1].std(0, ddof=1)  # (H, W)
    style = {"cmap": FIELD, "vmin": 0.0, "vmax": float(np.percentile(spread, 99.5)) or 1.0}
    image = draw_map(spread_map, spread, grid, style)
    figure.colorbar(image, ax=spread_map, label=units)
    spread_map.set_title(f"spread at +{leads[-1]} h")

    # The plume, at the point where the spread is largest.
    row, column = np.unravel_index(spread.argmax(), spread.shape)
    latitude, longitude = grid
    spread_map.plot(longitude[column], latitude[row], "r+")
    plume.plot(leads, members[:, :, row, column], color="tab:blue", linewidth=0.8)
    plume.plot(leads, members[:, :, row, column].mean(1), color="tab:blue", linewidth=2.5, label="mean of the members")
    plume.plot(leads, truth[:, row, column], "k--", label="truth")
    plume.set(title=f"members at {latitude[row]:.0f} N, {longitude[column]:.0f} E", xlabel="lead time (hours)")
    plume.set_ylabel(units)
    plume.legend(fontsize="small")

    # The ranks: flat where the truth may be any member.
    ranks.bar(range(len(histogram)), histogram)
    ranks.axhline(1 / len(histogram), color="k", linestyle="--")
    ranks.set(title=f"rank of the truth at +{leads[-1]} h, all starts", xlabel="members below it", ylabel="share")
    return figure
