"""Real training runs of one problem in several layouts, their speed and error in one table and one picture.

The runs are those of the training scripts, and the table is made of their summary.json. A script does not repeat a
finished run, and continues a stopped one.
"""

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pandas import DataFrame
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from tools.benchmarks.cases import in_turns
from tools.instruments.rank_case import build_case
from tools.instruments.ranks import Case
from tools.pictures import save_curves
from tools.planner.layouts import script_of
from tools.slurm import on_nodes
from tools.tables import format_tables
from utils.command_line import option_words
from utils.config import SCRIPTS, explain, read_named_config
from utils.errors import STOPPED_STATUS, UsageError, reported_as_usage_error
from utils.files import read_json
from utils.launch import read_launch
from utils.schema import key
from utils.signals import StopRequest

POLL_SECONDS = 0.1  # a run, and a request to stop, are looked at so often
GPUS_PER_NODE = 4  # as in the submit scripts
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")]


class Study(BaseModel, extra="forbid", strict=True):
    """Layouts that train the same model on the same data."""

    options: dict[str, Any] = key("keys of the config, for all runs", {})
    batch_per_rank: PositiveInt | None = key("weak scaling: samples of a step for each rank", None)
    layouts: dict[Name, dict[str, Any]] = key("named layouts: ranks, or a list of them, and keys of the config")


def summary_file(run: Case) -> Path:
    """The file that the training script of a run writes at the end."""
    return Path(run.config.expdir) / run.config.config / run.config.run_num / "summary.json"


def run(
    words: list[str],
    study: str,
    study_file: str,
    only: int | None,
    list_runs: bool,
    report_only: bool,
) -> dict[str, Any]:
    """Make the missing runs of a study, one after another, and print the table of all; returns its figures.

    words: options of the config, for all runs. only: this process is a rank of a job, and becomes the training script
    of the run with this number, among the runs of as many ranks as the job has. list_runs: print commands alone.
    report_only: make no run. Raises UsageError for what cannot be run, before anything is started.
    """
    runs = build_runs(study_file, study, words)
    if only is not None:
        # All jobs of an array have the same size, so `only` counts the runs of that size alone.
        ranks = read_launch().world_size
        runs = [run for run in runs if run.ranks == ranks]
        if only >= len(runs):
            raise UsageError(f"--only {only}: the study has {len(runs)} runs of {ranks} ranks, numbered from 0")
        chosen = runs[only]
        # The script takes over this process, so that signals of Slurm reach it directly.
        os.execv(sys.executable, [sys.executable, chosen.script, *chosen.words])
    if list_runs:
        for run in runs:
            print(shlex.join(["torchrun", f"--nproc_per_node={run.ranks}", run.script, *run.words]))
        jobs = array_jobs(runs, [f"--study={study}", f"--study_file={study_file}", *words])
        print("\n".join(jobs))
        return {}

    # A failed run leaves the others to be made.
    failed = []
    todo = {} if report_only else {run.name: run for run in runs}
    for _, _, run in in_turns(todo, 1):
        status = start(run)
        # A request to stop holds for the runs that are left as well.
        if status == STOPPED_STATUS:
            print("stopped; repeat the command to resume")
            sys.exit(status)
        if status:
            failed.append(run.name)
            print(f"{run.name}: failed with status {status}", flush=True)
    # The table also has the runs that earlier calls have finished.
    rows = collect(runs)
    print(format_tables("scaling", rows))
    missing = [run.name for run in runs if not summary_file(run).exists()]
    if missing:
        print(f"not finished: {', '.join(missing)}")
    return {"study": study, "rows": rows, "failed": [*failed, *missing]}


