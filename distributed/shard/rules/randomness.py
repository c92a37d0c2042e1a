"""Random numbers: each part of a split tensor has a stream of its own, and copies have the same numbers.

The default generators must be alike on all ranks that share an image; they are alike afterwards too. What a model draws
into plain tensors is therefore the same on all of them. Compiled code cannot change generators: there every part draws
from the default one, so that parts of one size have the same numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.layers import rank_random
from distributed.shard.operands import reduced, written
from distributed.shard.spec import Spec
from distributed.shard.tensor import ShardTensor, named, no_rule, rule, wrap

DROPOUT = set(named("dropout", "dropout_", "alpha_dropout"))
DRAWING = named("rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_")
IN_PLACE = set(named("dropout_", "bernoulli_", "normal_", "uniform_"))


def own_stream(spec: Spec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context in which the default generators draw this rank's part of a tensor."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    part = 0
    for placement, group in zip(spec.placements, spec.mesh.groups, strict=True):
        part = part * group.size + (group.rank if placement.is_shard() else 0)
    return rank_random(device, part)


@rule(*DROPOUT, *DRAWING)
def drawn(func: Callable, x: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """Draw this rank's part, with parameters that are numbers."""
    if func in DROPOUT and not _drops(*args, **kwargs):
        out = func(x, *args, **kwargs)
        return wrap(out, x.spec) if out is not x else x
    if "out" in kwargs or kwargs.get("generator") is not None or any(isinstance(a, Tensor) for a in args):
        raise no_rule(func, (x, *args), kwargs, "with out=, a generator, or a tensor of parameters")
    if x.spec.partial and (func in IN_PLACE or kwargs.get("inplace") or args[2:] == (True,)):
        raise no_rule(func, (x, *args), kwargs, "in place on a partial tensor")
    x = reduced(x)
    with own_stream(x.spec, x.device):
        out = func(x, *args, **kwargs)
    return written(x) if out is x else wrap(out, x.spec)


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> bool:
    return p > 0 and training and train
