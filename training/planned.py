"""A run compared with its plan: what was planned and measured of a step, and the likely reason for what differs."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training.flops import is_gpu
from training.timing import WARMUP_ITERATIONS
from training.trackers import FILE_NAME, LARGEST, read_metrics
from utils.config import check_config, differing_keys, read_named_config
from utils.errors import UsageError
from utils.files import read_json

PLAN = "plan.json"  # in the folder of a run
OFF = 0.15  # share by which a figure may differ without a reason
NUMBERS = "step_time_s", "peak_allocated_bytes", "calls", "forward_s", "backward_s", "update_s"  # that a plan needs
OF_SPEED = "global_batch_size", "amp_mode", "enable_jit", "enable_tf32", "enable_cuda_graphs", "enable_fused"
Plan = dict[str, Any]
Mean = Callable[..., float]  # seconds of phases of a step, added up


def read_plan(path: Path) -> Plan:
    """A plan as plan.py --submit stores it. Raises UsageError for anything else."""
    plan = read_json(path)
    numbers = [plan.get(name) for name in NUMBERS] if isinstance(plan, dict) else [None]
    sizes = all(isinstance(n, int | float) and 0 <= n <= LARGEST for n in numbers) and plan["step_time_s"] > 0
    if not sizes or not all(isinstance(plan.get(name), dict) for name in ("settings", "layout")):
        raise UsageError(f"{path}: is not a plan as plan.py --submit stores it")
    return plan


def compare(folder: Path) -> str:
    """Planned and measured figures of the run in a folder, and likely reasons, as text.

    Raises UsageError where it has no plan, that of another run, or no reading.
    """
    if not (folder / PLAN).exists():
        raise UsageError(f"{folder}: has no {PLAN}: its run was not started by plan.py --submit, or with --plan")
    plan, readings = read_plan(folder / PLAN), _steady(folder)
    first, last, mean = readings[0], readings[-1], _means(readings)
    _check(plan, folder, last)
    found = measured(folder)

    rows = [
        ("step, without its data, ms", plan["step_time_s"] * 1e3, found["step_time_s"] * 1e3),
        ("forward, ms", plan["forward_s"] * 1e3, mean("forward") * 1e3),
        ("backward, ms", plan["backward_s"] * 1e3, mean("backward", "reduce") * 1e3),
        ("update, ms", plan["update_s"] * 1e3, mean("optimizer") * 1e3),
        ("memory at most, GiB", plan["peak_allocated_bytes"] / 2**30, found["peak_allocated_bytes"] / 2**30),
        ("collectives of a step", plan["calls"], found["calls"]),
    ]
    if mean("pipeline"):
        both = (plan["forward_s"] + plan["backward_s"]) * 1e3
        rows[1:3] = [("forward and backward, ms", both, mean("pipeline", "reduce") * 1e3)]
    lines = [
        f"plan for {plan['layout'].get('gpus')} x {plan.get('gpu')}; run on {last['ranks']} x {last['device']}, "
        f"iterations {first['iteration'] - first['iterations'] + 1} to {last['iteration']}",
        f"{'':<28}{'planned':>12}{'measured':>12}{'ratio':>8}",
    ]
    for name, planned, value in rows:  # 0: not measured
        cells = f"{value:>12.4g}" + (f"{value / planned:>8.2f}" if planned else "") if value else f"{'-':>12}"
        lines.append(f"{name:<28}{planned:>12.4g}{cells}")
    ratios = {name.split(",")[0]: value / planned for name, planned, value in rows if planned and value}
    lines += [f"- {reason}" for reason in _reasons(plan, last, ratios, mean)]
    if (folder / "summary.json").exists():
        lines.append(f"plans that rest on this run: plan.py --calibrate {shlex.quote(str(folder / 'summary.json'))}")
    return "\n".join(lines)


def measured(folder: Path) -> dict[str, Any]:
    """{key of a plan: what the run in a folder says of it}: a step without its data, memory, collectives.

    None: not measured. Raises UsageError where the run has no reading.
    """
    readings = _steady(folder)
    mean, last = _means(readings), readings[-1]
    counts = [r["messages"] for r in readings if r.get("messages")]
    calls = next((n for n in counts if n % 1 == 0), None)  # a fraction: a CUDA graph was captured meanwhile
    return {
        "step_time_s": mean("step") - mean("data"),
        "peak_allocated_bytes": last["memory/most_bytes"],
        "calls": 0 if calls is None and last["ranks"] == 1 else calls,
    }


def _means(readings):
    def mean(*names: str) -> float:
        found = [(r["iterations"], sum(r.get(f"time/{name}") or 0 for name in names)) for r in readings]
        return sum(n * seconds for n, seconds in found) / sum(n for n, _ in found)

    return mean


def _steady(folder):
    """Readings of rank 0 after the warmup of its last start, or all of them in a shorter run."""
    path = folder / FILE_NAME.format(0)
    whole = ("iterations", "since_start", "ranks", "device", "memory/most_bytes", "time/step")
    readings = [r for r in read_metrics(path) if all(r.get(name) for name in whole)] if path.exists() else []
    if not readings:
        raise UsageError(f"{folder}: has no readings ({path.name}): no step of this run was read")
    begins = max(i for i, r in enumerate(readings) if i == 0 or r["since_start"] <= r["iterations"])
    last_start = readings[begins:]
    return [r for r in last_start if r["since_start"] - r["iterations"] >= WARMUP_ITERATIONS] or last_start


def _check(plan, folder, last):
    """Raise UsageError where a plan is that of another run."""
    where = str(folder / PLAN)
    name = str(plan["settings"].pop("config", None))
    own = check_config(read_named_config(folder / "config.yaml", name), name, f"{folder / 'config.yaml'}: {name}")
    planned = check_config(plan["settings"], name, where)
    keys = differing_keys(planned, own, "model", "layout")
    keys += [key for key in OF_SPEED if getattr(planned, key) != getattr(own, key)]
    found = [f"{key} ({getattr(planned, key)} there, {getattr(own, key)} in the run)" for key in keys]
    if plan["layout"].get("gpus") != last["ranks"]:
        found.append(f"ranks ({plan['layout'].get('gpus')} there, {last['ranks']} in the run)")
    if found:
        raise UsageError(f"{where}: is the plan of another run: {', '.join(found)}")


def _reasons(plan: Plan, last: dict[str, Any], ratios: dict[str, float], mean: Mean) -> Iterator[str]:
    """Why figures are off, as far as the readings tell."""
    off = {name for name, ratio in ratios.items() if not 1 - OFF <= ratio <= 1 + OFF}
    on_cpu = last["device"] == "cpu"
    if not (on_cpu if plan.get("device_type") == "cpu" else is_gpu(str(plan.get("gpu")), last["device"])):
        yield f"the plan is for {plan.get('gpu')}, and {last['device']} is another device: times and memory are its own"
        off -= {"step", "memory at most", "forward", "backward", "update", "forward and backward"}
    data, late = mean("data") / mean("step"), mean("slowest_over_mean")
    if data > OFF:
        yield f"data: a step waits {data:.0%} of its time for its batch, which no plan has: --num_data_workers"
    if late > 1 + OFF:
        yield f"straggler: rank {last['time/slowest_rank']:.0f} takes {late:.2f} times the mean until ranks first meet"
    if "step" in off:
        forward, backward = ratios.get("forward", 1), ratios.get("backward", 1)
        if last["ranks"] > 1 and backward > forward * (1 + OFF):
            yield "messages: the backward pass, which reduces gradients, is further off than the forward one"
        else:
            yield "computation: all phases are off alike: the device reaches another share of its peak than planned"
    if "memory at most" in off:
        cpu, gpu = "the resident set has Python and its libraries in it", "fragments and compiled code are not planned"
        yield f"memory: {cpu if on_cpu else gpu}; docs/plan.md says what is"
    if "collectives of a step" in off:
        yield "collectives: the run sends others than planned: another version of torch, or validation in between"
