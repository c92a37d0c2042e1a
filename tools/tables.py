"""Tables of benchmarks."""

import importlib.util
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from utils.device import device_module
from utils.yaml_files import read_mappings

MIB = 2**20
GIB = 2**30
TABLES = "tools/tables.yaml"


def machine(device: torch.device) -> dict[str, Any]:
    """Description of the machine that the figures were measured on."""
    gpu = device_module(device, "get_device_name")
    processor = platform.processor() or platform.machine()  # many systems have no name for their processor
    name = gpu.get_device_name(device) if gpu else processor
    return {
        "device": str(device),
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def installed(module: str) -> bool:
    """Tell whether this Python has a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # nor the package around it
        return False


def format_table(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[Any]],
    words: Collection[str] = (),
) -> str:
    """Lines of a Markdown table. columns: {title: format specification}; rows: a value for each, None shows as '-'.

    words: titles of further columns that hold words, as the first one does.
    """
    cells = [list(columns)]
    for row in rows:
        texts = []
        for value, spec in zip(row, columns.values(), strict=True):
            text = "-" if value is None else format(value, spec)
            texts.append(text)
        cells.append(texts)
    # Markdown aligns a column by the colon in the rule. The first column names the rows, the others hold numbers.
    padded = []
    rule = []
    for place, column in enumerate(zip(*cells, strict=True)):
        width = max(map(len, column))  # of its widest cell
        if place == 0 or column[0] in words:
            padded.append([text.ljust(width) for text in column])
            rule.append("-" * (width + 2))
        else:
            padded.append([text.rjust(width) for text in column])
            rule.append("-" * (width + 1) + ":")
    header, *lines = [f"| {' | '.join(texts)} |" for texts in zip(*padded, strict=True)]
    return "\n".join([header, f"|{'|'.join(rule)}|", *lines])


def format_tables(command: str, *rows: Iterable[Mapping[str, Any]]) -> str:
    """The tables that tools/tables.yaml has for a command, with the rows of each, under their titles.

    They are {title: {column: "{name of a value in a row:.2f}"}}; a value that is missing shows as '-'.
    """
    titles = read_mappings(TABLES, "tables")[command]
    texts = []
    for (title, templates), rows_of_table in zip(titles.items(), rows, strict=True):
        if title:
            texts.append(title)
        lines = []
        for row in rows_of_table:
            lines.append([_cell(template, row) for template in templates.values()])
        # The cells are texts already, so their columns need no format.
        texts.append(format_table(dict.fromkeys(templates, ""), lines))
    return "\n\n".join(texts)


def _cell(template: str, row: Mapping[str, Any]) -> str:
    values = [row.get(name) for _, name, _, _ in Formatter().parse(template) if name]
    is_missing = any(value is None or value != value for value in values)  # NaN is unequal to itself
    if is_missing:
        return "-"
    return template.format(**row).replace("|", "/")  # a bar would end the cell
