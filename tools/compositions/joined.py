"""A model whose blocks join tensors by tuples, as most people write it; those of networks/ do so outside of blocks."""

import torch
from torch import Tensor, nn

WIDTH = 8


class Joined(nn.Module):
    """Convolutions and two blocks: (B, in_channels, H, W) -> (B, out_channels, H, W)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Conv2d(WIDTH, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Predict an image from an image."""
        x = self.stem(x)  # (B, WIDTH, H, W)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """A gate for each channel of two tensors side by side: (B, WIDTH, H, W) -> the same."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the gated tensors to x."""
        both = torch.cat((x, torch.relu(x)), 1)  # (B, 2 WIDTH, H, W)
        gate = torch.sigmoid(1 - both.mean((2, 3), keepdim=True))  # (B, 2 WIDTH, 1, 1)
        return x + self.mix(both * gate)
