"""Compare the forecasts of several runs by lead time: how long each is of use, and where it blurs or makes noise.

    python -m tools.forecasting.compare logs/demo/00 logs/demo_steps/00 --out compared.png

Before it, `forecast.py --run_folder RUN` makes the forecast of each run, from the same dates and over the same hours.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from pydantic import BaseModel, ConfigDict, ValidationError

from tools.forecasting.output_files import SKILL
from tools.forecasting.skill_report import useful_hours
from tools.pictures import save
from tools.tables import format_table
from training.results import HEADLINE
from utils.config import explain
from utils.errors import ArgumentParser, UsageError, run_main
from utils.files import read_json

Values = dict[str, list[float | None]]  # {channel: one value for each lead time}


class Spectra(BaseModel):
    """The spectra of a forecast."""

    lead_hours: list[int]
    ratio_up_to_km: float
    ratio: Values
    wavelengths_km: list[float]
    power: dict[str, dict[str, list[list[float]]]]


class Skill(BaseModel):
    """What is read of a skill.json."""

    model_config = ConfigDict(extra="ignore")

    starts: list[str]
    lead_hours: list[int]
    units: dict[str, str]
    rmse: dict[str, Values]
    spectra: Spectra


def read_skill(run: Path | str) -> Skill:
    """The skill of the forecast in a run's folder. Raises UsageError where there is none."""
    path = Path(run) / "forecast" / SKILL
    if not path.exists():
        raise UsageError(f"{path}: no forecast yet: python forecast.py --run_folder {run}")
    record = read_json(path)
    try:
        return Skill.model_validate(record)
    except ValidationError as error:
        raise UsageError(explain(error, Skill, str(path))) from None


def compare_table(skills: Mapping[str, Skill], channels: Sequence[str]) -> str:
    """A Markdown table: for each run and channel the hours of use, and the power of short waves at the end."""
    rows: list[Sequence[Any]] = []
    for run, skill in skills.items():
        hours = [useful_hours(skill.rmse, name, skill.lead_hours) for name in channels]
        power = [skill.spectra.ratio[name][-1] for name in channels]
        rows.append([run, *hours, *(math.nan if value is None else value for value in power)])
    last = next(iter(skills.values())).spectra.lead_hours[-1]
    use = {f"{name}: of use up to (h)": "d" for name in channels}
    return format_table({"run": "", **use, **{f"power of {name} at {last} h": ".2f" for name in channels}}, rows)


def compare_figure(skills: Mapping[str, Skill], channels: Sequence[str]) -> Figure:
    """RMSE by lead time, and the last spectra relative to truth: a column for each channel, a curve for each run."""
    figure = Figure(figsize=(3.2 * len(channels), 5.2), layout="constrained")
    panels = figure.subplots(2, len(channels), squeeze=False)
    for (above, below), name in zip(panels.T, channels, strict=True):
        for run, skill in skills.items():
            leads, spectra = skill.lead_hours, skill.spectra
            above.plot(leads, np.array(skill.rmse["model"][name], float), marker=".", label=run)
            power = {key: np.array(values[-1]) for key, values in spectra.power[name].items()}
            below.plot(spectra.wavelengths_km, power["model"] / np.where(power["truth"] > 0, power["truth"], np.nan))
        above.plot(leads, np.array(skill.rmse["climatology"][name], float), "k--", label="climatology")
        above.set(title=name, ylabel=f"RMSE ({skill.units[name]})", ylim=(0, None), xlabel="lead time (hours)")
        above.xaxis.set_major_locator(MultipleLocator(24 * math.ceil(leads[-1] / 120)))
        below.axhline(1, color="k", linestyle="--")
        below.set(xscale="log", ylim=(0, 2), xlabel="zonal wavelength (km)")
        below.set_ylabel(f"power at {spectra.lead_hours[-1]} h / truth")
        below.invert_xaxis()
        above.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for forecasts that cannot be compared."""
    parser = ArgumentParser(prog="python -m tools.forecasting.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, with its forecast")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw curves and spectra (.png)")
    options = parser.parse_args(argv)
    skills = {run: read_skill(run) for run in options.runs}
    first = skills[options.runs[0]]
    channels = [name for name in HEADLINE if name in first.spectra.power] or list(first.spectra.power)[:4]
    for run, skill in skills.items():
        for what in ("starts", "lead_hours", "units"):
            if getattr(skill, what) != getattr(first, what):
                raise UsageError(f"{run}: its forecast has other {what} than that of {options.runs[0]}")
        if missing := [name for name in channels if name not in skill.spectra.power]:
            raise UsageError(f"{run}: its forecast has no spectra of {missing[0]}")
    print(compare_table(skills, channels))
    if options.out:
        save(compare_figure(skills, channels), options.out, dpi=100)
        print(f"\ncurves and spectra: {options.out}")


if __name__ == "__main__":
    run_main(main)
