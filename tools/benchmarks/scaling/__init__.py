"""A scaling study: real training runs over layouts and sizes, and one report of speed, error and cost.

The runs of a study are runs of the training scripts, and the report reads their run folders (summary, TensorBoard
events). A finished run is not repeated, and a stopped run is continued.
"""

import os
import time
from pathlib import Path

from tools.benchmarks.scaling.report import collect, text_table, write_report
from tools.benchmarks.scaling.runs import FINISHED, OTHER_SETTINGS, become, output_file, start, state
from tools.benchmarks.scaling.study import Run, build_runs, job_lines, parse_target, read_study
from tools.slurm import submit
from utils.errors import FAILED_STATUS, STOPPED_STATUS, UsageError
from utils.launch import read_launch

ACTIONS = {  # besides `run`: what else may be done with a study
    "list": "print the runs",
    "report_only": "make no run",
    "sbatch": "print the jobs for Slurm",
    "submit": "submit them",
}


def run(
    words: list[str],
    name: str = "quick",
    study_file: str = "config/scaling.yaml",
    out: str | None = None,
    only: int | None = None,
    action: str = "run",
    target: str | None = None,
) -> int:
    """Run an action on a study; returns the exit status: 1 where runs are not finished, 75 where one was stopped.

    words: options of the config, for all runs. out: folder of the report, by default logs/scaling/<name>. only: number
    of the one run to make. action: `run` makes missing runs and then the report, `report_only` the report alone, `list`
    prints the runs, `sbatch` prints the jobs, `submit` submits the jobs. target: like z500=300, in place of the
    study's. Raises UsageError for what cannot be run, before anything is started.
    """
    study = read_study(study_file, name)
    runs = build_runs(study_file, study, words)
    aim = None
    if target or study.target:
        where = ("command line", "given with --target") if target else (f"{study_file}: {name}", "set in the study")
        aim = parse_target(target or study.target or "", *where)
    folder = Path(out or f"logs/scaling/{name}")
    if action == "list":
        for each in runs:
            print(f"{each.number:3d}  {state(each, folder).kind:17}  {each.command}")
        return 0
    if only is not None and not 0 <= only < len(runs):
        raise UsageError(f"--only {only}: the study has runs 0 to {len(runs) - 1}; --list shows them")
    folder.mkdir(parents=True, exist_ok=True)
    if action in ("sbatch", "submit"):
        given = [f"--study={name}", f"--study_file={study_file}", f"--out={folder}"]
        given += [f"--target={target}"] if target else []
        lines = job_lines(_startable(runs, folder), study.gpus_per_node, [*given, *words], folder)
        print(f"the report comes with job {submit(lines)}, after all runs" if action == "submit" else "\n".join(lines))
        return 0

    launch, chosen = read_launch(), runs if only is None else [runs[only]]
    if only is not None and ("RANK" in os.environ or launch.world_size > 1):
        become(runs[only], folder, launch)
    if launch.world_size > 1:
        raise UsageError("benchmark.py scaling starts the ranks itself: start it in one process, or give --only")
    for each in _startable(chosen, folder) if action == "run" else ():
        print(f"[{each.number + 1}/{len(runs)}] {each.command}", flush=True)
        started = time.monotonic()
        status = start(each, folder)
        now = state(each, folder)
        said = "finished" if now.kind == FINISHED else f"{now.kind}: {now.why} ({output_file(each, folder)})"
        print(f"    {said} after {time.monotonic() - started:.0f} s", flush=True)
        if status == STOPPED_STATUS:
            print("stopped; repeat the command to resume")
            return STOPPED_STATUS
    if action == "run" and only is not None:
        return 0 if state(runs[only], folder).kind == FINISHED else FAILED_STATUS
    figures = collect(runs, folder, aim)
    write_report(figures, study, folder)
    print(f"\n{text_table(figures)}\n\nthe report is {folder / 'report.html'}, its figures are report.json")
    return 0 if all(figures.rows["state"] == FINISHED) else FAILED_STATUS


def _startable(runs: list[Run], folder: Path) -> list[Run]:
    """Runs that may start: unfinished ones, unless their folder holds other settings, which a line then says."""
    chosen = []
    for each in runs:
        now = state(each, folder)
        if now.kind == OTHER_SETTINGS:
            print(f"# {each.name} is left out: {now.why}")
        elif now.kind != FINISHED:
            chosen.append(each)
    return chosen
