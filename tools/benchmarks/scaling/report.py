"""What the runs of a study come to: a table for the terminal, one self-contained HTML file, its figures as JSON.

Figures are read from the summary and the TensorBoard events in each run folder. A run that was stopped and continued
has several event files. TensorBoard's reader joins them and drops steps that were computed twice.
"""

import io
import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from jinja2 import Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series, option_context
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from tools.benchmarks.scaling.runs import FINISHED, place, state
from tools.benchmarks.scaling.study import Run, Study, Target
from tools.pictures import COLORS, bars
from tools.tables import cells, format_table
from training.results import HEADLINE
from training.run_folder import read_summary
from training.timing import WARMUP_ITERATIONS
from utils.config import nearest, read_mappings
from utils.errors import UsageError
from utils.files import whole_file, write_json

USUAL_FIELD = "z500"
OF_THE_SUMMARY = ("parameters", "peak_memory_bytes", "rmse", "persistence_rmse", "units")
MEASURED = (*OF_THE_SUMMARY, "samples_per_sec", "training_seconds", "seconds_to_target")
TEXTS = read_mappings("config/scaling_report.yaml", "texts")


class Figures(NamedTuple):
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
            row |= {name: summary.get(name) for name in OF_THE_SUMMARY} | _speed(steps)
            row["crowd"] = _crowd(run, where, summary["device"]) if where else ""
    if target and (missing := [own for own in errors.values() if target.field not in own]):
        near = nearest(target.field, missing[0])
        raise UsageError(f"target {target.field}={target.rmse:g}: no run forecasts '{target.field}'{near}")
    target = target or _choose(errors)
    for row in rows:
        if target and row["run"] in errors:
            own = errors[row["run"]][target.field]
            seconds, sign = seconds_to(own, target.rmse), "≤ " if own.iloc[0] <= target.rmse else ""
            row["seconds_to_target"] = seconds
            row["reached"] = "not reached" if math.isnan(seconds) else f"{sign}{seconds:.1f}"
    return Figures(_compared(DataFrame(rows)), errors, target)


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


def _speed(steps: DataFrame) -> dict[str, float]:
    """Speed and seconds. The first steps count in the seconds alone, unless the run has no others."""
    steady = steps[steps["first"] >= WARMUP_ITERATIONS]
    epochs = (steps if steady.empty else steady).groupby("epoch")[["samples", "seconds"]].sum()
    speeds = epochs["samples"] / epochs["seconds"]
    return {
        "samples_per_sec": speeds.median(), "slowest_epoch": speeds.min(), "fastest_epoch": speeds.max(),
        "training_seconds": steps["seconds"].sum() if len(steps) else math.nan,
    }  # fmt: skip


def _crowd(run: Run, where: dict[str, Any], device: str) -> str:
    """Whether there were more threads than cores on a node, or more ranks than devices, in words."""
    threads, kind = (where["threads"], "cores") if device == "cpu" else (1, "devices")
    if run.ranks / where["nodes"] * threads <= where[kind]:
        return ""
    there = f"{where['nodes']} x {where[kind]} {kind}"
    return f"oversubscribed: {run.ranks} ranks with {where['threads']} thread(s) each take turns on {there}"


def _compared(frame: DataFrame) -> DataFrame:
    """The rows with speedup and efficiency, relative to the fastest of the smallest runs of a family, and costs."""
    frame = frame.reindex(columns=frame.columns.union(MEASURED, sort=False))  # also where no run is finished
    timed = frame[frame["samples_per_sec"].notna()].sort_values(["ranks", "samples_per_sec"], ascending=[True, False])
    base = timed.groupby("family")[["run", "ranks", "samples_per_sec"]].first().reindex(frame["family"])
    base.index = frame.index
    hours = frame["ranks"] / 3600  # of devices, whether they compute or wait
    speedup = frame["samples_per_sec"] / base["samples_per_sec"]
    return frame.assign(
        relative_to=base["run"].where(frame["samples_per_sec"].notna()),
        speedup=speedup,
        efficiency=speedup / (frame["ranks"] / base["ranks"]),
        device_hours=hours * frame["training_seconds"],
        device_hours_per_1000_samples=hours * 1000 / frame["samples_per_sec"],
        device_hours_to_target=hours * frame["seconds_to_target"],
        peak_gib=frame["peak_memory_bytes"].astype(float) / 2**30,
    )


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


def write_report(figures: Figures, study: Study, out: Path) -> None:
    """Write report.html and report.json into the folder `out`."""
    rows = json.loads(figures.rows.to_json(orient="records", double_precision=15))
    target = vars(figures.target) if figures.target else None
    write_json(out / "report.json", {"study": study.name, "about": study.about, "target": target, "rows": rows})
    with whole_file(out / "report.html") as part:
        part.write_text(page(figures, study), encoding="utf-8")


