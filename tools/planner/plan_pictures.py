"""Pictures of plans: `plan.py --png`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from pandas import DataFrame, Series

from tools.pictures import draw_bars, finish, panels, save, save_curves
from tools.planner.plan import Plan
from tools.planner.plan_text import layout_words
from tools.tables import GIB


def layouts_picture(plans: Sequence[Plan], path: Path | str) -> None:
    """Write the memory of each layout by category as a PNG, and the time of several layouts by part."""
    # Times are compared between layouts, so a single plan has only the panel of memory.
    count = min(2, len(plans))
    figure, (memory_axes, *time_axes) = panels(len(plans), count, 6.5 * count)
    labels = [layout_words(plan) for plan in plans]
    _draw_memory(memory_axes, plans, labels)
    for axes in time_axes:
        _draw_times(axes, plans, labels)
    save(figure, path)


def _draw_memory(axes: Axes, plans: Sequence[Plan], labels: list[str]) -> None:
    # The categories peak at different moments. The mark shows what is needed at once, the dashed line what there is.
    categories = [plan.memory | {"overhead": plan.overhead} for plan in plans]
    sizes = DataFrame(categories, labels) / GIB
    draw_bars(axes, sizes)
    needed = [plan.needed / GIB for plan in plans]
    rows = range(len(plans))
    axes.plot(needed, rows, "k|", markersize=14, label="needed at once")
    gpu = plans[0].gpu
    available = gpu.memory / GIB
    axes.axvline(available, color="black", linestyle="--", linewidth=1, label=gpu.name)
    finish(axes, title="memory of a rank, each category at its most", xlabel="GiB")


def _draw_times(axes: Axes, plans: Sequence[Plan], labels: list[str]) -> None:
    seconds = DataFrame([plan.time.parts for plan in plans], labels)  # (layouts, parts)
    milliseconds = seconds.fillna(0) * 1e3
    # A part that no plan has would only be a name in the legend.
    is_used = milliseconds.any()
    draw_bars(axes, milliseconds.loc[:, is_used])
    finish(axes, title="time of a step", xlabel="ms")


def scaling_picture(plans: Sequence[Plan], path: Path | str) -> None:
    """Write samples/s by number of GPUs as a PNG, a curve for each kind of scaling."""
    speeds = {}
    for plan in plans:
        gpus = plan.layout.world_size
        kind = plan.curve["scaling"]
        speeds[gpus, kind] = plan.samples_per_sec
    # Rows are numbers of GPUs, columns are kinds of scaling.
    curves = Series(speeds).unstack()
    save_curves(curves, path, xlabel="GPUs", ylabel="samples/s, the best layout")
