"""A study as Slurm jobs. All tasks of an array get the same nodes and GPUs, so each size of run has its own array."""

import shlex
from pathlib import Path

from tools.benchmarks.scaling.study import Run
from utils.errors import UsageError

SUBMIT = "submit_scaling.sh"


def job_lines(runs: list[Run], gpus_per_node: int, words: list[str], out: Path) -> list[str]:
    """Lines of bash: an array of runs for each number of nodes and GPUs, and a last job that writes the report.

    words: options of benchmark.py scaling, for every job. Each task of an array makes the run with its number and
    writes to <out>/run-<number>.out. Raises UsageError where a run does not fill its nodes.
    """
    arrays: dict[tuple[int, int], list[int]] = {}
    for run in runs:
        nodes, gpus = -(-run.ranks // gpus_per_node), min(run.ranks, gpus_per_node)
        if nodes * gpus != run.ranks:
            raise UsageError(f"{run.name}: {run.ranks} ranks do not fill nodes of {gpus_per_node} GPUs")
        arrays.setdefault((nodes, gpus), []).append(run.number)
    given = shlex.join(words)
    lines = [
        f"job{i}=$(sbatch --parsable {_request(nodes, gpus)} --array={','.join(map(str, numbers))} "
        f"--output={shlex.quote(str(out))}/run-%a.out {SUBMIT} {given})"
        for i, ((nodes, gpus), numbers) in enumerate(arrays.items())
    ]
    after = f"--dependency=afterany:{':'.join(f'$job{i}' for i in range(len(arrays)))} " if arrays else ""
    report = f"sbatch --parsable {_request(1, 1)} {after}--output={shlex.quote(str(out))}/report.out"
    return [*lines, f"{report} {SUBMIT} {given} --report_only"]


def _request(nodes: int, gpus: int) -> str:
    return f"-N {nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus}"
