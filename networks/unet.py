"""U-Net from image to image on the globe, with batch norms.

Method: Ronneberger et al. 2015 (arXiv:1505.04597), with BatchNorm after every convolution
(Ioffe and Szegedy 2015, arXiv:1502.03167). Longitude, the last axis, is periodic; beyond the poles there are zeros.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.vit import NoiseEmbedding


class GlobeConv(nn.Module):
    """Convolution of 3 x 3 points, periodic in longitude: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        # Zeros are added along latitude alone: forward continues the image along longitude.
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=(1, 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W) -> (B, C', H, W)."""
        padded = F.pad(x, (1, 1, 0, 0), mode="circular")  # (B, C, H, W + 2)
        return self.conv(padded)


class DoubleConv(nn.Sequential):
    """Twice convolution, BatchNorm, ReLU: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int):
        layers: list[nn.Module] = []
        for channels in (in_channels, out_channels):
            layers.append(GlobeConv(channels, out_channels))
            layers.append(nn.BatchNorm2d(out_channels))
            layers.append(nn.ReLU())
        super().__init__(*layers)


class UNet(nn.Module):
    """Down by 2 ** levels and up again, with a skip at each level: (B, in_channels, H, W) -> (B, out_channels, H, W).

    img_size: (H, W). width: channels on the finest grid, doubled at each level. noise_features: numbers of the noise
    that the model takes beside an image, and by which it scales and shifts the coarsest grid; 0: it takes none.
    Raises ValueError where 2 ** levels does not divide H and W.
    """

    def __init__(
        self,
        img_size: Sequence[int],
        in_channels: int,
        out_channels: int,
        width: int = 32,
        levels: int = 2,
        noise_features: int = 0,
    ):
        super().__init__()
        # An image may be cut between the cells of the coarsest grid.
        self.patch_size = 2**levels
        if any(points % self.patch_size for points in img_size):
            raise ValueError(f"img_size {list(img_size)} cannot be halved {levels} times")
        widths = [width * 2**level for level in range(levels + 1)]  # channels of each level, the finest first
        self.first = DoubleConv(in_channels, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.down.append(DoubleConv(fine, coarse))
        # Modules draw their weights as they are made, so the order here is that of the random numbers.
        upwards = widths[:0:-1]  # from the coarsest level to the second
        self.up = nn.ModuleList()
        for channels in upwards:
            self.up.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        self.join = nn.ModuleList()
        for channels in upwards:
            self.join.append(DoubleConv(channels, channels // 2))
        self.head = nn.Conv2d(width, out_channels, kernel_size=1)
        self.noise_embed = NoiseEmbedding(noise_features, widths[-1]) if noise_features else None

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """x: (B, in_channels, H, W) -> (B, out_channels, H, W). noise: (B, noise_features), if there are any."""
        x = self.first(x)  # (B, width, H, W)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))  # (B, 2 C, H / 2, W / 2)
        if self.noise_embed is not None:
            factor, shift = self.noise_embed(noise)  # (B, C), the same for all points of a member
            x = x * factor[:, :, None, None] + shift[:, :, None, None]
        for up, join in zip(self.up, self.join, strict=True):
            x = up(x)  # (B, C / 2, 2 H, 2 W)
            x = torch.cat([x, skips.pop()], 1)  # (B, C, 2 H, 2 W)
            x = join(x)  # (B, C / 2, 2 H, 2 W)
        return self.head(x)
