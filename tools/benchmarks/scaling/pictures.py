"""The pictures of a scaling report, as SVG text."""

import io
import re

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.benchmarks.scaling.figures import Figures, Row
from tools.pictures import COLORS, bars


def pictures(figures: Figures) -> dict[str, str]:
    """{name: SVG} of speed, efficiency, error and cost, where there are figures."""
    timed = [row for row in figures.rows if row.samples_per_sec]
    reached = [row for row in timed if row.device_hours_to_target]
    drawn = {}
    if timed:
        drawn["speed"] = _speed(timed)
        drawn["efficiency"] = _bars(timed, [100 * (row.efficiency or 0) for row in timed], "efficiency, %")
    if figures.target and timed:
        drawn["error"] = _error(figures, timed)
    if reached and figures.target:
        wanted = f"{figures.target.field} = {figures.target.rmse:g}"
        hours = [row.device_hours_to_target or 0 for row in reached]
        drawn["cost"] = _bars(reached, hours, f"device-hours to {wanted}")
    return drawn


def _panels(rows: list[Row]) -> tuple[Figure, list[tuple[Axes, str, list[Row]]]]:
    """A figure, and a panel for each family: (axes, name, rows)."""
    names = dict.fromkeys(row.family for row in rows)
    figure = Figure(figsize=(4.6 * len(names), 3.8), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    return figure, [(a, n, [row for row in rows if row.family == n]) for a, n in zip(axes, names, strict=True)]


def _color(rows: list[Row], layout: str) -> str:
    return COLORS[list(dict.fromkeys(row.layout for row in rows)).index(layout) % len(COLORS)]


def _speed(rows: list[Row]) -> str:
    """Samples/s over ranks, one panel for each family: a line for each layout, and the ideal line."""
    figure, panels = _panels(rows)
    for axes, name, family in panels:
        base = next(row for row in family if row.run == row.relative_to)
        for layout in dict.fromkeys(row.layout for row in family):
            points = {base.ranks: base} | {row.ranks: row for row in family if row.layout == layout}
            line = sorted((ranks, row.samples_per_sec) for ranks, row in points.items())
            axes.plot(*zip(*line, strict=True), "o-", color=_color(rows, layout), label=layout)
        ranks = sorted({row.ranks for row in family})
        ideal = [(base.samples_per_sec or 0) * n / base.ranks for n in ranks]
        axes.plot(ranks, ideal, "--", color="#888888", label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ranks, map(str, ranks))
        axes.set_yticks(ideal, [f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" for speed in ideal])
        axes.set(title=f"{name} ({family[0].scaling} scaling)", xlabel="ranks", ylabel="samples/s of all ranks")
        _finish(axes)
    return _svg(figure)


def _bars(rows: list[Row], values: list[float], unit: str) -> str:
    """A bar for each run."""
    return _svg(bars([row.run for row in rows], values, unit, [_color(rows, row.layout) for row in rows], row=0.26))


def _error(figures: Figures, rows: list[Row]) -> str:
    """RMSE over training time, one panel a family, and the target."""
    assert figures.target
    target, (figure, panels) = figures.target, _panels(rows)
    for axes, name, family in panels:
        for row in family:
            points = figures.histories[row.number].error_over_time(target.field)
            color, label = _color(rows, row.layout), f"{row.layout}-{row.ranks}"
            axes.plot(*zip(*points, strict=True), ".-", color=color, label=label)
        axes.axhline(target.rmse, linestyle="--", color="#888888", label="target")
        unit = (family[0].units or {}).get(target.field, "")
        axes.set(title=name, xlabel="seconds in training steps", ylabel=f"RMSE of {target.field} ({unit})")
        _finish(axes)
    return _svg(figure)


def _finish(axes: Axes) -> None:
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False)


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element; the names inside are unique on a page only by the figure."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
