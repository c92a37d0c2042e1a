"""One pass over the validation samples: loss, RMSE and ACC of the model and of the trivial forecasts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.losses import relative_l2
from training.metrics import ForecastMetrics
from training.pictures import forecast_figure
from utils import comm
from utils.data_loader import BatchLoader

PICTURED = ("u10", "z500")


class Validator:
    """Scores forecasts on every sample of `loader` exactly once."""

    def __init__(self, loader: BatchLoader):
        self.loader = loader
        n = loader.n_out
        self.names = loader.dataset.channel_names[:n]
        self.units = loader.dataset.channel_units[:n]
        self.means, self.stds, time_means = (torch.from_numpy(values[:n]) for values in loader.statistics)
        self.climatology = ((time_means - self.means) / self.stds).to(loader.device)
        self.new_metrics = partial(ForecastMetrics, loader.dataset.grid.latitude, self.stds, self.climatology)
        self.baselines: dict[str, dict[str, float]] = {}  # the same in every pass: scored in the first
        self.figures: dict[str, Figure] = {}  # pictured channel -> figure, of the last pass

    @torch.no_grad()
    def run(self, parallel: ParallelModel, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Scores of one pass of a ParallelModel, or None where `stop()` became true on the way."""
        parallel.model.eval()
        try:
            return self._run(parallel, stop)
        finally:
            parallel.model.train()

    def _run(self, parallel: ParallelModel, stop: Callable[[], bool]) -> dict[str, Any] | None:
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
                self.figures[name] = forecast_figure(fields, self.loader.dataset.grid, name, self.units[c])
