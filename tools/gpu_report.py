"""A report of all that needs a GPU: training, forecast, tests, benchmarks, and plans beside what was measured.

    make gpu                                              on this machine's GPUs, in 10 minutes at most
    python -m tools.gpu_report --device cpu --gpu h100    a rehearsal at tiny sizes, without a GPU
    python -m tools.gpu_report --plan h100 a100-80gb      the plans of its training runs alone

The commands of config/gpu_report.yaml run one after another, each within a limit; whatever becomes of one, the others
follow. The report, a Markdown file named after the GPUs, is written anew after each. Exit status: 0 all commands
passed, 1 some did not, 2 wrong options or no GPU.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tools.planner.compare import measured, planned_figures
from tools.planner.hardware import Gpu, gpu_called, load_gpu
from tools.planner.search import Request
from tools.tables import GIB, format_tables, machine
from training.loggers import FILE_NAME, read_metrics
from utils.config import ROOT, read_mappings
from utils.device import driver, select_device
from utils.errors import FAILED_STATUS, STOPPED_STATUS, ArgumentParser, first_line, run_main
from utils.files import read_json, whole_file

COMMANDS = "config/gpu_report.yaml"
SECONDS, LONGEST = 600, 240  # of all commands, of one
GRACE_SECONDS = 40  # for a command to end that was asked to; torchrun kills its ranks after 30
POLL_SECONDS = 0.1
STOPPED, SAVED = "quick/stopped", "Saved checkpoint"  # a training that is ended when it says so
PRINTED = "ladder", "preflight", "loaders"  # commands whose output is part of the report


def commands(device: str, count: int) -> dict[str, str]:
    """{name: command} for so many GPUs, or for two ranks on the CPU."""
    table, python = read_mappings(COMMANDS, "commands"), shlex.quote(sys.executable)
    own = {"python": python, "torchrun": f"{python} -m torch.distributed.run --standalone", "count": count}
    words = own | table[device]
    words |= {name: text.format(**words) for name, text in table["any"].items()}
    return {name: text.format(**words) for name, text in table["commands"].items() if count > 1 or "{two}" not in text}


def planned(name: str, command: str, gpu: Gpu) -> dict[str, Any]:
    """A row with the planned figures of a command that trains; of any other its name alone."""
    trained = training(command)
    if not trained:
        return {"command": name}
    try:
        plan = planned_figures(Request(trained[0], gpu).plan(trained[1]))
    except Exception as error:  # of one run: the others have theirs
        return {"command": name, "said": f"not planned: {type(error).__name__}: {first_line(error)}"}
    return {
        "command": name, "on": f"{trained[1]} x {gpu.name}", "planned_gib": plan["peak_allocated_bytes"] / GIB,
        "planned_step_s": plan["step_time_s"], "planned_calls": plan["calls"],
    }  # fmt: skip


def training(command: str) -> tuple[list[str], int] | None:
    """(options, ranks) of a command that trains; None for any other."""
    match = re.search(r"(?:nproc_per_node=(\d+) )?-m train\w* (.*)", command)
    return (match[2].split(), int(match[1] or 1)) if match else None


def run_command(name: str, command: str, work: Path, seconds: float) -> tuple[str, str]:
    """Run a command in a folder; returns what became of it, and what it said last where it did not pass.

    Its output goes to NAME.log.
    """
    log, end, saved = work / f"{name.replace('/', '-')}.log", time.monotonic() + seconds, False
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
            cwd=ROOT if name == "tests" else work, start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None and time.monotonic() < end and not saved:
            saved = name == STOPPED and SAVED in log.read_text(errors="replace")
            time.sleep(POLL_SECONDS)
        running = process.poll() is None and not saved
    finally:  # end it, and the rest of its group
        with suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    if running:
        return "out of time", lines[-1]
    if process.returncode != (STOPPED_STATUS if name == STOPPED else 0):
        return f"failed, status {process.returncode}", lines[-1]
    return "passed", ""


def run_figures(folder: Path) -> dict[str, Any]:
    """Figures of the finished run in a folder; {} where there is none."""
    if not (folder / "summary.json").exists():
        return {}
    summary, last = read_json(folder / "summary.json"), read_metrics(folder / FILE_NAME.format(0))[-1]
    figures = {"mfu": last["speed/mfu"], "gib": summary["peak_memory_bytes"] / GIB}
    return summary | measured(folder) | figures


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report that the words of a command line ask for; returns the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--out", type=Path, default="docs/results", metavar="FOLDER", help="of the report (%(default)s)")
    option("--gpu", metavar="NAME", help="GPU of config/hardware.yaml to plan for (that of the device's name)")
    option("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal (%(default)s)")
    option("--plan", nargs="+", metavar="NAME", help="only print the plans for these GPUs")
    options = parser.parse_args(argv)
    if options.plan:
        training_runs = [each for each in commands(options.device, 2).items() if training(each[1])]
        rows = [planned(*each, gpu) for gpu in map(load_gpu, options.plan) for each in training_runs]
        print(format_tables("gpu_report", rows))
        return 0

    device = select_device(options.device)
    count = 2 if device.type == "cpu" else torch.accelerator.device_count()
    about = machine(device) | {
        "devices": count, "driver": " ".join(driver() or ["unknown"]), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    work = Path("logs/gpu_report", time.strftime("%Y%m%d-%H%M%S")).absolute()  # for runs and output
    path = options.out / (re.sub(r"\W+", "-", f"{about['name']} x{count}".lower()) + ".md")
    gpu_name = options.gpu or gpu_called(about["name"])
    work.mkdir(parents=True)  # a new one: data in it are deleted at the end
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the report ends its command first
    todo, end = commands(device.type, count), time.monotonic() + SECONDS
    gpu = load_gpu(gpu_name) if gpu_name else None
    rows = [planned(name, command, gpu) if gpu else {"command": name} for name, command in todo.items()]

    def report() -> str:
        """Write the report with what is known so far, whole or not at all; returns its text."""
        printed = []
        for name in PRINTED:
            if (log := work / f"{name}.log").exists():
                printed.append(f"## {name}\n\n```text\n{log.read_text(errors='replace').strip()}\n```")
        made = f"Made by `make gpu`: {', '.join(f'{what} {value}' for what, value in about.items())}."
        text = "\n\n".join([f"# {about['name']}", made, format_tables("gpu_report", rows), *printed]) + "\n"
        with whole_file(path) as file:
            file.write_text(text)
        return text

    print(report(), flush=True)  # before anything is measured
    try:
        for row, (name, command) in zip(rows, todo.items(), strict=True):
            began = time.monotonic()
            if began > end:
                break
            row["status"], row["said"] = run_command(name, command, work, min(LONGEST, end - began))
            row["seconds"] = round(time.monotonic() - began, 1)
            row |= run_figures(work / "logs" / name)
            report()
            print(f"{row['status']:<12} {row['seconds']:6.1f} s  {name}  {row['said']}", flush=True)
    finally:
        shutil.rmtree(work / "data", ignore_errors=True)
    print(f"{report()}\n{path}; output of the commands: {work}")
    return 0 if all(row.get("status") == "passed" for row in rows) else FAILED_STATUS


if __name__ == "__main__":
    run_main(main)
