"""Tables, CSV and picture of `benchmark.py domain`, from its rows."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from tools import tables
from tools.pictures import COLORS, save
from tools.tables import MIB, print_table

TABLES = {  # title: (figure of a row, factor, format)
    "Latency: ms of a forward pass, or of a training step": ("seconds", 1e3, ".1f"),
    "Speed-up: images/s to those of one device, in the same round": ("speedup", 1, ".2f"),
    "CPU time: ms of a step, mean over the ranks": ("cpu_seconds", 1e3, ".1f"),
    "Memory: MiB at most, on the rank that holds most": ("peak", 1 / MIB, ".1f"),
    "Memory: of one device / of a rank": ("memory_reduction", 1, ".2f"),
    "Activations: MiB kept for the backward pass": ("activations", 1 / MIB, ".1f"),
}


POINT = ["mode", "precision", "batch", "image"]
PLACE = ["mode", "precision", "image", "layout", "devices_of_an_image", "ranks"]


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table of each figure, image sizes x layouts; with several batches, one of throughput."""
    frame = DataFrame([r | {"image": in_points(r["image"])} for r in results], dtype=object)
    frame = frame.sort_values("mode", kind="stable")  # forward, training; else as measured

    def print_wide(title: str, heads: Iterable[str], keys: list[str], name: str, factor: float, spec: str) -> None:
        shown = frame[frame["mode"] == "training"] if name == "activations" else frame
        words = shown.apply(_cell, axis=1, args=(name, factor, spec))
        rows = words.groupby([shown[key] for key in keys], sort=False).agg(list)
        print_table(title, dict.fromkeys(heads, ""), [(*key, *cells) for key, cells in rows.items()])

    for title, figure in TABLES.items():
        print_wide(title, ("", *POINT[1:], *frame["layout"].unique()), POINT, *figure)
    batches = frame["batch"].unique()
    if len(batches) > 1:
        heads = ("", "precision", "image", "layout", "devices of an image", "all", *(f"batch {n}" for n in batches))
        title = "Throughput: images/s of all devices; batch: what those of one image take at a time"
        print_wide(title, heads, PLACE, "images_per_sec", 1, ".2f")


def in_points(image: Sequence[int]) -> str:
    """Size of an image in words: 32 x 64."""
    return " x ".join(map(str, image))


def _cell(row: Series, name: str, factor: float, spec: str) -> str:
    if row["out_of_memory"]:
        return "out of memory"
    return "-" if row[name] is None else format(row[name] * factor, spec)


def write_csv(path: str, figures: dict[str, Any]) -> None:
    """One line for each row, without figures that have several values."""
    results = figures["rows"]
    single = [name for name in results[0] if not name.endswith("_of_rounds")]
    tables.write_csv(path, [r | {"image": in_points(r["image"])} for r in results], single)


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Time and memory over the size of an image: a forward pass above, a training step below."""
    frame = DataFrame(figures["rows"])
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    layouts, styles = (list(frame.groupby(keys, sort=False).groups) for keys in ("layout", ["precision", "batch"]))
    sides = dict(zip(frame["tokens"], frame["image"].map(in_points), strict=True))
    drawn = (("seconds", 1e3, "ms"), ("peak", 1 / MIB, "MiB at most, of a rank"))
    for row, mode in zip(grid, ("forward", "training"), strict=True):
        fit = frame[(frame["mode"] == mode) & ~frame["out_of_memory"]]
        for axes, (name, factor, label) in zip(row, drawn, strict=True):
            for (layout, precision, batch), rows in fit.groupby(["layout", "precision", "batch"], sort=False):
                axes.plot(
                    rows["tokens"], rows[name] * factor, marker="o",
                    label=f"{layout}{f', {precision}, batch {batch}' if len(styles) > 1 else ''}",
                    color=COLORS[layouts.index(layout) % len(COLORS)],
                    linestyle=("-", "--", ":", "-.")[styles.index((precision, batch)) % 4],
                )  # fmt: skip
            axes.set(title=f"{mode}: {'time' if name == 'seconds' else 'memory'}", ylabel=label, yscale="log")
            axes.set_xscale("log")
            axes.set_xticks(list(sides), sides.values(), minor=False)
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("points of an image; where a line ends, memory has run out")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    save(figure, path)
