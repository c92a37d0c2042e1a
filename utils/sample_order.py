"""The interface of a data set for the loaders, and which of its samples a rank reads in an iteration.

Any class with the methods of Dataset can be loaded; weather/ has ours. The samples are a function of numbers alone, so
that a run can resume anywhere.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:  # DALI's worker processes do without torch, which takes seconds to import
    from torch import Tensor


class Dataset(Protocol):
    """Samples of several frames each: the n of the input, oldest first, and the targets of every step of a forecast.

    One whose `read` may raise ConnectionLostError says so by an attribute `is_remote`, which is true.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one sample of this rank: (n + steps, C, h, w)."""

    def __len__(self) -> int:
        """Count the samples."""

    def open(self) -> None:
        """Open the files where they are not open: a data set travels to another process without them."""

    def read(self, index: int, out: np.ndarray) -> None:
        """Read a sample, or its first frames, into `out`, contiguous float32."""

    def dates(
        self,
        indices: Sequence[int] | np.ndarray,
        steps: int,
    ) -> np.ndarray:
        """The dates at which `steps` steps start, (len(indices), steps) datetime64[s]: from the present frame on."""

    def check_finite(self, index: int) -> None:
        """Raise UsageError, naming the place, where a sample has a value that is not finite."""

    def listing(self) -> dict[str, str]:
        """{name: what this rank sees of it} of the files, which ranks compare."""

    def close(self) -> None:
        """Close the files."""


class ChannelStatistics(Protocol):
    """Mean and standard deviation of each channel, (C, 1, 1) float32."""

    @property
    def means(self) -> np.ndarray:
        """Means."""

    @property
    def stds(self) -> np.ndarray:
        """Standard deviations, all positive."""


class ForcingChannels(Protocol):
    """Further input channels that are known for any date and place."""

    def channels(self, steps: int) -> int:
        """Count the channels for so many steps of a forecast."""

    def __call__(self, dates: np.ndarray) -> "Tensor":
        """The forcings of k dates for each sample, (B, k): (B, channels(k), h, w) on the device."""


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the samples in one epoch: a permutation drawn from seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def training_indices(num_samples: int, batch_size: int, seed: int, iteration: int) -> np.ndarray:
    """Samples of one training step, (batch_size,).

    The permutations of all epochs follow each other in one endless stream, of which step i takes the i-th batch. Every
    sample comes once an epoch, every batch is full, and the iteration alone says where a run resumes.
    """
    indices = []
    # A batch may reach from one epoch into the next.
    for position in range(iteration * batch_size, (iteration + 1) * batch_size):
        epoch, place = divmod(position, num_samples)
        order = epoch_order(num_samples, seed, epoch)
        indices.append(order[place])
    return np.array(indices)


def own_positions(
    count: int,
    rank: int,
    ranks: int,
    micro_batches: int = 1,
) -> np.ndarray:
    """Places in a batch of `count` samples of those that a rank has, micro-batch after micro-batch: (count / ranks,).

    Each micro-batch is shared out by itself. So the i-th micro-batches of all ranks are together the i-th of one
    device, and whatever normalizes over a micro-batch sees the same samples.
    """
    # Axes: micro-batches, ranks, samples.
    places = np.arange(count).reshape(micro_batches, ranks, -1)
    return places[:, rank].reshape(-1)


class Order(NamedTuple):
    """Samples of a rank in each iteration: its equal part of the samples of all ranks.

    batch_size: of this rank. seed: of training; None for validation, which takes the samples in their order, and fills
    up the last batch from the start. stages: the steps of a forecast, as (first iteration, steps), from 0 on. inputs:
    frames of the input. micro_batches: of a training step.
    """

    num_samples: int
    batch_size: int
    rank: int
    ranks: int
    seed: int | None = None
    stages: Sequence[tuple[int, int]] = ((0, 1),)
    inputs: int = 1
    micro_batches: int = 1

    def samples(self, iteration: int) -> np.ndarray:
        """The numbers of the samples of an iteration, (batch_size,)."""
        whole = self.batch_size * self.ranks  # samples of a batch of all ranks
        if self.seed is None:
            first = iteration * whole + self.batch_size * self.rank
            return np.arange(first, first + self.batch_size) % self.num_samples
        batch = training_indices(self.num_samples, whole, self.seed, iteration)
        # A rank takes its share of every micro-batch.
        positions = own_positions(whole, self.rank, self.ranks, self.micro_batches)
        return batch[positions]

    def steps(self, iteration: int) -> int:
        """The steps of the forecasts of an iteration; in validation the most of all stages."""
        if self.seed is None:
            return max(steps for _, steps in self.stages)
        # The last stage that has begun is the one of this iteration.
        begun = [steps for first, steps in self.stages if first <= iteration]
        return begun[-1]

    def frames(self, iteration: int) -> int:
        """The frames of a sample: those of the input, and one for each step."""
        return self.inputs + self.steps(iteration)

    def counts(self) -> list[int]:
        """How many samples of each validation batch are new: every rank has as many batches, and a count may be 0."""
        counts = []
        for batch_start in range(0, self.num_samples, self.batch_size * self.ranks):
            own_start = batch_start + self.batch_size * self.rank
            left = max(0, self.num_samples - own_start)
            counts.append(min(self.batch_size, left))
        return counts
