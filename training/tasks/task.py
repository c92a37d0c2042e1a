"""The interface of a task: its data, its loss, its validation, and the shape of a model's output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.checks.usage import Usage
from distributed.parallel_model import ParallelModel
from distributed.split import own_window
from training.models.info import ModelInfo, inspect_model
from utils import agreement, comm
from utils.data_loader import BatchLoader
from utils.errors import UsageError
from utils.sample_order import own_positions
from utils.schema import Config

if TYPE_CHECKING:  # it is slow to import, and rank 0 alone draws
    from matplotlib.figure import Figure

Shape = tuple[int, ...]
FORECAST_KEYS = (
    "forcings",
    "input_frames",
    "predict",
    "rollout_steps",
    "rollout_schedule",
    "loss",
    "channel_weights",
    "pressure_weights",
    "ensemble_size",
)


class Task(ABC):
    """The purpose that a model is trained for. Each module of training/tasks has one such class, named <Name>Task.

    Raises UsageError where the config lacks what the task needs.
    """

    forecasts = False  # whether the keys FORECAST_KEYS mean something to it

    def __init__(self, config: Config):
        self.config = config
        self.notes: list[str] = []  # of the data, for the log of the run
        if not self.forecasts:
            self._refuse_forecast_keys()
        self.check()

    def _refuse_forecast_keys(self) -> None:
        """Raise UsageError for a key that has another value than its default, and means nothing to this task."""
        config = self.config
        for key in FORECAST_KEYS:
            default = Config.model_fields[key].default
            if getattr(config, key) != default:
                raise UsageError(f"{config.config}: {key} belongs to task forecast, not to {config.task}")

    @cached_property
    def facts(self) -> ModelInfo:
        """Facts about the model of this config."""
        return inspect_model(self.config)

    @property
    def usage(self) -> Usage:
        """How that model uses its modules and parameters."""
        return self.facts.usage

    def check_model(self) -> None:
        """Raise UsageError where the output of the config's model does not fit the task."""
        config = self.config
        given = self.facts.output_shape
        wanted = self.output_shape(1)
        if given != wanted:
            raise UsageError(
                f"{config.config}: task {config.task} needs a model whose output is {list(wanted)} for one sample; "
                f"that of model {config.model} is {list(given)}"
            )

    @abstractmethod
    def check(self) -> None:
        """Raise UsageError for settings that the task cannot be done with."""

    def output_shape(self, samples: int) -> Shape:
        """The shape of what a model gives for so many whole samples; by default images of the channels to forecast."""
        return samples, self.config.n_out_channels, *self.config.img_size

    def predict(self, parallel: ParallelModel, x: Tensor, y: Tensor, noise: Tensor | None = None) -> Tensor:
        """The prediction that is compared with y, in training. x: a batch of inputs; y: only its shape matters.

        noise: of the members of an ensemble that this rank has, see training/forecasting/ensemble.py; None without one.
        """
        return parallel.module(x)

    def loaders(self, device: torch.device) -> list[BatchLoader]:
        """build_loaders on every rank, and a look at their data.

        Where one rank fails, sees other files, or finds what is no data, every rank raises a UsageError.
        """
        # A rank that fails alone would leave the others waiting.
        loaders = agreement.raise_on_all_ranks(lambda: self.build_loaders(device))
        listing: dict[str, Any] = {}
        for loader in loaders:
            listing |= loader.listing()
        agreement.check_alike(listing)
        agreement.raise_on_all_ranks(lambda: self.check_data(loaders))
        return loaders

    def check_data(self, loaders: Sequence[BatchLoader]) -> None:
        """Look at this rank's share of the data, and note what was seen. Raises UsageError for what is no data."""
        return

    def data_record(self) -> dict[str, Any]:
        """What a checkpoint remembers of the data that it was trained on, as JSON."""
        return {}

    def check_data_record(self, record: dict[str, Any], where: Path) -> None:
        """Raise UsageError where the data of a resumed run are not of the kind of those before. where: checkpoints."""
        return

    @abstractmethod
    def build_loaders(self, device: torch.device) -> list[BatchLoader]:
        """Loaders of this rank's part of the training and of the validation data."""

    @abstractmethod
    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The mean loss of a batch, a scalar in float32. image_group: the ranks that share its images."""

    @abstractmethod
    def build_validator(self, loader: BatchLoader) -> "Validator":
        """The object that scores a model on every sample of a loader."""

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a whole global batch, random numbers on the CPU."""
        samples = self.config.global_batch_size
        # Every rank draws the whole batch, and takes its part.
        channels = self.config.model_in_channels
        x = torch.randn(samples, channels, *self.config.img_size, generator=generator)
        y = torch.randn(self.output_shape(samples), generator=generator)
        return x, y

    def own_window(self) -> tuple[slice, ...]:
        """This rank's part of every image, one slice for each axis."""
        return own_window(self.config.img_size, self.facts.kept_together)

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of a global batch, (B, ...): its samples, as a loader reads them, and its part of images."""
        micro_batches = self.config.gradient_accumulation
        positions = own_positions(len(whole), comm.get_rank("dp"), comm.get_size("dp"), micro_batches)
        part = whole[positions]
        window = self.own_window()
        is_image = part.dim() == 2 + len(window)  # (B, C, h, w), not a label of each sample
        if is_image:
            part = part[(slice(None), slice(None), *window)]
        return part.clone()

    def check_batch(self, samples: int) -> None:
        """Raise UsageError where the training data have fewer samples than one batch."""
        # An epoch must hold at least one batch.
        batch = self.config.global_batch_size
        if batch > samples:
            raise UsageError(f"global_batch_size {batch} is larger than the training data: {samples} samples")


class Validator(ABC):
    """Scores a model on every sample of `loader` exactly once.

    names, units: of the channels that are scored one by one. figures: pictures of the last pass, {name: figure}.
    """

    def __init__(self, loader: BatchLoader):
        self.loader = loader
        self.names: list[str] = []
        self.units: list[str] = []
        self.figures: dict[str, Figure] = {}

    @torch.no_grad()
    def run(
        self,
        parallel: ParallelModel,
        beat: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Scores of one pass of a ParallelModel, `val_loss` among them. beat: called for each batch."""
        # Running statistics may differ by rank, and validation needs the same on all.
        parallel.share_buffers()
        parallel.model.eval()
        try:
            return self.score(parallel, beat)
        finally:
            parallel.model.train()

    def describe(self, summary: dict[str, Any]) -> str:
        """The main scores of a run's summary, for people."""
        return f"validation loss {summary['val_loss']:.4f}"

    @abstractmethod
    def score(
        self,
        parallel: ParallelModel,
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """One pass of a model that is in evaluation mode."""
