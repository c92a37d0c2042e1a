"""Forecasting: from the state of the atmosphere to the state one step later, on year files."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.collectives import as_group, sum_over_ranks
from distributed.parallel_model import ParallelModel
from training.crps import exchange_points, own_points, weighted_crps
from training.ensemble import VALIDATION, draw_noise, members_of_ranks, own_members, repeat_members, whole_members
from training.ensemble_metrics import EnsembleMetrics
from training.losses import loss_weights, relative_l2, weighted_squared_error
from training.metrics import ForecastMetrics
from training.region import check_columns
from training.results import skill_table
from training.rollout import Network, Rollout
from training.tasks.task import Task, Validator
from utils import comm
from utils.data_loader import BatchLoader, DataLoader, reads_samples
from utils.errors import UsageError
from utils.schema import Config, count_forcings
from weather.channels import CHANNELS
from weather.data_check import DataCheck
from weather.data_record import Record, check_same_kind, make_record
from weather.dataset import FieldDataset
from weather.forcings import Forcings
from weather.grid import latitudes
from weather.remote_store import RemoteOptions
from weather.splits import check_apart
from weather.statistics import Paths, Statistics, check_changes, check_climatology, positive_statistics, read_statistics

PICTURED = ("u10", "z500")


class ForecastTask(Task):
    """Image to image, over one step or several: latitude-weighted scores of each channel."""

    forecasts = True

    def check(self) -> None:
        """The data have latitude and longitude."""
        if len(self.config.img_size) != 2:
            where = f"{self.config.config}: img_size {self.config.img_size}"
            raise UsageError(f"{where}: forecasts are of latitude and longitude")
        self._rollout: Rollout | None = None
        self._train: FieldDataset | None = None
        self._weights: dict[bool, Tensor] = {}  # of whole images, or of this rank's part
        # Names of the channels and latitudes of the rows, until the data tell.
        self._described = [channel.name for channel in CHANNELS], latitudes(self.config.img_size[0])

    def build_loaders(self, device: torch.device) -> list[BatchLoader]:
        """Loaders of pairs of frames. Raises UsageError where data and config disagree."""
        config = self.config
        # Of the ranks that train on the same samples one reads, and sends them to the others.
        Loader = loader_class(config.data_loader_config) if reads_samples() else BatchLoader

        train = self._open(config.train_data_path, config.limit_nsamples)
        valid = self._open(config.valid_data_path, config.limit_nsamples_val)
        # Both data sets must have the same channels, points and time step.
        valid.check_like(train)
        valid.check_step_like(train)
        self._described = train.description.names, train.description.grid.latitude
        self._train = train
        self.notes = [*train.notes(), *valid.notes(), *check_columns(config, train.description.grid)]
        # Weights for channels that the data lack are refused now, not in the first step.
        if config.loss != "relative_l2":
            loss_weights(config, *self._described)
        self.check_batch(len(train))

        # The data tell how large a change of the state is.
        self._rollout = rollout_of(config, device)
        forcings = Forcings(config.forcings, train, device) if config.forcings else None
        build = partial(
            Loader,
            statistics=statistics_of(config, train.description.names),
            n_in=config.n_in_channels,
            n_out=config.n_out_channels,
            batch_size=config.global_batch_size // comm.get_size("dp"),
            device=device,
            num_workers=config.num_data_workers,
            forcings=forcings,
            stages=config.rollout_stages,
            frames=config.input_frames,
            micro_batches=config.gradient_accumulation,
        )
        loader = build(train)
        valid_loader = build(valid)
        # Only one of them reads at a time.
        valid_loader.share_memory_with(loader)
        return [loader, valid_loader]

    def _open(self, folder: str, limit: int | None) -> FieldDataset:
        """This rank's part of the images of a folder. limit: only the first so many samples."""
        config = self.config
        rows, columns = self.own_window()
        return FieldDataset(
            folder,
            max(config.n_in_channels, config.n_out_channels),
            config.img_size,
            config.dt,
            limit,
            rows,
            columns,
            config.longest_rollout,
            config.input_frames,
            config.options(RemoteOptions),
        )

    def check_data(self, loaders: Sequence[BatchLoader]) -> None:
        """Look at frames, at the statistics beside them, and for a year that is in two of the folders."""
        if self.config.check_data == "off":
            return
        train, valid = [cast(FieldDataset, loader.dataset) for loader in loaders]
        if comm.is_main():  # the files are alike on all ranks
            self.notes += check_apart(valid, train)
            self.notes += check_test_years(self.config, train)
        statistics = cast(Statistics, loaders[0].statistics)
        looked = look_at_frames(self.config, [train, valid], statistics, is_training=True)
        self.notes.append(looked.describe())

    def data_record(self) -> Record:
        """Channels, time step and dates of the training."""
        if self._train is None:
            return {}
        return make_record(self._train)

    def check_data_record(self, record: Record, where: Path) -> None:
        """The time step and the channels must be those of before."""
        if self._train is not None:
            check_same_kind(record, self._train, where)

    def predict(self, parallel: ParallelModel, x: Tensor, y: Tensor, noise: Tensor | None = None) -> Tensor:
        """A forecast of as many steps as y has; of an ensemble the rank's members, sample by sample: (B m, ...)."""
        if noise is not None:
            x = repeat_members(x, noise.shape[1])
            noise = noise.flatten(0, 1)  # (B m, steps, K)
        # The target has the steps of the forecast, one after the other.
        steps = y.shape[1] // self.config.n_out_channels
        if steps == 1 and self.config.predict == "state":
            return parallel.module(x) if noise is None else parallel.module(x, noise[:, 0])
        # DistributedDataParallel, around the model, makes ready for the backward pass: once, in the last step.
        return self.rollout(x.device).forecast(parallel.model, x, steps, parallel.module, noise)

    def rollout(self, device: torch.device) -> Rollout:
        """The object that turns the network's outputs into forecasts."""
        if self._rollout is None:
            # Without data, as in a benchmark, a model meets random numbers: their changes have scale 1.
            scale = None
            if self.config.predict != "state":
                scale = torch.ones(self.config.n_out_channels, 1, 1, device=device)
            self._rollout = Rollout(self.config, scale)
        return self._rollout

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The loss that the config names, the mean over the steps of the forecast."""
        if self.config.loss == "crps":
            return self._crps(prediction, target).mean()
        # Every step of a forecast counts as a sample: (B, k n_out, h, w) -> (B k, n_out, h, w).
        n_out = self.config.n_out_channels
        prediction = prediction.unflatten(1, (-1, n_out)).flatten(0, 1)
        target = target.unflatten(1, (-1, n_out)).flatten(0, 1)
        return self.sample_losses(prediction, target, False, image_group).mean()

    def sample_losses(
        self,
        prediction: Tensor,
        target: Tensor,
        whole: bool = True,
        image_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The loss of each sample, (B,), of images (B, n_out, H, W); not whole: of this rank's part of them."""
        if self.config.loss == "relative_l2":
            return relative_l2(prediction, target, image_group)
        return weighted_squared_error(prediction, target, self.weights(whole, target.device), image_group)

    def weights(self, whole: bool, device: torch.device) -> Tensor:
        """Weights of the channels and points of an image, (n_out, H, 1); not whole: of this rank's rows."""
        # The weights are made once, and kept on the device.
        if whole not in self._weights:
            weights = loss_weights(self.config, *self._described)  # (n_out, H, 1)
            if not whole:
                rows = self.own_window()[0]
                weights = weights[:, rows]  # (n_out, h, 1)
            self._weights[whole] = weights.to(device)
        return self._weights[whole]

    def _crps(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The score of each sample by the members of all ranks, (B,). prediction: this rank's, (B m, k n_out, h, w)."""
        group = comm.get_group("ens")
        members = prediction.unflatten(0, (len(target), -1)).flatten(2)  # (B, m, P), of this rank's part of images
        members = exchange_points(members, members_of_ranks(self.config), group)  # (B, M, p)

        # The steps of a forecast have the same weights, and the loss is their mean.
        weights = self.weights(False, target.device)
        steps = target.shape[1] // len(weights)
        of_a_step = weights.expand(-1, -1, target.shape[-1]).flatten() / steps
        of_points = own_points(of_a_step.repeat(steps), group)  # (p,)
        truth = own_points(target.flatten(1), group)  # (B, p)
        scores = weighted_crps(members, truth, of_points, self.config.crps_alpha)
        return sum_over_ranks(scores, as_group(comm.get_group("sample")))

    def member_losses(self, members: Tensor, target: Tensor) -> Tensor:
        """The score of each sample, (B,), of whole ensembles (B, M, n_out, H, W) and whole images (B, n_out, H, W)."""
        weights = self.weights(True, target.device).expand(-1, -1, target.shape[-1]).flatten()
        return weighted_crps(members.flatten(2), target.flatten(1), weights, self.config.crps_alpha)

    def build_validator(self, loader: BatchLoader) -> Validator:
        """RMSE and ACC of each channel."""
        rollout = self.rollout(loader.device)
        if self.config.ensemble_size > 1:
            return EnsembleValidator(loader, rollout, self.member_losses, self.config)
        return ForecastValidator(loader, rollout, self.sample_losses)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers; forcings that stay are the same for all samples."""
        config = self.config
        steps = config.longest_rollout
        fixed, timed = count_forcings(config.forcings)
        # The forcings that change come once for each step; one step is among the channels of the model.
        inputs = config.model_in_channels + (steps - 1) * timed
        outputs = steps * config.n_out_channels
        x = torch.randn(config.global_batch_size, inputs, *config.img_size, generator=generator)
        first = config.state_channels
        x[1:, first : first + fixed] = x[:1, first : first + fixed]
        y = torch.randn(len(x), outputs, *config.img_size, generator=generator)
        return x, y


def loader_class(name: str) -> type[BatchLoader]:
    """The class of the data loader that the config names. DALI is imported only where it is asked for."""
    if name == "pytorch":
        return DataLoader
    from utils.data_loader_dali import DaliDataLoader

    return DaliDataLoader


def check_test_years(config: Config, train: FieldDataset) -> list[str]:
    """Look at the test years, if they are there already; returns notes on what a forecast will refuse.

    Raises UsageError where the test years beside the training years, in the same folder, are of the training.
    """
    try:
        channels = max(config.n_in_channels, config.n_out_channels)
        # The test years need fewer options: nobody trains on them.
        test = FieldDataset(config.inf_data_path, channels, config.img_size, config.dt)
    except UsageError:
        return []  # training needs no test years: what is wrong with them is for the forecast to say
    with closing(test):
        try:
            test.check_step_like(train)
            return check_apart(test, train)
        except UsageError as error:
            # The path may be that of a config, which nobody has changed, to other data.
            is_of_same_data = Path(config.inf_data_path).parent == Path(config.train_data_path).parent
            if is_of_same_data:
                raise
            return [f"forecasts on inf_data_path will be refused: {error}"]


def look_at_frames(
    config: Config, datasets: Sequence[FieldDataset], statistics: Statistics, is_training: bool
) -> DataCheck:
    """Look at this rank's share of the frames, and hold the statistics against those of the first data set."""
    first = datasets[0]
    names = first.description.names
    paths = Paths(config.global_means_path, config.global_stds_path, config.time_means_path)
    if comm.is_main():  # it reads a file as large as a frame, which is the same for all ranks
        img_size = first.files[0].shape[2:]
        is_global = first.description.grid.is_global
        check_climatology(paths, statistics, names, img_size, is_global)
    looked = DataCheck(datasets, config.check_data, (comm.rank(), comm.world_size()))
    looked.run(comm.is_main())
    # A run on a few samples has other statistics than all of the years.
    is_of_training = is_training and config.limit_nsamples is None
    looked.sums.check(statistics, names, paths, first.folder, is_of_training)
    return looked


def statistics_of(config: Config, names: Sequence[str] = ()) -> Statistics:
    """The statistics that a config names, of its channels and image. Raises UsageError where they cannot be used."""
    channels = max(config.n_in_channels, config.n_out_channels)
    stds = positive_statistics(config.global_stds_path, channels, names)
    climatology = read_statistics(config.time_means_path, channels, config.img_size)
    means = read_statistics(config.global_means_path, channels)
    return Statistics(means, stds, climatology)


def rollout_of(config: Config, device: torch.device) -> Rollout:
    """The Rollout of a config. Raises UsageError where the size of the change is asked for, and not known."""
    if config.predict == "state":
        return Rollout(config)
    # The file lies beside the other statistics.
    path = Path(config.global_stds_path).with_name("change_stds.npy")
    if not path.exists():
        make = f"python -m weather.year_files TRAIN_FOLDER {path.parent}"
        raise UsageError(f"{path}: not there; predict change needs the size of the change: make it with `{make}`")
    stds = positive_statistics(config.global_stds_path, config.n_out_channels)
    changes = positive_statistics(path, config.n_out_channels)
    if config.check_data != "off":
        check_changes(path, changes, config.global_stds_path, stds)
    change_scale = torch.from_numpy(changes / stds).to(device)
    return Rollout(config, change_scale)


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
        self.means = torch.from_numpy(statistics.means[:n])  # (n_out, 1, 1)
        self.stds = torch.from_numpy(statistics.stds[:n])  # (n_out, 1, 1)
        time_means = torch.from_numpy(statistics.time_means[:n])  # (n_out, H, W)
        self.climatology = ((time_means - self.means) / self.stds).to(loader.device)
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
        metrics = self.new_metrics()
        persistence = self.new_metrics()
        climatology = self.new_metrics()
        losses = []
        example = None
        n_out = self.loader.n_out
        network = self.network(parallel)
        for batch, (x, y, count) in enumerate(self.loader.valid()):
            beat()
            # Persistence forecasts the state of now.
            state = parallel.whole_images(x[:, : self.loader.n_in])[:count]
            forecasts = self.whole_steps(parallel, network, x, y, count, batch)

            # The loss of a sample is the mean over the steps of its forecast. Other scores are of the first step.
            step_losses = [self.sample_losses(prediction, target) for prediction, target in forecasts]
            losses.append(torch.stack(step_losses).mean(0))
            prediction, target = forecasts[0]
            prediction = self.best_guess(prediction, target)
            metrics.update(prediction, target)
            if not self.baselines:
                climatology.update(self.climatology.expand_as(target), target)
                if self.loader.n_in >= n_out:
                    persistence.update(state[:, :n_out], target)
            if example is None and count:
                example = target[:1].clone(), prediction[:1]

        if not self.baselines:
            scored = {"persistence_rmse": persistence, "climatology_rmse": climatology}
            for name, baseline in scored.items():
                if baseline.squared_errors:
                    rmse, _ = baseline.compute()
                    self.baselines[name] = self._by_channel(rmse)
        if example is not None:  # more ranks than samples: some have none
            self._draw(*example)
        rmse, acc = metrics.compute()
        val_loss = comm.global_mean(torch.cat(losses)).item()
        return {
            "val_loss": val_loss,
            "rmse": self._by_channel(rmse),
            "acc": self._by_channel(acc),
            **self.baselines,
        }

    def best_guess(self, prediction: Tensor, target: Tensor) -> Tensor:
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
        n_out = self.loader.n_out
        targets = y.split(n_out, 1)
        predictions = self.rollout.steps(network, x, len(targets))
        pairs = []
        for prediction, target in zip(predictions, targets, strict=True):
            whole_prediction = parallel.whole_images(prediction)[:count]
            whole_target = parallel.whole_images(target)[:count]
            pairs.append((whole_prediction, whole_target))
        return pairs

    def _by_channel(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    def _draw(self, target: Tensor, prediction: Tensor) -> None:
        """Make pictures of one sample, (1, n_out, H, W)."""
        from training.pictures import lead_time_figure  # slow to import, and rank 0 alone draws

        def in_units(image: Tensor, channel: int) -> np.ndarray:
            normalised = image[:, channel].cpu()  # (1, H, W)
            return (normalised * self.stds[channel] + self.means[channel]).numpy()

        for channel, name in enumerate(self.names):
            if name in PICTURED:
                truth = in_units(target, channel)
                forecast = in_units(prediction, channel)
                self.figures[name] = lead_time_figure(truth, forecast, (), self.grid, name, self.units[channel])


class EnsembleValidator(ForecastValidator):
    """Loss of the whole ensembles; of their first step the scores of members, and those of their mean as a forecast."""

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
        return scores

    def best_guess(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean of the members, which are scored. prediction: (B, M, n_out, H, W)."""
        self.ensembles.update(prediction, target)
        return prediction.mean(1)

    def whole_steps(
        self,
        parallel: ParallelModel,
        network: Network,
        x: Tensor,
        y: Tensor,
        count: int,
        batch: int,
    ) -> list[tuple[Tensor, Tensor]]:
        """(members, target) of each step: whole ensembles (B, M, n_out, H, W) and images of the first `count` samples.

        A sample has the same noise in every validation.
        """
        targets = y.split(self.loader.n_out, 1)
        samples = self.loader.order().samples(batch)
        moments = [(VALIDATION, sample) for sample in samples]
        own = own_members(self.config)
        drawn = draw_noise(self.config.seed, moments, own, len(targets), self.config.noise_features)
        noise = drawn.to(x.device, x.dtype).flatten(0, 1)  # (B m, steps, K)
        states = self.rollout.steps(network, repeat_members(x, len(own)), len(targets), noise=noise)
        pairs = []
        for state, target in zip(states, targets, strict=True):
            members = whole_members(parallel.whole_images(state), self.config)  # (B, M, n_out, H, W)
            whole_target = parallel.whole_images(target)
            pairs.append((members[:count], whole_target[:count]))
        return pairs
