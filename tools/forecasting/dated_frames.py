"""The start of forecasts: the config of a trained run, and frames by their date.

Frames are the initial states, and the truth that forecasts are compared with.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.tasks import forecast, task_of
from training.tasks.forecast import look_at_frames
from utils.command_line import parse_command_line
from utils.config import check_config, differing_keys, load_config, read_named_config
from utils.errors import UsageError
from utils.schema import Config, keys_that_affect
from utils.yaml_files import read_mappings
from weather.checks.data_record import Record, check_same_kind, check_unseen
from weather.fields.grid import HOUR
from weather.fields.time_axis import show
from weather.sources.remote_store import RemoteOptions
from weather.years.dataset import FieldDataset
from weather.years.forcings import Forcings


def run_config(
    folder: Path | str,
    words: Sequence[str],
    world_size: int,
    splits: Collection[str],
) -> Config:
    """The Config of the run in a folder, overridden by the words of a command line.

    splits: the keys by which this program can split a model; the layout of the run itself does not matter. The local
    batch size is 1 unless the words set it. Raises UsageError if the folder holds no run of a forecasting model, or if
    the words contradict its weights.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise UsageError(f"{folder}: no run there (it has no config.yaml); give the folder of one, like logs/quick/00")
    name = next(iter(read_mappings(file, "configs")), "")
    stored = read_named_config(file, name)
    trained = check_config(stored, name, f"{file}: {name}")
    if not isinstance(task_of(trained), forecast.ForecastTask):
        raise UsageError(f"{folder}: is a run of task {trained.task}, which forecasts nothing")
    # Layout and regularisation of the training do not matter here: the defaults take their place.
    preset = {key: Config.model_fields[key].default for key in keys_that_affect("layout", "training")}
    preset["local_batch_size"] = 1
    # A model that takes noise makes ensembles, of as many members as in training unless the words say otherwise.
    if trained.ensemble_size > 1:
        preset |= {"loss": trained.loss, "ensemble_size": trained.ensemble_size}
    _check_members(folder, trained, parse_command_line(words, None, str(file)))
    words = [f"--yaml_config={file}", f"--config={name}", *words]
    config = load_config(words, world_size=world_size, splits=splits, preset=preset)
    for key in differing_keys(trained, config, "model"):
        raise UsageError(f"{folder}: was trained with {key} {getattr(trained, key)}, not {getattr(config, key)}")
    return config.model_copy(update={"noddp": True})  # no gradients: nothing to average


def _check_members(folder: Path | str, trained: Config, options: dict[str, Any]) -> None:
    """Raise UsageError where options ask a model without noise for members, or one that takes noise for a forecast.

    The weights would not fit, or those for noise would be left out and the forecast would be none that was trained.
    """
    asked = options.get("ensemble_size")
    if not isinstance(asked, int):  # not given, or no number, which is refused as any value that does not fit
        return
    if asked > 1 and not trained.noise_of_model:
        raise UsageError(
            f"{folder}: ensemble_size {asked}: its model takes no noise, so its members would be alike: train an "
            f"ensemble, which may begin with its weights: --loss crps --ensemble_size {asked} --init_from {folder}"
        )
    if asked == 1 and trained.noise_of_model:
        raise UsageError(
            f"{folder}: ensemble_size 1: its model was trained as an ensemble, and each member takes noise: give 2 or "
            "more"
        )


