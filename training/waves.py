"""Made samples: plane waves in boxes of two or three dimensions.

Every rank computes the points of its own part alone, from the number of the sample; nothing is read or sent.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from utils import comm
from utils.data_loader import ONE_STEP, Batch, BatchLoader
from utils.device import to_device
from utils.sample_order import Order

SAMPLES = {"train": 4096, "valid": 256}  # where limit_nsamples does not say otherwise


class Waves(ABC):
    """Samples with a wave in every channel, cos(2 pi (n_0 x_0 + n_1 x_1 + ..) + phase).

    window: this rank's slice of each axis. seed: of what is random in a sample.
    """

    def __init__(self, count: int, img_size: Sequence[int], channels: int, window: Sequence[slice], seed: int):
        self.count, self.channels, self.seed = count, channels, seed
        self.axes = [torch.arange(n)[part] / n for n, part in zip(img_size, window, strict=True)]

    def __len__(self):
        return self.count

    @abstractmethod
    def draw(self, random: torch.Generator) -> tuple[Tensor, ...]:
        """The few numbers of which a sample is made."""

    @abstractmethod
    def make(self, *drawn: Tensor) -> Batch:
        """(input, target) of B samples, on the device of their numbers, (B, ...) each."""

    def batch(self, samples: Iterable[int], device: torch.device) -> Batch:
        """The samples of these numbers: drawn on the host, and made on the device."""
        seeds = (self.seed * 1_000_003 + int(sample) for sample in samples)
        drawn = default_collate([self.draw(torch.Generator().manual_seed(seed)) for seed in seeds])
        self.axes = [x.to(device) for x in self.axes]  # the first time only
        return self.make(*(to_device(x, device) for x in drawn))

    def image(self, numbers: Tensor, phases: Tensor) -> Tensor:
        """(B, C, *window) float32. numbers: of waves along each axis, (B, axes). phases: in turns, (B, C)."""
        ones, left = [1] * len(self.axes), range(len(self.axes))[::-1]  # axes after each
        along = [
            n.view(-1, *ones, 1) * x.view(-1, *ones[:i]) for i, n, x in zip(left, numbers.T, self.axes, strict=True)
        ]
        return torch.cos(2 * math.pi * (sum(along) + phases.view(*phases.shape, *ones)))


class WaveLoader(BatchLoader):
    """Batches of the samples of Waves: inputs (B, C, ...), targets (B, ...)."""

    def __init__(self, waves: Waves, batch_size: int, device: torch.device):
        self.waves, self.batch_size, self.device, self.stages = waves, batch_size, device, ONE_STEP

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.waves)

    def listing(self) -> dict[str, str]:
        """There are no files."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

    def _check(self, samples: Iterable[int]) -> None:
        """Made numbers are finite."""

    def _shared_batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        for iteration in iterations:
            yield self.waves.batch(order.samples(iteration), self.device)


def wave_loaders(task: Any, make: Callable[..., Waves], device: torch.device) -> list[BatchLoader]:
    """Loaders for the training and the validation of a Task. make: Waves, of the arguments that Waves takes."""
    config = task.config
    counts = config.limit_nsamples or SAMPLES["train"], config.limit_nsamples_val or SAMPLES["valid"]
    task.check_batch(counts[0], "")
    batch, image = config.global_batch_size // comm.get_size("dp"), (config.img_size, config.n_in_channels)
    return [
        WaveLoader(make(count, *image, task.own_window(), 2 * config.seed + part), batch, device)
        for part, count in enumerate(counts)  # training and validation images differ, for any seed
    ]
