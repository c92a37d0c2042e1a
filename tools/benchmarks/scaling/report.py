"""The report of a scaling study: one self-contained HTML file, its figures as JSON, a table for the terminal."""

import io
import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat, option_context

from tools.benchmarks.scaling.figures import Figures
from tools.benchmarks.scaling.runs import FINISHED
from tools.benchmarks.scaling.study import Study
from tools.pictures import COLORS, bars
from tools.tables import cells, format_table
from training.results import HEADLINE
from utils.files import whole_file, write_json

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: left; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
.warn { background: #fff3cd; padding: .6em 1em }
"""
HELD = {"strong": "the same batch, shared by more ranks", "weak": "the same batch for each rank"}
CAPTIONS = {
    "speed": "Samples/s of all ranks over the number of ranks, both axes logarithmic. The dashed line is the smallest "
    "run of the family times the number of ranks. In strong scaling runs leave it where what cannot be split begins to "
    "count; in weak scaling they should follow it.",
    "efficiency": "Efficiency = speedup / (ranks / ranks of the smallest run), speedup = samples/s / samples/s of that "
    "run. At 100 % each rank does as much work a second as there.",
    "error": "RMSE at each validation, over the seconds spent in training steps. In strong scaling all runs make the "
    "same steps: the curves are one curve, stretched. A larger batch sees more samples a second and makes fewer steps "
    "of them: its curve may lie above.",
    "cost": "Device-hours = ranks x seconds / 3600: what the target costs, whether the devices compute or wait. At an "
    "efficiency of 50 % the same steps cost twice as much.",
}
COLUMNS = {  # of the tables
    "run": "{run}",
    "ranks": "{ranks}",
    "batch": "{batch}",
    "samples/s": "{samples_per_sec:.1f}",
    "epochs": "{slowest_epoch:.1f} to {fastest_epoch:.1f}",
    "relative to": "{relative_to}",
    "speedup": "{speedup:.2f}",
    "efficiency": "{efficiency:.0%}",
    "GiB a rank": "{peak_gib:.2f}",
    "iterations": "{iterations}",
    "seconds": "{training_seconds:.1f}",
    "seconds to target": "{reached}",
    "device-hours to target": "{device_hours_to_target:.3g}",
    "device-hours for 1,000 samples": "{device_hours_per_1000_samples:.3g}",
    "device-hours of the run": "{device_hours:.3g}",
    "s to target": "{seconds_to_target:.1f}",
    "device-hours": "{device_hours_to_target:.2g}",
}
SPEED, COST = list(COLUMNS)[:9], ["run", *list(COLUMNS)[9:15]]
IN_TERMINAL = [*SPEED[:5], "speedup", "efficiency", "s to target", "device-hours", "GiB a rank"]


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
    table = format_table(dict.fromkeys(IN_TERMINAL, ""), in_words(done, IN_TERMINAL).to_numpy().tolist())
    lines = [table if len(done) else "no run is finished"]
    lines += [f"\ntarget: {figures.target}"] if figures.target else []
    lines += [f"{row.run}: {row.state}: {row.why}" for row in missing.itertuples()]
    lines += [f"{row.run}: {row.crowd}" for row in done.itertuples() if row.crowd]
    return "\n".join(lines)


def in_words(rows: DataFrame, titles: Sequence[str]) -> DataFrame:
    """The figures of some runs under these titles of COLUMNS, as text."""
    return DataFrame(cells(rows.to_dict("records"), {title: COLUMNS[title] for title in titles}), columns=titles)


def page(figures: Figures, study: Study) -> str:
    """The whole page."""
    rows = figures.rows
    done, missing = rows[rows["state"] == FINISHED], rows[rows["state"] != FINISHED]
    parts = [f"<h1>Scaling study: {escape(study.name)}</h1>", f"<p>{escape(study.about)}</p>"]
    if len(missing):
        title = f"{len(missing)} of {len(rows)} runs are not in the figures"
        parts.append(_table(title, missing[["run", "state", "why"]]))
    parts += [f'<p class="warn">{escape(f"{row.run}: {row.crowd}")}</p>' for row in done.itertuples() if row.crowd]
    if figures.target:
        parts.append(f"<p>Target: RMSE of {escape(str(figures.target))}</p>")
    for (scaling, family), own in done.groupby(["scaling", "family"], sort=False):
        parts.append(f"<h2>{escape(family)}: {scaling} scaling, {HELD[scaling]}</h2>")
        parts += [_table("Speed", in_words(own, SPEED)), _table("Time and cost", in_words(own, COST))]
        if own["rmse"].notna().any():
            parts.append(_table("RMSE at the end", _errors(own[own["rmse"].notna()])))
    for name, svg in pictures(figures, done).items():
        parts.append(f"<h2>{name.capitalize()}</h2><figure>{svg}<figcaption>{CAPTIONS[name]}</figcaption></figure>")
    parts += ["<h2>Runs</h2>", _table("Commands", rows[["run", "command"]])]
    parts.append(_table("Run on", DataFrame([{"run": row.run} | row.place for row in done.itertuples()]).fillna("-")))
    head = f'<meta charset="utf-8"><title>Scaling study: {escape(study.name)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(title: str, cells: DataFrame) -> str:
    with option_context("display.max_colwidth", None):
        return f"<h3>{escape(title)}</h3>\n{cells.to_html(index=False, border=0)}"


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
    timed, target = done[done["samples_per_sec"].notna()], figures.target
    if timed.empty:
        return {}
    layouts = list(timed["layout"].unique())
    colors = {layout: COLORS[i % len(COLORS)] for i, layout in enumerate(layouts)}

    def run_bars(values: Series, unit: str) -> str:
        own = [colors[layout] for layout in timed["layout"][values.index]]
        return _svg(bars(values.rename(timed["run"]), unit, own, row=0.26))

    def speed(axes: Axes, family: DataFrame) -> None:
        base = family[family["run"] == family["relative_to"]]
        for layout, own in family.groupby("layout", sort=False):
            line = concat([base, own]).drop_duplicates("ranks", keep="last").sort_values("ranks")
            axes.plot(line["ranks"], line["samples_per_sec"], "o-", color=colors[layout], label=layout)
        ranks = sorted(family["ranks"].unique())
        ideal = [base["samples_per_sec"].item() * n / base["ranks"].item() for n in ranks]
        axes.plot(ranks, ideal, "--", color="#888888", label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ranks, map(str, ranks))
        axes.set_yticks(ideal, [f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" for speed in ideal])
        axes.set(xlabel="ranks", ylabel="samples/s of all ranks")

    def error(axes: Axes, family: DataFrame) -> None:
        assert target
        for row in family.itertuples():
            error = figures.errors[row.run][target.field]
            axes.plot(error.index, error, ".-", color=colors[row.layout], label=f"{row.layout}-{row.ranks}")
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
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
