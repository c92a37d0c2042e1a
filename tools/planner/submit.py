"""Submit a plan to Slurm."""

import shlex
from collections.abc import Sequence

from tools.planner.layouts import arguments, script_of
from tools.planner.plan import Plan
from tools.planner.search import Request
from tools.slurm import submit
from utils.config import SCRIPTS
from utils.errors import UsageError


def choose(plans: Sequence[Plan], number: int) -> Plan:
    """The plan of this number, from 1, in a list. Raises UsageError where there are fewer."""
    if number > len(plans):
        raise UsageError(f"--choose {number}: the search lists {len(plans)} layouts; --top {number} lists more")
    return plans[number - 1]


def submit_plan(plan: Plan, request: Request, options: str) -> str:
    """Queue the run of a plan, after a preflight in the same job; returns what was done, in words.

    options: further words for sbatch, as a shell reads them. Raises UsageError where the plan does not fit the GPU or
    its nodes, and where Slurm refuses.
    """
    ranks, config = plan.layout.world_size, plan.config
    if plan.fits == "no":
        raise UsageError("--submit: this layout does not fit into memory: --choose another, or give more --gpus")
    if ranks % plan.nodes:
        raise UsageError(f"--submit: {ranks} ranks do not fill {plan.nodes} nodes of {plan.gpu.gpus_per_node} GPUs")
    submit_file, tasks = SCRIPTS[script_of(vars(config))].submit, ranks // plan.nodes
    sbatch = ["sbatch", "--parsable", f"--nodes={plan.nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node={tasks}"]
    line = f"{shlex.join(sbatch)} {options} {shlex.join([submit_file, *arguments(config, request.words)])}"
    return f"job {submit(['export PREFLIGHT=1', line])}: PREFLIGHT=1 {line}"
