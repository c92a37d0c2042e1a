"""The report of a forecast: a table of its skill, curves, maps and an animation."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.forecasting.output_files import SKILL, file_name
from tools.forecasting.rollout import Plume, Result
from tools.forecasting.scores import ensemble_table
from tools.forecasting.spectra import spread
from tools.pictures import save
from tools.tables import format_table
from training.forecasting.metrics import HEADLINE
from training.forecasting.pictures import (
    animate,
    blur_figure,
    ensemble_figure,
    lead_time_figure,
    skill_figure,
    spectra_figure,
)
from utils.errors import UsageError
from utils.files import read_json, write_json
from weather.convert.climate_quantiles import QUANTILES
from weather.fields.grid import HOUR, Grid
from weather.fields.time_axis import show


def write_report(
    result: Result,
    out: Path | str,
    about: dict[str, Any],
    files: bool,
    others: Mapping[str, dict[str, Any]],
) -> None:
    """Write skill, pictures and animation of a Result to the folder `out`, and print a summary. One rank calls this.

    about: of output_files.attributes. files: the forecasts are in the folder as NetCDF. others: of read_skill, by run.
    """
    out = Path(out)
    units = dict(zip(result.names, result.units, strict=True))
    headline = told_channels(result.names)
    record = _skill_record(result, about, headline, units)
    write_json(out / SKILL, record)
    pictures = _draw_pictures(result, out, headline, units)
    if is_ensemble(result):
        pictures.insert(0, "blur.png")
        _draw_blur(result, out / "blur.png", headline, units, others)

    print(f"\n{skill_table(result, headline, units)}")
    if is_ensemble(result):
        print(f"\n{ensemble_table(result.ensembles, headline, units, result.leads, others)}")
    for run, skill in {"": record, **others}.items():
        # Another run may forecast some of the channels only.
        shared = [name for name in headline if name in skill["rmse"]["model"]]
        hours = [f"{name} {useful_hours(skill['rmse'], name, result.leads)} h" for name in shared]
        of_run = f" ({run})" if run else ""
        print(f"RMSE below persistence and climatology up to: {', '.join(hours)}{of_run}")
    short = f"{result.spectra.short:.0f} km"
    print(f"power: of the model at wavelengths up to {short}, relative to truth: less than 1 is blur, more is noise\n")

    # A model that amplifies its own output ends in infinity or NaN.
    rmse_of_model = list(result.skill["rmse"]["model"].values())  # (C, L)
    finite = np.isfinite(rmse_of_model).all(0)  # (L,)
    if not finite.all():
        first_broken = finite.argmin()
        print(f"the forecast is not finite from {result.leads[first_broken]} hours on: the rollout is unstable")
    _print_files(result, out, pictures, files)


def _skill_record(
    result: Result,
    about: dict[str, Any],
    headline: Sequence[str],
    units: dict[str, str],
) -> dict[str, Any]:
    """The content of skill.json. about: as in write_report. headline: channels whose whole spectra are kept."""
    spectra = result.spectra
    power = {}
    for name in [*headline, result.channel]:
        of_channel = spectra.of(result.names.index(name))
        power[name] = {key: values.tolist() for key, values in of_channel.items()}
    ratio = spectra.ratio().tolist()
    ratio_by_channel = dict(zip(result.names, ratio, strict=True))
    starts = [show(start) for start in result.starts]
    return {
        **about,
        "starts": starts,
        "lead_hours": result.leads,
        "units": units,
        "points": describe_points(result.grid),
        **result.skill,
        **result.ensembles,
        "brier_quantiles": QUANTILES,
        "brier_thresholds": result.thresholds,
        "spectra": {
            "lead_hours": spectra.leads,
            "ratio_up_to_km": spectra.short,  # short waves of every channel, of truth
            "ratio": ratio_by_channel,
            "wavelengths_km": spectra.wavelengths.tolist(),
            "power": power,
        },
    }


def _draw_pictures(result: Result, out: Path, headline: Sequence[str], units: dict[str, str]) -> list[str]:
    """Write curves, maps and the animation; returns the names of their files, the animation last."""
    channel = result.channel
    unit = units[channel]
    pictures = ["skill.png", "spectra.png", f"{channel}.png", f"{channel}.webp"]
    skill_file, spectra_file, maps_file, animation_file = (out / name for name in pictures)
    forecast = result.forecast  # (L, H, W)
    if result.plume is not None:
        pictures.insert(0, "ensemble.png")
        _draw_ensemble(result, result.plume, out / "ensemble.png", unit)

    curves = skill_figure(result.skill, headline, units, result.leads)
    save(curves, skill_file, dpi=100)
    spectra = result.spectra
    power = {name: spectra.of(result.names.index(name)) for name in headline}
    curves = spectra_figure(power, spectra.wavelengths, spectra.leads, units)
    save(curves, spectra_file, dpi=100)

    # Maps show every other lead time of the table. Counted from the last, the longest forecast is among them.
    shown = spread(len(result.leads))[::-2]
    shown.reverse()
    leads = [result.leads[i] for i in shown]
    first = result.starts[0]
    title = f"{channel}, forecast from {show(first)}"
    maps = lead_time_figure(result.truth[shown], forecast[shown], leads, result.grid, title, unit)
    save(maps, maps_file, dpi=80)

    def title_of(lead: int) -> str:
        return f"{title} + {lead} h = {show(first + lead * HOUR)}"

    animate(animation_file, result.truth, forecast, result.leads, result.grid, title_of, unit)
    return pictures


def is_ensemble(result: Result) -> bool:
    """Tell whether the model has made several members."""
    return "spread" in result.ensembles


def _draw_ensemble(result: Result, plume: Plume, file: Path, unit: str) -> None:
    """Draw the members of the shown channel after the first start, and the ranks of the truth over all starts."""
    channel = result.channel
    row, column = plume.point
    figure = ensemble_figure(
        members=plume.members,
        truth=result.truth[:, row, column],
        point=plume.point,
        spread=plume.spread,
        histogram=result.ensembles["rank_histogram"]["model"][channel][-1],
        leads=result.leads,
        grid=result.grid,
        title=f"{channel}, {plume.members.shape[1]} members from {show(result.starts[0])}",
        units=unit,
    )
    save(figure, file, dpi=100)


def _draw_blur(
    result: Result,
    file: Path,
    headline: Sequence[str],
    units: dict[str, str],
    others: Mapping[str, dict[str, Any]],
) -> None:
    """Draw the power of truth, a member, the mean of the members, and of other runs, at the last lead time."""
    names = {"truth": "truth", "model": "a member", "mean": "mean of the members"}
    spectra = result.spectra
    curves: dict[str, dict[str, np.ndarray]] = {}
    for channel in headline:
        of_channel = spectra.of(result.names.index(channel))
        curves[channel] = {label: of_channel[name][-1] for name, label in names.items()}
        for run, record in others.items():
            power = record.get("spectra", {}).get("power", {}).get(channel)
            if power is None:  # of another version
                continue
            of_run = np.array(power["model"][-1], float)
            if of_run.shape == spectra.wavelengths.shape:  # of the same grid
                curves[channel][run] = of_run
    figure = blur_figure(curves, spectra.wavelengths, spectra.leads[-1], units)
    save(figure, file, dpi=100)


def _print_files(result: Result, out: Path, pictures: Sequence[str], files: bool) -> None:
    """Print where everything is. Of the forecasts, one for each start date, the first file is named."""
    *images, animation = pictures
    written = [SKILL, *images]
    if files:
        written.append(file_name(result.starts[0]))
    more = " ..." if files and len(result.starts) > 1 else ""
    print(f"everything is in {out}: {', '.join(written)}{more}")
    print(f"animation:  {out / animation}")


def read_skill(
    run: Path | str,
    starts: Iterable[np.datetime64],
    leads: Sequence[int],
    units: Mapping[str, str],
    grid: Grid,
) -> dict[str, Any]:
    """Read the skill of the forecast in a run's folder.

    units: of the channels that it is compared in. Raises UsageError where its dates, lead times, points or units are
    others, and where it forecasts none of the channels that a report tells of.
    """
    path = Path(run) / "forecast" / SKILL
    if not path.exists():
        raise UsageError(f"{path}: no forecast yet: python forecast.py --run_folder {run}")
    record = read_json(path)
    dates = [show(start) for start in starts]
    is_same = record.get("lead_hours") == list(leads) and record.get("starts") == dates
    if not is_same:
        raise UsageError(f"{path}: its forecast has other dates or lead times: compare those of the same options")
    # An error is a mean over the points; files of before do not name theirs.
    points = describe_points(grid)
    points_of_run = record.get("points", points)
    if points_of_run != points:
        raise UsageError(
            f"{path}: its forecast is of {points_of_run}, not of {points}: compare runs of the same points"
        )
    of_run = record["units"]
    told = told_channels(list(units))
    if not any(name in of_run for name in told):
        raise UsageError(f"{path}: its forecast has none of {', '.join(told)}: compare runs that share channels")
    for name, unit in units.items():
        # A score in other units is another number.
        if of_run.get(name, unit) != unit:
            raise UsageError(f"{path}: its {name} is in {of_run[name]}, not in {unit}: compare runs of the same units")
    return record


def describe_points(grid: Grid) -> str:
    """The points of a grid by its size and corners: '32 x 64 points from 90 N 0 E to -84.4 N 354.4 E'."""
    rows = len(grid.latitude)
    columns = len(grid.longitude)
    first, last = (f"{grid.latitude[end]:.5g} N {grid.longitude[end]:.5g} E" for end in (0, -1))
    return f"{rows} x {columns} points from {first} to {last}"


def told_channels(names: Sequence[str]) -> Sequence[str]:
    """The channels that a report tells of: those of HEADLINE, or the first ones where there are none of these."""
    return [name for name in HEADLINE if name in names] or names[:4]


def skill_table(result: Result, channels: Sequence[str], units: dict[str, str]) -> str:
    """RMSE of each forecast, ACC and power of the model by lead time, as text."""
    shown = spread(len(result.leads))
    ratio = result.spectra.ratio()  # (C, lead times of the spectra, which are those that are shown)
    power = dict(zip(result.names, ratio, strict=True))
    rows: list[list[Any]] = []
    for name in channels:
        label = f"{name} ({units[name]})"
        scores = {f"RMSE {forecast}": values[name] for forecast, values in result.skill["rmse"].items()}
        scores["ACC model"] = result.skill["acc"]["model"][name]
        for score, values in scores.items():
            rows.append([label, score, *(values[i] for i in shown)])
        rows.append([label, "power model", *power[name]])
    columns = {f"mean over {len(result.starts)} starts": "", "score": ""}
    for i in shown:
        columns[f"{result.leads[i]} h"] = ".3f"
    return format_table(columns, rows)


def useful_hours(rmse: Mapping[str, Mapping[str, Sequence[float | None]]], name: str, leads: Sequence[int]) -> int:
    """The last lead time, in hours, up to which the model beats persistence and climatology in a channel; 0 for none.

    rmse: {forecast: {channel: value at each lead time}}, of a Result or of skill.json.
    """
    model = np.array(rmse["model"][name], float)  # (L,)
    persistence = np.array(rmse["persistence"][name], float)
    climatology = np.array(rmse["climatology"][name], float)
    better = model < np.minimum(persistence, climatology)
    # argmin is the first lead time at which the model is no better.
    count = len(better) if better.all() else int(better.argmin())
    return leads[count - 1] if count else 0