def build_runs(path: str, name: str, words: list[str]) -> list[Case]:
    """The runs of a study in the order of its file. words: options of the config; they win over the study's.

    Raises UsageError for unknown keys, and naming the run where the training script would refuse it.
    """
    try:
        study = Study.model_validate(read_named_config(path, name))
    except ValidationError as error:
        raise UsageError(explain(error, Study, f"{path}: {name}")) from None
    runs = []
    for layout, keys in study.layouts.items():
        options = study.options | keys
        counts = options.pop("ranks", None)  # no key of the config
        for ranks in counts if isinstance(counts, list) else [counts]:
            run_name = f"{layout}-{ranks}"
            with reported_as_usage_error(UsageError, f"{path}: {name}: {run_name}"):
                if not isinstance(ranks, int) or ranks < 1:
                    raise UsageError("ranks: expected a number, or a list of numbers")
                script = script_of(options)
                own = [f"--yaml_config={SCRIPTS['train.py'].yaml_config}"]
                for option, value in options.items():
                    own += option_words(option, value)
                # Each run has a folder of its own, where a repeated command finds it again.
                own += [*words, f"--run_num={name}-{run_name}"]
                # Weak scaling fixes the batch of a rank, whatever the words say about the whole batch.
                if study.batch_per_rank:
                    own.append(f"--global_batch_size={study.batch_per_rank * ranks}")
                runs.append(build_case(run_name, script, own, ranks))
    return runs


def start(run: Case) -> int:
    """Train on this machine to the end; returns the exit status, STOPPED_STATUS where a signal asked to stop.

    SIGTERM and Ctrl-C are passed on: the run saves first.
    """
    launcher = []
    if run.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    command = [sys.executable, *launcher, run.script, *run.words]
    with StopRequest() as stop:
        process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # unless the user has set it
            start_new_session=True,  # or Ctrl-C would reach it twice
        )
        while process.poll() is None and not stop.made:
            time.sleep(POLL_SECONDS)
        if stop.made:
            # The run saves its state on SIGTERM, so it is waited for and not killed.
            process.terminate()
        status = process.wait()
    return STOPPED_STATUS if stop.made else status


def array_jobs(runs: Sequence[Case], words: Sequence[str]) -> list[str]:
    """A command for each number of ranks: an array of jobs, of which each task is one run. words: of benchmark.py."""
    lines = []
    for ranks, tasks in Counter(run.ranks for run in runs).items():
        # All tasks of an array ask for the same nodes, so each number of ranks has an array of its own.
        request = [*on_nodes(ranks, GPUS_PER_NODE), f"--array=0-{tasks - 1}"]
        lines.append(shlex.join(["sbatch", *request, "submit_scaling.sh", *words]))
    return lines


def collect(runs: Sequence[Case]) -> list[dict[str, Any]]:
    """The figures of finished runs. Speedup and efficiency are relative to the fastest of the smallest runs."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        file = summary_file(run)
        if not file.exists():
            continue
        summary = read_json(file)
        batch = run.config.global_batch_size
        speed = summary["samples_per_sec"]
        row = {
            "run": run.name,
            "ranks": run.ranks,
            "batch": batch,
            "samples_per_sec": speed,
            "device_hours": run.ranks * batch * summary["iterations"] / speed / 3600,
            "val_loss": summary.get("val_loss"),  # None where a run has no validation
            "gib": summary["peak_memory_bytes"] / 2**30,
        }
        rows.append(row)
    base = min(rows, key=lambda row: (row["ranks"], -row["samples_per_sec"]), default={})
    for row in rows:
        row["speedup"] = row["samples_per_sec"] / base["samples_per_sec"]
        row["efficiency"] = row["speedup"] / row["ranks"] * base["ranks"]  # 1.0 for the base
    return rows


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Samples/s over the number of ranks, a curve for each layout, beside what perfect scaling would give."""
    rows = DataFrame(figures["rows"])
    if rows.empty:
        raise UsageError(f"{path}: no run is finished, there is nothing to draw")
    rows["layout"] = rows["run"].str.rpartition("-")[0]  # 'fsdp-4' is fsdp on 4 ranks
    speeds = rows.pivot(index="ranks", columns="layout", values="samples_per_sec")  # (ranks, layouts)
    # Perfect is the speed of a rank in the fastest of the smallest runs, times the ranks.
    speed_of_rank = speeds.iloc[0].max() / speeds.index[0]
    speeds["perfect"] = speed_of_rank * speeds.index
    save_curves(speeds, path, title=f"{figures['study']}: speed of all ranks", xlabel="ranks", ylabel="samples/s")
