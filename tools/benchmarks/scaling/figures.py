"""Figures of the runs of a study, a row for each: speedup, efficiency, time and cost.

They are read from the summary and the TensorBoard events in each run folder. A run that was stopped and continued has
several event files. TensorBoard's reader joins them and drops steps that were computed twice.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from pandas import DataFrame, Series
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from tools.benchmarks.scaling.runs import FINISHED, place, state
from tools.benchmarks.scaling.study import Run, Target
from training.run_folder import read_summary
from training.timing import WARMUP_ITERATIONS
from utils.config import nearest
from utils.errors import UsageError

USUAL_FIELD = "z500"
OF_THE_SUMMARY = ("parameters", "peak_memory_bytes", "rmse", "persistence_rmse", "units")
OF_THE_STEPS = ("samples_per_sec", "slowest_epoch", "fastest_epoch", "training_seconds")


@dataclass(frozen=True)
class Figures:
    """What a study has come to.

    rows: a row for each run; NaN where the run is not finished or a figure does not apply. samples_per_sec is of all
    ranks together, the median over the epochs. relative_to is the run that speedup and efficiency are measured against.
    reached: seconds to the target in words, ≤ where the first validation had reached it. rmse, persistence_rmse: of
    each field, in its units, at the end. crowd: why the speed of an oversubscribed run says little, "" for others.
    errors: {run: RMSE of each validation, with a column for each field, by seconds in training steps}.
    """

    rows: DataFrame
    errors: dict[str, DataFrame]
    target: Target | None


def collect(runs: list[Run], out: Path, target: Target | None) -> Figures:
    """Read every run folder and compute the figures.

    target: None chooses one that all finished runs reach. Raises UsageError for a field that no run forecasts.
    """
    rows, errors = [], {}
    for run in runs:
        now, where = state(run, out), place(run, out)
        row: dict[str, Any] = {
            "number": run.number, "run": run.name, "family": run.family, "layout": run.layout, "scaling": run.scaling,
            "ranks": run.ranks, "command": run.command, "folder": str(run.folder), "state": now.kind, "why": now.why,
            "batch": run.config.global_batch_size, "iterations": run.config.num_iters, "place": where,
        }  # fmt: skip
        rows.append(row)
        if now.kind == FINISHED:
            summary = read_summary(run.folder / "summary.json")
            steps, errors[run.name] = read_history(run.folder, run.config.global_batch_size)
            row |= {name: summary.get(name) for name in OF_THE_SUMMARY}
            row |= zip(OF_THE_STEPS, _speed(steps), strict=True)
            row["crowd"] = _crowd(run, where, summary["device"]) if where else ""
    if target:
        _check(target, errors)
    else:
        target = _choose(errors)
    if target:
        for row in rows:
            if row["run"] in errors:
                own = errors[row["run"]][target.field]
                seconds, sign = seconds_to(own, target.rmse), "≤ " if own.iloc[0] <= target.rmse else ""
                row["seconds_to_target"] = seconds
                row["reached"] = "not reached" if math.isnan(seconds) else f"{sign}{seconds:.1f}"
    return Figures(_compared(rows), errors, target)


def read_history(folder: Path, batch: int) -> tuple[DataFrame, DataFrame]:
    """The training steps and the errors in the events of a run folder. batch: samples of an optimizer step.

    steps: from reading to reading, indexed by the last iteration of each piece; columns `first` (iteration - 1),
    `samples`, `seconds` and `epoch`. Steps whose reading was lost with a killed process count with the speed of the
    next one. errors: as of Figures.
    """
    events = EventAccumulator(str(folder), {SCALARS: 0})  # 0: keep all events
    events.Reload()
    found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()[SCALARS]}
    speeds = Series(found.get("speed/samples_per_sec", {}), dtype=float)
    ends = Series(found.get("loss/train_epoch", {}), dtype=float).index
    steps = DataFrame({"first": [0, *speeds.index[:-1]][: len(speeds)]}, index=speeds.index)
    steps["samples"] = (steps.index - steps["first"]) * batch
    steps["seconds"] = steps["samples"] / speeds
    steps["epoch"] = ends.searchsorted(steps.index)  # a reading ends with each epoch: none is in two
    errors = DataFrame({tag.partition("_")[2]: values for tag, values in found.items() if tag.startswith("rmse/")})
    errors.index = [float(steps["seconds"][steps.index <= iteration].sum()) for iteration in errors.index]
    return steps, errors


def seconds_to(errors: Series, target: float) -> float:
    """Seconds in training steps until an error first falls to `target`; NaN where it never does.

    It is interpolated linearly between two validations. A run whose first validation is below the target has reached
    it then. errors: of each validation, by seconds.
    """
    reached = numpy.flatnonzero(errors <= target)
    if not len(reached):
        return math.nan
    around = errors.iloc[max(0, reached[0] - 1) : reached[0] + 1]
    return float(numpy.interp(-target, -around, around.index))  # the errors fall, interp wants a rise


def _speed(steps: DataFrame) -> list[float]:
    """OF_THE_STEPS. The first steps count in the seconds alone, unless the run has no others."""
    steady = steps[steps["first"] >= WARMUP_ITERATIONS]
    epochs = (steps if steady.empty else steady).groupby("epoch")[["samples", "seconds"]].sum()
    speeds = epochs["samples"] / epochs["seconds"]
    return [speeds.median(), speeds.min(), speeds.max(), steps["seconds"].sum() if len(steps) else math.nan]


def _crowd(run: Run, where: dict[str, Any], device: str) -> str:
    """Whether there were more threads than cores on a node, or more ranks than devices, in words."""
    threads, kind = (where["threads"], "cores") if device == "cpu" else (1, "devices")
    if run.ranks / where["nodes"] * threads <= where[kind]:
        return ""
    there = f"{where['nodes']} x {where[kind]} {kind}"
    return f"oversubscribed: {run.ranks} ranks with {where['threads']} thread(s) each take turns on {there}"


def _compared(rows: list[dict[str, Any]]) -> DataFrame:
    """The rows with speedup and efficiency, relative to the fastest of the smallest runs of a family, and costs."""
    known = dict.fromkeys(name for row in rows for name in row)
    frame = DataFrame(rows, columns=[*known, *({*OF_THE_SUMMARY, *OF_THE_STEPS, "seconds_to_target"} - {*known})])
    timed = frame[frame["samples_per_sec"].notna()].sort_values(["ranks", "samples_per_sec"], ascending=[True, False])
    base = timed.groupby("family")[["run", "ranks", "samples_per_sec"]].first().reindex(frame["family"])
    base.index = frame.index
    frame["relative_to"] = base["run"].where(frame["samples_per_sec"].notna())
    frame["speedup"] = frame["samples_per_sec"] / base["samples_per_sec"]
    frame["efficiency"] = frame["speedup"] / (frame["ranks"] / base["ranks"])
    hours = frame["ranks"] / 3600  # of devices, whether they compute or wait
    frame["device_hours"] = hours * frame["training_seconds"]
    frame["device_hours_per_1000_samples"] = hours * 1000 / frame["samples_per_sec"]
    frame["device_hours_to_target"] = hours * frame["seconds_to_target"]
    frame["peak_gib"] = frame["peak_memory_bytes"].astype(float) / 2**30
    return frame


def _check(target: Target, errors: dict[str, DataFrame]) -> None:
    for own in errors.values():
        if target.field not in own:
            near = nearest(target.field, own)
            raise UsageError(f"target {target.field}={target.rmse:g}: no run forecasts '{target.field}'{near}")


def _choose(errors: dict[str, DataFrame]) -> Target | None:
    """An RMSE that every finished run reaches: the best of the worst run, rounded up to three digits."""
    fields = set.intersection(*map(set, errors.values())) if errors else set()
    if not fields:
        return None
    field = USUAL_FIELD if USUAL_FIELD in fields else min(fields)
    worst = max(own[field].min() for own in errors.values())
    digit = 10.0 ** (math.floor(math.log10(worst)) - 2)
    reason = "chosen afterwards: what the worst of these runs reaches at its best, rounded up"
    return Target(field, float(f"{math.ceil(worst / digit) * digit:.6g}"), reason)
