"""Tasks on made samples: plane waves in boxes of two or three dimensions.

Every rank computes the points of its own part alone, from the number of the sample; nothing is read or sent.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.tasks.task import Task, Validator
from utils import comm
from utils.data_loader import Batch, BatchLoader
from utils.device import to_device
from utils.sample_order import Order

SAMPLES = 4096, 256  # of training and validation, where limit_nsamples does not say otherwise


class WaveTask(Task):
    """A task whose inputs are waves, with random phases.

    scored: the names of the numbers that `scores` gives of each sample. shown: the main ones of their means, as text.
    """

    scored: tuple[str, ...]
    shown: str

    @abstractmethod
    def draw(self, random: torch.Generator) -> Tensor:
        """Numbers of waves along each axis, (axes,)."""

    @abstractmethod
    def target(self, axes: Sequence[Tensor], numbers: Tensor, phases: Tensor) -> Tensor:
        """The targets, (B, ...), of the inputs waves(axes, numbers, phases)."""

    @abstractmethod
    def scores(self, parallel: ParallelModel, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Scores of the first `count` samples of a batch, (count, len(scored))."""

    def build_loaders(self, device: torch.device) -> list[BatchLoader]:
        """Loaders of images that are made on the way; training and validation images differ, for any seed."""
        config = self.config
        train_count = config.limit_nsamples or SAMPLES[0]
        valid_count = config.limit_nsamples_val or SAMPLES[1]
        self.check_batch(train_count)
        batch_size = config.global_batch_size // comm.get_size("dp")
        window = self.own_window()
        # Seeds of training are even and those of validation odd: their images differ, whatever the seed of the run.
        train_seed = 2 * config.seed
        valid_seed = train_seed + 1
        return [
            WaveLoader(self, train_count, window, train_seed, batch_size, device),
            WaveLoader(self, valid_count, window, valid_seed, batch_size, device),
        ]

    def build_validator(self, loader: BatchLoader) -> Validator:
        """Means over all samples."""
        return MeanValidator(loader, self)


def waves(axes: Sequence[Tensor], numbers: Tensor, phases: Tensor) -> Tensor:
    """A wave in every channel, cos(2 pi (n_0 x_0 + n_1 x_1 + ..) + phase): (B, C, h, w, ..) float32.

    axes: the points along each axis, in lengths of the box. numbers: of waves along each axis, (B, axes). phases: in
    turns, (B, C).
    """
    ones = [1] * len(axes)
    turns = []  # n_i x_i for each axis, shaped so that their sum is of the whole box
    for axis, (number, points) in enumerate(zip(numbers.T, axes, strict=True)):
        ones_after = ones[axis + 1 :]
        along_axis = points.view(-1, *ones_after)
        turns.append(number.view(-1, *ones, 1) * along_axis)
    phase = phases.view(*phases.shape, *ones)  # (B, C, 1, 1, ..)
    return torch.cos(2 * math.pi * (sum(turns) + phase))


class WaveLoader(BatchLoader):
    """Batches of the samples of a WaveTask: inputs (B, C, h, w, ..) float32, and targets (B, ...).

    window: this rank's slice of each axis. seed: of what is random in a sample.
    """

    def __init__(
        self,
        task: WaveTask,
        count: int,
        window: Sequence[slice],
        seed: int,
        batch_size: int,
        device: torch.device,
    ):
        self.task = task
        self.count = count
        self.seed = seed
        self.batch_size = batch_size
        self.device = device
        self.micro_batches = task.config.gradient_accumulation
        self.axes = []  # this rank's points along each axis, in lengths of the box
        for length, part in zip(task.config.img_size, window, strict=True):
            points = torch.arange(length)[part] / length
            self.axes.append(points.to(device))

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.count

    def batch(self, samples: Iterable[int]) -> Batch:
        """The samples of these numbers: drawn on the host, and made on the device."""
        drawn_numbers = []
        drawn_phases = []
        for sample in samples:
            # A sample follows from its number alone, whichever rank makes it.
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + int(sample))
            drawn_numbers.append(self.task.draw(random))
            drawn_phases.append(torch.rand(self.task.config.n_in_channels, generator=random))
        numbers = to_device(torch.stack(drawn_numbers), self.device)  # (B, axes)
        phases = to_device(torch.stack(drawn_phases), self.device)  # (B, C)
        x = waves(self.axes, numbers, phases)
        y = self.task.target(self.axes, numbers, phases)
        return x, y

    def listing(self) -> dict[str, str]:
        """There are no files."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

    def check_finite(self, samples: Iterable[int]) -> None:
        """Made numbers are finite."""

    def _shared_batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        return map(self.batch, map(order.samples, iterations))


class MeanValidator(Validator):
    """Means of a task's scores over all samples."""

    def __init__(self, loader: BatchLoader, task: WaveTask):
        super().__init__(loader)
        self.task = task

    def describe(self, summary: dict[str, Any]) -> str:
        """The main scores."""
        return self.task.shown.format(**summary)

    def score(
        self,
        parallel: ParallelModel,
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """{name: mean}."""
        scores = []
        # The last batch may hold samples that only fill it up.
        for batch in self.loader.valid():
            beat()
            scores.append(self.task.scores(parallel, *batch))
        means = comm.global_mean(torch.cat(scores))  # (len(scored),)
        return dict(zip(self.task.scored, means.tolist(), strict=True))
