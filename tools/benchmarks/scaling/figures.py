"""Figures of the runs of a study: speedup, efficiency, time and cost, one row for each run."""

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.scaling.history import History, read_history
from tools.benchmarks.scaling.runs import FINISHED, place, state, summary
from tools.benchmarks.scaling.study import Run, Target
from utils.config import nearest
from utils.errors import UsageError

USUAL_FIELD = "z500"


@dataclass
class Row:
    """The figures of a run; None where the run is not finished or a figure does not apply.

    samples_per_sec: of all ranks together, the median over the epochs. relative_to: the run that speedup and efficiency
    are measured against. at_first: whether the first validation had reached the target. rmse, persistence_rmse: of
    every field, in its units, at the end. oversubscribed: more threads than cores on a node, or more ranks than
    accelerators.
    """

    number: int
    run: str
    family: str
    layout: str
    scaling: str
    ranks: int
    command: str
    folder: str
    state: str
    why: str
    batch: int
    iterations: int
    parameters: int | None = None
    samples_per_sec: float | None = None
    slowest_epoch: float | None = None
    fastest_epoch: float | None = None
    relative_to: str | None = None
    speedup: float | None = None
    efficiency: float | None = None
    training_seconds: float | None = None
    device_hours: float | None = None
    device_hours_per_1000_samples: float | None = None
    seconds_to_target: float | None = None
    at_first: bool | None = None
    device_hours_to_target: float | None = None
    peak_memory_bytes: int | None = None
    rmse: dict[str, float] | None = None
    persistence_rmse: dict[str, float] | None = None
    units: dict[str, str] | None = None
    place: dict[str, Any] | None = None
    oversubscribed: bool | None = None

    @property
    def peak_gib(self) -> float | None:
        """The most memory that a rank held, GiB."""
        return self.peak_memory_bytes / 2**30 if self.peak_memory_bytes else None

    @property
    def spread(self) -> str | None:
        """Samples/s of the slowest and the fastest epoch, in words."""
        return None if self.slowest_epoch is None else f"{self.slowest_epoch:.1f} to {self.fastest_epoch:.1f}"

    @property
    def reached(self) -> str:
        """Seconds to the target, in words."""
        if self.seconds_to_target is None:
            return "not reached"
        return f"{'≤ ' if self.at_first else ''}{self.seconds_to_target:.1f}"

    @property
    def crowd(self) -> str:
        """Why the speed of an oversubscribed run says little."""
        place = self.place or {}
        there = f"{place['devices']} device(s)" if place["devices"] else f"{place['cores']} core(s)"
        return (
            f"oversubscribed: {self.ranks} ranks with {place['threads']} thread(s) each take turns on "
            f"{place['nodes']} x {there}; the speed says nothing about scaling"
        )

    def to_json(self) -> dict[str, Any]:
        """All figures by name."""
        return asdict(self)


@dataclass(frozen=True)
class Figures:
    """A row for each run, {number: history} of the finished runs, and the target."""

    rows: list[Row]
    histories: dict[int, History]
    target: Target | None


def collect(runs: list[Run], out: Path, target: Target | None) -> Figures:
    """Read every run folder and compute the figures.

    target: None chooses one that all finished runs reach. Raises UsageError for a field that no run forecasts.
    """
    rows, histories = [], {}
    for run in runs:
        now = state(run, out)
        row = Row(
            run.number, run.name, run.family, run.layout, run.scaling, run.ranks, run.command, str(run.folder),
            now.kind, now.why, run.config.global_batch_size, run.config.num_iters, place=place(run, out),
        )  # fmt: skip
        rows.append(row)
        if now.kind == FINISHED:
            histories[run.number] = read_history(run.folder, run.config.global_batch_size)
            _fill(row, histories[run.number], summary(run))
    target = _check(target, histories) if target else _choose(histories)
    for family in dict.fromkeys(row.family for row in rows):
        _compare([(row, row.samples_per_sec) for row in rows if row.family == family and row.samples_per_sec])
    if target:
        for number, history in histories.items():
            _reach(rows[number], history, target)
    return Figures(rows, histories, target)


def device_hours(ranks: int, seconds: float) -> float:
    """Device-hours of `ranks` devices, whether they compute or wait."""
    return ranks * seconds / 3600


def _fill(row: Row, history: History, result: dict[str, Any]) -> None:
    speeds = history.epoch_speeds()
    row.parameters, row.peak_memory_bytes = result["parameters"], result["peak_memory_bytes"]
    row.rmse, row.units = result.get("rmse"), result["units"]
    row.persistence_rmse = result.get("persistence_rmse")
    if speeds:
        row.samples_per_sec = statistics.median(speeds)
        row.slowest_epoch, row.fastest_epoch = min(speeds), max(speeds)
        row.device_hours_per_1000_samples = device_hours(row.ranks, 1000 / row.samples_per_sec)
        row.training_seconds = history.seconds_at(row.iterations)
        row.device_hours = device_hours(row.ranks, row.training_seconds)
    if row.place:
        each, of = (row.place["threads"], "cores") if result["device"] == "cpu" else (1, "devices")
        row.oversubscribed = row.ranks / row.place["nodes"] * each > row.place[of]


def _compare(family: list[tuple[Row, float]]) -> None:
    """Fill in speedup and efficiency, relative to the fastest of the smallest runs. family: (row, samples/s)."""
    if not family:
        return
    base, base_speed = min(family, key=lambda pair: (pair[0].ranks, -pair[1]))
    for row, speed in family:
        row.relative_to = base.run
        row.speedup = speed / base_speed
        row.efficiency = row.speedup / (row.ranks / base.ranks)


def _reach(row: Row, history: History, target: Target) -> None:
    row.seconds_to_target = history.seconds_to(target.field, target.rmse)
    if row.seconds_to_target is not None:
        row.at_first = bool(history.errors[target.field].iloc[0] <= target.rmse)
        row.device_hours_to_target = device_hours(row.ranks, row.seconds_to_target)


def _check(target: Target, histories: dict[int, History]) -> Target:
    for history in histories.values():
        if target.field not in history.errors:
            near = nearest(target.field, history.errors)
            raise UsageError(f"target {target.field}={target.rmse:g}: no run forecasts '{target.field}'{near}")
    return target


def _choose(histories: dict[int, History]) -> Target | None:
    """An RMSE that every finished run reaches: the best of the worst run, rounded up to three digits."""
    fields = set.intersection(*(set(history.errors) for history in histories.values())) if histories else set()
    if not fields:
        return None
    field = USUAL_FIELD if USUAL_FIELD in fields else min(fields)
    worst = max(history.errors[field].min() for history in histories.values())
    digit = 10.0 ** (math.floor(math.log10(worst)) - 2)
    reason = "chosen afterwards: what the worst of these runs reaches at its best, rounded up"
    return Target(field, float(f"{math.ceil(worst / digit) * digit:.6g}"), reason)
