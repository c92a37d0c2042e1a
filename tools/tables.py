"""Tables, CSV and JSON of benchmarks."""

import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from utils.device import library
from utils.files import whole_file

MIB = 2**20


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = library(device, "get_device_name")
    name = gpu.get_device_name(device) if gpu else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def installed(module: str) -> bool:
    """Whether this Python has a module, which is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # nor the package around it
        return False


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


def print_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table under its title."""
    print(f"{title}\n\n{format_table(columns, rows)}\n")


def spread(values: Sequence[float], spec: str) -> str:
    """The least and the largest of some values, in words."""
    return f"{min(values):{spec}} to {max(values):{spec}}"


def in_mib(size: float | None) -> float | None:
    """Bytes as MiB; None stays None."""
    return None if size is None else size / MIB


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Write a file of CSV, whole or not at all: of each row the values with these names."""
    with whole_file(Path(path)) as part:
        pandas.DataFrame(rows, columns=list(names), dtype=object).to_csv(part, index=False)
