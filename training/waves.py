"""Made samples: plane waves in boxes of two or three dimensions.

Every rank computes the points of its own part alone, from the number of the sample; nothing is read or sent.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from utils.data_loader import Batch, BatchLoader, Indices


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
    def sample(self, index: int) -> tuple[Tensor, Any]:
        """(input, target)."""

    def random(self, index: int) -> torch.Generator:
        """The random numbers of a sample."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + index)

    def image(self, numbers: Sequence[int], phases: Tensor) -> Tensor:
        """(C, *window) float32. numbers: of waves along each axis. phases: in turns, (C,)."""
        axes = len(self.axes)
        along = [n * x.view(-1, *[1] * (axes - 1 - i)) for i, (n, x) in enumerate(zip(numbers, self.axes, strict=True))]
        return torch.cos(2 * math.pi * (sum(along) + phases.view(-1, *[1] * axes)))


class WaveLoader(BatchLoader):
    """Batches of the samples of Waves: inputs (B, C, ...), targets (B, ...)."""

    def __init__(self, waves: Waves, batch_size: int, device: torch.device):
        self.waves, self.batch_size, self.device = waves, batch_size, device

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.waves)

    def close(self) -> None:
        """Nothing is open."""

    def _shared_batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        for iteration in iterations:
            x, y = default_collate([self.waves.sample(int(i)) for i in indices(iteration)])
            yield x.to(self.device), y.to(self.device)
