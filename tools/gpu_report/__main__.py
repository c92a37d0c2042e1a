"""A report of all that needs a GPU: tests, training, forecast, benchmarks, plans beside measurements.

    make gpu                                              on this machine's GPUs, in 10 minutes at most
    python -m tools.gpu_report --device cpu --gpu h100    a rehearsal at tiny sizes, without a GPU

Its parts run one after another, the most valuable first, each within a time of its own; whatever becomes of one, the
others follow. The report, NAME.json and NAME.md for GPUs of that name, is written anew after each. Exit status: 0 no
part failed (one that lacks something is skipped), 1 some did, 2 wrong options or no GPU.
"""

import argparse
import math
import platform
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools import tables
from tools.gpu_report.parts import PARTS, Machine
from tools.gpu_report.running import run_parts
from tools.planner.hardware import load_gpu, read_gpus
from utils.config import read_mappings
from utils.device import built_for, driver, select_device
from utils.errors import FAILED_STATUS, ArgumentParser, reported_as_usage_error, run_main
from utils.files import whole_file, write_json

MINUTES = 10  # of all parts
OPTIONAL = ("nvidia.dali", "natten", "matplotlib", "pytest")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report that the words of a command line ask for; returns the exit status."""
    options = parse(argv)
    device = select_device(options.device)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    about, work = description(device, count), options.work.absolute()
    results: list[dict[str, Any]] = []
    path = options.out / re.sub(r"\W+", "-", f"{about['name']} x{count}".lower())
    with reported_as_usage_error(OSError, "--out, --work"):
        options.out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True)  # a new one: data in it are deleted at the end
        write_report(path, about, results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the report ends its part first
    machine = Machine(device.type, count, options.gpu or planner_entry(about["name"]), work)
    try:
        for result in run_parts(list(machine.parts()), work, 60 * MINUTES):
            results.append(result)
            write_report(path, about, results)
            print(f"{result['status']:<12} {result['seconds']:6.1f} s  {result['part']}  {result['why']}", flush=True)
    finally:
        shutil.rmtree(work / "data", ignore_errors=True)
    print(f"{path}.md; output of the parts: {options.work}")
    return 0 if {result["status"] for result in results} <= {"passed", "skipped"} else FAILED_STATUS


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options. Raises UsageError for options that cannot be used."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option, work = parser.add_argument, f"logs/gpu_report/{time.strftime('%Y%m%d-%H%M%S')}"
    option("--out", type=Path, default="docs/results", metavar="FOLDER", help="of the report (%(default)s)")
    option("--work", type=Path, default=work, metavar="FOLDER", help="a new one, for runs and output (%(default)s)")
    option("--gpu", metavar="NAME", help="GPU of config/hardware.yaml to plan for (that of the device's name)")
    option("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal (%(default)s)")
    options = parser.parse_args(argv)
    if options.gpu:
        load_gpu(options.gpu)
    return options


def description(device: torch.device, count: int) -> dict[str, Any]:
    """What the figures are of: the machine, and what is installed."""
    absent = [name for name in OPTIONAL if not tables.installed(name)] + ([] if shutil.which("nsys") else ["nsys"])
    today = time.strftime("%Y-%m-%d")
    return tables.machine(device) | {
        "devices": count, "driver": " ".join(driver() or ["unknown"]), "built for": built_for(),
        "python": platform.python_version(), "date": today, "not installed": " ".join(absent) or "-",
    }  # fmt: skip


def planner_entry(name: str) -> str:
    """The entry of config/hardware.yaml for a GPU of this name; '' where there is none."""
    fitting = [entry for entry in read_gpus() if all(word in name.lower() for word in entry.split("-"))]
    return max(fitting, key=len, default="")


def write_report(path: Path, machine: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Write PATH.json and PATH.md, each whole or not at all. machine: {what: value}. parts: results of run_parts."""
    found, goals = {part["part"]: part["figures"] for part in parts}, []
    for name, part in read_mappings(PARTS, "parts")["parts"].items():
        for what, goal in part.get("goals", {}).items():
            measured = found.get(name, {}).get(goal["figure"])
            least, most = goal.get("least", -math.inf), goal.get("most", math.inf)
            met = "not measured" if measured is None else "yes" if least <= measured <= most else "no"
            goals.append({"goal": what, "wanted": goal["wanted"], "measured": measured, "met": met})
    write_json(f"{path}.json", {"machine": machine, "goals": goals, "parts": parts})

    rows = []
    for part in parts:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in part["figures"].items())
        rows.append((part["part"], part["status"], part["seconds"], part["why"].replace("|", "/") or figures))
    about = ", ".join(f"{what} {value}" for what, value in machine.items())
    sections = [
        f"# {machine['name']}",
        f"Made by `make gpu`: {about}.",
        tables.format_table(dict.fromkeys(goals[0], ""), [[*map(shown, goal.values())] for goal in goals]),
        tables.format_table({"part": "", "status": "", "seconds": ".1f", "found": ""}, rows),
    ]
    with whole_file(Path(f"{path}.md")) as file:
        file.write_text("\n\n".join(sections) + "\n")


def shown(value: Any) -> str:
    """A figure with four digits; anything else as it is."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_main(main)
