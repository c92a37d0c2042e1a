"""Pictures of benchmarks and plans: horizontal bars, and how a figure is finished and written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.files import whole_file

matplotlib.use("Agg")

COLORS = ("#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
SHADES = ("#cc6677", "#882255", "#ddaa99", "#441133")
HELD_COLORS = {"parameters": "#4477aa", "gradients": "#66ccee", "optimizer": "#ccbb44", "activations": "#bbbbbb"}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=120)


def panels(labels: Sequence[str], count: int = 1, width: float = 8, row: float = 0.4) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side for horizontal bars: a row for each label, the first one on top."""
    figure = Figure(figsize=(width, 1.8 + row * len(labels)), layout="constrained")
    axes = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    return figure, axes


def stack(axes: Axes, parts: Mapping[str, Sequence[float | None]], colors: Sequence[str | None]) -> None:
    """Bars of several parts, one behind the other. parts: {name: a length for each row}; None is no length."""
    start = [0.0] * len(next(iter(parts.values())))
    for (name, values), color in zip(parts.items(), colors, strict=True):
        lengths = [value or 0 for value in values]
        axes.barh(range(len(lengths)), lengths, left=start, label=name, color=color)
        start = [a + b for a, b in zip(start, lengths, strict=True)]


def mark(axes: Axes, values: Sequence[float], name: str) -> None:
    """A vertical stroke in each row."""
    axes.plot(values, range(len(values)), "k|", markersize=14, label=name)


def finish(axes: Axes, **labels: Any) -> None:
    """Title and axis labels as Axes.set takes them, a legend below the axes, no frame."""
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize="small", frameon=False)


def bars(
    labels: Sequence[str], values: Sequence[float], unit: str, color: Any = COLORS[0], row: float = 0.4, title: str = ""
) -> Figure:
    """A horizontal bar chart with the value at each bar, the first one on top. color: one, or one for each bar."""
    figure, (axes,) = panels(labels, row=row)
    axes.bar_label(axes.barh(range(len(labels)), values, color=color), fmt="%.3g", padding=3)
    axes.margins(x=0.12)
    axes.set(title=title, xlabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
