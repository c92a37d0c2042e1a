"""Submit a plan to Slurm, and keep it with its run, which is compared with it (training/planned.py)."""

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.instruments.phases import PHASES
from tools.planner.layouts import command, script_of
from tools.planner.plan import Plan
from tools.planner.search import Request
from tools.planner.step_time import step_time
from tools.planner.trace import trace_step
from tools.slurm import submit
from utils.config import SCRIPTS
from utils.errors import UsageError
from utils.files import write_json


def choose(plans: Sequence[Plan], number: int) -> Plan:
    """The plan of this number, from 1, in a list. Raises UsageError where there are fewer."""
    if number > len(plans):
        raise UsageError(f"--choose {number}: the search lists {len(plans)} layouts; --top {number} lists more")
    return plans[number - 1]


def submit_plan(plan: Plan, request: Request, options: str) -> str:
    """Store a plan as JSON and queue its run, after a preflight in the same job; returns what was done, in words.

    options: further words for sbatch, as a shell reads them. Raises UsageError where the plan does not fit the GPU or
    its nodes, and where Slurm refuses.
    """
    ranks, config = plan.layout.world_size, plan.config
    if plan.fits == "no":
        raise UsageError("--submit: this layout does not fit into memory: --choose another, or give more --gpus")
    if ranks % plan.nodes:
        raise UsageError(f"--submit: {ranks} ranks do not fill {plan.nodes} nodes of {plan.gpu.gpus_per_node} GPUs")
    words = shlex.split(command(config, plan.layout, request.words, plan.gpu.gpus_per_node))
    script = script_of(vars(config))
    submit_file = SCRIPTS[script].submit
    own = words[next(i for i, word in enumerate(words) if word in (script, submit_file)) + 1 :]
    file = Path(config.expdir) / "plans" / f"{config.config}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    tasks = ranks // plan.nodes
    sbatch = ["sbatch", "--parsable", f"--nodes={plan.nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node={tasks}"]
    line = f"{shlex.join(sbatch)} {options} {shlex.join([submit_file, *own, f'--plan={file}'])}"
    write_json(file, stored(plan, request))
    try:
        job = submit(["export PREFLIGHT=1", line])
    except UsageError:
        file.unlink()
        raise
    return f"job {job}: PREFLIGHT=1 {line}\nthe plan is in {file}; in the folder of the run it will be plan.json"


def stored(plan: Plan, request: Request) -> dict[str, Any]:
    """A plan as a run needs it: also with its config, its seconds by phase, and its collectives."""
    device_type = plan.gpu.device
    traces = trace_step(plan.config, plan.layout, device_type)

    def seconds(phase: str) -> float:
        own = [
            replace(
                trace,
                operations=Counter({what: n for what, n in trace.operations.items() if what.phase == phase}),
                messages=Counter({what: n for what, n in trace.messages.items() if what.phase == phase}),
            )
            for trace in traces
        ]
        return step_time(own, plan.config, plan.layout, plan.gpu, request.calibration).seconds

    return plan.to_json() | {
        "settings": plan.config.model_dump(),
        "device_type": device_type,
        "calls": sum(c["count"] for c in plan.time.collectives if c["kind"] != "send"),
        **{f"{phase}_s": seconds(phase) for phase in PHASES},
    }
