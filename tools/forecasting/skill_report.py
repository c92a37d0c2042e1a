"""The report of a forecast: a table of its skill, curves, maps and an animation."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.forecasting.output_files import SKILL, file_name
from tools.forecasting.rollout import Result
from tools.forecasting.spectra import spread
from tools.pictures import save
from tools.tables import format_table
from training.pictures import animate, lead_time_figure, skill_figure, spectra_figure
from training.results import HEADLINE
from utils.errors import UsageError
from utils.files import read_json, write_json
from weather.grid import HOUR
from weather.time_axis import show


def write_report(
    result: Result, out: Path | str, about: dict[str, Any], files: bool, others: Mapping[str, dict[str, Any]]
) -> None:
    """Write skill, pictures and animation of a Result to the folder `out`, and print a summary. One rank calls this.

    about: of output_files.attributes. files: the forecasts are in the folder as NetCDF. others: of read_skill, by run.
    """
    out, first, spectra = Path(out), result.starts[0], result.spectra
    units = dict(zip(result.names, result.units, strict=True))
    headline = [name for name in HEADLINE if name in units] or result.names[:4]
    names = [file_name(start) for start in result.starts] if files else []
    pictures = ["skill.png", "spectra.png", f"{result.channel}.png", f"{result.channel}.webp"]
    record = {
        **about, "starts": [show(start) for start in result.starts], "lead_hours": result.leads, "units": units,
        **result.skill,
        "spectra": {
            "lead_hours": spectra.leads, "ratio_up_to_km": spectra.short,  # short waves of every channel, of truth
            "ratio": dict(zip(result.names, spectra.ratio().tolist(), strict=True)),
            "wavelengths_km": spectra.wavelengths.tolist(),
            "power": {
                name: {key: values.tolist() for key, values in spectra.of(result.names.index(name)).items()}
                for name in [*headline, result.channel]
            },
        },
    }  # fmt: skip
    write_json(out / SKILL, record)

    save(skill_figure(result.skill, headline, units, result.leads), out / pictures[0], dpi=100)
    power = {name: result.spectra.of(result.names.index(name)) for name in headline}
    save(spectra_figure(power, result.spectra.wavelengths, result.spectra.leads, units), out / pictures[1], dpi=100)
    unit, channel = units[result.channel], result.channel
    some = spread(len(result.leads))[::-2][::-1]  # every other one, counted from the last
    leads = [result.leads[i] for i in some]
    title = f"{channel}, forecast from {show(first)}"
    maps = lead_time_figure(result.truth[some], result.forecast[some], leads, result.grid, title, unit)
    save(maps, out / pictures[2], dpi=80)
    animate(
        out / pictures[3], result.truth, result.forecast, result.leads, result.grid,
        lambda lead: f"{title} + {lead} h = {show(first + lead * HOUR)}", unit,
    )  # fmt: skip

    print(f"\n{skill_table(result, headline, units)}")
    short = f"{result.spectra.short:.0f} km"
    for run, skill in {"": record, **others}.items():
        hours = [f"{name} {useful_hours(skill['rmse'], name, result.leads)} h" for name in headline]
        print(f"RMSE below persistence and climatology up to: {', '.join(hours)}{run and f' ({run})'}")
    print(f"power: of the model at wavelengths up to {short}, relative to truth: less than 1 is blur, more is noise\n")
    finite = np.isfinite(list(result.skill["rmse"]["model"].values())).all(0)  # (L,)
    if not finite.all():
        print(f"the forecast is not finite from {result.leads[finite.argmin()]} hours on: the rollout is unstable")
    print(f"everything is in {out}: {', '.join(['skill.json', *pictures[:3], *names[:1]])}{' ...' * (len(names) > 1)}")
    print(f"animation:  {out / pictures[3]}")


def read_skill(run: Path | str, starts: Iterable[np.datetime64], leads: Sequence[int]) -> dict[str, Any]:
    """Read the skill of the forecast in a run's folder. Raises UsageError where its dates or lead times are others."""
    path = Path(run) / "forecast" / SKILL
    if not path.exists():
        raise UsageError(f"{path}: no forecast yet: python forecast.py --run_folder {run}")
    record = read_json(path)
    if [record.get("lead_hours"), record.get("starts")] != [list(leads), [show(start) for start in starts]]:
        raise UsageError(f"{path}: its forecast has other dates or lead times: compare those of the same options")
    return record


def skill_table(result: Result, channels: Sequence[str], units: dict[str, str]) -> str:
    """RMSE of each forecast, ACC and power of the model by lead time, as text."""
    some, power = spread(len(result.leads)), dict(zip(result.names, result.spectra.ratio(), strict=True))
    rows: list[list[Any]] = []
    for name in channels:
        scores = {f"RMSE {forecast}": values[name] for forecast, values in result.skill["rmse"].items()}
        scores["ACC model"] = result.skill["acc"]["model"][name]
        for label, values in scores.items():
            rows.append([f"{name} ({units[name]})", label, *(values[i] for i in some)])
        rows.append([f"{name} ({units[name]})", "power model", *power[name]])
    titles = {f"mean over {len(result.starts)} starts": "", "score": ""}
    return format_table(titles | {f"{result.leads[i]} h": ".3f" for i in some}, rows)


def useful_hours(rmse: Mapping[str, Mapping[str, Sequence[float | None]]], name: str, leads: Sequence[int]) -> int:
    """The last lead time, in hours, up to which the model beats persistence and climatology in a channel; 0 for none.

    rmse: {forecast: {channel: value at each lead time}}, of a Result or of skill.json.
    """
    values = [np.array(rmse[forecast][name], float) for forecast in ("model", "persistence", "climatology")]
    better = values[0] < np.minimum(values[1], values[2])
    count = len(better) if better.all() else int(better.argmin())
    return leads[count - 1] if count else 0
