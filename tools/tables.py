"""Tables of benchmarks."""

import importlib.util
import platform
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from utils.config import read_mappings
from utils.device import device_module

MIB, GIB = 2**20, 2**30
TABLES = "config/benchmarks.yaml"


def machine(device: torch.device) -> dict[str, Any]:
    """Description of the machine that the figures were measured on."""
    gpu = device_module(device, "get_device_name")
    name = gpu.get_device_name(device) if gpu else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def installed(module: str) -> bool:
    """Tell whether this Python has a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # nor the package around it
        return False


def format_table(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[Any]],
) -> str:
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


def format_tables(command: str, *rows: Iterable[Mapping[str, Any]]) -> str:
    """The tables that config/benchmarks.yaml has for a command, with the rows of each, under their titles.

    They are {title: {column: "{name of a value in a row:.2f}"}}; a value that is missing shows as '-'.
    """

    def cell(template: str, row: Mapping[str, Any]) -> str:
        values = [row.get(name) for _, name, _, _ in Formatter().parse(template) if name]
        missing = any(value is None or value != value for value in values)
        return "-" if missing else template.format(**row).replace("|", "/")

    texts = []
    for (title, columns), own in zip(read_mappings(TABLES, "tables")[command].items(), rows, strict=True):
        texts += [title] if title else []
        lines = [[cell(template, row) for template in columns.values()] for row in own]
        texts.append(format_table(dict.fromkeys(columns, ""), lines))
    return "\n\n".join(texts)
