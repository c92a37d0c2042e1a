"""Forecasting: from the state of the atmosphere to the state one step later, on year files."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.losses import relative_l2, relative_l2_loss
from training.metrics import ForecastMetrics
from training.pictures import forecast_figure
from training.results import skill_table
from training.tasks.task import Shape, Task, Validator
from utils import comm
from utils.data_loader import BatchLoader, DataLoader, reads_samples
from utils.errors import UsageError
from utils.schema import Config
from weather.dataset import FieldDataset, Statistics, load_statistics

PICTURED = ("u10", "z500")


class Trained(Task):
    """Image to image: relative L2 loss, latitude-weighted scores of each channel."""

    def check(self) -> None:
        """The data have latitude and longitude."""
        if len(self.config.img_size) != 2:
            where = f"{self.config.config}: img_size {self.config.img_size}"
            raise UsageError(f"{where}: forecasts are of latitude and longitude")

    def output_shape(self, samples: int) -> Shape:
        """Whole images of the channels to forecast."""
        return samples, self.config.n_out_channels, *self.config.img_size

    def build_loaders(self, device: torch.device) -> list[BatchLoader]:
        """Loaders of pairs of frames. Raises UsageError where data and config disagree."""
        config = self.config
        Loader = loader_class(config.data_loader_config) if reads_samples() else BatchLoader
        n_in, n_out, window = config.n_in_channels, config.n_out_channels, self.own_window()
        train, valid = (
            FieldDataset(folder, max(n_in, n_out), config.img_size, config.dt, limit, *window)
            for folder, limit in (
                (config.train_data_path, config.limit_nsamples),
                (config.valid_data_path, config.limit_nsamples_val),
            )
        )
        valid.check_like(train)
        self.check_batch(len(train), f" in {config.train_data_path}")
        batch_size = config.global_batch_size // comm.get_size("dp")
        shared = statistics_of(config), n_in, n_out, batch_size, device, config.num_data_workers
        return [Loader(dataset, *shared) for dataset in (train, valid)]

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The relative L2 loss of neural operators."""
        return relative_l2_loss(prediction, target, image_group)

    def build_validator(self, loader: BatchLoader) -> Validator:
        """RMSE and ACC of each channel."""
        return ForecastValidator(loader)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers."""
        config, (samples, *size) = self.config, (self.config.global_batch_size, *self.config.img_size)
        x = torch.randn(samples, config.n_in_channels, *size, generator=generator)
        return x, torch.randn(samples, config.n_out_channels, *size, generator=generator)


def loader_class(name: str) -> type[BatchLoader]:
    """The class of the data loader that the config names. DALI is imported only where it is asked for."""
    if name == "pytorch":
        return DataLoader
    from utils.data_loader_dali import DaliDataLoader

    return DaliDataLoader


def statistics_of(config: Config) -> Statistics:
    """The statistics that a config names, of its channels and its image. Raises UsageError as load_statistics."""
    channels = max(config.n_in_channels, config.n_out_channels)
    paths = config.global_means_path, config.global_stds_path, config.time_means_path
    return load_statistics(*paths, channels, config.img_size)


class ForecastValidator(Validator):
    """Loss, RMSE and ACC of the forecasts, beside those of persistence and climatology."""

    def __init__(self, loader: BatchLoader):
        super().__init__(loader)
        n = loader.n_out
        names, units, self.grid = loader.dataset.description
        self.names, self.units = names[:n], units[:n]
        self.means, self.stds, time_means = (torch.from_numpy(values[:n]) for values in loader.statistics)
        self.climatology = ((time_means - self.means) / self.stds).to(loader.device)
        self.new_metrics = partial(ForecastMetrics, self.grid.latitude, self.stds, self.climatology)
        self.baselines: dict[str, dict[str, float]] = {}  # the same in every pass: scored in the first

    def describe(self, summary: dict[str, Any]) -> str:
        """RMSE of the headline channels beside persistence and climatology."""
        return skill_table(summary)

    def score(self, parallel: ParallelModel, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """{"val_loss", "rmse", "acc", "persistence_rmse", "climatology_rmse"}, all but the first by channel."""
        metrics, persistence, climatology = self.new_metrics(), self.new_metrics(), self.new_metrics()
        losses, example = [], None
        for x, y, count in self.loader.valid():
            if stop():
                return None
            prediction = parallel.forecast(x, self.loader.n_out)[:count]
            x, y = parallel.whole_images(x)[:count], parallel.whole_images(y)[:count]
            losses.append(relative_l2(prediction, y))
            metrics.update(prediction, y)
            if not self.baselines:
                climatology.update(self.climatology.expand_as(y), y)
                if x.shape[1] >= y.shape[1]:
                    persistence.update(x[:, : y.shape[1]], y)
            if example is None and count:
                example = x[0].clone(), y[0].clone(), prediction[0].float()
        if not self.baselines:
            scored = {"persistence_rmse": persistence, "climatology_rmse": climatology}
            self.baselines = {name: self._by_channel(m.compute()[0]) for name, m in scored.items() if m.squared_errors}
        if example is not None:  # more ranks than samples: some have none
            self._draw(*example)
        rmse, acc = (self._by_channel(values) for values in metrics.compute())
        return {
            "val_loss": comm.global_mean(torch.cat(losses)).item(),
            "rmse": rmse,
            "acc": acc,
            **self.baselines,
        }

    def _by_channel(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    def _draw(self, x: Tensor, y: Tensor, prediction: Tensor) -> None:
        for c, name in enumerate(self.names[: len(x)]):
            if name in PICTURED:
                fields = [(f[c].cpu() * self.stds[c] + self.means[c]).numpy() for f in (x, y, prediction)]
                self.figures[name] = forecast_figure(fields, self.grid, name, self.units[c])
