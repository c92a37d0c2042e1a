"""A finished run compared with the plan of its config: figures of a step, and the likely reason for what differs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.planner.hardware import gpu_called, load_gpu
from tools.planner.plan import Plan, plan_layout
from tools.tables import format_table
from training.models.info import is_gpu
from training.run.folder import read_summary
from training.run.loggers import FILE_NAME, read_metrics
from training.run.telemetry import WARMUP_ITERATIONS
from utils.config import check_config, read_named_config
from utils.errors import UsageError
from utils.yaml_files import read_mappings

ROWS = "tools/planner/compare.yaml"
OFF = 0.15  # share by which a figure may differ without a reason


def beside(
    title: str,
    planned: Mapping[str, float],
    measured: Mapping[str, float],
) -> str:
    """Planned figures beside measured ones, {name of a row: figure}, and measured to planned, as a table."""
    rows = []
    for name, plan in planned.items():
        ratio = measured[name] / plan if plan else None
        rows.append((name, plan, measured[name], ratio))
    columns = {title: "", "planned": ".4g", "measured": ".4g", "measured/planned": ".2f"}
    return format_table(columns, rows)


def compare(folder: Path, gpu_name: str | None = None) -> str:
    """Planned and measured figures of the finished run in a folder, and likely reasons, as text.

    gpu_name: in config/hardware.yaml, or of a measured machine; by default that of the run's device.
    Raises UsageError where the run is not finished or has no reading, and for a device without a plan.
    """
    file = folder / "summary.json"
    if not file.exists():
        raise UsageError(f"{folder}: has no {file.name}: no run has finished here")
    name = read_summary(file, config=str)["config"]
    readings = _steady(folder)
    first = readings[0]
    last = readings[-1]
    ranks = last["ranks"]
    device = last["device"]

    # The plan.
    gpu_name = gpu_name or gpu_called(device)
    if gpu_name is None:
        raise UsageError(
            f"{device}: config/hardware.yaml has no such device: give --gpu NAME, one of its names or that of a "
            "measured machine (plan.py --calibrate)"
        )
    gpu = load_gpu(gpu_name)
    # The folder keeps the config of this run, while the file that it came from may have changed.
    where = folder / "config.yaml"
    config = check_config(read_named_config(where, name), name, str(where), world_size=ranks)
    layout = config.layout(ranks, gpu.gpus_per_node)
    plan = planned_figures(plan_layout(config, layout, gpu))

    # Beside it the run, as far as it was measured.
    run = read_figures(folder)
    planned = {}
    found = {}
    ratios = {}
    for key, row in read_mappings(ROWS, "figures").items():
        # Some devices measure less than a plan has.
        if run[key] is None:
            continue
        title = row["title"]
        unit = row["unit"]
        planned[title] = plan[key] / unit
        found[title] = run[key] / unit
        if plan[key]:
            ratios[key] = run[key] / plan[key]

    start = first["iteration"] - first["iterations"] + 1  # a reading covers several iterations
    lines = [
        f"plan for {ranks} x {gpu.name}; run on {ranks} x {device}, iterations {start} to {last['iteration']}\n",
        f"{beside('', planned, found)}\n",
    ]
    lines += [f"- {reason}" for reason in _reasons(gpu, readings, ratios)]
    return "\n".join(lines)


def planned_figures(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, also with its config, seconds by phase, and number of collectives, the batch's included."""
    phases = {f"{phase}_s": seconds for phase, seconds in plan.time.phases.items()}
    # Input and target, which one rank reads for them all.
    broadcasts = 2 if plan.layout.tp * plan.layout.pp > 1 else 0
    # Messages between stages are no collectives.
    calls = [c["count"] for c in plan.time.collectives if c["kind"] != "send"]
    others = {
        "settings": plan.config.model_dump(),
        "pipeline_s": phases["forward_s"] + phases["backward_s"],
        "calls": sum(calls) + broadcasts,
    }
    return plan.to_json() | phases | others


