"""A report of all that needs a GPU: training, forecast, tests, benchmarks, and plans beside what was measured.

    make gpu                                              on this machine's GPUs, in 15 minutes at most
    make gpu ARGS="--seconds 1800"                        on a node whose files are read for the first time
    python -m tools.gpu_report --device cpu --gpu h100    a rehearsal at tiny sizes, without a GPU
    python -m tools.gpu_report --plan h100 a100-80gb      the plans of its training runs alone

The commands of tools/gpu_report.yaml run one after another, each within a limit; whatever becomes of one, the others
follow. The report, a Markdown file named after the GPUs, is written anew after each. Exit status: 0 no command failed
(some may not have been reached), 1 some did, 2 wrong options or no GPU.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.commands import started
from tools.planner.compare import planned_figures, read_figures
from tools.planner.hardware import Gpu, gpu_called, load_gpu
from tools.planner.search import Request
from tools.tables import GIB, format_tables, machine
from training.run.loggers import FILE_NAME, read_metrics
from utils.device import driver, select_device
from utils.errors import FAILED_STATUS, STOPPED_STATUS, ArgumentParser, first_line, int_in_range, run_main
from utils.files import read_json, whole_file
from utils.yaml_files import ROOT, read_mappings

COMMANDS = "tools/gpu_report.yaml"
SECONDS = 900  # of all commands
LONGEST = 360  # of one command
PASSED = "passed"
OUT_OF_TIME = "out of time"  # its own
NOT_REACHED = "not reached"  # since the time of all commands was over
NOT_FINISHED = "not finished"  # likewise
GRACE_SECONDS = 40  # for a command to end that was asked to; torchrun kills its ranks after 30
POLL_SECONDS = 0.1
STOPPED = "quick/stopped"  # a training that is ended when it says SAVED
SAVED = "Saved checkpoint"
PRINTED = ("preflight", "ladder", "loaders")  # commands whose output is part of the report


def commands(device: str, count: int) -> dict[str, str]:
    """{name: command} for so many GPUs, or for two ranks on the CPU."""
    table = read_mappings(COMMANDS, "commands")
    python = shlex.quote(sys.executable)
    own = {
        "python": python,
        "torchrun": f"{python} -m torch.distributed.run --standalone",
        "count": count,
    }
    # The words of a device may stand in those of any, and both in the commands.
    words = own | table[device]
    words |= {name: text.format(**words) for name, text in table["any"].items()}
    made = {}
    for name, text in table["commands"].items():
        needs_two = "{two}" in text
        if count > 1 or not needs_two:
            made[name] = text.format(**words)
    return made


def planned(name: str, command: str, gpu: Gpu) -> dict[str, Any]:
    """A row with the planned figures of a command that trains; of any other its name alone."""
    trained = training(command)
    if not trained:
        return {"command": name}
    words, ranks = trained
    try:
        plan = planned_figures(Request(words, gpu).plan(ranks))
    except Exception as error:  # of one run: the others have theirs
        return {"command": name, "said": f"not planned: {type(error).__name__}: {first_line(error)}"}
    return {
        "command": name,
        "on": f"{ranks} x {gpu.name}",
        "planned_gib": plan["peak_allocated_bytes"] / GIB,
        "planned_step_s": plan["step_time_s"],
        "planned_calls": plan["calls"],
    }


def training(command: str) -> tuple[list[str], int] | None:
    """(options, ranks) of a command that trains; None for any other."""
    match = re.search(r"(?:nproc_per_node=(\d+) )?-m train\w* (.*)", command)
    if match is None:
        return None
    ranks, words = match.groups()
    return words.split(), int(ranks or 1)


def run_command(
    name: str,
    command: str,
    work: Path,
    seconds: float,
) -> tuple[str, str]:
    """Run a command in a folder; returns what became of it, and what it said last where it did not pass.

    Its output goes to NAME.log.
    """
    log = work / f"{name.replace('/', '-')}.log"
    end = time.monotonic() + seconds
    saved = False
    # The command runs in another folder, and still finds our modules.
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    folder = ROOT if name == "tests" else work
    with (
        log.open("wb") as output,
        started(
            shlex.split(command), GRACE_SECONDS, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder
        ) as process,
    ):
        while process.poll() is None and time.monotonic() < end and not saved:
            saved = name == STOPPED and SAVED in log.read_text(errors="replace")
            time.sleep(POLL_SECONDS)
        running = process.poll() is None and not saved
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    if running:
        return OUT_OF_TIME, lines[-1]
    expected = STOPPED_STATUS if name == STOPPED else 0
    if process.returncode != expected:
        return f"failed, status {process.returncode}", lines[-1]
    return PASSED, ""


def run_figures(folder: Path) -> dict[str, Any]:
    """Figures of the finished run in a folder; {} where there is none."""
    if not (folder / "summary.json").exists():
        return {}
    summary = read_json(folder / "summary.json")
    *_, last = read_metrics(folder / FILE_NAME.format(0))
    figures = {"mfu": last["speed/mfu"], "gib": summary["peak_memory_bytes"] / GIB}
    return summary | read_figures(folder) | figures


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report that the words of a command line ask for; returns the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--out", type=Path, default="docs/results", metavar="FOLDER", help="of the report (%(default)s)")
    option("--gpu", metavar="NAME", help="GPU of config/hardware.yaml to plan for (that of the device's name)")
    option("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal (%(default)s)")
    option("--seconds", type=int_in_range(1, 10**6), default=SECONDS, help="of all commands together (%(default)s)")
    option("--plan", nargs="+", metavar="NAME", help="only print the plans for these GPUs")
    options = parser.parse_args(argv)
    if options.plan:
        rows = []
        todo = commands(options.device, 2)
        for planned_gpu in map(load_gpu, options.plan):
            for name, command in todo.items():
                if training(command):
                    rows.append(planned(name, command, planned_gpu))
        print(format_tables("gpu_report", rows))
        return 0

    device = select_device(options.device)
    count = 2 if device.type == "cpu" else torch.accelerator.device_count()
    gpu_name = options.gpu or gpu_called(machine(device)["name"])
    # A GPU that config/hardware.yaml does not have is measured without plans.
    gpu = load_gpu(gpu_name) if gpu_name else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the report ends its command first
    todo = commands(device.type, count)
    rows = [planned(name, command, gpu) if gpu else {"command": name} for name, command in todo.items()]
    report = Report(device, count, options.out, rows)
    print(report.write(), flush=True)  # before anything is measured
    try:
        run_commands(todo, report, options.seconds)
    finally:
        shutil.rmtree(report.work / "data", ignore_errors=True)
    print(f"{report.write()}\n{report.path}; output of the commands: {report.work}")
    unreached = [row["command"] for row in rows if row["status"] in (NOT_REACHED, NOT_FINISHED)]
    if unreached:
        print(f"not reached or not finished in {options.seconds} s: {', '.join(unreached)}; --seconds gives more")
    failed = any(row["status"] not in (PASSED, NOT_REACHED, NOT_FINISHED) for row in rows)
    return FAILED_STATUS if failed else 0


class Report:
    """The file of a report. rows: of its table, which change as the commands run. count: of devices."""

    def __init__(
        self,
        device: torch.device,
        count: int,
        folder: Path,
        rows: list[dict[str, Any]],
    ):
        about = machine(device)
        self.name = about["name"]
        file_name = re.sub(r"\W+", "-", f"{self.name} x{count}".lower())
        self.path = folder / f"{file_name}.md"
        self.about = about | {
            "devices": count,
            "driver": " ".join(driver() or ["unknown"]),
            "date": time.strftime("%Y-%m-%d"),
        }
        self.work = Path("logs/gpu_report", time.strftime("%Y%m%d-%H%M%S")).absolute()  # for runs and output
        self.work.mkdir(parents=True)  # a new one: data in it are deleted at the end
        self.rows = rows
        for row in rows:
            row["status"] = NOT_REACHED

    def write(self) -> str:
        """Write what is known so far, whole or not at all; returns its text."""
        facts = ", ".join(f"{what} {value}" for what, value in self.about.items())
        parts = [f"# {self.name}", f"Made by `make gpu`: {facts}.", format_tables("gpu_report", self.rows)]
        for name in PRINTED:
            log = self.work / f"{name}.log"
            if log.exists():
                output = log.read_text(errors="replace").strip()
                parts.append(f"## {name}\n\n```text\n{output}\n```")
        text = "\n\n".join(parts) + "\n"
        with whole_file(self.path) as file:
            file.write_text(text)
        return text


def run_commands(todo: Mapping[str, str], report: Report, seconds: float) -> None:
    """Run commands one after another, so many seconds altogether; each one's row is in the report when it ends."""
    end = time.monotonic() + seconds
    for row, (name, command) in zip(report.rows, todo.items(), strict=True):
        began = time.monotonic()
        left = end - began
        if left <= 0:
            return
        # A command gets its own limit, or what is left for all of them where that is less.
        status, said = run_command(name, command, report.work, min(LONGEST, left))
        if status == OUT_OF_TIME and left < LONGEST:
            status = NOT_FINISHED  # others have taken its time
        row |= {"status": status, "said": said, "seconds": round(time.monotonic() - began, 1)}
        row |= run_figures(report.work / "logs" / name)
        report.write()
        print(f"{status:<12} {row['seconds']:6.1f} s  {name}  {said}", flush=True)


if __name__ == "__main__":
    run_main(main)
