"""A finished run compared with the plan of its config: figures of a step, and the likely reason for what differs."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.instruments.phases import PHASES
from tools.planner.hardware import Gpu, load_gpu, read_gpus
from tools.planner.plan import Plan, plan_layout
from tools.planner.step_time import step_time
from tools.planner.trace import trace_step
from training.flops import is_gpu
from training.loggers import FILE_NAME, read_metrics
from training.run_folder import read_summary
from training.timing import WARMUP_ITERATIONS
from utils.config import check_config, read_named_config
from utils.errors import UsageError

OFF = 0.15  # share by which a figure may differ without a reason
Mean = Callable[..., float]  # seconds of phases of a step, added up


def compare(folder: Path, gpu_name: str | None = None) -> str:
    """Planned and measured figures of the finished run in a folder, and likely reasons, as text.

    gpu_name: in config/hardware.yaml, or of a measured machine; by default that of the run's device.
    Raises UsageError where the run is not finished or has no reading, and for a device without a plan.
    """
    file = folder / "summary.json"
    if not file.exists():
        raise UsageError(f"{folder}: has no {file.name}: no run has finished here")
    summary, readings = read_summary(file, config=str), _steady(folder)
    first, last, mean, found = readings[0], readings[-1], _means(readings), measured(folder)
    gpu, ranks, where = gpu_of_run(gpu_name, last["device"]), last["ranks"], folder / "config.yaml"
    name = summary["config"]
    config = check_config(read_named_config(where, name), name, str(where), world_size=ranks)
    plan = planned_figures(plan_layout(config, config.layout(ranks, gpu.gpus_per_node), gpu))

    rows = [
        ("step, without its data, ms", plan["step_time_s"] * 1e3, found["step_time_s"] * 1e3),
        ("forward, ms", plan["forward_s"] * 1e3, mean("forward") * 1e3),
        ("backward, ms", plan["backward_s"] * 1e3, mean("backward", "reduce") * 1e3),
        ("update, ms", plan["update_s"] * 1e3, mean("optimizer") * 1e3),
    ]
    if mean("pipeline"):
        both = (plan["forward_s"] + plan["backward_s"]) * 1e3
        rows[1:3] = [("forward and backward, ms", both, mean("pipeline", "reduce") * 1e3)]
    if last["device"] != "cpu":  # there the run knows its resident set alone, with Python and its libraries in it
        memory = [figures["peak_allocated_bytes"] / 2**30 for figures in (plan, found)]
        rows.append(("memory at most, GiB", *memory))
    rows.append(("collectives of a step", plan["calls"], found["calls"]))
    lines = [
        f"plan for {ranks} x {gpu.name}; run on {ranks} x {last['device']}, "
        f"iterations {first['iteration'] - first['iterations'] + 1} to {last['iteration']}",
        f"{'':<28}{'planned':>12}{'measured':>12}{'ratio':>8}",
    ]
    for name, planned, value in rows:  # 0: not measured
        cells = f"{value:>12.4g}" + (f"{value / planned:>8.2f}" if planned else "") if value else f"{'-':>12}"
        lines.append(f"{name:<28}{planned:>12.4g}{cells}")
    ratios = {name.split(",")[0]: value / planned for name, planned, value in rows if planned and value}
    lines += [f"- {reason}" for reason in _reasons(gpu, last, ratios, mean)]
    lines.append(f"plans that rest on this run: plan.py --calibrate {shlex.quote(str(file))}")
    return "\n".join(lines)


def gpu_of_run(name: str | None, device: str) -> Gpu:
    """The Gpu of this name, by default the one whose device reports `device`. Raises UsageError where there is none."""
    name = name or next((gpu for gpu in read_gpus() if is_gpu(gpu, device)), None)
    if name is None:
        raise UsageError(
            f"{device}: config/hardware.yaml has no such device: give --gpu NAME, one of its names or that of a "
            "measured machine (plan.py --calibrate)"
        )
    return load_gpu(name)


def planned_figures(plan: Plan, calibration: float | None = None) -> dict[str, Any]:
    """A plan as JSON, also with its config, its seconds by phase, and its number of collectives."""
    traces = trace_step(plan.config, plan.layout, plan.gpu.device)

    def seconds(phase: str) -> float:
        own = [
            replace(
                trace,
                operations=Counter({what: n for what, n in trace.operations.items() if what.phase == phase}),
                messages=Counter({what: n for what, n in trace.messages.items() if what.phase == phase}),
            )
            for trace in traces
        ]
        return step_time(own, plan.config, plan.layout, plan.gpu, calibration).seconds

    return plan.to_json() | {
        "settings": plan.config.model_dump(),
        "calls": sum(c["count"] for c in plan.time.collectives if c["kind"] != "send"),
        **{f"{phase}_s": seconds(phase) for phase in PHASES},
    }


def measured(folder: Path) -> dict[str, Any]:
    """{key of planned_figures: what the run in a folder says of it}: a step without its data, memory, collectives.

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


def _reasons(gpu: Gpu, last: dict[str, Any], ratios: dict[str, float], mean: Mean) -> Iterator[str]:
    """Why figures are off, as far as the readings tell."""
    off = {name for name, ratio in ratios.items() if not 1 - OFF <= ratio <= 1 + OFF}
    same = last["device"] == "cpu" if gpu.device == "cpu" else gpu.measured or is_gpu(gpu.name, last["device"])
    if not same:
        yield f"the plan is for {gpu.name}, and {last['device']} is another device: times and memory are its own"
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
        yield "memory: fragments and compiled code are not planned; docs/plan.md says what is"
    if "collectives of a step" in off:
        yield "collectives: the run sends others than planned: another version of torch, or validation in between"
