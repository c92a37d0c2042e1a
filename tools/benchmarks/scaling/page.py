"""The page of a scaling study: one HTML file that needs nothing else."""

from collections.abc import Iterable
from html import escape
from typing import Any

from tools.benchmarks.scaling.figures import Figures, Row
from tools.benchmarks.scaling.pictures import pictures
from tools.benchmarks.scaling.runs import FINISHED
from tools.benchmarks.scaling.study import Study
from training.results import HEADLINE

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px }
caption { text-align: left; font-weight: bold }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: right }
td:first-child, th:first-child, .text td, .text th { text-align: left }
.text td { overflow-wrap: anywhere }
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
NOTES = """<ul>
<li><b>samples/s</b>: the median over the epochs, without the first 10 steps of the run (memory, compilation, first
reads); slowest and fastest epoch beside it. Each run was made once: a difference within that spread says nothing, and
neither does one between runs made at other times on a machine that others use.</li>
<li><b>seconds</b>: in training steps, as the trainer counts them, the first ones included; without validations,
checkpoints and the start of processes. Steps that a killed run lost and made again count once.</li>
<li><b>to target</b>: the first time that the RMSE is at the target; between the validations before and after, it is
taken to fall in a straight line. ≤: at the first validation it was there already.</li>
<li><b>memory</b>: the most that a rank held: allocated by torch on a GPU, resident on a CPU (libraries and all).</li>
</ul>"""


def page(figures: Figures, study: Study, software: dict[str, Any]) -> str:
    """The whole page. software: what the report, not the runs, was made with."""
    rows = figures.rows
    done, missing = ([row for row in rows if (row.state == FINISHED) == wanted] for wanted in (True, False))
    parts = [f"<h1>Scaling study: {escape(study.name)}</h1>", f"<p>{escape(study.about)}</p>"]
    if missing:
        cells = [(row.run, row.state, row.why) for row in missing]
        parts.append(
            _table(f"{len(missing)} of {len(rows)} runs are not in the figures", ["run", "state", "why"], cells, "text")
        )
    parts += [f'<p class="warn">{escape(row.run)}: {escape(crowd(row))}</p>' for row in done if row.oversubscribed]
    if figures.target:
        parts.append(f"<p>Target: RMSE of {escape(str(figures.target))}</p>")
    for scaling, held in HELD.items():
        for family in dict.fromkeys(row.family for row in done if row.scaling == scaling):
            parts.append(f"<h2>{escape(family)}: {scaling} scaling, {held}</h2>")
            parts += _family([row for row in done if row.family == family])
    for name, svg in pictures(figures).items():
        parts.append(f"<h2>{name.capitalize()}</h2><figure>{svg}<figcaption>{CAPTIONS[name]}</figcaption></figure>")
    parts += ["<h2>How the figures are made</h2>", NOTES, "<h2>Runs</h2>"]
    parts.append(_table("Commands", ["run", "command"], [(row.run, row.command) for row in rows], "text"))
    names = ["device", "name", "nodes", "cores", "devices", "threads", "torch"]
    where = [(row.run, *((row.place or {}).get(name) for name in names)) for row in done]
    parts.append(_table("Run on", ["run", *names], where))
    parts.append(f"<p>Report made with {escape(', '.join(f'{name} {value}' for name, value in software.items()))}</p>")
    head = f'<meta charset="utf-8"><title>Scaling study: {escape(study.name)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def spread(row: Row) -> str:
    """Samples/s of the slowest and the fastest epoch."""
    return "-" if row.slowest_epoch is None else f"{row.slowest_epoch:.1f} to {row.fastest_epoch:.1f}"


def crowd(row: Row) -> str:
    """Why the speed of an oversubscribed run says little."""
    place = row.place or {}
    there = f"{place['devices']} device(s)" if place["devices"] else f"{place['cores']} core(s)"
    return (
        f"oversubscribed: {row.ranks} ranks with {place['threads']} thread(s) each take turns on {place['nodes']} x "
        f"{there}; the speed says nothing about scaling"
    )


def _family(rows: list[Row]) -> Iterable[str]:
    """Tables of the finished runs of a family."""
    speed = [
        (r.run, r.ranks, r.batch, _show(r.samples_per_sec, ".1f"), spread(r), r.relative_to, _show(r.speedup, ".2f"),
         _show(r.efficiency, ".0%"), _show(r.peak_gib, ".2f"))
        for r in rows
    ]  # fmt: skip
    titles = ["run", "ranks", "batch", "samples/s", "slowest to fastest epoch", "relative to", "speedup", "efficiency"]
    yield _table("Speed", [*titles, "GiB a rank"], speed)
    yield from _arithmetic(rows)
    cost = [
        (r.run, r.iterations, _show(r.training_seconds, ".1f"), _reached(r), _show(r.device_hours_to_target, ".3g"),
         _show(r.device_hours_per_1000_samples, ".3g"), _show(r.device_hours, ".3g"))
        for r in rows
    ]  # fmt: skip
    hours = [f"device-hours {what}" for what in ("to target", "for 1,000 samples", "of the run")]
    yield _table("Time and cost", ["run", "iterations", "seconds", "seconds to target", *hours], cost)
    if scored := [row for row in rows if row.rmse]:
        yield _errors(scored)


def _arithmetic(rows: list[Row]) -> Iterable[str]:
    """Speedup and efficiency of the largest run, with the numbers put in."""
    last = max(rows, key=lambda row: row.ranks)
    base = next((row for row in rows if row.run == last.relative_to), None)
    if base and base is not last:
        yield (
            f"<p>{escape(last.run)}: {last.samples_per_sec:.1f} / {base.samples_per_sec:.1f} samples/s = a speedup of "
            f"{last.speedup:.2f}; {last.speedup:.2f} / ({last.ranks} / {base.ranks} ranks) = {last.efficiency:.0%}.</p>"
        )


def _errors(rows: list[Row]) -> str:
    """RMSE of the headline fields at the end, beside persistence."""
    rmse, units, persistence = rows[0].rmse or {}, rows[0].units or {}, rows[0].persistence_rmse
    fields = [name for name in HEADLINE if name in rmse] or list(rmse)[:4]
    cells = [(row.run, *(_show((row.rmse or {}).get(name), ".3f") for name in fields)) for row in rows]
    if persistence:
        cells.append(("persistence: nothing changes", *(_show(persistence.get(name), ".3f") for name in fields)))
    return _table("RMSE at the end", ["run", *(f"{name} ({units.get(name)})" for name in fields)], cells)


def _reached(row: Row) -> str:
    return ("≤ " if row.at_first else "") + _show(row.seconds_to_target, ".1f", "not reached")


def _show(value: float | None, spec: str, otherwise: str = "-") -> str:
    return otherwise if value is None else format(value, spec)


def _table(caption: str, titles: list[str], rows: Iterable[tuple[Any, ...]], kind: str = "figures") -> str:
    """Titles and cells are escaped; None shows as '-'."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = [[escape("-" if cell is None else str(cell)) for cell in row] for row in rows]
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<table class="{kind}"><caption>{escape(caption)}</caption>\n<tr>{head}</tr>\n{body}</table>'
