"""The report as JSON and as a page: what was reached beside what is wanted, and what every part found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_report.parts import LADDER, PLANNED, WIDE
from tools.tables import format_table
from utils.files import whole_file, write_json

# What is wanted of a figure of a part: {what: (part, figure, in words, as a condition)}.
GOALS = {
    "MFU, embed 384, batch 16": (LADDER, "MFU", "0.35 or more", lambda x: x >= 0.35),
    "MFU, embed 1024, batch 16": (WIDE, "MFU", "0.5 or more", lambda x: x >= 0.5),
    "fastest step, times fp32": (LADDER, "x fp32", "7 or more", lambda x: x >= 7),
    "planned memory, off by": (PLANNED, "memory off", "0.05 at most", lambda x: abs(x) <= 0.05),
    "planned step time, uncalibrated, off by": (PLANNED, "time off", "0.2 at most", lambda x: abs(x) <= 0.2),
}


def write_report(path: Path, machine: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Write PATH.json and PATH.md, each whole or not at all. machine: {what: value}. parts: results of run_parts."""
    found, goals = {part["part"]: part["figures"] for part in parts}, []
    for what, (part, figure, wanted, condition) in GOALS.items():
        measured = found.get(part, {}).get(figure)
        met = "not measured" if measured is None else "yes" if condition(measured) else "no"
        goals.append({"goal": what, "wanted": wanted, "measured": measured, "met": met})
    write_json(f"{path}.json", {"machine": machine, "goals": goals, "parts": parts})
    with whole_file(Path(f"{path}.md")) as file:
        file.write_text(page(machine, goals, parts))


def page(machine: dict[str, Any], goals: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> str:
    """The page in Markdown."""
    about = ", ".join(f"{what} {value}" for what, value in machine.items())
    rows = [
        (part["part"], part["status"], part["seconds"], part["why"].replace("|", "/") or listed(part["figures"]))
        for part in parts
    ]
    tables = [
        format_table(dict.fromkeys(goals[0], ""), [[*map(shown, goal.values())] for goal in goals]),
        format_table({"part": "", "status": "", "seconds": ".1f", "found": ""}, rows),
    ]
    return "\n\n".join((f"# {machine['name']}", f"Made by `make gpu`: {about}.", *tables)) + "\n"


def listed(figures: dict[str, Any]) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {shown(value)}" for name, value in figures.items())


def shown(value: Any) -> str:
    """A figure with four digits; anything else as it is."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
