"""A finished run compared with the plan of its config: figures of a step, and the likely reason for what differs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.planner.hardware import load_gpu, read_gpus
from tools.planner.plan import Plan, plan_layout
from tools.tables import format_table
from training.flops import is_gpu
from training.loggers import FILE_NAME, read_metrics
from training.run_folder import read_summary
from training.timing import WARMUP_ITERATIONS
from utils.config import check_config, read_named_config
from utils.errors import UsageError

ROWS = {  # {key of planned_figures: (title, its unit)}
    "step_time_s": ("step, without its data, ms", 1e-3), "forward_s": ("forward, ms", 1e-3),
    "backward_s": ("backward, ms", 1e-3), "pipeline_s": ("forward and backward, ms", 1e-3),
    "update_s": ("update, ms", 1e-3), "peak_allocated_bytes": ("memory at most, GiB", 2**30),
    "calls": ("collectives of a step", 1),
}  # fmt: skip
OFF = 0.15  # share by which a figure may differ without a reason


def beside(title: str, planned: Mapping[str, float], measured: Mapping[str, float], **more: Mapping[str, str]) -> str:
    """Planned figures beside measured ones, and the ratio of measured to planned, as a table.

    planned, measured: {name of a row: figure}. more: {title: {name of a row: text}} of further columns.
    """
    rows = []
    for name, plan in planned.items():
        ratio = measured[name] / plan if plan else None
        rows.append((name, plan, measured[name], ratio, *(column[name] for column in more.values())))
    columns = {title: "", "planned": ".4g", "measured": ".4g", "measured/planned": ".2f"}
    return format_table(columns | dict.fromkeys(more, ""), rows)


def compare(folder: Path, gpu_name: str | None = None) -> str:
    """Planned and measured figures of the finished run in a folder, and likely reasons, as text.

    gpu_name: in config/hardware.yaml, or of a measured machine; by default that of the run's device.
    Raises UsageError where the run is not finished or has no reading, and for a device without a plan.
    """
    file = folder / "summary.json"
    if not file.exists():
        raise UsageError(f"{folder}: has no {file.name}: no run has finished here")
    name, readings = read_summary(file, config=str)["config"], _steady(folder)
    first, last = readings[0], readings[-1]
    ranks, device, where = last["ranks"], last["device"], folder / "config.yaml"
    if gpu_name is None and not (gpu_name := next((gpu for gpu in read_gpus() if is_gpu(gpu, device)), None)):
        raise UsageError(
            f"{device}: config/hardware.yaml has no such device: give --gpu NAME, one of its names or that of a "
            "measured machine (plan.py --calibrate)"
        )
    gpu = load_gpu(gpu_name)
    config = check_config(read_named_config(where, name), name, str(where), world_size=ranks)
    plan, run = planned_figures(plan_layout(config, config.layout(ranks, gpu.gpus_per_node), gpu)), measured(folder)
    planned, found, ratios = {}, {}, {}
    for key, (title, unit) in ROWS.items():
        if run[key] is not None:
            planned[title], found[title] = plan[key] / unit, run[key] / unit
            if plan[key]:
                ratios[key] = run[key] / plan[key]
    return "\n".join([
        f"plan for {ranks} x {gpu.name}; run on {ranks} x {device}, "
        f"iterations {first['iteration'] - first['iterations'] + 1} to {last['iteration']}\n",
        f"{beside('', planned, found)}\n",
        *(f"- {reason}" for reason in _reasons(gpu, readings, ratios)),
    ])  # fmt: skip


def planned_figures(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, also with its config, seconds by phase, and collectives, the batch's included."""
    phases = {f"{phase}_s": seconds for phase, seconds in plan.time.phases.items()}
    broadcasts = 2 if plan.layout.tp * plan.layout.pp > 1 else 0  # input and target, which one rank reads for them all
    return plan.to_json() | phases | {
        "settings": plan.config.model_dump(), "pipeline_s": phases["forward_s"] + phases["backward_s"],
        "calls": sum(c["count"] for c in plan.time.collectives if c["kind"] != "send") + broadcasts,
    }  # fmt: skip


def measured(folder: Path) -> dict[str, Any]:
    """{key of planned_figures: what the run in a folder says of it}: a step without its data, phases, memory, messages.

    None: not measured. Raises UsageError where the run has no reading.
    """
    readings = _steady(folder)
    mean, last = partial(_mean, readings), readings[-1]
    counts = [r["messages"] for r in readings if r.get("messages")]
    calls = next((n for n in counts if n % 1 == 0), None)  # a fraction: a CUDA graph was captured meanwhile

    def phase(name, *more):
        return mean(name, *more) if mean(name) else None

    return {
        "step_time_s": mean("step") - mean("data"), "forward_s": phase("forward"),
        "backward_s": phase("backward", "reduce"), "pipeline_s": phase("pipeline", "reduce"),
        "update_s": phase("optimizer"),
        # Of a CPU the run knows its resident set alone, with Python and its libraries in it.
        "peak_allocated_bytes": last["memory/most_bytes"] if last["device"] != "cpu" else None,
        "calls": 0 if calls is None and last["ranks"] == 1 else calls,
    }  # fmt: skip


def _mean(readings, *names):
    """Mean seconds of phases of a step, added up."""
    seconds = [sum(r.get(f"time/{name}") or 0 for name in names) for r in readings]
    return fmean(seconds, weights=[r["iterations"] for r in readings])


def _steady(folder):
    """Readings of rank 0 after the warmup of its last start, or all of them in a shorter run."""
    path = folder / FILE_NAME.format(0)
    readings = read_metrics(path) if path.exists() else []
    if not readings:
        raise UsageError(f"{folder}: has no readings ({path.name}): no step of this run was read")
    begins = max(i for i, r in enumerate(readings) if i == 0 or r["since_start"] <= r["iterations"])
    last_start = readings[begins:]
    return [r for r in last_start if r["since_start"] - r["iterations"] >= WARMUP_ITERATIONS] or last_start


def _reasons(gpu, readings, ratios):
    """Why figures are off, as far as the readings tell."""
    mean, last = partial(_mean, readings), readings[-1]
    off = {name for name, ratio in ratios.items() if not 1 - OFF <= ratio <= 1 + OFF}
    same = last["device"] == "cpu" if gpu.device == "cpu" else gpu.measured or is_gpu(gpu.name, last["device"])
    if not same:
        yield f"the plan is for {gpu.name}, and {last['device']} is another device: times and memory are its own"
        off &= {"calls"}
    data, late = mean("data") / mean("step"), mean("slowest_over_mean")
    if data > OFF:
        yield f"data: a step waits {data:.0%} of its time for its batch, which no plan has: --num_data_workers"
    if late > 1 + OFF:
        yield f"straggler: rank {last['time/slowest_rank']:.0f} takes {late:.2f} times the mean until ranks first meet"
    if "step_time_s" in off:
        if last["ranks"] > 1 and ratios.get("backward_s", 1) > ratios.get("forward_s", 1) * (1 + OFF):
            yield "messages: the backward pass, which reduces gradients, is further off than the forward one"
        else:
            yield "computation: all phases are off alike: the device reaches another share of its peak than planned"
    if "peak_allocated_bytes" in off:
        yield "memory: fragments and compiled code are not planned; docs/plan.md says what is"
    if "calls" in off:
        yield "collectives: the run sends others than planned: another version of torch, or validation in between"
