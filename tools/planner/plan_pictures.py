"""Pictures of plans: `plan.py --png`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from tools.pictures import draw_bars, finish, mark, panels, save
from tools.planner.plan import Plan
from tools.planner.plan_text import GIB, layout_words
from tools.planner.search import Point

COLORS = {
    "parameters": "#4477aa", "gradients": "#66ccee", "optimizer": "#228833", "activations": "#ccbb44",
    "temporaries": "#ee6677", "buffers": "#aa3377", "overhead": "#bbbbbb",
}  # fmt: skip


def layouts_picture(plans: Sequence[Plan], path: Path | str) -> None:
    """Write the memory of each layout by category as a PNG, and the time of several layouts by part."""
    count, labels = min(2, len(plans)), [layout_words(plan) for plan in plans]
    figure, (memory, *others) = panels(len(plans), count, 6.5 * count)
    sizes = DataFrame([plan.memory | {"overhead": plan.overhead} for plan in plans], labels)
    draw_bars(memory, sizes[list(COLORS)] / GIB, list(COLORS.values()))
    mark(memory, [plan.needed / GIB for plan in plans], "needed at once")
    memory.axvline(plans[0].gpu.memory / GIB, color="black", linestyle="--", linewidth=1, label=plans[0].gpu.name)
    finish(memory, title="memory of a rank, each category at its most", xlabel="GiB")
    for axes in others:
        parts = DataFrame([plan.time.parts for plan in plans], labels).fillna(0) * 1e3
        draw_bars(axes, parts.loc[:, parts.any()])
        finish(axes, title="time of a step", xlabel="ms")
    save(figure, path)


def scaling_picture(points: Sequence[Point], path: Path | str) -> None:
    """Write samples/s by number of GPUs as a PNG, a curve for each kind of scaling."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    rows = [(point.scaling, point.plan.layout.world_size, point.plan.samples_per_sec) for point in points]
    curves = DataFrame(rows, columns=["scaling", "GPUs", "speed"]).pivot(index="GPUs", columns="scaling")["speed"]
    curves.plot(ax=axes, marker="o")
    finish(axes, xlabel="GPUs", ylabel="samples/s, the best layout", xscale="log", yscale="log")
    axes.set_xticks(curves.index, map(str, curves.index))
    axes.set_xticks([], minor=True)
    save(figure, path)
