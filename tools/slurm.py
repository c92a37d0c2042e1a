"""Jobs for Slurm."""

import shutil
import subprocess

from utils.errors import UsageError

ASK = """sbatch() {
    local words=()
    for word; do [[ $word == --dependency=* ]] || words+=("$word"); done  # on jobs that are not there yet
    command sbatch --test-only "${words[@]}"
}"""
SUBMITTED = "trap 'for name in ${!job@}; do echo ${!name}; done' EXIT"  # the arrays, after the number of the last job


def on_nodes(ranks: int, gpus_per_node: int) -> list[str]:
    """Options of sbatch for the fewest nodes with a GPU for each rank. Raises UsageError where they are not filled."""
    nodes = -(-ranks // gpus_per_node)  # rounded up
    if ranks % nodes:
        raise UsageError(f"{ranks} ranks do not fill {nodes} nodes of {gpus_per_node} GPUs")
    each = ranks // nodes
    return [f"--nodes={nodes}", f"--ntasks-per-node={each}", f"--gpus-per-node={each}"]


def submit(lines: list[str]) -> str:
    """Submit these jobs, all or none; returns the number of the last one. Raises UsageError where Slurm refuses.

    Slurm is asked about all of them first. What it refuses all the same (so many jobs) leaves those before it in the
    queue, and the error names them.
    """
    if not shutil.which("sbatch"):
        raise UsageError("--submit: there is no sbatch here: call this on a login node of a Slurm cluster")
    # The lines run twice: first Slurm is asked whether it takes each job, then it is given them.
    for before in (ASK, SUBMITTED):
        done = subprocess.run(["bash", "-c", "\n".join(["set -e", before, *lines])], capture_output=True, text=True)
        jobs = done.stdout.split()
        if done.returncode:
            left = f"; in the queue: {' '.join(jobs)} (scancel takes them back)" if jobs else "; nothing was submitted"
            raise UsageError(f"sbatch: {' '.join(done.stderr.split()) or f'status {done.returncode}'}{left}")
    return jobs[0]
