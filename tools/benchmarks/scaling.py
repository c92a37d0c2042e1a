"""Real training runs of one problem in several layouts, their speed and error in one table and one picture.

The runs are those of the training scripts, and the table is made of their summary.json. A finished run is not repeated,
and a stopped run is continued.
"""

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pandas import DataFrame
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from tools.pictures import finish, panels, save
from tools.planner.layouts import script_of
from tools.tables import print_tables
from training.run_folder import read_summary
from utils.config import SCRIPTS, check_config, differing_keys, explain, load_config, option_words, read_named_config
from utils.errors import STOPPED_STATUS, UsageError, reported_as_usage_error
from utils.launch import read_launch
from utils.schema import Config, Text, key
from utils.signals import StopRequest

POLL_SECONDS = 0.1
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")]
OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list) else [value])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Layout(_Strict):
    """A layout, on one or several numbers of ranks."""

    ranks: Annotated[list[PositiveInt], OneOrMore, Field(min_length=1)] = key("ranks of the run; a list: of each run")
    options: dict[str, Any] = key("keys of the config that make the layout", {})


class Study(_Strict):
    """Layouts that train the same model on the same data."""

    yaml_config: Text = key("file of the config", SCRIPTS["train.py"].yaml_config)
    options: dict[str, Any] = key("keys of the config, for all runs", {})
    batch_per_rank: PositiveInt | None = key("weak scaling: samples of a step for each rank", None)
    gpus_per_node: PositiveInt = key("GPUs of a node, for jobs of Slurm", 4)
    layouts: dict[Name, Layout] = key("named layouts")


@dataclass(frozen=True)
class Run:
    """One training run: `ranks` processes of `script` with `words`, which give `config`."""

    name: str
    ranks: int
    script: str
    words: list[str]
    config: Config

    @property
    def folder(self) -> Path:
        """The run folder, which the training script makes."""
        return Path(self.config.expdir) / self.config.config / self.config.run_num

    @property
    def command(self) -> str:
        """The command that starts it on this machine."""
        start = "python" if self.ranks == 1 else f"torchrun --nproc_per_node {self.ranks}"
        return f"{start} {self.script} {shlex.join(self.words)}"

    @property
    def output(self) -> Path:
        """The file for what it prints."""
        return Path(self.config.expdir) / "scaling" / f"{self.config.run_num}.out"

    def summary(self) -> dict[str, Any] | None:
        """Its summary; None before it is finished. Raises UsageError where its folder holds another run."""
        if not (path := self.folder / "summary.json").exists():
            return None
        name, file = self.config.config, self.folder / "config.yaml"
        there = check_config(read_named_config(file, name), name, f"{file}: {name}")
        keys = differing_keys(there, self.config, "model", "result", "training", "layout", "speed")
        differing = [f"{key} {getattr(there, key)}" for key in keys]
        summary = read_summary(path)
        if summary["world_size"] != self.ranks:
            differing.append(f"{summary['world_size']} ranks")
        if differing:
            raise UsageError(f"{self.name}: {self.folder} holds a run with {', '.join(differing)}: move it away")
        return summary


def run(
    words: list[str],
    study: str = "quick",
    study_file: str = "config/scaling.yaml",
    only: int | None = None,
    list_runs: bool = False,
    report_only: bool = False,
) -> dict[str, Any]:
    """Make the missing runs of a study, one after another, and print the table of all; returns its figures.

    words: options of the config, for all runs. only: this process is a rank of a job, and becomes the training script
    of the run with this number, among the runs of as many ranks as the job has. list_runs: print commands alone.
    report_only: make no run. Raises UsageError for what cannot be run, before anything is started.
    """
    runs, ranks = build_runs(study_file, study, words), read_launch().world_size
    if only is not None:
        _become([run for run in runs if run.ranks == ranks], only, ranks)
    if ranks > 1:
        raise UsageError("benchmark.py scaling starts the ranks itself: start it in one process, or give --only")
    if list_runs:
        gpus = read_study(study_file, study).gpus_per_node
        jobs = array_jobs(runs, gpus, [f"--study={study}", f"--study_file={study_file}", *words])
        print("\n".join([*(run.command for run in runs), "", *jobs]))
        return {}
    for run in [run for run in runs if not report_only and run.summary() is None]:
        started, status = time.monotonic(), start(run)
        print(f"{run.name}: status {status} after {time.monotonic() - started:.0f} s", flush=True)
        if status == STOPPED_STATUS:
            print("stopped; repeat the command to resume")
            sys.exit(status)
    rows = collect(runs)
    print_tables("scaling", rows)
    missing = [run for run in runs if run.summary() is None]
    for run in missing:
        print(f"{run.name}: not finished (what it printed: {run.output})")
    return {"study": study, "rows": rows, "failed": [run.name for run in missing]}


