"""Models that use their modules and weights otherwise than by calling each child once."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Base(nn.Module):
    """A stem, what a subclass puts between, and a head."""

    def __init__(self, in_channels, out_channels, width=6):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1)
        self.build(width)
        self.head = nn.Conv2d(width, out_channels, 1)

    def build(self, width):
        """Make the modules between."""

    def between(self, x):
        return x

    def forward(self, x):
        return self.head(self.between(self.stem(x)))


class WalkedOver(Base):
    """It walks over containers, one inside another, and never calls them."""

    def build(self, width):
        pairs = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)) for _ in range(2)]
        self.body = nn.ModuleDict({"pairs": nn.ModuleList(pairs), "last": nn.Conv2d(width, width, 1)})

    def between(self, x):
        for pair in self.body["pairs"]:
            for layer in pair:
                x = x + F.gelu(layer(x))
        return x + self.body["last"](x)


class TiedAcross(Base):
    """Encoder and decoder share a weight, of 7 rows; two layers of a unit share another one."""

    def build(self, width):
        self.down, self.up = nn.Linear(width, 7, bias=False), nn.Linear(width, 7, bias=False)
        self.up.weight = self.down.weight
        self.inside = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))
        self.inside[2].weight = self.inside[0].weight

    def between(self, x):
        h = F.gelu(self.down(x.permute(0, 2, 3, 1)))
        return self.inside(F.linear(h, self.up.weight.t()).permute(0, 3, 1, 2))


class Listed(Base):
    """Parameters in containers of torch."""

    def build(self, width):
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1, width, 1, 1)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.zeros(1, width, 1, 1))})

    def between(self, x):
        return F.gelu(x * self.scales[0]) * self.scales[1] + self.shifts["first"]


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.scale = nn.Conv2d(width, width, 1), nn.Parameter(torch.ones(width, 1, 1))

    def encode(self, x):
        return F.gelu(self.layer(x)) * self.scale


class Aside(Base):
    """It calls another method of a module, and reads the weight of one that it also calls."""

    def build(self, width):
        self.mixer, self.table = Mixer(width), nn.Conv2d(width, width, 1)

    def between(self, x):
        x = self.table(self.mixer.encode(x))
        return x + F.conv2d(x, self.table.weight)


class Scalar(Base):
    """Learned numbers without a dimension, one of them in a module that is called."""

    def build(self, width):
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.PReLU(width)
        self.norm.gain = nn.Parameter(torch.tensor(2.0))

    def between(self, x):
        return torch.tanh(self.gate) * self.norm(x) * self.norm.gain


class Strided(Base):
    """The memory of a weight is in another order."""

    def build(self, width):
        self.mix = nn.Parameter(torch.randn(3, width).t())

    def between(self, x):
        return x * (self.mix @ self.mix.t()).sum(1)[:, None, None]


class Unused(Base):
    """A branch whose result is thrown away, and a module that nobody calls."""

    def build(self, width):
        self.aside, self.never = nn.Conv2d(width, 3, 1), nn.Linear(5, 5)

    def between(self, x):
        self.seen = self.aside(x).detach()
        return x


class WritesInput(Base):
    """Layers that write to what they are given, as ResNets with activation in front do."""

    def build(self, width):
        pairs = [nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        self.layers = nn.Sequential(*pairs)

    def between(self, x):
        return self.layers(x)


class Flat(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).flatten(2).unflatten(2, x.shape[2:])


class WrittenView(Base):
    """A module returns a view, to which the model adds in place."""

    def build(self, width):
        self.flat = nn.ModuleList([Flat(width, width, 1) for _ in range(2)])

    def between(self, x):
        for layer in self.flat:
            x = layer(x)
            x += 1
            x = F.gelu(x)
        return x


class Box:
    def __init__(self, value):
        self.value = value


class Boxed(nn.Conv2d):
    def forward(self, x):
        return Box(super().forward(x))


class ReturnsObject(Base):
    """Modules return objects of a class of their own."""

    def build(self, width):
        self.boxed = nn.ModuleList([Boxed(width, width, 1) for _ in range(2)])

    def between(self, x):
        for layer in self.boxed:
            x = F.gelu(layer(x).value)
        return x


class JoinsLater(Base):
    """One layer is used from the third pass of training on."""

    def build(self, width):
        self.later, self.passes = nn.Conv2d(width, width, 1), 0

    def between(self, x):
        self.passes += self.training
        return x + self.later(x) if self.passes > 2 else x


class Turns(Base):
    """Each pass of training uses one of two layers."""

    def build(self, width):
        self.layers, self.passes = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(2)]), 0

    def between(self, x):
        self.passes += self.training
        return x + self.layers[self.passes % 2](x)


class Drops(Base):
    """It skips layers by a number that it draws."""

    def build(self, width):
        self.layers = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(4)])

    def between(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                x = x + layer(x)
        return x


class DropsByPython(Drops):
    def between(self, x):
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + layer(x)
        return x


class Recomputed(Base):
    """Each layer in a reentrant checkpoint."""

    reentrant, times = True, 1

    def build(self, width):
        pairs = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU()) for _ in range(2)]
        self.layers = nn.ModuleList(pairs)

    def between(self, x):
        for layer in self.layers:
            for _ in range(self.times):
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class RecomputedTwice(Recomputed):
    times = 2


class RecomputedNew(RecomputedTwice):
    reentrant = False


class Lazy(Base):
    """Layers that learn their shapes from the first image."""

    def build(self, width):
        self.layers = nn.Sequential(
            nn.LazyConv2d(width, 3, padding=1, bias=False), nn.LazyBatchNorm2d(), nn.LazyConv2d(width, 1)
        )

    def between(self, x):
        return self.layers(x)


class LazyAside(Lazy):
    """A lazy layer that nobody calls."""

    def build(self, width):
        super().build(width)
        self.never = nn.LazyLinear(3)


class PassesOn(Base):
    """The settings are those of the class that it inherits from."""

    def __init__(self, *args, bias=True, **kwargs):
        super().__init__(*args, width=4, **kwargs)
        self.bias = bias


class FixesOne(PassesOn):
    """It gives the class that it inherits from a setting of its own."""

    def __init__(self, **kwargs):
        super().__init__(out_channels=20, **kwargs)


class ReturnsDict(Base):
    def forward(self, x):
        return {"forecast": super().forward(x), "scale": x.mean()}


class ReturnsPairInTraining(Base):
    def forward(self, x):
        y = super().forward(x)
        return (y, [y]) if self.training else y


class ReturnsPairInEvaluation(Base):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else (y, y)


class ReturnsNothing(Base):
    def forward(self, x):
        super().forward(x)


class ReturnsClasses(Base):
    def forward(self, x):
        return super().forward(x).argmax(1, keepdim=True)


class FixedKernel(nn.Module):
    """Smooths with a kernel in a buffer."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("kernel", torch.full((width, 1, 3, 3), 1 / 9))
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return self.proj(x - F.conv2d(x, self.kernel, padding=1, groups=x.shape[1]))


class Smooths(Base):
    def build(self, width):
        self.smooth = FixedKernel(width)

    def between(self, x):
        return self.smooth(x)


class Wide(Base):
    """A weight in a type of its own."""

    def build(self, width):
        self.fine = nn.Parameter(torch.linspace(0.5, 1, width, dtype=torch.float64))

    def between(self, x):
        return x * self.fine.to(x.dtype)[:, None, None]


class CompiledWhole(Base):
    """A part that the model compiles by itself, as one graph."""

    def build(self, width):
        gate = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.GELU())
        self.gate = torch.compile(gate, fullgraph=True, backend="aot_eager")

    def between(self, x):
        return x * self.gate(x)
