"""The samples of a rank in an iteration: a function of numbers alone, so that a run can resume anywhere."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the samples in one epoch: a permutation drawn from seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def training_indices(num_samples: int, batch_size: int, seed: int, iteration: int) -> np.ndarray:
    """Samples of one training step, (batch_size,).

    The permutations of all epochs follow each other in one endless stream, of which step i takes the i-th batch. Every
    sample comes once an epoch, every batch is full, and the iteration alone says where a run resumes.
    """
    positions = range(iteration * batch_size, (iteration + 1) * batch_size)
    return np.array([epoch_order(num_samples, seed, p // num_samples)[p % num_samples] for p in positions])


def validation_indices(num_samples: int, batch_size: int, iteration: int) -> np.ndarray:
    """Samples of one validation batch, (batch_size,), in order. The last batch is filled up from the start."""
    return np.arange(iteration * batch_size, (iteration + 1) * batch_size) % num_samples


def rank_indices(
    indices: Callable[..., np.ndarray], args: tuple[int, ...], rank: int, world_size: int, iteration: int
) -> np.ndarray:
    """This rank's equal part, in order, of the samples indices(*args, iteration) of all ranks."""
    samples = indices(*args, iteration)
    own = len(samples) // world_size
    return samples[rank * own : (rank + 1) * own]


class Order(NamedTuple):
    """What a rank reads in each iteration.

    samples(iteration): their numbers. stages: how many steps of a forecast, as (first iteration, steps), from 0 on.
    """

    samples: partial[np.ndarray]
    stages: Sequence[tuple[int, int]]

    def steps(self, iteration: int) -> int:
        """The steps of the forecasts of an iteration."""
        return [steps for first, steps in self.stages if first <= iteration][-1]


def validation_counts(num_samples: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    """How many samples of each of a rank's validation batches are new; the others fill up the last batches.

    batch_size: of one rank. Every rank has as many batches; a count may be 0.
    """
    firsts = range(0, num_samples, batch_size * world_size)
    return [min(batch_size, max(0, num_samples - first - rank * batch_size)) for first in firsts]