def read_study(path: str, name: str) -> Study:
    """The Study of this name in a YAML file. Raises UsageError for unknown keys and values that do not fit."""
    try:
        return Study.model_validate(read_named_config(path, name))
    except ValidationError as error:
        raise UsageError(explain(error, Study, f"{path}: {name}")) from None


def build_runs(path: str, name: str, words: list[str]) -> list[Run]:
    """The runs of a study in the order of its file. words: options of the config; they win over the study's.

    Raises UsageError for unknown keys, and naming the run where the training script would refuse it.
    """
    study, runs = read_study(path, name), []
    for layout_name, layout in study.layouts.items():
        options = study.options | layout.options
        for ranks in dict.fromkeys(layout.ranks):
            run_name = f"{layout_name}-{ranks}"
            with reported_as_usage_error(UsageError, f"{path}: {name}: {run_name}"):
                script = script_of(options)
                own = [f"--yaml_config={study.yaml_config}"]
                own += [word for option, value in options.items() for word in option_words(option, value)]
                own += [*words, f"--run_num={name}-{run_name}"]
                if study.batch_per_rank:
                    own.append(f"--global_batch_size={study.batch_per_rank * ranks}")
                config = load_config(own, None, ranks, *SCRIPTS[script][:2])
            runs.append(Run(run_name, ranks, script, own, config))
    return runs


def start(run: Run) -> int:
    """Train on this machine to the end; returns the exit status, STOPPED_STATUS where a signal asked to stop.

    SIGTERM and Ctrl-C are passed on: the run saves first.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    command = [sys.executable, *(launcher if run.ranks > 1 else []), run.script, *run.words]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    run.output.parent.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, run.output.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # or Ctrl-C would reach it twice
        )  # fmt: skip
        while process.poll() is None and not stop.made:
            time.sleep(POLL_SECONDS)
        if stop.made:
            process.terminate()
        status = process.wait()
    return STOPPED_STATUS if stop.made else status


def array_jobs(runs: Sequence[Run], gpus_per_node: int, words: Sequence[str]) -> list[str]:
    """A command for each number of ranks: an array of jobs, of which each task is one run. words: of benchmark.py."""
    lines = []
    for ranks, tasks in Counter(run.ranks for run in runs).items():
        nodes, gpus = -(-ranks // gpus_per_node), min(ranks, gpus_per_node)
        if nodes * gpus != ranks:
            raise UsageError(f"{ranks} ranks do not fill nodes of {gpus_per_node} GPUs")
        request = f"--nodes={nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus} --array=0-{tasks - 1}"
        lines.append(f"sbatch {request} submit_scaling.sh {shlex.join(words)}")
    return lines


def _become(runs: Sequence[Run], number: int, ranks: int) -> None:
    """Let this process go on as the training script. Does not return."""
    if not 0 <= number < len(runs):
        raise UsageError(f"--only {number}: the study has {len(runs)} runs of {ranks} ranks, numbered from 0")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, runs[number].script, *runs[number].words])


def collect(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures of finished runs. Speedup and efficiency are relative to the fastest of the smallest runs."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        if summary := run.summary():
            speed, batch = summary["samples_per_sec"], run.config.global_batch_size
            hours = run.ranks * batch * summary["iterations"] / speed / 3600  # of all devices
            rows.append({
                "run": run.name, "ranks": run.ranks, "batch": batch, "samples_per_sec": speed, "device_hours": hours,
                "val_loss": summary.get("val_loss"), "rmse": summary.get("rmse", {}),
                "gib": summary["peak_memory_bytes"] / 2**30, "command": run.command,
            })  # fmt: skip
    base = min(rows, key=lambda row: (row["ranks"], -row["samples_per_sec"]), default={})
    for row in rows:
        row["speedup"] = row["samples_per_sec"] / base["samples_per_sec"]
        row["efficiency"] = row["speedup"] / row["ranks"] * base["ranks"]
    return rows


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Samples/s over the number of ranks, a curve for each layout, beside what perfect scaling would give."""
    rows = DataFrame(figures["rows"])
    if rows.empty:
        raise UsageError(f"{path}: no run is finished, there is nothing to draw")
    rows["layout"] = rows["run"].str.rpartition("-")[0]
    speeds = rows.pivot(index="ranks", columns="layout", values="samples_per_sec")
    speeds["perfect"] = speeds.iloc[0].max() / speeds.index[0] * speeds.index
    figure, (axes,) = panels(8)
    speeds.plot(ax=axes, marker="o", loglog=True)
    axes.set_xticks(speeds.index, map(str, speeds.index))
    finish(axes, title=f"{figures['study']}: speed of all ranks", xlabel="ranks", ylabel="samples/s")
    save(figure, path)
