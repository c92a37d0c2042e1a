"""Tables of benchmarks."""

import importlib.util
import platform
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from utils.config import read_mappings
from utils.device import library

MIB = 2**20
TABLES = "config/benchmarks.yaml"


def machine(device: torch.device) -> dict[str, Any]:
    """Description of the machine that the figures were measured on."""
    gpu = library(device, "get_device_name")
    name = gpu.get_device_name(device) if gpu else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def installed(module: str) -> bool:
    """Tell whether this Python has a module, without importing it."""
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


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lines of a Markdown table of rows with the same keys, which are its titles; '' without rows."""
    return format_table(dict.fromkeys(rows[0], ""), [[*map(shown, row.values())] for row in rows]) if rows else ""


def shown(value: Any) -> str:
    """A figure with four digits, figures by name one after another, anything else as it is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(figure)}" for name, figure in value.items())
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def cells(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    """The cells of a table as text, '-' where a value is missing. columns: {title: "{name of a value:.2f}"}."""

    def cell(template: str, row: Mapping[str, Any]) -> str:
        values = [row.get(name) for _, name, _, _ in Formatter().parse(template) if name]
        return "-" if any(value is None or value != value for value in values) else template.format(**row)

    return [[cell(template, row) for template in columns.values()] for row in rows]


def print_tables(command: str, *rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the tables that config/benchmarks.yaml has for a command, with the rows of each."""
    for (title, columns), own in zip(read_mappings(TABLES, "tables")[command].items(), rows, strict=True):
        table = format_table(dict.fromkeys(columns, ""), cells(own, columns))
        print(f"{title}\n\n{table}\n" if title else table)
