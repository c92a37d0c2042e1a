"""The page of a scaling study: one self-contained HTML file."""

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


FIRST = ["run", "ranks", "batch", "samples/s"]
COLUMNS: dict[str, tuple[str, str]] = {  # of tables, on the page and in the terminal: (figure of a Row, format)
    "run": ("run", ""),
    "ranks": ("ranks", ""),
    "batch": ("batch", ""),
    "samples/s": ("samples_per_sec", ".1f"),
    "slowest to fastest epoch": ("spread", ""),
    "relative to": ("relative_to", ""),
    "speedup": ("speedup", ".2f"),
    "efficiency": ("efficiency", ".0%"),
    "GiB a rank": ("peak_gib", ".2f"),
    "iterations": ("iterations", ""),
    "seconds": ("training_seconds", ".1f"),
    "seconds to target": ("reached", ""),
    "device-hours to target": ("device_hours_to_target", ".3g"),
    "device-hours for 1,000 samples": ("device_hours_per_1000_samples", ".3g"),
    "device-hours of the run": ("device_hours", ".3g"),
    "epochs": ("spread", ""),
    "s to target": ("seconds_to_target", ".1f"),
    "device-hours": ("device_hours_to_target", ".2g"),
}
SPEED = list(COLUMNS)[:9]
COST = ["run", *list(COLUMNS)[9:15]]
IN_TERMINAL = [*FIRST, "epochs", "speedup", "efficiency", "s to target", "device-hours", "GiB a rank"]


def page(figures: Figures, study: Study, software: dict[str, Any]) -> str:
    """The whole page. software: of the report, not of the runs."""
    rows = figures.rows
    done, missing = ([row for row in rows if (row.state == FINISHED) == wanted] for wanted in (True, False))
    parts = [f"<h1>Scaling study: {escape(study.name)}</h1>", f"<p>{escape(study.about)}</p>"]
    if missing:
        why = [(row.run, row.state, row.why) for row in missing]
        title = f"{len(missing)} of {len(rows)} runs are not in the figures"
        parts.append(_table(title, ["run", "state", "why"], why, "text"))
    parts += [f'<p class="warn">{escape(row.run)}: {escape(row.crowd)}</p>' for row in done if row.oversubscribed]
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
    parts.append(_table("Run on", ["run", *names], [(r.run, *map((r.place or {}).get, names)) for r in done]))
    parts.append(f"<p>Report made with {escape(', '.join(f'{name} {value}' for name, value in software.items()))}</p>")
    head = f'<meta charset="utf-8"><title>Scaling study: {escape(study.name)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _family(rows: list[Row]) -> Iterable[str]:
    """Tables of the finished runs of a family."""
    yield _table("Speed", SPEED, [cells(row, SPEED) for row in rows])
    last = max(rows, key=lambda row: row.ranks)
    base = next((row for row in rows if row.run == last.relative_to), None)
    if base and base is not last:  # the arithmetic of the largest run, with the numbers put in
        yield (
            f"<p>{escape(last.run)}: {last.samples_per_sec:.1f} / {base.samples_per_sec:.1f} samples/s = a speedup of "
            f"{last.speedup:.2f}; {last.speedup:.2f} / ({last.ranks} / {base.ranks} ranks) = {last.efficiency:.0%}.</p>"
        )
    yield _table("Time and cost", COST, [cells(row, COST) for row in rows])
    if scored := [row for row in rows if row.rmse]:
        yield _errors(scored)


def _errors(rows: list[Row]) -> str:
    """RMSE of the headline fields at the end, beside persistence."""
    units, persistence = rows[0].units or {}, rows[0].persistence_rmse
    errors = {row.run: row.rmse or {} for row in rows}
    fields = [name for name in HEADLINE if name in errors[rows[0].run]] or list(errors[rows[0].run])[:4]
    if persistence:
        errors["persistence: nothing changes"] = persistence
    lines = [(run, *(_show(rmse.get(name), ".3f") for name in fields)) for run, rmse in errors.items()]
    return _table("RMSE at the end", ["run", *(f"{name} ({units.get(name)})" for name in fields)], lines)


def cells(row: Row, titles: Iterable[str]) -> list[str]:
    """The figures of a run under these titles of COLUMNS, as text."""
    return [_show(getattr(row, COLUMNS[title][0]), COLUMNS[title][1]) for title in titles]


def _show(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _table(caption: str, titles: list[str], rows: Iterable[Iterable[Any]], kind: str = "figures") -> str:
    """Titles and cells are escaped; None shows as '-'."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = ["".join(f"<td>{escape(_show(cell, ''))}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="{kind}"><caption>{escape(caption)}</caption>\n<tr>{head}</tr>\n{body}</table>'
