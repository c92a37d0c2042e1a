"""Models as users write them: none of them knows of this repository."""

import math
import os
import signal
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class BatchNormNet(nn.Sequential):
    """Only modules of torch: each draws its own weights."""

    def __init__(self, in_channels, out_channels, width=6):
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out_channels, 1),
        )


class DropoutNet(BatchNormNet):
    """It drops out by a probability that no option of a config switches off."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self[1] = nn.Dropout(0.2)


class Reinitialized(BatchNormNet):
    """It changes what its modules have drawn."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        nn.init.orthogonal_(self[3].weight)


class Replaced(BatchNormNet):
    """One of its parameters is another tensor than the module has made."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self[3].bias = nn.Parameter(torch.ones(out_channels))


class Scaled(nn.Module):
    """A parameter and a buffer of its own, and no reset_parameters."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, out_channels))
        self.register_buffer("offset", torch.linspace(-1, 1, out_channels), persistent=False)

    def forward(self, x):
        return self.conv(x) * self.scale[:, None, None] + self.offset[:, None, None]


class ReadsNumbers(BatchNormNet):
    """It cannot be built on the meta device."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class HoldsATensor(BatchNormNet):
    """A tensor that no state_dict names."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.factor = torch.full((out_channels, 1, 1), 2.0)

    def forward(self, x):
        return super().forward(x) * self.factor


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, in_channels, 1)
        self.second = nn.Conv2d(in_channels, in_channels, 1)
        self.second.weight = self.first.weight
        self.last = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        return self.last(self.second(F.gelu(self.first(x))))


class TiedMatrices(nn.Module):
    """Two layers with one matrix, on the channels of each point."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.Linear(in_channels, in_channels)
        self.second = nn.Linear(in_channels, in_channels)
        self.second.weight = self.first.weight
        self.last = nn.Linear(in_channels, out_channels)

    def forward(self, x):
        x = self.second(F.gelu(self.first(x.movedim(1, -1))))
        return self.last(x).movedim(-1, 1)


class Spectral(nn.Module):
    """Weights of waves are complex numbers."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        numbers = torch.get_default_dtype().to_complex()
        self.waves = nn.Parameter(torch.randn(in_channels, out_channels, 3, 4, dtype=numbers) / in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        waves = torch.fft.rfft2(x)[..., :3, :4]
        mixed = torch.einsum("bihw,iohw->bohw", waves, self.waves)
        return self.conv(x) + torch.fft.irfft2(mixed, s=x.shape[-2:])


class GroupNormNet(nn.Sequential):
    """A halo, and statistics of the whole image."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, out_channels, 1)
        )


class Coarse(nn.Sequential):
    """Its coarse grid fits no cut of the image, and it does not say between which points one may cut."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, 6, 4, stride=4), nn.GELU(), nn.ConvTranspose2d(6, out_channels, 4, stride=4)
        )


class Whole(BatchNormNet):
    """Its output is whole on every rank: a product with all rows."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.mix = nn.Parameter(torch.eye(20) + 0.1)

    def forward(self, x):
        return torch.einsum("bchw,hk->bckw", super().forward(x), self.mix)


class Single(GroupNormNet):
    """It computes in float32, whatever it is given."""

    def forward(self, x):
        return super().forward(x.float())


class HalfSingle(nn.Module):
    """A part of it has weights in bfloat16 and computes in it, again in the backward pass; float32 normalises it."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = GroupNormNet(in_channels, out_channels)
        self.mix = nn.Conv2d(out_channels, out_channels, 1, dtype=torch.bfloat16)

    def mixed(self, x):
        return self.mix(x.to(torch.bfloat16)).to(dtype=torch.float32)

    def forward(self, x):
        x = self.net(x)
        mixed = checkpoint(self.mixed, x, use_reentrant=False)
        return x + mixed * torch.rsqrt(mixed.type(torch.float32).square().mean(1, keepdim=True) + 1)


class RoundedMean(nn.Module):
    """Takes a mean off, which it rounds to float32 by a name that no comparison can widen."""

    def forward(self, x):
        rounded = x.type("torch.FloatTensor")
        return x - rounded.exp().mean((2, 3), keepdim=True).to(x.dtype)


