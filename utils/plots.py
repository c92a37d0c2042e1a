"""Pictures of fields on a map."""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")


def forecast_figure(fields, latitude, longitude, name, units):
    """Input, target, prediction and error of one channel, four maps with coordinates and colour bars.

    fields: (input, target, prediction), each (H, W), in physical units. latitude, longitude: degrees, (H,), (W,).
    The first three share one colour scale; the error has its own, symmetric about zero.
    """
    start, target, prediction = (np.asarray(field, dtype=np.float32) for field in fields)
    low, high = np.percentile(target, [0.5, 99.5])
    bound = max(float(np.abs(prediction - target).max()), np.finfo(np.float32).tiny)
    shared = {"cmap": "viridis", "vmin": low, "vmax": high}
    panels = [
        ("input", start, shared),
        ("target", target, shared),
        ("prediction", prediction, shared),
        ("error", prediction - target, {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound}),
    ]
    step_lat, step_lon = abs(latitude[1] - latitude[0]) / 2, (longitude[1] - longitude[0]) / 2
    extent = (
        longitude[0] - step_lon, longitude[-1] + step_lon,
        min(latitude) - step_lat, max(latitude) + step_lat,
    )  # fmt: skip
    figure = Figure(figsize=(11, 6))
    for axes, (title, field, style) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, panels, strict=True):
        rows = field if latitude[0] > latitude[-1] else field[::-1]
        image = axes.imshow(rows, extent=extent, aspect="auto", interpolation="nearest", **style)
        axes.set(title=f"{name} {title}", xticks=range(0, 361, 60), yticks=range(-90, 91, 30))
        axes.set_xlim(extent[:2])
        axes.set_ylim(extent[2:])
        figure.colorbar(image, ax=axes, label=units)
    figure.subplots_adjust(left=0.07, right=0.97, bottom=0.09, top=0.95, wspace=0.08, hspace=0.15)
    figure.supxlabel("longitude (degrees east)", fontsize="medium")
    figure.supylabel("latitude (degrees north)", fontsize="medium")
    return figure
