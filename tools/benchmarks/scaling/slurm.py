"""A study as Slurm jobs. All tasks of an array get the same nodes and GPUs, so each size of run has its own array."""

import shlex
import shutil
import subprocess
from pathlib import Path

from tools.benchmarks.scaling.study import Run
from utils.errors import UsageError

SUBMIT = "submit_scaling.sh"
ASK = """sbatch() {
    local words=()
    for word; do [[ $word == --dependency=* ]] || words+=("$word"); done  # on jobs that are not there yet
    command sbatch --test-only "${words[@]}"
}"""
SUBMITTED = "trap 'for name in ${!job@}; do echo ${!name}; done' EXIT"  # the arrays, after the number of the last job


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


def submit(lines: list[str]) -> str:
    """Submit these jobs, all or none; returns the number of the last one. Raises UsageError where Slurm refuses.

    Slurm is asked about all of them first. What it refuses all the same (so many jobs) leaves those before it in the
    queue, and the error names them.
    """
    if not shutil.which("sbatch"):
        raise UsageError("--submit: there is no sbatch here: call this on a login node of a Slurm cluster")
    for before in (ASK, SUBMITTED):
        done = subprocess.run(["bash", "-c", "\n".join(["set -e", before, *lines])], capture_output=True, text=True)
        jobs = done.stdout.split()
        if done.returncode:
            left = f"; in the queue: {' '.join(jobs)} (scancel takes them back)" if jobs else "; nothing was submitted"
            raise UsageError(f"sbatch: {' '.join(done.stderr.split()) or f'status {done.returncode}'}{left}")
    return jobs[0]


def _request(nodes: int, gpus: int) -> str:
    return f"-N {nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus}"
