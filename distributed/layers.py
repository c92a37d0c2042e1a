"""Layers split over a tensor-parallel group. Each takes a whole layer and keeps this rank's part of its weights.

Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053): a column-parallel layer splits its output features, and the
row-parallel layer after it splits its input features, so nothing is communicated between the two. Korthikanti et al.
2022 (arXiv:2205.05198): sequence parallelism splits the tokens outside of such a pair.

Shapes in comments: B batch, N tokens, n this rank's slice of the tokens, D features.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distributed.collectives import (
    Group,
    Sizes,
    all_gather,
    copy_to_region,
    reduce_from_region,
    reduce_scatter,
    shard,
    to_compute_dtype,
)


def shard_parameter(parameter: Tensor, dim: int, group: Group) -> nn.Parameter:
    """This rank's piece of a whole parameter, with memory of its own. Works on the meta device too."""
    view = shard(parameter.detach(), dim, group.rank, group.size)
    piece = view.clone(memory_format=torch.contiguous_format)  # a view would keep the whole parameter in memory
    return nn.Parameter(piece, requires_grad=parameter.requires_grad)


class ColumnParallelLinear(nn.Linear):
    """Linear layer with its output features split over `group`: (B, N, D_in) -> (B, N, D_out / size).

    tokens: number of tokens of every rank, for sequence parallelism. The input is then this rank's slice, (B, n, D_in).
    """

    def __init__(self, linear: nn.Linear, group: Group, tokens: Sizes | None = None):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features // group.size
        self.weight = shard_parameter(linear.weight, 0, group)  # (D_out / size, D_in)
        self.bias = shard_parameter(linear.bias, 0, group)  # (D_out / size,)
        self.group = group
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D_in), or (B, n, D_in) of this rank's tokens -> (B, N, D_out / size)."""
        x = to_compute_dtype(x)
        # The layer needs all tokens. Backward is an all-reduce, or a reduce-scatter with sequence parallelism.
        if self.tokens is None:
            x = copy_to_region(x, self.group)  # (B, N, D_in)
        else:
            x = all_gather(x, dim=1, sizes=self.tokens, group=self.group)  # (B, N, D_in)
        return F.linear(x, self.weight, self.bias)  # (B, N, D_out / size)


class RowParallelLinear(nn.Linear):
    """Linear layer with its input features split over `group`: (B, N, D_in / size) -> (B, N, D_out).

    The bias is whole on every rank and is added once, to the sum. tokens: as in ColumnParallelLinear. The output is
    then (B, n, D_out), and each rank computes the gradient of the bias for its n tokens only.
    """

    def __init__(self, linear: nn.Linear, group: Group, tokens: Sizes | None = None):
        nn.Module.__init__(self)
        self.in_features = linear.in_features // group.size
        self.out_features = linear.out_features
        self.weight = shard_parameter(linear.weight, 1, group)  # (D_out, D_in / size)
        self.bias = linear.bias
        self.group = group
        self.tokens = tokens
        self.partial_gradients = ("bias",) if tokens else ()

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D_in / size) -> (B, N, D_out), or (B, n, D_out) of this rank's tokens."""
        term = F.linear(x, self.weight)  # (B, N, D_out), one term of the sum over the ranks
        # The terms are added up by an all-reduce, or by a reduce-scatter with sequence parallelism.
        if self.tokens is None:
            x = reduce_from_region(term, self.group)  # (B, N, D_out)
        else:
            x = reduce_scatter(term, 1, self.tokens, self.group)  # (B, n, D_out)
        return x + self.bias.to(x.dtype)


class RankRandom(nn.Module):
    """Call `inner` with random numbers that differ between the ranks of a group, for dropout of sharded activations.

    The default generators must have the same state on all ranks of the group, and still have it afterwards. Dropout of
    replicated activations elsewhere is therefore the same on all ranks. The seed is drawn from the CPU's default
    generator. Activation checkpointing restores this generator before it recomputes, so the numbers are the same again.
    torch.compile breaks its graph here in training, and CUDA graphs cannot capture it.
    """

    def __init__(self, inner: Callable[..., Tensor], group: Group):
        super().__init__()
        self.inner = inner
        self.group = group
        why = "dropout under tensor parallelism sets generators; sequence parallelism does not"
        self.forked = torch.compiler.disable(self._forked, reason=why)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `inner`; in training, with random numbers of this rank's own."""
        if self.training:
            return self.forked(*args, **kwargs)
        return self.inner(*args, **kwargs)

    def _forked(self, x, *args, **kwargs):
        with rank_random(x.device, self.group.rank):
            return self.inner(x, *args, **kwargs)


@contextlib.contextmanager
def rank_random(device: torch.device, stream: int) -> Iterator[None]:
    """A context in which the default generators, equal on all ranks, give the numbers of a stream: 0, 1, ..."""
    seed = int(torch.randint(2**62, ()))
    # fork_rng always saves the CPU's generator, and those of the devices that it is given.
    if device.type == "cpu":
        forked = torch.random.fork_rng([], device_type="cuda")
    else:
        forked = torch.random.fork_rng([device], device_type=device.type)
    with forked:
        torch.manual_seed(seed + stream)
        yield