def read_figures(folder: Path) -> dict[str, Any]:
    """{key of planned_figures: what the run in a folder says of it}: a step without its data, phases, memory, messages.

    None: not measured. Raises UsageError where the run has no reading.
    """
    readings = _steady(folder)
    mean = partial(_mean, readings)
    last = readings[-1]

    # Messages of a step. A fraction: a CUDA graph was captured meanwhile.
    counts = [reading["messages"] for reading in readings if reading.get("messages")]
    calls = next((count for count in counts if count % 1 == 0), None)
    if calls is None and last["ranks"] == 1:
        calls = 0

    # Of a CPU the run knows its resident set alone, with Python and its libraries in it.
    peak = last["memory/most_bytes"] if last["device"] != "cpu" else None

    def phase(name, *more):
        return mean(name, *more) if mean(name) else None

    return {
        "step_time_s": mean("step") - mean("data"),
        "forward_s": phase("forward"),
        "backward_s": phase("backward", "reduce"),
        "pipeline_s": phase("pipeline", "reduce"),
        "update_s": phase("optimizer"),
        "peak_allocated_bytes": peak,
        "calls": calls,
    }


def _mean(readings, *names):
    """Mean seconds of phases of a step, added up."""
    seconds = []
    for reading in readings:
        phases = [reading.get(f"time/{name}") or 0 for name in names]
        seconds.append(sum(phases))
    # A reading is the mean over so many iterations.
    weights = [reading["iterations"] for reading in readings]
    return fmean(seconds, weights=weights)


def _steady(folder):
    """Readings of rank 0 after the warmup of its last start, or all of them in a shorter run."""
    path = folder / FILE_NAME.format(0)
    readings = read_metrics(path) if path.exists() else []
    if not readings:
        raise UsageError(f"{folder}: has no readings ({path.name}): no step of this run was read")
    begins = 0
    for i, reading in enumerate(readings):
        # The first reading after a start covers every iteration since then.
        is_first_after_a_start = reading["since_start"] <= reading["iterations"]
        if is_first_after_a_start:
            begins = i
    last_start = readings[begins:]
    warm = [r for r in last_start if r["since_start"] - r["iterations"] >= WARMUP_ITERATIONS]
    return warm or last_start


def _reasons(gpu, readings, ratios):
    """Why figures are off, as far as the readings tell."""
    mean = partial(_mean, readings)
    last = readings[-1]
    off = {name for name, ratio in ratios.items() if not 1 - OFF <= ratio <= 1 + OFF}
    if gpu.device == "cpu":
        is_same_device = last["device"] == "cpu"
    else:
        is_same_device = gpu.measured or is_gpu(gpu.name, last["device"])
    if not is_same_device:
        yield f"the plan is for {gpu.name}, and {last['device']} is another device: times and memory are its own"
        # The number of collectives alone is the same on every device.
        off &= {"calls"}

    # What no plan has.
    data = mean("data") / mean("step")
    late = mean("slowest_over_mean")
    if data > OFF:
        yield f"data: a step waits {data:.0%} of its time for its batch, which no plan has: --num_data_workers"
    if late > 1 + OFF:
        yield f"straggler: rank {last['time/slowest_rank']:.0f} takes {late:.2f} times the mean until ranks first meet"

    # What a plan has.
    if "step_time_s" in off:
        forward = ratios.get("forward_s", 1)
        backward = ratios.get("backward_s", 1)
        if last["ranks"] > 1 and backward > forward * (1 + OFF):
            yield "messages: the backward pass, which reduces gradients, is further off than the forward one"
        else:
            yield "computation: all phases are off alike: the device reaches another share of its peak than planned"
    if "peak_allocated_bytes" in off:
        yield "memory: fragments and compiled code are not planned; docs/plan.md says what is"
    if "calls" in off:
        yield "collectives: the run sends others than planned: another version of torch, or validation in between"
