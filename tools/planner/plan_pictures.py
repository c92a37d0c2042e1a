"""Pictures of plans: `plan.py --png`."""

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame, Series

from tools.pictures import draw_bars, finish, panels, save, save_curves
from tools.planner.plan import Plan
from tools.planner.plan_text import layout_words
from tools.tables import GIB


def layouts_picture(plans: Sequence[Plan], path: Path | str) -> None:
    """Write the memory of each layout by category as a PNG, and the time of several layouts by part."""
    count, labels = min(2, len(plans)), [layout_words(plan) for plan in plans]
    figure, (memory, *others) = panels(len(plans), count, 6.5 * count)
    sizes = DataFrame([plan.memory | {"overhead": plan.overhead} for plan in plans], labels)
    draw_bars(memory, sizes / GIB)
    needed = [plan.needed / GIB for plan in plans]
    memory.plot(needed, range(len(plans)), "k|", markersize=14, label="needed at once")
    memory.axvline(plans[0].gpu.memory / GIB, color="black", linestyle="--", linewidth=1, label=plans[0].gpu.name)
    finish(memory, title="memory of a rank, each category at its most", xlabel="GiB")
    for axes in others:
        parts = DataFrame([plan.time.parts for plan in plans], labels).fillna(0) * 1e3
        draw_bars(axes, parts.loc[:, parts.any()])
        finish(axes, title="time of a step", xlabel="ms")
    save(figure, path)


def scaling_picture(plans: Sequence[Plan], path: Path | str) -> None:
    """Write samples/s by number of GPUs as a PNG, a curve for each kind of scaling."""
    speeds = {(plan.layout.world_size, plan.curve["scaling"]): plan.samples_per_sec for plan in plans}
    save_curves(Series(speeds).unstack(), path, xlabel="GPUs", ylabel="samples/s, the best layout")
