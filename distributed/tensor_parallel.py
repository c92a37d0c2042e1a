"""Tensor parallelism, applied to the plain model from outside: heads and hidden features are split over a group.

Each block needs 2 all-reduces forward and 2 backward (Shoeybi et al. 2019, arXiv:1909.08053). With sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198) norms, dropout and residuals work on a slice of the tokens. Each block then
needs 2 all-gathers and 2 reduce-scatters in each direction. They send the same number of bytes, and the activations
between the pairs take 1/size of the memory.

| | split over the group | whole on every rank |
|---|---|---|
| weights | qkv, fc1 (rows), proj, fc2 (columns), biases of qkv, fc1 | norms, biases of proj, fc2, patch embedding, position embedding, head |
| activations | heads, hidden features; tokens between pairs, with sequence parallelism | the residual stream, without |

Weights that are whole on every rank stay identical, because every rank computes the same gradient for them. Sequence
parallelism is the exception: norms and biases that see a slice of the tokens hold a part of their gradient.
reduce_partial_gradients adds up all these parts in one all-reduce, once per optimizer step.
"""  # noqa: E501

from functools import partial

import torch
from torch import nn

from distributed.collectives import (
    AnyGroup,
    as_group,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    shard_sizes,
    to_compute_dtype,
)
from distributed.layers import ColumnParallelLinear, RankRandom, RowParallelLinear
from distributed.protocol import SplittableAttention, SplittableMLP, check_transformer
from utils.errors import LayoutError
from utils.torch_private import is_dtensor


def tensor_parallel(
    model: nn.Module,
    group: AnyGroup,
    sequence_parallel: bool = False,
) -> dict[str, int]:
    """Split a transformer, in place, over `group`: a ProcessGroup or a DeviceMesh of one dimension.

    model: a SplittableTransformer (distributed/protocol.py).

    Returns {parameter name: dim} of the split parameters, cut by collectives.shard; the others are whole. The model may
    hold its weights, of which this rank keeps its part, or be on the meta device. Context parallelism must be applied
    before this; checkpointing, compilation and data parallelism after it.

    Dropout: seed the default generators alike on all ranks of the group; with sequence parallelism, differently.

    Raises ValueError if heads or hidden features are not a multiple of the group's size, or if there are fewer tokens
    than ranks.
    """
    group = as_group(group)
    if group.size == 1:
        return {}
    # Context parallelism may have left this rank a band of the image: its tokens are the ones to split.
    band = check_transformer(model, "tensor parallelism").pos_embed.tokens
    tokens = None
    if sequence_parallel:
        count = band.stop - band.start
        tokens = shard_sizes(count, group.size)
    _check(model, group.size, tokens)
    dims: dict[str, int] = {}
    made: dict[tuple[type, int], nn.Module] = {}  # a layer that several blocks share stays one
    for name, module in list(model.named_modules()):
        if isinstance(module, SplittableAttention):
            dims |= _split_pair(module, name, "qkv", "proj", group, tokens, made)
        elif isinstance(module, SplittableMLP):
            dims |= _split_pair(module, name, "fc1", "fc2", group, tokens, made)
    if tokens:
        _split_tokens(model, group, tokens)
    else:
        _draw_dropout_apart(model, group)
    return dims


def _check(model, size, tokens):
    """Raise LayoutError where heads, hidden features or tokens cannot be split over so many ranks."""
    for block in model.blocks:
        heads = block.attn.proj.in_features // block.attn.head_dim
        hidden = block.mlp.fc1.out_features
        for count, what in ((heads, "heads"), (hidden, "hidden features")):
            if count % size:
                raise LayoutError(f"tensor parallel: {count} {what} cannot be split over {size} ranks")
    has_empty_slice = tokens and not min(tokens)
    if has_empty_slice:
        raise LayoutError(f"sequence parallel: {sum(tokens)} tokens cannot be split over {size} ranks")


def _split_pair(module, name, first, second, group, tokens, made):
    """Split two layers of a module; returns {parameter name: dim}. made: {(kind, id of a layer): the split one}."""
    for attribute, Parallel in ((first, ColumnParallelLinear), (second, RowParallelLinear)):
        layer = getattr(module, attribute)
        key = Parallel, id(layer)
        if key not in made:
            made[key] = Parallel(layer, group, tokens)
        setattr(module, attribute, made[key])
    # Linear weights are (D_out, D_in): the first layer splits its outputs, the second one its inputs.
    return {
        f"{name}.{first}.weight": 0,
        f"{name}.{first}.bias": 0,
        f"{name}.{second}.weight": 1,
    }


def _draw_dropout_apart(model, group):
    """Drop different elements on each rank where heads and hidden features are split."""
    for module in list(model.modules()):
        if isinstance(module, SplittableAttention) and module.dropout:
            module.attend = RankRandom(module.attend, group)
        elif isinstance(module, SplittableMLP) and module.drop.p:
            module.drop = RankRandom(module.drop, group)


def _split_tokens(model, group, tokens):
    """Split the tokens from the first dropout to the last norm."""
    model.pos_drop.register_forward_pre_hook(partial(_scatter_tokens, tokens=tokens, group=group))
    model.norm.register_forward_hook(partial(_gather_tokens, tokens=tokens, group=group))
    # These norms see a slice of the tokens, so each rank computes a part of the gradient of their weights.
    norms = [model.norm]
    for block in model.blocks:
        norms += [block.norm1, block.norm2]
    for norm in norms:
        norm.partial_gradients = ("weight", "bias")


def _scatter_tokens(module, inputs, tokens, group):
    own = scatter_to_region(inputs[0], 1, tokens, group)  # (B, N, D) -> (B, n, D)
    return own.clone()  # a view would keep all tokens


def _gather_tokens(module, inputs, output, tokens, group):
    own = to_compute_dtype(output)  # (B, n, D)
    return gather_from_region(own, 1, tokens, group)  # (B, N, D)


@torch.no_grad()
def reduce_partial_gradients(model: nn.Module, group: AnyGroup) -> None:
    """Add up all gradients of which each rank holds a part, in one all-reduce over the tensor-parallel group.

    Call this after the last backward pass of a step, before gradients are clipped. It does nothing without sequence
    parallelism. The model may be wrapped by DDP or fully_shard: the sum over this group and their mean commute.
    """
    group = as_group(group)
    grads = []
    for module in model.modules():
        for name in getattr(module, "partial_gradients", ()):
            grad = getattr(module, name).grad
            if grad is not None:
                part = grad.to_local() if is_dtensor(grad) else grad
                grads.append(part)
    if not grads or group.size == 1:
        return

    # One message for all gradients: many small ones would each cost the latency of an all-reduce.
    flat = torch.cat([grad.flatten() for grad in grads])
    summed = reduce_from_region(flat, group)
    parts = summed.split([grad.numel() for grad in grads])
    in_shape = []
    for part, grad in zip(parts, grads, strict=True):
        in_shape.append(part.view_as(grad))
    torch._foreach_copy_(grads, in_shape)
