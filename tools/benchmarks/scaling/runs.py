"""The runs of a study on this machine or in a job: the state of each, and how it is started.

The output of a run goes to `<out>/run-<number>.out`, and a description of its machine to `<out>/run-<number>.json`.
Everything else is in the run folder.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.benchmarks.scaling.study import Run
from tools.tables import machine
from training.run_folder import read_summary
from utils.config import check_config, differing_keys, read_named_config
from utils.errors import STOPPED_STATUS, UsageError
from utils.files import read_json, write_json
from utils.launch import Launch
from utils.signals import StopRequest

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
UNFINISHED, OTHER_SETTINGS = "unfinished", "of other settings"
POLL_SECONDS = 0.1
START_OF_A_JOB = "launch: job "  # sites/launch.sh begins with it; a job that is requeued appends to its file
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+: )?(?:error: |(?!.*SignalException)[\w.]*(?:Error|Exception): ).+", re.M)


class State(NamedTuple):
    """State of a run: one of the words above, and the reason in a line."""

    kind: str
    why: str = ""


def state(run: Run, out: Path) -> State:
    """The State of a run, from its folder and from the output of its last start."""
    error = _last_error(run, out)
    if not (run.folder / "config.yaml").exists():
        return State(FAILED, error) if error else State(MISSING, "never started")
    if differing := _other_settings(run):
        return State(OTHER_SETTINGS, f"{run.folder} has {differing}: move it away, or give the study another name")
    if (run.folder / "summary.json").exists():
        return State(FINISHED)
    return State(FAILED, error) if error else State(UNFINISHED, "it was stopped, or is running")


def place(run: Run, out: Path) -> dict[str, Any]:
    """The machine of a run: device, cores and nodes; empty where this program did not start the run."""
    path = output_file(run, out).with_suffix(".json")
    there = read_json(path) if path.exists() else {}
    return there if there.get("run") == run.name else {}  # else the runs of the study had other numbers


def start(run: Run, out: Path) -> int:
    """Train on this machine to the end; returns the exit status, STOPPED_STATUS where a signal asked to stop.

    SIGTERM and Ctrl-C are passed on: the run saves first, and the same study continues it.
    """
    _write_place(run, out, Launch(world_size=run.ranks), int(os.environ.get("OMP_NUM_THREADS", 1)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    command = [sys.executable, *(launcher if run.ranks > 1 else []), run.script, *run.words]
    with (
        StopRequest() as stop,
        output_file(run, out).open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # or Ctrl-C would reach it twice
        ) as process,
    ):  # fmt: skip
        while process.poll() is None and not stop.made:
            time.sleep(POLL_SECONDS)
        if stop.made:
            process.terminate()
        status = process.wait()
        if status not in (0, STOPPED_STATUS) and not stop.made and _last_error(run, out) is None:
            print(f"error: it ended with status {status}", file=output)
    return STOPPED_STATUS if stop.made else status


def become(run: Run, out: Path, launch: Launch) -> None:
    """Let this process, which srun or torchrun started as a rank, go on as the training script. Does not return.

    Raises UsageError where the launcher started another number of ranks, or the run's folder holds other settings.
    """
    if (now := state(run, out)).kind == OTHER_SETTINGS:
        raise UsageError(f"{run.name}: {now.why}")
    if launch.world_size != run.ranks:
        raise UsageError(f"run {run.number}, {run.name}, is of {run.ranks} ranks; {launch.world_size} were started")
    if launch.rank == 0:
        _write_place(run, out, launch, torch.get_num_threads())
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, run.script, *run.words])


def output_file(run: Run, out: Path) -> Path:
    """Where a run's output goes; in a job, by the number of the array's task."""
    return out / f"run-{run.number}.out"


def _write_place(run: Run, out: Path, launch: Launch, threads: int) -> None:
    cpu = run.config.device == "cpu" or not torch.accelerator.is_available()
    found = None if cpu else torch.accelerator.current_accelerator()  # only its name is read
    here = machine(found or torch.device("cpu")) | {
        "run": run.name,
        "nodes": launch.nodes,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "devices": torch.accelerator.device_count() if found else 0,
    }
    write_json(output_file(run, out).with_suffix(".json"), here)


def _last_error(run: Run, out: Path) -> str | None:
    """The first error in the output of a run's last start; None where there is none."""
    path = output_file(run, out)
    if not path.exists() or (path.with_suffix(".json").exists() and not place(run, out)):
        return None
    text = path.read_text(errors="replace").rpartition(START_OF_A_JOB)[2]
    found = ERROR.search(text)
    return found[0] if found else None


def _other_settings(run: Run) -> str:
    """The keys in which the run in the folder differs from the one of the study, layout included; "" for none."""
    path, name, ours = run.folder / "config.yaml", run.config.config, run.config
    there = check_config(read_named_config(path, name), name, f"{path}: {name}")
    keys = differing_keys(there, ours, "model", "result", "training", "layout", "speed")
    differing = [f"{key} {getattr(there, key)}, not {getattr(ours, key)}" for key in keys]
    summary = run.folder / "summary.json"
    if summary.exists() and (ranks := read_summary(summary)["world_size"]) != run.ranks:
        differing.append(f"{ranks} ranks, not {run.ranks}")
    return ", ".join(differing)
