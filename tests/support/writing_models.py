"""A model that writes into its own fields in place, as those on a sphere do at the poles and over land."""

import torch
from torch import nn


class WritesInPlace(nn.Module):
    """It damps the first and the last row, and sets the points of a mask to a learned number."""

    def __init__(self, in_channels, out_channels, img_size, width=4):
        super().__init__()
        self.lift = nn.Conv2d(in_channels, width, 1)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.project = nn.Conv2d(width, out_channels, 1)
        self.damping = nn.Parameter(torch.tensor(0.5))
        points = torch.arange(img_size[0] * img_size[1]).view(*img_size)
        self.register_buffer("land", points % 5 == 0)

    def forward(self, x):
        h = self.lift(x) * 1  # a result that may be written to
        h[:, :, 0] *= self.damping
        h[:, :, -1] *= self.damping
        h[:, :, self.land] = 0
        return self.project(self.mix(h))
