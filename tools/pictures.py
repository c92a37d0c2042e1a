"""Pictures of benchmarks and plans: horizontal bars, and how a figure is finished and written."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from utils.files import whole_file

matplotlib.use("Agg")  # draws without a display


def save(figure: Figure, path: str | Path, dpi: int = 120, note: str = "") -> None:
    """Write a figure as PNG, whole or not at all. note: text that the file keeps beside the picture."""
    metadata = {"Description": note} if note else None
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=dpi, metadata=metadata)


def panels(
    rows: int,
    count: int = 1,
    width: float = 8,
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side for so many rows of horizontal bars."""
    height = 1.8 + 0.4 * rows  # inches; the labels below the axes need the same room for any number of bars
    figure = Figure(figsize=(width, height), layout="constrained")
    (axes,) = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes)


def draw_bars(axes: Axes, parts: DataFrame) -> None:
    """Horizontal bars, a row for each label of the index, the first one on top; the columns one behind the other."""
    parts.plot.barh(ax=axes, stacked=True, width=0.8)
    # The limits turn the axis around, so that the first row is on top.
    bottom = len(parts) - 0.5
    axes.set(ylabel="", ylim=(bottom, -0.5))


def save_curves(curves: DataFrame, path: Path | str, **labels: Any) -> None:
    """Write a curve for each column, over the index, both axes logarithmic. labels: as Axes.set takes them."""
    figure, (axes,) = panels(8)
    curves.plot(ax=axes, marker="o", loglog=True)
    # The values of the index are the ticks, in place of powers of ten.
    axes.set_xticks(curves.index, map(str, curves.index))
    axes.set_xticks([], minor=True)
    finish(axes, **labels)
    save(figure, path)


def finish(axes: Axes, **labels: Any) -> None:
    """Title and axis labels as Axes.set takes them, a legend below the axes, no frame."""
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),  # in fractions of the axes: centred, below the labels
        ncols=3,
        fontsize="small",
        frameon=False,
    )
