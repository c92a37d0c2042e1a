"""Microsoft's Aurora (Bodnar et al. 2025, Nature 641, 1180; `pip install microsoft-aurora`) on this trainer's data.

Aurora takes and gives a Batch: dictionaries of surface, static and atmospheric variables, with a history of frames.
This adapter makes one from the channels of an input, and channels from Aurora's answer. Neither of the two knows
whether tensors are split over devices. The data are normalised before, so Aurora does not do it again: with published
weights, the statistics of the data have to be Aurora's (aurora.normalisation).
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import tau
from typing import Any

import aurora
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NEW_YEAR = datetime(2020, 1, 1, tzinfo=UTC)  # of every sample: the forcing `day` does not say which year it is
HOURS = 365.25 * 24  # of a year

NO_NUMBERS = {Tensor.__bool__: True, Tensor.__float__: 0.0}  # what is read of a tensor that has none


class Forecaster(nn.Module):
    """Aurora from channels to channels: (B, frames C + statics, H, W) -> (B, C, H, W).

    channels: names of the C channels of a frame, in their order. Those of an atmospheric variable are the variable's
    name and a level, like z500, at every one of `levels` (hPa); all others are surface variables. static_vars: names of
    further input channels, the fixed `forcings` of the config in their order; without any, zeros take their place.
    dated: the forcing `day`, and no other that changes, gives each sample its day and hour.
    sizes: other arguments of aurora.Aurora.
    """

    def __init__(
        self,
        img_size: Sequence[int],
        channels: Sequence[str],
        atmos_vars: Sequence[str],
        levels: Sequence[int],
        static_vars: Sequence[str] = (),
        dated: bool = False,
        patch_size: int = 4,
        embed_dim: int = 512,
        num_heads: int = 16,
        **sizes: Any,
    ):
        super().__init__()
        self.channels = channels
        self.levels = levels
        self.patch_size = patch_size
        self.static_vars = static_vars
        self.dated = dated

        # Channels of each variable: one for each level, or one at the surface.
        self.at_levels: dict[str, list[int]] = {}
        for name in atmos_vars:
            self.at_levels[name] = [channels.index(f"{name}{level}") for level in levels]
        atmospheric = set(chain(*self.at_levels.values()))
        self.at_surface = {name: i for i, name in enumerate(channels) if i not in atmospheric}

        # The grid begins at the north pole and has no row at the south pole.
        height, width = img_size
        latitude = torch.linspace(90, -90, height + 1)[:height]
        longitude = torch.arange(width) * (360 / width)
        self.register_buffer("latitude", latitude, persistent=False)
        self.register_buffer("longitude", longitude, persistent=False)

        # YAML has lists where Aurora takes tuples.
        for key, size in sizes.items():
            if isinstance(size, list):
                sizes[key] = tuple(size)
        with NumbersOnHost():
            self.aurora = NormalisedAurora(
                surf_vars=tuple(self.at_surface),
                static_vars=tuple(static_vars) or ("lsm",),
                patch_size=patch_size,
                atmos_vars=tuple(atmos_vars),
                embed_dim=embed_dim,
                num_heads=num_heads,
                **sizes,
            )

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of the Swin transformer: the units of fsdp and of recomputation."""
        backbone = self.aurora.backbone
        blocks = nn.ModuleList()
        for layer in (*backbone.encoder_layers, *backbone.decoder_layers):
            blocks.extend(layer.blocks)
        return blocks

    def forward(self, x: Tensor) -> Tensor:
        """x: the present frame, the earlier ones, the static fields, and cosine and sine of the time of the year."""
        # Frames of C channels each, then static fields, then two channels of the time of the year.
        count = len(self.channels)
        end = x.shape[1] - 2 * self.dated
        first_static = end - len(self.static_vars)
        frames = [x[:, i : i + count] for i in range(0, first_static, count)]
        history = torch.stack(frames[::-1], 1)  # (B, T, C, H, W), the oldest first
        fields = x[0, first_static:end]  # (statics, H, W), the same in every sample
        statics = dict(zip(self.static_vars, fields, strict=True))
        if not statics:
            statics = {"lsm": torch.zeros_like(x[0, 0])}

        surface = {name: history[:, :, i] for name, i in self.at_surface.items()}  # (B, T, H, W) each
        atmosphere = {}
        for name, indices in self.at_levels.items():
            levels = [history[:, :, i] for i in indices]
            atmosphere[name] = torch.stack(levels, 2)  # (B, T, levels, H, W)
        batch = aurora.Batch(surface, statics, atmosphere, metadata=None)
        with ChecksHold():
            dates = (NEW_YEAR,) * len(x)
            if self.dated:
                times = x[:, end:].amax((2, 3))  # (B, 2), the same at every point
                dates = tuple(map(date_of, times))
            metadata = aurora.Metadata(self.latitude, self.longitude, dates, tuple(self.levels))
            answer = self.aurora(replace(batch, metadata=metadata))

        # The answer has one frame of every variable.
        of_channel = {i: answer.surf_vars[name][:, 0] for name, i in self.at_surface.items()}
        for name, indices in self.at_levels.items():
            variable = answer.atmos_vars[name][:, 0]  # (B, levels, H, W)
            for level, index in enumerate(indices):
                of_channel[index] = variable[:, level]
        return torch.stack([of_channel[i] for i in range(count)], 1)


def date_of(time: Tensor) -> datetime:
    """The full hour at a time of the year, of which (cosine, sine) are given."""
    cosine, sine = time
    angle = float(torch.atan2(sine, cosine))
    hours = round(angle / tau % 1 * HOURS)
    return NEW_YEAR + timedelta(hours=hours)


class NormalisedBatch(aurora.Batch):
    """A Batch whose variables are normalised already."""

    def normalise(self, surf_stats: Any) -> "NormalisedBatch":
        """The same."""
        return self

    unnormalise = normalise

    def type(self, t: Any) -> "NormalisedBatch":
        """Convert everything to a dtype."""
        return normalised(super().type(t))


def normalised(batch: aurora.Batch) -> NormalisedBatch:
    """The same variables, of which Aurora takes the scale as it is."""
    return NormalisedBatch(batch.surf_vars, batch.static_vars, batch.atmos_vars, batch.metadata)


class NormalisedAurora(aurora.Aurora):
    """Aurora for variables that are normalised already."""

    def _pre_norm_hook(self, batch: aurora.Batch) -> NormalisedBatch:
        return normalised(batch)

    def _post_decoder_hook(self, batch: aurora.Batch, pred: aurora.Batch) -> NormalisedBatch:
        return normalised(pred)


class NumbersOnHost(TorchFunctionMode):
    """Inside, Aurora can be built on the meta device: it reads its drop rates from a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {"device": "cpu"} if func is torch.linspace else {}
        return func(*args, **options | (kwargs or {}))


class ChecksHold(TorchFunctionMode):
    """Inside, Aurora runs without numbers, as in a plan: whether coordinates are in range, it reads as true."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if func not in NO_NUMBERS or args[0].numel() > 1:
                raise
            return NO_NUMBERS[func]
