"""Forecasting: from the state of the atmosphere to the state one step later, on year files that were looked at."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.collectives import as_group, sum_over_ranks
from distributed.parallel_model import ParallelModel
from training.forecasting.crps import exchange_points, own_points
from training.forecasting.ensemble import members_of_ranks, repeat_members
from training.forecasting.losses import loss_weights
from training.forecasting.rollout import Rollout
from training.tasks.task import Task, Validator
from training.tasks.validation import EnsembleValidator, ForecastValidator
from utils import comm
from utils.choices import choose, load
from utils.data_loader import BatchLoader, reads_samples
from utils.errors import UsageError
from utils.schema import Config, count_forcings
from weather.checks.data_check import DataCheck
from weather.checks.data_record import Record, check_apart, check_same_kind, make_record
from weather.checks.statistics import (
    Paths,
    Statistics,
    check_changes,
    check_climatology,
    positive_statistics,
    read_statistics,
)
from weather.fields.channels import CHANNELS
from weather.fields.grid import Grid, latitudes
from weather.sources.remote_store import RemoteOptions
from weather.years.dataset import FieldDataset
from weather.years.forcings import Forcings

GIVES_CHANGE = {"state": False, "change": True}  # of `predict`: whether the network gives the change of the state
LOADERS = {"pytorch": "utils.data_loader:DataLoader", "dali": "utils.data_loader_dali:DaliDataLoader"}
# Our network that joins the last column to the first.
JOINING = "unet"
# The one that takes both axes for periodic: its filters are of frequencies.
PERIODIC = "afno"


class ForecastTask(Task):
    """Image to image, over one step or several: latitude-weighted scores of each channel."""

    forecasts = True

    def check(self) -> None:
        """The data have latitude and longitude."""
        if len(self.config.img_size) != 2:
            where = f"{self.config.config}: img_size {self.config.img_size}"
            raise UsageError(f"{where}: forecasts are of latitude and longitude")
        self._loss = self.config.loss_kind
        self._score = load(self._loss.function)
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
        if self._loss.is_weighted:
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
        if self._loss.scores_members:
            return self._score_ensemble(prediction, target).mean()
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
        if not self._loss.is_weighted:
            return self._score(prediction, target, image_group)
        return self._score(prediction, target, self.weights(whole, target.device), image_group)

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

    def _score_ensemble(self, prediction: Tensor, target: Tensor) -> Tensor:
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
        scores = self._score(members, truth, of_points, self.config.crps_alpha)
        return sum_over_ranks(scores, as_group(comm.get_group("sample")))

    def member_losses(self, members: Tensor, target: Tensor) -> Tensor:
        """The score of each sample, (B,), of whole ensembles (B, M, n_out, H, W) and whole images (B, n_out, H, W)."""
        weights = self.weights(True, target.device).expand(-1, -1, target.shape[-1]).flatten()
        return self._score(members.flatten(2), target.flatten(1), weights, self.config.crps_alpha)

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
    return load(choose("data_loader_config", name, LOADERS))


def statistics_of(config: Config, names: Sequence[str] = ()) -> Statistics:
    """The statistics that a config names, of its channels and image. Raises UsageError where they cannot be used."""
    channels = max(config.n_in_channels, config.n_out_channels)
    stds = positive_statistics(config.global_stds_path, channels, names)
    climatology = read_statistics(config.time_means_path, channels, config.img_size)
    means = read_statistics(config.global_means_path, channels)
    return Statistics(means, stds, climatology)


def rollout_of(config: Config, device: torch.device) -> Rollout:
    """The Rollout of a config. Raises UsageError where the size of the change is asked for, and not known."""
    gives_change = choose("predict", config.predict, GIVES_CHANGE)
    if not gives_change:
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


def check_columns(config: Config, grid: Grid) -> list[str]:
    """Hold the model against the columns of its images; returns notes on what is let pass.

    Raises UsageError for a model that joins the eastern edge of a region to the western one.
    """
    if grid.goes_around:
        return []
    west = grid.longitude[0]
    east = grid.longitude[-1]
    columns = f"columns from {west:g} to {east:g} degrees do not go around the globe"
    if config.model == JOINING:
        raise UsageError(
            f"{config.config}: {columns}, and model {JOINING} joins the last to the first: train vit, neighborhood or "
            "a model of your own"
        )
    if config.model == PERIODIC:
        return [f"{columns}, and model {PERIODIC} takes images for periodic: expect errors at their edges"]
    return []
