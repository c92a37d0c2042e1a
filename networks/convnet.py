"""A small convolutional network from image to image on the globe.

One level of a U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with group norms (Wu and He 2018, arXiv:1803.08494).
Longitude, the last axis, is periodic; beyond the poles there are zeros.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GlobeConv(nn.Module):
    """Convolution with an odd kernel, periodic in longitude: (B, C, H, W) -> (B, C', H / stride, W / stride)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, bias: bool = True):
        super().__init__()
        self.wrap = kernel_size // 2
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=(self.wrap, 0), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W) -> (B, C', H / stride, W / stride), rounded up."""
        return self.conv(F.pad(x, (self.wrap, self.wrap, 0, 0), mode="circular"))


class ConvBlock(nn.Module):
    """Convolution, GroupNorm, GELU: (B, C, H, W) -> (B, C', H / stride, W / stride)."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, stride: int = 1):
        super().__init__()
        self.conv = GlobeConv(in_channels, out_channels, stride=stride)
        self.norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W) -> (B, C', H / stride, W / stride), rounded up."""
        return F.gelu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Down to half of the points and up again, with a skip: (B, in_channels, H, W) -> (B, out_channels, H, W).

    width: channels on the fine grid, twice as many on the coarse one. groups: of the norms, a divisor of width.
    H and W are even.
    """

    def __init__(self, in_channels: int, out_channels: int, width: int = 32, groups: int = 4):
        super().__init__()
        self.patch_size = 2  # an image may be cut between the cells of the coarse grid
        self.fine = ConvBlock(in_channels, width, groups)
        self.down = ConvBlock(width, 2 * width, groups, stride=2)
        self.coarse = ConvBlock(2 * width, 2 * width, groups)
        self.up = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.join = ConvBlock(2 * width, width, groups)
        self.head = nn.Conv2d(width, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in_channels, H, W) -> (B, out_channels, H, W)."""
        fine = self.fine(x)  # (B, width, H, W)
        coarse = self.coarse(self.down(fine))  # (B, 2 width, H/2, W/2)
        return self.head(self.join(torch.cat([self.up(coarse), fine], 1)))
