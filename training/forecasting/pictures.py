"""Pictures: fields on a map, skill by lead time, an ensemble's plume, spread and ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.animation import PillowWriter
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MultipleLocator

from weather.fields.grid import Grid

matplotlib.use("Agg")
FRAMES_PER_SECOND = 4
FIELD = "viridis"  # the colour map of fields
ERROR = "RdBu_r"  # the colour map of their errors, white at zero
Style = dict[str, Any]  # options of imshow
Skill = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]  # {score: {forecast: {channel: value by lead time}}}


def lead_time_figure(
    truth: np.ndarray,
    forecast: np.ndarray,
    leads: Sequence[int],
    grid: Grid,
    title: str,
    units: str,
) -> Figure:
    """Truth, forecast and error of one channel, a row of maps for each lead time.

    truth, forecast: (L, H, W), in physical units. leads: hours, to name the rows, or (). One colour scale for all maps,
    one for all errors.
    """
    figure, rows, _ = _rows_of_maps(truth, forecast, len(truth), grid, title, units)
    for (first, *_), lead in zip(rows, leads, strict=False):
        first.axes.set_ylabel(f"+{lead} h")
    return figure


def animate(
    path: Path,
    truth: np.ndarray,
    forecast: np.ndarray,
    leads: Sequence[int],
    grid: Grid,
    title: Callable[[int], str],
    units: str,
) -> None:
    """Write the maps of lead_time_figure as an animated WebP, a frame for each lead time.

    title: of the lead in hours. (Frames of a GIF have a palette each, and the colour bars would flicker.)
    """
    figure, (images,), heading = _rows_of_maps(truth, forecast, 1, grid, title(leads[0]), units)
    figure.set_dpi(100)
    writer = PillowWriter(fps=FRAMES_PER_SECOND)
    with writer.saving(figure, path, dpi=figure.dpi):
        for lead, true, predicted in zip(leads, truth, forecast, strict=True):
            fields = true, predicted, predicted - true
            for image, field in zip(images, fields, strict=True):
                image.set_data(northern_first(field, grid))
            heading.set_text(title(lead))
            writer.grab_frame()
            # The first frame has arranged the maps, and they must not move afterwards.
            figure.set_layout_engine("none")


def _rows_of_maps(truth, forecast, count, grid, title, units):
    """Maps of the first `count` lead times, the scales of all: the figure, its images by row, its heading."""
    shared, symmetric = colour_scales(truth, forecast - truth)
    figure = Figure(figsize=(13, 0.9 + 2.2 * count), layout="constrained")
    panels = figure.subplots(count, 3, sharex=True, sharey=True, squeeze=False)
    rows = []
    for row, true, predicted in zip(panels, truth[:count], forecast[:count], strict=True):
        truth_axes, forecast_axes, error_axes = row
        images = [
            draw_map(truth_axes, true, grid, shared),
            draw_map(forecast_axes, predicted, grid, shared),
            draw_map(error_axes, predicted - true, grid, symmetric),
        ]
        rows.append(images)
    for axes, name in zip(panels[0], ("truth", "forecast", "error"), strict=True):
        axes.set_title(name)
    # One scale for truth and forecast of all rows, and one for the errors.
    _, forecast_image, error_image = rows[-1]
    figure.colorbar(forecast_image, ax=panels[:, :2], label=units, pad=0.01)
    figure.colorbar(error_image, ax=panels[:, 2], label=units, pad=0.01)
    figure.supxlabel("longitude (degrees east)", fontsize="medium")
    figure.supylabel("latitude (degrees north)", fontsize="medium")
    return figure, rows, figure.suptitle(title)


def skill_figure(
    skill: Skill,
    channels: Sequence[str],
    units: Mapping[str, str],
    leads: Sequence[int],
) -> Figure:
    """RMSE and ACC by lead time, a column for each channel, a curve for each forecast.

    skill: {"rmse" or "acc": {forecast: {channel: values of all lead times}}}. units: {channel: units}. leads: hours.
    """
    figure = Figure(figsize=(3.2 * len(channels), 5.2), layout="constrained")
    panels = figure.subplots(2, len(channels), sharex=True, squeeze=False)
    # Ticks are at whole days, at most about five of them.
    hours_between_ticks = 24 * math.ceil(leads[-1] / 120)
    for row, score in zip(panels, ("rmse", "acc"), strict=True):
        for axes, name in zip(row, channels, strict=True):
            for forecast, values in skill[score].items():
                curve = np.array(values[name], dtype=float)
                axes.plot(leads, curve, marker=".", label=forecast)
            if score == "rmse":
                axes.set(ylabel=f"RMSE ({units[name]})", ylim=(0, None))
            else:
                axes.set(ylabel="ACC", ylim=(None, 1.02))
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_locator(MultipleLocator(hours_between_ticks))
    for axes, name in zip(panels[0], channels, strict=True):
        axes.set_title(name)
    panels[0][0].legend(fontsize="small")
    figure.supxlabel("lead time (hours)", fontsize="medium")
    return figure


def spectra_figure(
    spectra: Mapping[str, Mapping[str, np.ndarray]],
    wavelengths: np.ndarray,
    leads: Sequence[int],
    units: Mapping[str, str],
) -> Figure:
    """Power of truth and model by wavelength, and their ratio, a column for each channel, a curve for each lead time.

    spectra: {channel: {"model" or "truth": (L, K)}}. wavelengths: (K,), km. leads: (L,), hours. units: of each channel.
    """
    figure = Figure(figsize=(3.2 * len(spectra), 5.2), layout="constrained")
    panels = figure.subplots(2, len(spectra), sharex=True, squeeze=False)
    colours = colormaps["plasma"](np.linspace(0, 0.85, len(leads)))
    for (above, below), (name, power) in zip(panels.T, spectra.items(), strict=True):
        model = power["model"]  # (L, K)
        truth = power["truth"]
        # Where the truth has no power the ratio stays NaN, and nothing is drawn.
        not_known = np.full_like(model, np.nan)
        ratio = np.divide(model, truth, out=not_known, where=truth > 0)
        for i, lead in enumerate(leads):
            above.plot(wavelengths, model[i], color=colours[i], label=f"+{lead} h")
            below.plot(wavelengths, ratio[i], color=colours[i])
        above.plot(wavelengths, truth.mean(0), "k--", label="truth")
        below.axhline(1, color="k", linestyle="--")
        above.set(title=name, ylabel=f"power (({units[name]})$^2$ m)", xscale="log", yscale="log")
        below.set(ylabel="model / truth", ylim=(0, 2))
    panels[0][0].invert_xaxis()  # all panels share this axis
    panels[0][0].legend(fontsize="small")
    figure.supxlabel("zonal wavelength (km)", fontsize="medium")
    return figure


def colour_scales(truth: np.ndarray, error: np.ndarray) -> tuple[Style, Style]:
    """Options of imshow for fields, by the truth, and for errors, symmetric about zero."""
    low, high = np.percentile(truth, [0.5, 99.5])
    finite = error[np.isfinite(error)]
    largest = float(np.abs(finite).max(initial=0))
    tiny = float(np.finfo(np.float32).tiny)
    bound = max(largest, tiny)  # a scale of no width cannot be drawn
    of_fields: Style = {"cmap": FIELD, "vmin": low, "vmax": high}
    of_errors: Style = {"cmap": ERROR, "vmin": -bound, "vmax": bound}
    return of_fields, of_errors


def draw_map(axes: Axes, field: np.ndarray, grid: Grid, style: Style) -> AxesImage:
    """A field (H, W) on axes in degrees, with coastlines where there are any; returns the image. style: of imshow."""
    # A point is the middle of a pixel, so the picture reaches half a step beyond the outer points.
    latitude, longitude = grid
    half_lat = abs(latitude[1] - latitude[0]) / 2
    half_lon = (longitude[1] - longitude[0]) / 2
    west = longitude[0] - half_lon
    east = longitude[-1] + half_lon
    south = latitude.min() - half_lat
    north = latitude.max() + half_lat
    extent = west, east, south, north
    rows = northern_first(field, grid)
    image = axes.imshow(rows, extent=extent, aspect="auto", interpolation="nearest", **style)

    # Coastlines run from -180 to 180 degrees, and maps from 0 to 360: twice drawn, they cover both.
    lines = []
    for line in coastlines():
        lines += [line, line + (360, 0)]
    axes.add_collection(LineCollection(lines, colors="black", linewidths=0.5), autolim=False)
    if grid.is_global:
        axes.set(xticks=range(0, 361, 60), yticks=range(-90, 91, 30))
    axes.set(xlim=(west, east), ylim=(south, north))
    return image


def northern_first(field: np.ndarray, grid: Grid) -> np.ndarray:
    """The rows of a field in the order in which imshow draws them."""
    is_northern_first = grid.latitude[0] > grid.latitude[-1]
    return field if is_northern_first else field[::-1]


@cache
def coastlines() -> list[np.ndarray]:
    """Lines of points, (N, 2) in degrees east (-180 to 180) and north; none where cartopy or its data are missing.

    Nothing is downloaded: a compute node may have no way out, and would wait for it.
    """
    with suppress(Exception):  # coastlines are an ornament: whatever is wrong with them, the map is drawn
        from cartopy import config
        from cartopy.io import shapereader

        for folder in (config["pre_existing_data_dir"], config["data_dir"]):
            path = folder / "shapefiles/natural_earth/physical/ne_110m_coastline.shp"
            if path.is_file():
                lines = []
                for shape in shapereader.Reader(path).geometries():
                    parts = getattr(shape, "geoms", [shape])  # a shape of one line has no parts
                    lines += [np.array(line.coords) for line in parts]
                return lines
    return []


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
