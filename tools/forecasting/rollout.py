"""Autoregressive forecasts: the output of a model after one step is its input for the next step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distributed.parallel_model import ParallelModel
from tools.forecasting.dated_frames import DatedFrames
from tools.forecasting.output_files import FileKind, ForecastFile
from tools.forecasting.scores import LeadTimeEnsembles, LeadTimeSkill, Scores
from tools.forecasting.spectra import LeadTimeSpectra, Spectra
from training.forecasting.ensemble import FORECAST, draw_noise, own_members, repeat_members, whole_members
from training.step.step import autocast
from training.tasks.forecast import rollout_of
from utils import comm
from utils.device import to_device
from utils.errors import UsageError, nearest
from utils.sample_order import Order
from utils.schema import Config
from weather.fields.grid import HOUR, Grid

HOURS_BEFORE_1970 = 10**9  # more than any date of data
MOST_POINTS = 8192  # of those at which members are kept for a picture: 64 x 128


@dataclass
class Plume:
    """The members at the point where they differ most at the last lead time, and the map of that difference."""

    members: np.ndarray  # (L, M)
    point: tuple[int, int]  # row and column
    spread: np.ndarray  # (H, W), standard deviation of the members


@dataclass
class Result:
    """The outcome of a forecast."""

    starts: np.ndarray  # (N,) datetime64[s]
    leads: list[int]  # hours
    names: list[str]  # of the channels
    units: list[str]
    grid: Grid
    skill: Scores  # of LeadTimeSkill.compute
    ensembles: Scores  # of LeadTimeEnsembles.compute
    thresholds: str  # of its Brier scores: what their quantiles are of
    spectra: Spectra
    channel: str  # the channel of the pictures
    truth: np.ndarray  # (L, H, W) of this channel after the first start, in physical units; may be empty beyond rank 0
    forecast: np.ndarray  # likewise; of an ensemble the mean of its members
    plume: Plume | None  # of an ensemble, likewise


class ShownChannel:
    """Collects truth and forecast of a channel, lead time by lead time, in physical units.

    Of an ensemble that is the mean of its members. They themselves are kept at MOST_POINTS points or fewer.
    """

    def __init__(self) -> None:
        self.truths: list[np.ndarray] = []  # (H, W) of each lead time
        self.forecasts: list[np.ndarray] = []
        self.thinned: list[np.ndarray] = []  # (M, h, w) of each lead time
        self.every = 1  # of rows and columns so many is kept
        self.spread = np.empty(0)

    def add(self, members: np.ndarray, truth: np.ndarray) -> None:
        """Add a lead time. members: (M, H, W), one of them without an ensemble. truth: (H, W)."""
        self.truths.append(truth)
        self.forecasts.append(members.mean(0))
        if len(members) > 1:
            while truth[:: self.every, :: self.every].size > MOST_POINTS:
                self.every += 1
            self.thinned.append(members[:, :: self.every, :: self.every].copy())
            self.spread = members.std(0, ddof=1)

    def truth(self) -> np.ndarray:
        """(L, H, W); empty where nothing was added."""
        return np.array(self.truths)

    def forecast(self) -> np.ndarray:
        """(L, H, W); empty where nothing was added."""
        return np.array(self.forecasts)

    def plume(self) -> Plume | None:
        """The members where they differ most; None without an ensemble."""
        if not self.thinned:
            return None
        kept = self.spread[:: self.every, :: self.every]
        row, column = np.unravel_index(kept.argmax(), kept.shape)
        members = np.stack([each[:, row, column] for each in self.thinned])  # (L, M)
        point = (int(row) * self.every, int(column) * self.every)
        return Plume(members, point, self.spread)


def roll_out(
    parallel: ParallelModel,
    frames: DatedFrames,
    starts: np.ndarray,
    leads: list[int],
    config: Config,
    channel: str,
    out: Path | str | None,
    attributes: dict[str, str],
    layout: str = "cf",
    quantiles: np.ndarray | None = None,
) -> Result:
    """Forecast from every start with a ParallelModel; returns the Result, on every rank.

    frames: the initial states, and the truth to compare with. leads: of lead_times. channel: name of the channel to
    show. out: folder for the forecasts as NetCDF, or None. attributes: of these files. layout: theirs, of
    output_files.LAYOUTS. quantiles: of read_quantiles, the thresholds of Brier scores. All ranks call this together:
    data-parallel ranks divide the starts, domain-parallel ranks divide the images.
    """
    rollout = _Rollout(parallel, frames, leads, config, channel, quantiles)
    names, units, grid = rollout.names, rollout.units, rollout.grid
    kind = FileKind(leads, names, units, grid, attributes, layout)
    members = config.ensemble_size if config.ensemble_size > 1 else 0
    # One of the ranks that hold the same forecast.
    writes = comm.get_rank("image") == comm.get_rank("same_data") == 0
    shown: ShownChannel | None = None

    # Every rank makes as many batches of the same size, since all ranks of a sharded model take part in each forward
    # pass: dates after the first `count` of a batch repeat.
    order = Order(len(starts), config.local_batch_size or 1, comm.get_rank("dp"), comm.get_size("dp"))
    parallel.model.eval()
    with torch.no_grad(), autocast(config, frames.device):
        for batch, count in enumerate(order.counts()):
            dates = starts[order.samples(batch)]
            of_batch = None  # what pictures need is taken of the first start
            if writes and shown is None and count:
                of_batch = shown = ShownChannel()
            written = dates[:count] if writes and out is not None else dates[:0]
            with kind.opened(out or "", written, members) as files:
                _forecast_batch(rollout, dates, count, files, of_batch)
    scores = rollout.skill.compute(names)  # a collective: after it, every rank has written its files
    ensembles_by_lead = rollout.ensembles.compute(names)
    spectra = rollout.spectra.compute()
    shown = shown or ShownChannel()
    return Result(
        starts=starts,
        leads=leads,
        names=names,
        units=units,
        grid=grid,
        skill=scores,
        ensembles=ensembles_by_lead,
        thresholds=rollout.thresholds,
        spectra=spectra,
        channel=channel,
        truth=shown.truth(),
        forecast=shown.forecast(),
        plume=shown.plume(),
    )


def _forecast_batch(
    rollout: "_Rollout", dates: np.ndarray, count: int, files: Sequence[ForecastFile], shown: ShownChannel | None
) -> None:
    """Forecast from some dates, of which the first `count` are scored. Each lead time is written before the next one.

    files: of the first dates; none, where this rank writes nothing. shown: takes the forecast from the first date.
    """
    for step, (ensembles, truths) in enumerate(rollout.forecast(dates, count)):
        for file, ensemble in zip(files, ensembles, strict=False):
            fields = rollout.physical(ensemble)  # (M, C, H, W)
            if not rollout.is_ensemble:
                fields = fields[0]
            file.write(step, fields)
        if shown is not None:
            members = rollout.of_channel(ensembles[0])  # (M, H, W)
            truth = rollout.of_channel(truths[0])  # (H, W)
            shown.add(members, truth)


class _Rollout:
    """Forecasts of a model, and the scores of all that were made."""

    def __init__(
        self,
        parallel: ParallelModel,
        frames: DatedFrames,
        leads: list[int],
        config: Config,
        channel: str,
        quantiles: np.ndarray | None,
    ):
        self.parallel = parallel
        self.frames = frames
        self.leads = leads
        self.config = config
        self.n_out = config.n_out_channels
        all_names, all_units, self.grid = frames.dataset.description
        self.names = all_names[: self.n_out]
        self.units = all_units[: self.n_out]
        self.shown = all_names.index(channel)
        statistics = [values[: self.n_out] for values in frames.statistics]
        means, stds, _ = statistics
        self.means = torch.from_numpy(means)
        self.stds = torch.from_numpy(stds)
        self.skill = LeadTimeSkill(len(leads), self.grid.latitude, statistics, frames.device)
        self.thresholds = "of the map of the climatology" if quantiles is None else "of the climate of each point"
        self.ensembles = LeadTimeEnsembles(len(leads), self.grid.latitude, statistics, frames.device, quantiles)
        # Of a member: the mean of several is blurred, which is shown beside it.
        self.is_ensemble = config.ensemble_size > 1
        drawn = ("model", "truth", "mean") if self.is_ensemble else ("model", "truth")
        self.spectra = LeadTimeSpectra(leads, self.grid, self.stds, frames.device, drawn)

    def forecast(self, dates: np.ndarray, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Forecast from some dates, of which the first `count` are scored and yielded, lead time by lead time.

        Yields members (count, M, C, H, W), one of them without an ensemble, and truth (count, C, H, W), normalised.
        """
        frames = self.frames
        whole = self.parallel.whole_images
        read = [frames.read(dates + lead * HOUR) for lead in frames.input_leads]
        latest = torch.cat([frame[:, : self.config.n_in_channels] for frame in read], 1)  # (B, frames * C, h, w)
        persistence = whole(read[0][:, : self.n_out])[:count]  # (count, C, H, W)
        steps = rollout_of(self.config, frames.device)
        noise = self._noise(dates)
        members = len(own_members(self.config))
        latest = repeat_members(latest, members) if noise is not None else latest
        for step, lead in enumerate(self.leads):
            present = dates + (lead - self.leads[0]) * HOUR
            x = frames.with_forcings(latest, np.repeat(present, members))
            noise_of_step = None if noise is None else noise[:, step : step + 1]  # (B m, 1, K)
            (state,) = steps.steps(self.parallel.model, x, 1, noise=noise_of_step)
            latest = steps.moved_on(latest, state)
            ensemble = whole_members(whole(state), self.config)[:count]  # (count, M, C, H, W)
            frame = frames.read(dates + lead * HOUR)
            truth = whole(frame[:, : self.n_out])[:count]
            self._score(step, persistence, ensemble, truth)
            yield ensemble, truth

    def _score(self, step: int, persistence: Tensor, ensemble: Tensor, truth: Tensor) -> None:
        """Add a step to all scores. ensemble: (B, M, C, H, W); persistence, truth: (B, C, H, W); normalised."""
        mean = ensemble.mean(1)
        self.skill.update(step, persistence, mean, truth)
        self.ensembles.update(step, persistence, ensemble, truth)
        images = [ensemble[:, 0], truth]
        if self.is_ensemble:
            images.append(mean)
        self.spectra.update(step, *images)

    def _noise(self, dates: np.ndarray) -> Tensor | None:
        """The noise of this rank's members of forecasts from some dates, (B m, L, K); None without an ensemble."""
        config = self.config
        if config.ensemble_size == 1:
            return None
        hours = dates.astype("datetime64[h]").astype(int)
        # A stream has no name below zero, and dates before 1970 are.
        moments = [(FORECAST, int(hour) + HOURS_BEFORE_1970) for hour in hours]
        own = own_members(config)
        noise = draw_noise(config, moments, own, len(self.leads))
        return to_device(noise.flatten(0, 1), self.frames.device)

    def physical(self, fields: Tensor) -> np.ndarray:
        """Normalised fields in their units, (..., C, H, W)."""
        return (fields.cpu() * self.stds + self.means).numpy()

    def of_channel(self, fields: Tensor) -> np.ndarray:
        """The shown channel of normalised fields in its units, (..., C, H, W) -> (..., H, W)."""
        field = fields[..., self.shown, :, :].cpu()
        return (field * self.stds[self.shown] + self.means[self.shown]).numpy()


