"""Tables, JSON and pictures of benchmarks."""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from utils.files import whole_file

matplotlib.use("Agg")


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def format_table(columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of a Markdown table. columns: {title: format specification}; rows: a value for each, None shows as '-'."""
    cells = [
        ["-" if value is None else format(value, spec) for value, spec in zip(row, columns.values(), strict=True)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    align = ["<" if i == 0 else ">" for i in range(len(columns))]

    def line(words: Any) -> str:
        return "| " + " | ".join(f"{w:{a}{n}}" for w, a, n in zip(words, align, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (n + 1) + ("-" if a == "<" else ":") for a, n in zip(align, widths, strict=True)) + "|"
    return "\n".join([line(columns), rule, *map(line, cells)])


def write_json(path: str | Path, result: Any) -> None:
    """Write a file of JSON, whole or not at all."""
    with whole_file(Path(path)) as part:
        part.write_text(json.dumps(result, indent=1) + "\n")


def write_bars(path: str | Path, title: str, labels: Sequence[str], values: Sequence[float], unit: str) -> None:
    """A horizontal bar chart, first label on top."""
    figure = Figure(figsize=(8, 0.8 + 0.4 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(labels)), values, color="#4477aa")
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=120)
