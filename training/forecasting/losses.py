"""Training losses."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.collectives import as_group, at_least_float32, sum_over_ranks
from distributed.context_parallel import l2_norms
from distributed.shard.core.tensor import ShardTensor
from training.forecasting.metrics import latitude_weights
from utils.errors import UsageError, nearest
from utils.schema import Config
from weather.fields.channels import channel_key


def relative_l2(prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None = None) -> Tensor:
    """||prediction - target|| / ||target|| of each sample, norms over every other axis: (B, ...) -> (B,).

    prediction, target: tensors or ShardTensors. In float32 also where they are half precision. The loss of neural
    operators and of FourCastNet (Li et al. 2021, arXiv:2010.08895; Pathak et al. 2022, arXiv:2202.11214).
    image_group: process group whose ranks each hold a part of the images; norms are of whole images.
    """
    prediction = at_least_float32(prediction)
    target = at_least_float32(target)
    if isinstance(prediction, ShardTensor):
        squared_error = (prediction - target).square().flatten(1).sum(1)
        squared_size = target.square().flatten(1).sum(1)
        squares = torch.stack([squared_error, squared_size])  # (2, B): one all-reduce adds up both
        tiny = torch.finfo(squares.dtype).tiny
        error, size = squares.clamp(min=tiny).sqrt().unbind()
        return error / size

    prediction = prediction.flatten(1)  # (B, C h w)
    target = target.flatten(1)
    # Each rank holds a part of the images: the norms of the whole ones need an all-reduce.
    if image_group is not None and image_group.size() > 1:
        error, size = l2_norms(prediction - target, target, group=image_group)
        return error / size
    error = torch.linalg.vector_norm(prediction - target, dim=1)
    size = torch.linalg.vector_norm(target, dim=1)
    return error / size


def weighted_squared_error(
    prediction: Tensor, target: Tensor, weights: Tensor, image_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sum over channels and points of weights x squared error, one value a sample: (B, C, h, w) -> (B,), in float32.

    weights: (C, h, 1), see loss_weights. image_group: as for relative_l2; the weights are then those of this
    rank's rows, and one all-reduce of B numbers adds up the parts.
    """
    errors = (at_least_float32(prediction) - at_least_float32(target)).square() * weights  # (B, C, h, w)
    errors = errors.flatten(1).sum(1)  # (B,), of this rank's part
    return sum_over_ranks(errors, as_group(image_group))


def loss_weights(config: Config, names: Sequence[str], latitude: np.ndarray) -> Tensor:
    """Weights of the channels and rows of an image, (C, H, 1) float32; those of all its points add up to 1.

    Points weigh as the area of their cell, channels as channel_weights says, else 1; with pressure_weights those on
    pressure levels as their pressure, with mean 1: more where more of the air is (Lam et al. 2023, GraphCast,
    arXiv:2212.12794). names: of the channels; latitude: (H,) degrees. Raises UsageError for an unknown channel.
    """
    # The loss is of the channels that are forecast.
    names = list(names[: config.n_out_channels])
    for name in config.channel_weights:
        if name not in names:
            there = ", ".join(names)
            raise UsageError(f"{config.config}: channel_weights: no channel '{name}'{nearest(name, names)}: {there}")
    # The weights that the config gives by name come last, since they hold for any channel.
    by_name = dict.fromkeys(names, 1.0)
    if config.pressure_weights:
        by_name |= _weights_by_pressure(names)
    by_name |= config.channel_weights
    # In the order of the channels, (C,).
    weights = np.array([by_name[name] for name in names])
    if not weights.sum() > 0:
        raise UsageError(f"{config.config}: channel_weights: all channels weigh nothing")
    # Rows weigh as their area, (H,).
    rows = latitude_weights(latitude)
    columns = config.img_size[1]
    whole = weights[:, None] / weights.sum() * rows / rows.sum() / columns  # (C, H)
    return torch.from_numpy(whole.astype(np.float32))[..., None]


def _weights_by_pressure(names: Sequence[str]) -> dict[str, float]:
    """{name: weight} of the channels on pressure levels, with mean 1."""
    levels = {}
    for name in names:
        _, level = channel_key(name)
        if level:
            levels[name] = level
    total = sum(levels.values())
    return {name: level * len(levels) / total for name, level in levels.items()}