class Rounded(nn.Sequential):
    def __init__(self, in_channels, out_channels):
        super().__init__(RoundedMean(), nn.Conv2d(in_channels, out_channels, 1))


class Halves(BatchNormNet):
    """Its output fits no forecast."""

    def forward(self, x):
        return super().forward(x)[..., ::2]


class Fails(BatchNormNet):
    def forward(self, x):
        raise KeyError("no such channel")


def not_a_model(in_channels):
    return in_channels


class OwnAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim, self.dropout, self.attend = width // heads, 0.0, F.scaled_dot_product_attention
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)
        return self.proj(self.attend(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2))


class OwnMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Identity()
        self.drop.p = 0.0

    def forward(self, x):
        return self.fc2(self.drop(F.silu(self.fc1(x))))


class OwnBlock(nn.Module):
    """Without residual scaling or dropout, and with RMS norms."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width, eps=1e-6), OwnAttention(width, heads)
        self.norm2, self.mlp = nn.RMSNorm(width, eps=1e-6), OwnMLP(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).flatten(2).transpose(1, 2)


class Positions(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.table, self.tokens = nn.Parameter(torch.zeros(count, width)), slice(0, count)

    def forward(self, x):
        return x + self.table[self.tokens]


class Pixels(nn.Module):
    def __init__(self, grid, patch, channels, width):
        super().__init__()
        self.grid, self.patch, self.channels = grid, patch, channels
        self.proj = nn.Linear(width, channels * patch * patch)

    def forward(self, x):
        x = self.proj(x).unflatten(2, (self.channels, self.patch, self.patch)).unflatten(1, self.grid)
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class OwnTransformer(nn.Module):
    """It has the names of distributed/protocol.py, and nothing else in common with networks/vit.py."""

    def __init__(self, img_size, in_channels, out_channels, width=16, heads=4, patch=4):
        super().__init__()
        self.stride, grid = patch, tuple(n // patch for n in img_size)
        self.patch_embed = Patches(in_channels, width, patch, patch)
        self.pos_embed, self.pos_drop = Positions(grid[0] * grid[1], width), nn.Identity()
        self.blocks = nn.ModuleList(OwnBlock(width, heads) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), Pixels(grid, patch, out_channels, width)

    def forward(self, x):
        x = self.pos_drop(self.pos_embed(self.patch_embed(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Spherical(nn.Module):
    """A block of SFNO (Bonev et al. 2023): a transform over both axes, weights of each degree, and back.

    Cosines stand for the Legendre polynomials. scale: of the rows, so few degrees and orders are kept.
    """

    def __init__(self, in_channels, out_channels, img_size, width=16, scale=1):
        super().__init__()
        rows, self.columns = img_size
        self.orders = degrees = rows // scale
        places = math.pi * (torch.arange(rows) + 0.5) / rows
        degree = torch.arange(self.orders)[:, None, None] + torch.arange(degrees)[:, None]
        self.register_buffer("forth", torch.cos(degree * places) / rows)  # (m, l, rows)
        self.register_buffer("back", torch.cos(degree * places))
        self.inside, self.outside = nn.Conv2d(in_channels, width, 1), nn.Conv2d(width, out_channels, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(width, width, degrees, 2) / width)

    def forward(self, x):
        x = F.gelu(self.inside(x))
        waves = torch.fft.rfft(x)[..., : self.orders]  # (B, C, rows, m)
        harmonics = self.transformed("bckm,mlk->bclm", waves, self.forth)
        harmonics = torch.einsum("bclm,cdl->bdlm", harmonics, torch.view_as_complex(self.weight))
        waves = self.transformed("bclm,mlk->bckm", harmonics, self.back)
        return self.outside(x + torch.fft.irfft(waves, n=self.columns))

    def transformed(self, equation, x, basis):
        return torch.complex(*(torch.einsum(equation, part.contiguous(), basis) for part in (x.real, x.imag)))


class Graph(nn.Module):
    """Messages along edges between the points of an image and their neighbours, added up where they end."""

    def __init__(self, in_channels, out_channels, img_size, width=6):
        super().__init__()
        self.inside = nn.Conv2d(in_channels, width, 1)
        self.message = nn.Linear(2 * width, width)
        self.outside = nn.Conv2d(width, out_channels, 1)
        nodes = torch.arange(img_size[0] * img_size[1]).view(*img_size)
        pairs = [(nodes.roll(shift, 1), nodes) for shift in (1, -1)]
        pairs += [(nodes[1:], nodes[:-1]), (nodes[:-1], nodes[1:])]
        edges = torch.cat([torch.stack(pair).flatten(1) for pair in pairs], 1)
        self.register_buffer("edges", edges)  # (2, E): source and target

    def forward(self, x):
        x = self.inside(x)
        source, target = self.edges
        nodes = x.flatten(2).transpose(1, 2)  # (B, N, C)
        ends = torch.cat([nodes[:, source], nodes[:, target]], -1)  # (B, E, 2 C)
        summed = nodes.index_add(1, target, F.gelu(self.message(ends)))
        return self.outside(summed.transpose(1, 2).view(x.shape))


class BiasBeforeNorm(nn.Sequential):
    """The gradient of its first bias is zero but for rounding: BatchNorm takes the mean away."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, out_channels, 1)
        )