def text_table(figures: Figures) -> str:
    """The main figures as a Markdown table, then the runs that are missing or oversubscribed."""
    rows = figures.rows
    done, missing = rows[rows["state"] == FINISHED], rows[rows["state"] != FINISHED]
    shown = in_words(done, "terminal")
    table = format_table(dict.fromkeys(shown, ""), shown.to_numpy().tolist())
    lines = [table if len(done) else "no run is finished"]
    lines += [f"\ntarget: {figures.target}"] if figures.target else []
    lines += [f"{row.run}: {row.state}: {row.why}" for row in missing.itertuples()]
    lines += [f"{row.run}: {row.crowd}" for row in done.itertuples() if row.crowd]
    return "\n".join(lines)


def in_words(rows: DataFrame, table: str) -> DataFrame:
    """The figures of some runs as text, in a table of config/scaling_report.yaml."""
    columns = {title: TEXTS["columns"][title] for title in TEXTS["tables"][table]}
    return DataFrame(cells(rows.to_dict("records"), columns), columns=list(columns))


def page(figures: Figures, study: Study) -> str:
    """The whole page."""
    rows = figures.rows
    done, missing = rows[rows["state"] == FINISHED], rows[rows["state"] != FINISHED]
    families = []
    for (scaling, family), own in done.groupby(["scaling", "family"], sort=False):
        tables = {title: in_words(own, title) for title in ("Speed", "Time and cost")}
        if own["rmse"].notna().any():
            tables["RMSE at the end"] = _errors(own[own["rmse"].notna()])
        families.append((family, scaling, tables))
    places = DataFrame([{"run": row.run} | row.place for row in done.itertuples()]).fillna("-")
    with option_context("display.max_colwidth", None):
        return Template(TEXTS["page"]["template"], autoescape=True).render(
            study=study, rows=rows, done=done, missing=missing, target=figures.target, families=families,
            places=places, pictures=pictures(figures, done), texts=TEXTS,
        )  # fmt: skip


def _errors(rows: DataFrame) -> DataFrame:
    """RMSE of the headline fields at the end, beside persistence."""
    first = rows.iloc[0]
    errors = dict(zip(rows["run"], rows["rmse"], strict=True))
    if isinstance(first["persistence_rmse"], dict):
        errors["persistence: nothing changes"] = first["persistence_rmse"]
    fields = [name for name in HEADLINE if name in first["rmse"]] or list(first["rmse"])[:4]
    titles = {name: f"{name} ({first['units'].get(name)})" for name in fields}
    table = DataFrame(errors).T.reindex(columns=fields).rename(columns=titles)
    return table.map("{:.3f}".format).rename_axis("run").reset_index()


def pictures(figures: Figures, done: DataFrame) -> dict[str, str]:
    """{name: SVG} of speed, efficiency, error and cost, where there are figures. done: rows of the finished runs."""
    timed, target = done[done["samples_per_sec"].notna()].set_index("run"), figures.target
    if timed.empty:
        return {}
    colors = dict(zip(timed["layout"].unique(), cycle(COLORS), strict=False))

    def run_bars(values: Series, unit: str) -> str:
        return _svg(bars(values, unit, timed["layout"][values.index].map(colors).tolist(), row=0.26))

    def speed(axes: Axes, family: DataFrame) -> None:
        base = family.loc[family["relative_to"].iloc[0]]
        lines = family.pivot_table("samples_per_sec", "ranks", "layout", sort=False).sort_index()
        lines.loc[base["ranks"]] = lines.loc[base["ranks"]].fillna(base["samples_per_sec"])
        for layout, line in lines.items():
            line.dropna().plot(ax=axes, style="o-", color=colors[layout], label=layout)
        ideal = [base["samples_per_sec"] * n / base["ranks"] for n in lines.index]
        axes.plot(lines.index, ideal, "--", color="#888888", label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lines.index, map(str, lines.index))
        axes.set_yticks(ideal, [f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" for speed in ideal])
        axes.set(xlabel="ranks", ylabel="samples/s of all ranks")

    def error(axes: Axes, family: DataFrame) -> None:
        assert target
        for run, row in family.iterrows():
            label = f"{row['layout']}-{row['ranks']}"
            figures.errors[run][target.field].plot(ax=axes, style=".-", color=colors[row["layout"]], label=label)
        axes.axhline(target.rmse, linestyle="--", color="#888888", label="target")
        unit = family["units"].iloc[0].get(target.field, "")
        axes.set(xlabel="seconds in training steps", ylabel=f"RMSE of {target.field} ({unit})")

    drawn = {"speed": _panels(timed, speed), "efficiency": run_bars(100 * timed["efficiency"], "efficiency, %")}
    if target:
        drawn["error"] = _panels(timed, error)
        reached = timed["device_hours_to_target"].dropna()
        if len(reached):
            drawn["cost"] = run_bars(reached, f"device-hours to {target.field} = {target.rmse:g}")
    return drawn


def _panels(rows: DataFrame, draw: Callable[[Axes, DataFrame], None]) -> str:
    """A panel for each family, as SVG."""
    families = list(rows.groupby("family", sort=False))
    figure = Figure(figsize=(4.6 * len(families), 3.8), layout="constrained")
    for axes, (name, family) in zip(figure.subplots(1, len(families), squeeze=False)[0], families, strict=True):
        draw(axes, family)
        axes.set_title(f"{name} ({family['scaling'].iloc[0]} scaling)")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small", frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element; the names inside are unique on a page only by the figure."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]
