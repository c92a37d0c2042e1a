"""Members of an ensemble: which rank computes which, and the noise in which they differ.

A sample is read once. Each of its M members is a forecast of the model from the same state, with noise of its own. The
noise is drawn from a stream that names the moment, the sample and the member, never a rank. So a member is the same in
every layout, and in a run that is resumed.

Method: a model that takes noise, and is trained with a score of its members (Lang et al. 2024, AIFS-CRPS,
arXiv:2412.15832; Alet et al. 2025, FGN, arXiv:2506.10772).
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from distributed.collectives import as_group, gather_from_region
from utils import comm
from utils.device import to_device
from utils.layout import Sizes, shard_sizes
from utils.sample_order import own_positions
from utils.schema import Config

# The first number of a stream: which kind of forecast the noise is for.
TRAINING, VALIDATION, FORECAST = range(3)


def members_of_ranks(config: Config) -> Sizes:
    """How many members of a sample each rank along ens has, the larger shares first: 4 on 3 ranks: (2, 1, 1)."""
    return shard_sizes(config.ensemble_size, comm.get_size("ens"))


def own_members(config: Config) -> range:
    """The numbers of this rank's members."""
    counts = members_of_ranks(config)
    rank = comm.get_rank("ens")
    first = sum(counts[:rank])
    return range(first, first + counts[rank])


def repeat_members(x: Tensor, count: int) -> Tensor:
    """Each sample so many times, one after the other: (B, ...) -> (B count, ...)."""
    return x.repeat_interleave(count, 0)


def draw_noise(
    config: Config,
    moments: Iterable[Sequence[int]],
    members: Sequence[int],
    steps: int,
) -> Tensor:
    """Normal random numbers of each member of each sample and each step of its forecast, (B, m, steps, K), float32.

    moments: the numbers that name each sample, from 0 on; they make up its stream with the seed and the member. The
    first steps of a longer forecast are those of a shorter one.
    """
    drawn = []
    for moment in moments:
        for member in members:
            stream = np.random.default_rng([config.seed, *moment, member])
            drawn.append(stream.standard_normal((steps, config.noise_features), dtype=np.float32))
    noise = np.stack(drawn)  # (B m, steps, K)
    # Each step keeps a share of the step before, and as much is new as leaves the variance at 1.
    correlation = config.noise_correlation
    new_share = math.sqrt(1 - correlation**2)
    for step in range(1, steps):
        noise[:, step] = correlation * noise[:, step - 1] + new_share * noise[:, step]
    return torch.from_numpy(noise).unflatten(0, (-1, len(members)))


def whole_members(part: Tensor, config: Config) -> Tensor:
    """The members of all ranks, from this rank's, sample by sample: (B m, ...) -> (B, M, ...), on all of them."""
    counts = members_of_ranks(config)
    group = as_group(comm.get_group("ens"))
    own = part.unflatten(0, (-1, counts[group.rank]))  # (B, m, ...)
    return gather_from_region(own, 1, counts, group)


def training_noise(config: Config, iteration: int, steps: int, x: Tensor) -> Tensor:
    """The noise of this rank's members of its samples in an iteration, (B, m, steps, K), of the device and type of x.

    A sample is named by its place in the batch of all ranks, which is the same in every layout.
    """
    places = own_positions(
        config.global_batch_size, comm.get_rank("dp"), comm.get_size("dp"), config.gradient_accumulation
    )
    moments = [(TRAINING, iteration, place) for place in places]
    noise = draw_noise(config, moments, own_members(config), steps)
    return to_device(noise.to(x.dtype), x.device)  # the host goes on while it is copied


def one_member(config: Config, x: Tensor) -> tuple[Tensor, ...]:
    """What a forward pass of one member takes of a batch of inputs: images, and zeros for its noise in an ensemble."""
    images = x[:, : config.model_in_channels]
    if not config.noise_of_model:
        return (images,)
    return images, images.new_zeros(len(x), config.noise_of_model)