def shown_channel(names: Sequence[str], wanted: str | None) -> str:
    """The channel to show: the wanted one, otherwise z500 if it exists. Raises UsageError with the nearest name."""
    if wanted is None:
        return "z500" if "z500" in names else names[0]
    if wanted not in names:
        raise UsageError(f"channel '{wanted}': not forecast{nearest(wanted, names)}; there are {', '.join(names)}")
    return wanted


def lead_times(config: Config, interval: int, lead_hours: int) -> list[int]:
    """The lead time after each step of a rollout, in hours: [6, 12, ..., lead_hours] where dt is 1 and interval 6.

    interval: hours between frames. Raises UsageError if lead_hours is not a whole number of steps, or if the model
    outputs too few channels to continue from its own output.
    """
    step = config.dt * interval
    if lead_hours < step or lead_hours % step:
        raise UsageError(f"lead_hours {lead_hours}: the model makes steps of {step} hours; give a multiple of {step}")
    if lead_hours > step and config.n_out_channels < config.n_in_channels:
        raise UsageError(
            f"lead_hours {lead_hours}: this model takes {config.n_in_channels} channels and forecasts "
            f"{config.n_out_channels}, not enough for a second step; give --lead_hours {step}"
        )
    return list(range(step, lead_hours + 1, step))
