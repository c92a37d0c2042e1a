"""The report of a scaling study: a page, the figures as JSON and CSV, the main figures for a terminal."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from tools.benchmarks.scaling.figures import Figures
from tools.benchmarks.scaling.page import IN_TERMINAL, cells, page
from tools.benchmarks.scaling.runs import FINISHED
from tools.benchmarks.scaling.study import Study
from tools.tables import format_table, write_csv
from utils.files import whole_file, write_json

NOT_IN_CSV = ("rmse", "persistence_rmse", "units", "place")  # one value for each field, or several words


def write_report(figures: Figures, study: Study, out: Path) -> None:
    """Write report.html, report.json and report.csv into the folder `out`."""
    rows = [row.to_json() for row in figures.rows]
    target = vars(figures.target) if figures.target else None
    about = {"study": study.name, "about": study.about, "target": target, "written_on": _software()}
    write_json(out / "report.json", about | {"rows": rows})
    write_csv(out / "report.csv", rows, [name for name in rows[0] if name not in NOT_IN_CSV])
    with whole_file(out / "report.html") as part:
        part.write_text(page(figures, study, _software()), encoding="utf-8")


def text_table(figures: Figures) -> str:
    """The main figures as a Markdown table, then the runs that are missing or oversubscribed."""
    rows = [cells(row, IN_TERMINAL) for row in figures.rows if row.state == FINISHED]
    lines = [format_table(dict.fromkeys(IN_TERMINAL, ""), rows)] if rows else ["no run is finished"]
    if figures.target:
        lines.append(f"\ntarget: {figures.target}")
    for row in figures.rows:
        if row.state != FINISHED:
            lines.append(f"{row.run}: {row.state}: {row.why}")
        elif row.oversubscribed:
            lines.append(f"{row.run}: {row.crowd}")
    return "\n".join(lines)


def _software() -> dict[str, Any]:
    return {
        "python": platform.python_version(), "torch": torch.__version__, "system": sys.platform,
        "machine": platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
