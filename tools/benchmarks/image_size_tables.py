"""Tables and picture of `benchmark.py domain`, from its rows."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from tools.pictures import COLORS, save
from tools.tables import MIB, cells, format_table

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
    for title, (name, factor, spec) in TABLES.items():
        shown = frame[frame["mode"] == "training"] if name == "activations" else frame
        _print_wide(title, shown, ["", *POINT[1:]], POINT, "layout", name, factor, spec)
    if frame["batch"].nunique() > 1:
        heads = ["", "precision", "image", "layout", "devices of an image", "all"]
        title = "Throughput: images/s of all devices; batch: what those of one image take at a time"
        batches = frame.assign(batch=[f"batch {n}" for n in frame["batch"]])
        _print_wide(title, batches, heads, PLACE, "batch", "images_per_sec", 1, ".2f")


def _print_wide(title, frame, heads, keys, across, name, factor, spec):
    """A table with a row for each value of `keys`, and a column for each value of `across`."""
    values = [row | {name: row[name] and row[name] * factor} for row in frame.to_dict("records")]
    words = [word for (word,) in cells(values, {name: f"{{{name}:{spec}}}"})]
    words = ["out of memory" if out else word for word, out in zip(words, frame["out_of_memory"], strict=True)]
    rows = frame.assign(words=words).groupby(keys, sort=False)["words"].agg(list)
    columns = dict.fromkeys([*heads, *frame[across].unique()], "")
    print(f"{title}\n\n{format_table(columns, [(*key, *row) for key, row in rows.items()])}\n")


def in_points(image: Sequence[int]) -> str:
    """Size of an image in words: 32 x 64."""
    return " x ".join(map(str, image))


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
