"""Models that keep more than weights, or that draw on the host: none of them knows of this repository."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.own_models import OwnTransformer


class Everything(nn.Module):
    """A shared weight, a module with two names, buffers of all kinds, an extra state, and draws on the host.

    keeps: it moves buffers in forward, in place and by new tensors. draws: it scales by random numbers.
    """

    def __init__(self, in_channels, out_channels, img_size, keeps=True, draws=True, width=4):
        super().__init__()
        self.keeps, self.draws, self.calls = keeps, draws, 0
        self.stem = nn.Conv2d(in_channels, width, 1)
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.second.weight = self.first.weight
        self.again = self.first
        for name in ("written", "assigned"):
            self.register_buffer(name, torch.zeros(1, width, *img_size))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.head = nn.Conv2d(width, out_channels, 1)

    def forward(self, x):
        h = self.stem(x)
        h = h + F.gelu(self.first(h))
        h = h + F.gelu(self.second(h)) + self.again(h)
        if self.training and self.draws:
            h = h * (0.5 + random.random()) * (0.5 + np.random.rand())
        if self.training and self.keeps:
            self.keep(h.detach().mean(0, keepdim=True))
        return self.head(h - self.written - 0.5 * self.assigned)

    @torch.no_grad()
    def keep(self, mean):
        self.calls += 1
        self.count += 1
        self.waves *= 1j
        self.written.lerp_(mean, 0.1)
        self.assigned = 0.9 * self.assigned + 0.1 * mean

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class LayerDrop(nn.Module):
    """Skips layers, by Python's own random numbers or by those of torch."""

    def __init__(self, in_channels, out_channels, width=8, depth=4, by="random"):
        super().__init__()
        self.by = by
        self.stem = nn.Conv2d(in_channels, width, 1)
        self.blocks = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)])
        self.head = nn.Conv2d(width, out_channels, 1)

    def draw(self):
        return {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[self.by]()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and self.draw() < 0.5:
                continue
            x = x + F.gelu(block(x))
        return self.head(x)


class Drawn(nn.Sequential):
    """Its weights are drawn by numpy and Python, as older code does."""

    def __init__(self, in_channels, out_channels):
        super().__init__(nn.Conv2d(in_channels, out_channels, 1))
        drawn = np.random.randn(*self[0].weight.shape) * random.random()
        self[0].weight.data = torch.as_tensor(drawn, dtype=torch.float32)


class WithState(nn.Conv2d):
    """A convolution of single points with one more thing in its state."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, 1)


class Sparse(WithState):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.register_buffer("graph", torch.eye(3).to_sparse())


class Wide(WithState):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex128))


class Unspeakable(WithState):
    def get_extra_state(self):
        return {"when": object()}

    def set_extra_state(self, state):
        pass


class Growing(WithState):
    """Its buffer becomes longer in forward."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.register_buffer("history", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.history = torch.cat([self.history, x.detach().mean().view(1)])
        return super().forward(x)


class NormBlocks(nn.Module):
    """Blocks with running statistics."""

    def __init__(self, in_channels, out_channels, width=6):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in range(2))
        self.head = nn.Conv2d(width, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


class SharedBlocks(OwnTransformer):
    """Its blocks share their projections of heads and of hidden features."""

    def __init__(self, img_size, in_channels, out_channels):
        super().__init__(img_size, in_channels, out_channels)
        first, second = self.blocks
        second.attn.qkv, second.attn.proj.weight = first.attn.qkv, first.attn.proj.weight
        second.mlp.fc1.weight = first.mlp.fc1.weight


class SharedOtherwise(OwnTransformer):
    """A weight that tensor parallelism splits in one module and not in the other."""

    def __init__(self, img_size, in_channels, out_channels):
        super().__init__(img_size, in_channels, out_channels)
        self.pos_drop = nn.Linear(16, 16)
        self.pos_drop.p = 0.0
        self.pos_drop.weight = self.blocks[0].attn.proj.weight
