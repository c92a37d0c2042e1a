"""Scores of forecasts on the validation data: of single forecasts, and of the members of an ensemble."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.forecasting.ensemble import VALIDATION, draw_noise, own_members, repeat_members, whole_members
from training.forecasting.ensemble_metrics import EnsembleMetrics
from training.forecasting.metrics import ForecastMetrics, normalised_climatology, skill_table
from training.forecasting.rollout import Network, Rollout
from training.tasks.task import Validator
from utils import comm
from utils.data_loader import BatchLoader
from utils.device import to_device
from utils.schema import Config
from weather.checks.statistics import Statistics
from weather.years.dataset import FieldDataset

log = logging.getLogger(__name__)

PICTURED = ("u10", "z500")
ROUNDING = 1e-5  # spread of members, by their error, that may come from the order of sums alone


class ForecastValidator(Validator):
    """Loss of the whole forecasts; RMSE and ACC of their first step, beside those of persistence and climatology."""

    def __init__(
        self,
        loader: BatchLoader,
        rollout: Rollout,
        sample_losses: Callable[[Tensor, Tensor], Tensor],
    ):
        super().__init__(loader)
        self.rollout = rollout
        self.sample_losses = sample_losses
        n = loader.n_out
        # A loader knows of a data set what it reads; ours say more.
        dataset = cast(FieldDataset, loader.dataset)
        statistics = cast(Statistics, loader.statistics)
        # The first channels are the ones that are forecast.
        names, units, self.grid = dataset.description
        self.names = names[:n]
        self.units = units[:n]
        of_outputs = [values[:n] for values in statistics]
        self.means = torch.from_numpy(of_outputs[0])  # (n_out, 1, 1)
        self.stds = torch.from_numpy(of_outputs[1])  # (n_out, 1, 1)
        self.climatology = normalised_climatology(of_outputs, loader.device)  # (n_out, H, W)
        self.new_metrics = partial(ForecastMetrics, self.grid.latitude, self.stds, self.climatology)
        self.baselines: dict[str, dict[str, float]] = {}  # the same in every pass: scored in the first

    def network(self, parallel: ParallelModel) -> Network:
        """The model as a forecast calls it, with images and, in an ensemble, noise."""

        def call(x: Tensor, *noise: Tensor) -> Tensor:
            return parallel.predict(x, self.loader.n_out, *noise)

        return call

    def describe(self, summary: dict[str, Any]) -> str:
        """RMSE of the headline channels beside persistence and climatology."""
        return skill_table(summary)

    def score(
        self,
        parallel: ParallelModel,
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """{"val_loss", "rmse", "acc", "persistence_rmse", "climatology_rmse"}, all but the first by channel."""
        # Scores of the model, and of the two forecasts that need no model.
        metrics = self.new_metrics()
        persistence = self.new_metrics()
        climatology = self.new_metrics()
        losses = []
        example = None
        n_out = self.loader.n_out
        # Every rank passes over its share of the samples; the sums come together at the end.
        network = self.network(parallel)
        for batch, (x, y, count) in enumerate(self.loader.valid()):
            beat()
            # Persistence forecasts the state of now, into which a model may write.
            state = parallel.whole_images(x[:, : self.loader.n_in])[:count].clone()
            forecasts = self.whole_steps(parallel, network, x, y, count, batch)

            # The loss of a sample is the mean over the steps of its forecast. Other scores are of the first step.
            step_losses = [self.sample_losses(prediction, target) for prediction, target in forecasts]
            losses.append(torch.stack(step_losses).mean(0))
            prediction, target = forecasts[0]
            self.score_members(prediction, target)
            guess = self.best_guess(prediction)
            metrics.update(guess, target)
            # They are the same in every validation, so that the first one is enough.
            if not self.baselines:
                climatology.update(self.climatology.expand_as(target), target)
                if self.loader.n_in >= n_out:
                    persistence.update(state[:, :n_out], target)
            if example is None and count:
                example = target[:1].clone(), guess[:1]

        if not self.baselines:
            scored = {"persistence_rmse": persistence, "climatology_rmse": climatology}
            for name, baseline in scored.items():
                if baseline.means:
                    rmse, _ = baseline.compute()
                    self.baselines[name] = self._by_channel(rmse)
        if example is not None:  # more ranks than samples: some have none
            self._draw(*example)
        # Here ranks add up their sums: all of them come by.
        rmse, acc = metrics.compute()
        val_loss = comm.global_mean(torch.cat(losses)).item()
        return {
            "val_loss": val_loss,
            "rmse": self._by_channel(rmse),
            "acc": self._by_channel(acc),
            **self.baselines,
        }

    def score_members(self, prediction: Tensor, target: Tensor) -> None:
        """Add a result of whole_steps to scores that only members have; a single forecast has none."""
        return

    def best_guess(self, prediction: Tensor) -> Tensor:
        """The forecast whose RMSE and ACC are told, (B, n_out, H, W), of a result of whole_steps."""
        return prediction

    def whole_steps(
        self,
        parallel: ParallelModel,
        network: Network,
        x: Tensor,
        y: Tensor,
        count: int,
        batch: int,
    ) -> list[tuple[Tensor, Tensor]]:
        """(prediction, target) of each step of a forecast: whole images of the first `count` samples.

        batch: number of the batch, from 0.
        """
        # (B, n_out, h, w) of each step; h and w are those of this rank's part
        targets = y.split(self.loader.n_out, 1)
        states = self.states(network, x, len(targets), batch)
        pairs = []
        for state, target in zip(states, targets, strict=True):
            prediction = self.whole_prediction(parallel.whole_images(state))
            whole_target = parallel.whole_images(target)
            pairs.append((prediction[:count], whole_target[:count]))
        return pairs

    def states(self, network: Network, x: Tensor, steps: int, batch: int) -> Iterator[Tensor]:
        """Yield the state after each step, of this rank's part of the images. x, batch: as of whole_steps."""
        return self.rollout.steps(network, x, steps)

    def whole_prediction(self, state: Tensor) -> Tensor:
        """The prediction of a step, of whole images of a result of `states`."""
        return state

    def _by_channel(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    def _draw(self, target: Tensor, prediction: Tensor) -> None:
        """Make pictures of one sample, (1, n_out, H, W)."""
        from training.forecasting.pictures import lead_time_figure  # slow to import, and rank 0 alone draws

        def in_units(image: Tensor, channel: int) -> np.ndarray:
            normalised = image[:, channel].cpu()  # (1, H, W)
            return (normalised * self.stds[channel] + self.means[channel]).numpy()

        for channel, name in enumerate(self.names):
            if name in PICTURED:
                truth = in_units(target, channel)
                forecast = in_units(prediction, channel)
                self.figures[name] = lead_time_figure(truth, forecast, (), self.grid, name, self.units[channel])


class EnsembleValidator(ForecastValidator):
    """Loss of the whole ensembles; of their first step the scores of members, and those of their mean as a forecast.

    A prediction is an ensemble, (B, M, n_out, H, W).
    """

    def __init__(
        self,
        loader: BatchLoader,
        rollout: Rollout,
        member_losses: Callable[[Tensor, Tensor], Tensor],
        config: Config,
    ):
        super().__init__(loader, rollout, member_losses)
        self.config = config
        self.ensembles = self._new_ensembles()

    def _new_ensembles(self) -> EnsembleMetrics:
        return EnsembleMetrics(self.grid.latitude, self.stds, self.climatology)

    def score(
        self,
        parallel: ParallelModel,
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """As of one forecast, and {"crps", "spread", "spread_skill": by channel} of the ensembles."""
        self.ensembles = self._new_ensembles()
        scores = super().score(parallel, beat)
        of_ensembles = self.ensembles.compute()
        for name in ("crps", "spread", "spread_skill"):
            scores[name] = self._by_channel(getattr(of_ensembles, name))
        # They would train to the end as one forecast, at the price of several.
        are_equal = of_ensembles.spread_skill < ROUNDING
        if are_equal.all():
            log.warning(
                "the %d members of the ensemble are equal: what model %s gives does not depend on its noise, the "
                "second argument of its forward",
                self.config.ensemble_size,
                self.config.model,
            )
        return scores

    def score_members(self, prediction: Tensor, target: Tensor) -> None:
        """Add the ensembles of a batch to their scores."""
        self.ensembles.update(prediction, target)

    def best_guess(self, prediction: Tensor) -> Tensor:
        """The mean of the members."""
        return prediction.mean(1)

    def states(self, network: Network, x: Tensor, steps: int, batch: int) -> Iterator[Tensor]:
        """Yield the state of this rank's members after each step. A sample has the same noise in every validation."""
        samples = self.loader.order().samples(batch)
        moments = [(VALIDATION, sample) for sample in samples]
        own = own_members(self.config)
        drawn = draw_noise(self.config, moments, own, steps)
        noise = to_device(drawn.to(x.dtype), x.device).flatten(0, 1)  # (B m, steps, K)
        return self.rollout.steps(network, repeat_members(x, len(own)), steps, noise=noise)

    def whole_prediction(self, state: Tensor) -> Tensor:
        """The members of all ranks, (B, M, n_out, H, W)."""
        return whole_members(state, self.config)
