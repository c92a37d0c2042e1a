"""U-Net from image to image on the globe, with batch norms.

Method: Ronneberger et al. 2015 (arXiv:1505.04597), with BatchNorm after every convolution
(Ioffe and Szegedy 2015, arXiv:1502.03167). Longitude, the last axis, is periodic; beyond the poles there are zeros.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GlobeConv(nn.Module):
    """Convolution of 3 x 3 points, periodic in longitude: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=(1, 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W) -> (B, C', H, W)."""
        return self.conv(F.pad(x, (1, 1, 0, 0), mode="circular"))


class DoubleConv(nn.Sequential):
    """Twice convolution, BatchNorm, ReLU: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int):
        layers: list[nn.Module] = []
        for channels in (in_channels, out_channels):
            layers += [GlobeConv(channels, out_channels), nn.BatchNorm2d(out_channels), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down by 2 ** levels and up again, with a skip at each level: (B, in_channels, H, W) -> (B, out_channels, H, W).

    img_size: (H, W). width: channels on the finest grid, doubled at each level.
    Raises ValueError where 2 ** levels does not divide H and W.
    """

    def __init__(self, img_size: Sequence[int], in_channels: int, out_channels: int, width: int = 32, levels: int = 2):
        super().__init__()
        self.patch_size = 2**levels  # an image may be cut between the cells of the coarsest grid
        if any(points % self.patch_size for points in img_size):
            raise ValueError(f"img_size {list(img_size)} cannot be halved {levels} times")
        widths = [width * 2**level for level in range(levels + 1)]
        self.first = DoubleConv(in_channels, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(fine, coarse) for fine, coarse in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(n, n // 2, kernel_size=2, stride=2) for n in widths[:0:-1])
        self.join = nn.ModuleList(DoubleConv(n, n // 2) for n in widths[:0:-1])
        self.head = nn.Conv2d(width, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in_channels, H, W) -> (B, out_channels, H, W)."""
        x = self.first(x)  # (B, width, H, W)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))  # (B, 2 C, H / 2, W / 2)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))  # (B, C / 2, 2 H, 2 W)
        return self.head(x)
