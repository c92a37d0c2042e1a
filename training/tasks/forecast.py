"""Forecasting: from the state of the atmosphere to the state one step later, on year files."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.losses import loss_weights, relative_l2, weighted_squared_error
from training.metrics import ForecastMetrics
from training.results import skill_table
from training.rollout import Rollout
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
        Loader = loader_class(config.data_loader_config) if reads_samples() else BatchLoader
        n_in, n_out, (rows, columns) = config.n_in_channels, config.n_out_channels, self.own_window()
        channels = max(n_in, n_out)
        train, valid = (
            FieldDataset(
                folder,
                channels,
                config.img_size,
                config.dt,
                limit,
                rows,
                columns,
                config.longest_rollout,
                config.input_frames,
                config.options(RemoteOptions),
            )
            for folder, limit in (
                (config.train_data_path, config.limit_nsamples),
                (config.valid_data_path, config.limit_nsamples_val),
            )
        )
        valid.check_like(train)
        valid.check_step_like(train)
        self._described = train.description.names, train.description.grid.latitude
        self._train = train
        self.notes = [*train.notes(), *valid.notes()]
        if config.loss != "relative_l2":
            loss_weights(config, *self._described)
        self.check_batch(len(train))
        batch_size = config.global_batch_size // comm.get_size("dp")
        self._rollout = rollout_of(config, device)
        forcings = Forcings(config.forcings, train, device) if config.forcings else None
        statistics = statistics_of(config, train.description.names)
        shared = statistics, n_in, n_out, batch_size, device, config.num_data_workers, forcings
        steps = config.rollout_stages, config.input_frames, config.gradient_accumulation
        loader, valid_loader = (Loader(dataset, *shared, *steps) for dataset in (train, valid))
        valid_loader.share_memory_with(loader)
        return [loader, valid_loader]

    def check_data(self, loaders: Sequence[BatchLoader]) -> None:
        """Look at frames, at the statistics beside them, and for a year that is in two of the folders."""
        if self.config.check_data == "off":
            return
        train, valid = (cast(FieldDataset, loader.dataset) for loader in loaders)
        if comm.is_main():  # the files are alike on all ranks
            self.notes += check_apart(valid, train)
            self.notes += check_test_years(self.config, train)
        statistics = cast(Statistics, loaders[0].statistics)
        looked = look_at_frames(self.config, [train, valid], statistics, is_training=True)
        self.notes.append(looked.describe())

    def data_record(self) -> Record:
        """Channels, time step and dates of the training."""
        return make_record(self._train) if self._train is not None else {}

    def check_data_record(self, record: Record, where: Path) -> None:
        """The time step and the channels must be those of before."""
        if self._train is not None:
            check_same_kind(record, self._train, where)

    def predict(self, parallel: ParallelModel, x: Tensor, y: Tensor) -> Tensor:
        """A forecast of as many steps as y has."""
        steps = y.shape[1] // self.config.n_out_channels
        if steps == 1 and self.config.predict == "state":
            return parallel.module(x)
        # DistributedDataParallel, around the model, makes ready for the backward pass: once, in the last step.
        return self.rollout(x.device).forecast(parallel.model, x, steps, last=parallel.module)

    def rollout(self, device: torch.device) -> Rollout:
        """The object that turns the network's outputs into forecasts."""
        if self._rollout is None:
            scale = torch.ones(self.config.n_out_channels, 1, 1, device=device)  # of random numbers
            self._rollout = Rollout(self.config, None if self.config.predict == "state" else scale)
        return self._rollout

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The loss that the config names, the mean over the steps of the forecast."""
        n_out = self.config.n_out_channels
        prediction, target = (x.unflatten(1, (-1, n_out)).flatten(0, 1) for x in (prediction, target))
        return self.sample_losses(prediction, target, False, image_group).mean()

    def sample_losses(
        self, prediction: Tensor, target: Tensor, whole: bool = True, image_group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """The loss of each sample, (B,), of images (B, n_out, H, W); not whole: of this rank's part of them."""
        if self.config.loss == "relative_l2":
            return relative_l2(prediction, target, image_group)
        if whole not in self._weights:
            weights = loss_weights(self.config, *self._described)
            self._weights[whole] = (weights if whole else weights[:, self.own_window()[0]]).to(target.device)
        return weighted_squared_error(prediction, target, self._weights[whole], image_group)

    def build_validator(self, loader: BatchLoader) -> Validator:
        """RMSE and ACC of each channel."""
        return ForecastValidator(loader, self.rollout(loader.device), self.sample_losses)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers; forcings that stay are the same for all samples."""
        config, steps, (fixed, timed) = self.config, self.config.longest_rollout, count_forcings(self.config.forcings)
        inputs = config.model_in_channels + (steps - 1) * timed
        x = torch.randn(config.global_batch_size, inputs, *config.img_size, generator=generator)
        x[1:, config.state_channels :][:, :fixed] = x[:1, config.state_channels :][:, :fixed]
        return x, torch.randn(len(x), steps * config.n_out_channels, *config.img_size, generator=generator)


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
        check_climatology(paths, statistics, names, first.files[0].shape[2:], first.description.grid.is_global)
    looked = DataCheck(datasets, config.check_data, (comm.rank(), comm.world_size()))
    looked.run(comm.is_main())
    is_of_training = is_training and config.limit_nsamples is None
    looked.sums.check(statistics, names, paths, first.folder, is_of_training)
    return looked


def statistics_of(config: Config, names: Sequence[str] = ()) -> Statistics:
    """The statistics that a config names, of its channels and image. Raises UsageError where they cannot be used."""
    channels = max(config.n_in_channels, config.n_out_channels)
    stds = positive_statistics(config.global_stds_path, channels, names)
    climatology = read_statistics(config.time_means_path, channels, config.img_size)
    return Statistics(read_statistics(config.global_means_path, channels), stds, climatology)


def rollout_of(config: Config, device: torch.device) -> Rollout:
    """The Rollout of a config. Raises UsageError where the size of the change is asked for, and not known."""
    if config.predict == "state":
        return Rollout(config)
    path = Path(config.global_stds_path).with_name("change_stds.npy")
    if not path.exists():
        make = f"python -m weather.year_files TRAIN_FOLDER {path.parent}"
        raise UsageError(f"{path}: not there; predict change needs the size of the change: make it with `{make}`")
    stds = positive_statistics(config.global_stds_path, config.n_out_channels)
    changes = positive_statistics(path, config.n_out_channels)
    if config.check_data != "off":
        check_changes(path, changes, config.global_stds_path, stds)
    return Rollout(config, torch.from_numpy(changes / stds).to(device))


class ForecastValidator(Validator):
    """Loss of the whole forecasts; RMSE and ACC of their first step, beside those of persistence and climatology."""

    def __init__(self, loader: BatchLoader, rollout: Rollout, sample_losses: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(loader)
        self.rollout, self.sample_losses = rollout, sample_losses
        n = loader.n_out
        # A loader knows of a data set what it reads; ours say more.
        dataset, statistics = cast(FieldDataset, loader.dataset), cast(Statistics, loader.statistics)
        names, units, self.grid = dataset.description
        self.names, self.units = names[:n], units[:n]
        self.means, self.stds, time_means = (torch.from_numpy(values[:n]) for values in statistics)
        self.climatology = ((time_means - self.means) / self.stds).to(loader.device)
        self.new_metrics = partial(ForecastMetrics, self.grid.latitude, self.stds, self.climatology)
        self.baselines: dict[str, dict[str, float]] = {}  # the same in every pass: scored in the first

    def describe(self, summary: dict[str, Any]) -> str:
        """RMSE of the headline channels beside persistence and climatology."""
        return skill_table(summary)

    def score(self, parallel: ParallelModel, beat: Callable[[], None]) -> dict[str, Any]:
        """{"val_loss", "rmse", "acc", "persistence_rmse", "climatology_rmse"}, all but the first by channel."""
        metrics, persistence, climatology = self.new_metrics(), self.new_metrics(), self.new_metrics()
        losses, example = [], None
        for x, y, count in self.loader.valid():
            beat()
            n_out, state = self.loader.n_out, parallel.whole_images(x[:, : self.loader.n_in])[:count]
            network = partial(parallel.predict, out_channels=n_out)
            steps = zip(self.rollout.steps(network, x, y.shape[1] // n_out), y.split(n_out, 1), strict=True)
            pairs = [[parallel.whole_images(part)[:count] for part in parts] for parts in steps]
            losses.append(torch.stack([self.sample_losses(*pair) for pair in pairs]).mean(0))
            prediction, target = pairs[0]
            metrics.update(prediction, target)
            if not self.baselines:
                climatology.update(self.climatology.expand_as(target), target)
                if self.loader.n_in >= n_out:
                    persistence.update(state[:, :n_out], target)
            if example is None and count:
                example = target[:1].clone(), prediction[:1]
        if not self.baselines:
            scored = {"persistence_rmse": persistence, "climatology_rmse": climatology}
            self.baselines = {name: self._by_channel(m.compute()[0]) for name, m in scored.items() if m.squared_errors}
        if example is not None:  # more ranks than samples: some have none
            self._draw(*example)
        rmse, acc = (self._by_channel(values) for values in metrics.compute())
        val_loss = comm.global_mean(torch.cat(losses)).item()
        return {"val_loss": val_loss, "rmse": rmse, "acc": acc, **self.baselines}

    def _by_channel(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    def _draw(self, target: Tensor, prediction: Tensor) -> None:
        from training.pictures import lead_time_figure  # slow to import, and rank 0 alone draws

        for c, name in enumerate(self.names):
            if name in PICTURED:
                truth, forecast = ((f[:, c].cpu() * self.stds[c] + self.means[c]).numpy() for f in (target, prediction))
                self.figures[name] = lead_time_figure(truth, forecast, (), self.grid, name, self.units[c])
