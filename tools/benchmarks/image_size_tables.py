"""Tables, CSV and picture of `benchmark.py domain`, from its rows."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

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


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table of each figure, image sizes x layouts; with several batches, one of throughput."""
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for r in results:
        points.setdefault((r["mode"], r["precision"], r["batch"], in_points(r["image"])), {})[r["layout"]] = r
    points = dict(sorted(points.items(), key=lambda item: item[0][0]))  # forward, training; else as measured
    layouts = list(next(iter(points.values())))
    for title, (name, factor, spec) in TABLES.items():
        rows = [
            (*point, *(_cell(of_layout[layout], name, factor, spec) for layout in layouts))
            for point, of_layout in points.items()
            if name != "activations" or point[0] == "training"
        ]
        print_table(title, dict.fromkeys(("", "precision", "batch", "image", *layouts), ""), rows)
    batches = list(dict.fromkeys(r["batch"] for r in results))
    if len(batches) > 1:
        rows = [
            (mode, precision, image, layout, r["devices_of_an_image"], r["ranks"],
             *(_cell(points[mode, precision, n, image][layout], "images_per_sec", 1, ".2f") for n in batches))
            for (mode, precision, batch, image), of_layout in points.items() if batch == batches[0]
            for layout, r in of_layout.items()
        ]  # fmt: skip
        columns = ("", "precision", "image", "layout", "devices of an image", "all", *(f"batch {n}" for n in batches))
        title = "Throughput: images/s of all devices; batch: what those of one image take at a time"
        print_table(title, dict.fromkeys(columns, ""), rows)


def in_points(image: Sequence[int]) -> str:
    """Size of an image in words: 32 x 64."""
    return " x ".join(map(str, image))


def _cell(row: dict[str, Any], name: str, factor: float, spec: str) -> str:
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
    results = figures["rows"]
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        lines.setdefault((r["layout"], r["precision"], r["batch"]), []).append(r)
    layouts = list(dict.fromkeys(r["layout"] for r in results))
    sides = {r["tokens"]: in_points(r["image"]) for r in results}
    styles = list(dict.fromkeys((r["precision"], r["batch"]) for r in results))
    for row, mode in zip(grid, ("forward", "training"), strict=True):
        for axes, (name, factor, label) in zip(
            row, (("seconds", 1e3, "ms"), ("peak", 1 / MIB, "MiB at most, of a rank")), strict=True
        ):
            for (layout, precision, batch), rows in lines.items():
                fit = [r for r in rows if r["mode"] == mode and not r["out_of_memory"]]
                words = f"{layout}{f', {precision}, batch {batch}' if len(styles) > 1 else ''}"
                axes.plot(
                    [r["tokens"] for r in fit], [r[name] * factor for r in fit], marker="o", label=words,
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