class DatedFrames:
    """The normalised frames of a folder of year files, cropped to this rank's part of the image.

    Attributes: times, (T,) datetime64[s], increasing, of all files; interval, hours between frames; input_leads, hours
    of the frames that a model takes (0, -6, ...); statistics of the channels; dataset, the FieldDataset with the names
    of the channels and the coordinates.
    Raises UsageError if the folder holds no such data, or if its dates are unknown.
    """

    def __init__(self, folder: Path | str, config: Config, device: torch.device):
        self.folder = folder
        self.device = device
        self.config = config
        rows, columns = task_of(config).own_window()
        self.dataset = FieldDataset(
            folder,
            max(config.n_in_channels, config.n_out_channels),
            config.img_size,
            config.dt,
            None,
            rows,
            columns,
            remote=config.options(RemoteOptions),
        )
        self.statistics = forecast.statistics_of(config, self.dataset.description.names)
        means, stds, *_ = self.statistics
        self.means = torch.from_numpy(means).to(device)
        self.stds = torch.from_numpy(stds).to(device)
        self.forcings = None
        if config.forcings:
            self.forcings = Forcings(config.forcings, self.dataset, device)

        # The frames of all files are numbered through.
        times = self.dataset.times
        self.first_frame = np.cumsum([0, *map(len, times)])
        self.times = np.concatenate(times)
        self._check_order(times)
        seconds = self.dataset.step_seconds or 0
        self.interval = seconds // 3600
        self.input_leads = [-i * config.dt * self.interval for i in range(config.input_frames)]  # hours
        if not self.interval or seconds % 3600:
            raise UsageError(f"{folder}: its frames are {seconds} seconds apart, which is no whole number of hours")

    def _check_order(self, times: Sequence[np.ndarray]) -> None:
        """Raise UsageError where a file begins before the end of the one before it. times: of each file."""
        paths = self.dataset.paths
        for number, (earlier, later) in enumerate(itertools.pairwise(times)):
            if later[0] <= earlier[-1]:
                self.dataset.close()
                raise UsageError(
                    f"{paths[number + 1]}: begins at {show(later[0])}, and {paths[number]} before it ends at "
                    f"{show(earlier[-1])}: forecasts need each date once, in the order of the files' names; "
                    "move one of the files away, or name them by their dates"
                )

    def check(self, record: Record, checkpoint: Path, is_training_data: bool) -> list[str]:
        """Look at this rank's share of the frames; returns what was seen and assumed, a line each.

        record: of the data that the checkpoint was trained on. is_training_data: they are meant to be the same.
        Raises UsageError where the frames are no weather, of another kind than in training, or were trained on.
        """
        check_same_kind(record, self.dataset, checkpoint)
        notes = self.dataset.notes()
        if self.config.check_data == "off":
            return notes
        if not is_training_data:
            check_unseen(record, self.dataset, checkpoint)
        looked = look_at_frames(self.config, [self.dataset], self.statistics, is_training=False)
        return [*notes, looked.describe()]

    def read(self, times: np.ndarray) -> Tensor:
        """Read the frames at `times`, all of which must exist: (B, C, h, w), normalised, on the device."""
        dataset = self.dataset
        frames = np.empty((len(times), *dataset.shape[1:]), np.float32)  # (B, C, h, w)
        indices = np.searchsorted(self.times, times)  # (B,) of frames in all files
        for index, out in zip(indices, frames, strict=True):
            number = int(np.searchsorted(self.first_frame, index, side="right")) - 1
            frame_in_file = int(index - self.first_frame[number])
            dataset.files[number].read(frame_in_file, out[None], dataset.rows, dataset.columns)
        return (torch.from_numpy(frames).to(self.device) - self.means) / self.stds

    def with_forcings(self, frames: Tensor, times: np.ndarray) -> Tensor:
        """The input of the model: the latest frames, (B, n C, h, w), and the forcings of the present dates, (B,)."""
        if not self.forcings:
            return frames
        return torch.cat([frames, self.forcings(times[:, None])], 1)

    def starts(self, leads: Sequence[int]) -> np.ndarray:
        """The dates with all input frames, and a frame at every lead time (hours): (N,) datetime64[s]."""
        is_complete = np.ones(len(self.times), bool)
        for lead in (*self.input_leads, *leads):
            is_complete &= np.isin(self.times + lead * HOUR, self.times)
        return self.times[is_complete]

    def describe(self) -> str:
        """The range of dates as text."""
        return f"{self.folder} has {show(self.times[0])} to {show(self.times[-1])}, every {self.interval} hours"


def choose_starts(
    frames: DatedFrames,
    leads: Sequence[int],
    wanted: int | Sequence[str],
) -> np.ndarray:
    """The dates at which the forecasts start, (N,) datetime64[s], increasing.

    leads: hours, increasing. wanted: dates as text, or a number of dates; these are spread evenly over all dates that
    are followed by a frame at every lead time. Raises UsageError with the available dates if a date is missing or too
    few data follow it.
    """
    there = frames.describe()
    longest = leads[-1]
    possible = frames.starts(leads)
    if len(possible) == 0:
        raise UsageError(f"no date has {longest} hours of data after it for a forecast of that length: {there}")
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(possible):
            raise UsageError(f"starts {wanted}: 1 to {len(possible)} dates have {longest} hours after them: {there}")
        spread_evenly = np.linspace(0, len(possible) - 1, wanted).round().astype(int)
        return possible[spread_evenly]
    dates = sorted({parse_date(text) for text in wanted})
    for date in dates:
        if date not in possible:
            raise UsageError(
                f"start {show(date)}: no data for it and for every step of the {longest} hours after it: {there}; the "
                f"last possible start is {show(possible[-1])}"
            )
    return np.array(dates)


def parse_date(text: str) -> np.datetime64:
    """'2018-01-05T06' as datetime64[s] in UTC; '2018-01-05T08:00+02:00' is the same. Raises UsageError."""
    try:
        has_zone = re.search(r"T.*(Z|[+-]\d\d:?\d\d)$", text)
        if not has_zone:
            return np.datetime64(text, "s")
        in_utc = datetime.fromisoformat(text).astimezone(UTC)
        return np.datetime64(in_utc.replace(tzinfo=None), "s")
    except ValueError:
        raise UsageError(f"start '{text}': write a date (UTC) like 2018-01-05T06") from None
