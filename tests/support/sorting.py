"""A model with an operation that has no rule along a split dimension."""

from torch import nn


class Sorting(nn.Module):
    """Points of each column in the order of their values, added to a convolution: (B, C, H, W) -> (B, C_out, H, W)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return y + y.sort(2)[0].tanh()