class Narrow(nn.Module):
    """Its author names narrow types, of weights and of buffers that are no numbers."""

    def __init__(self, in_channels, out_channels, img_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1)
        self.mix = nn.Parameter(torch.randn(out_channels, out_channels, dtype=torch.cfloat))
        self.shift = nn.Parameter(torch.randn(out_channels, 1, 1, dtype=torch.float32))
        self.register_buffer("land", torch.rand(img_size) < 0.3)
        self.register_buffer("level", torch.arange(out_channels))
        self.register_buffer("never", torch.full((2,), -torch.inf))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.conv(x).masked_fill(self.land, 0.0) + self.shift
        self.calls += self.training
        waves = torch.fft.rfft2(x, norm="ortho")
        mixed = torch.einsum("bchw,cd->bdhw", waves, self.mix.to(waves.dtype))
        return x[:, self.level] + torch.fft.irfft2(mixed, s=x.shape[-2:], norm="ortho")


class RunningPeak(BatchNormNet):
    """A buffer that follows its samples, and by which it divides."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self[1] = nn.Identity()
        self.register_buffer("peak", torch.ones(6, 1, 1))

    def forward(self, x):
        x = self[0](x)
        if self.training:
            self.peak.mul_(0.9).add_(0.1 * x.detach().abs().amax((0, 2, 3))[:, None, None])
        return self[3](self[2](x / self.peak))


class Unsaved(BatchNormNet):
    """Its state holds what no checkpoint can hold."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self[1] = nn.Identity()

    def get_extra_state(self):
        return {"versions": {3}}

    def set_extra_state(self, state):
        assert state["versions"] == {3}


class Unused(nn.Module):
    """One of its layers is never called."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.spare = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Linear(4, 4)
        self.last = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


class Taught(nn.Module):
    """Weights that its author has frozen: a teacher, whose outputs need no gradients."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.student = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.teacher = nn.Conv2d(in_channels, out_channels, 1).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            lesson = self.teacher(x)
        return self.student(x) + lesson.tanh()


class Deaf(nn.Conv2d):
    """It takes noise and does nothing with it."""

    def __init__(self, in_channels, out_channels, noise_features):
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x, noise):
        return super().forward(x)


class Overwriting(nn.Conv2d):
    """It writes to its input."""

    def __init__(self, in_channels, out_channels, by=1.0):
        super().__init__(in_channels, out_channels, 1)
        self.by = by

    def forward(self, x):
        return super().forward(x.mul_(self.by))


class AlwaysDrops(nn.Conv2d):
    """Draws random numbers in validation too."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, training=True)


class Signalled(nn.Conv2d):
    """In its `signal_at`-th forward pass of a process, of validation, it sends a signal: "RANK BATCH NUMBER".

    Without that variable it is a convolution. What is due has a second to be written before SIGKILL.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, 1)
        self.passes = 0
        rank, batch, number = map(int, os.environ.get("SIGNAL_AT", "-1 0 0").split())
        self.number, self.batch = number, batch if rank == int(os.environ.get("RANK", 0)) else 0

    def forward(self, x):
        self.passes += not self.training
        if not self.training and self.passes == self.batch:
            time.sleep(self.number == signal.SIGKILL)
            os.kill(os.getpid(), self.number)
        return super().forward(x)
