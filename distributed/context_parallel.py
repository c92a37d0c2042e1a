"""Context parallelism, applied to the plain model from outside: the tokens of an image are split over a group.

Each rank holds a band of latitude, made of whole rows of patches: 45 rows over 4 ranks are 12, 11, 11 and 11 rows.
The rank reads, embeds and predicts only this band; only attention needs the other bands (distributed/attention.py). All
weights are whole on every rank, each rank computes a part of their gradient, and the loss is that of the whole image.
Two rules make the gradients right:

    data parallelism averages gradients over the flattened dp-cp group, as if bands were samples, and
    l2_norms, which adds up the bands' parts of the loss, multiplies the gradient by the number of cp ranks.

The mean over dp x cp ranks is then the gradient of a serial step. For the same reason the gradient of the *input* band
is cp times the serial one. Seed dropout differently on all ranks of the group, because each has tokens of its own.
"""

from functools import partial

import torch
from torch import Tensor

from distributed.attention import METHODS
from distributed.collectives import AnyGroup, as_group, shard_sizes, sum_over_ranks
from distributed.protocol import SplittableAttention, SplittableTransformer
from utils.errors import LayoutError


def context_parallel(model: SplittableTransformer, group: AnyGroup, method: str = "gather") -> None:
    """Make a transformer, in place, compute this rank's band: (B, C_in, h, W) -> (B, C_out, h, W).

    group: a ProcessGroup or a DeviceMesh of one dimension. method: gather, ring or all_to_all, see attention.py.
    split.own_window gives the band's h rows. The names and shapes of parameters do not change. Apply tensor parallelism
    after this.

    Raises ValueError if there are more ranks than rows of patches, for an unknown method, for dropout of the attention
    with ring, and if all_to_all cannot split the heads.
    """
    group = as_group(group)
    if method not in METHODS:
        raise LayoutError(f"context parallel: no method '{method}', there are {', '.join(METHODS)}")
    if group.size == 1:
        return
    if not hasattr(model.head, "grid"):
        raise LayoutError("context parallel: the model's head gives no image; domain parallelism splits such a model")
    rows, *others = model.head.grid  # rows and columns of patches
    if group.size > rows:
        raise LayoutError(f"context parallel: {rows} rows of patches cannot be split over {group.size} ranks")
    sizes = shard_sizes(rows, group.size)  # rows of patches of every rank
    row = torch.Size(others).numel()  # tokens of a row of patches
    tokens_of_ranks = tuple([n * row for n in sizes])
    for block in model.blocks:
        check_attention(block.attn, method, group.size, "context parallel")
        block.attn.attend = partial(METHODS[method], sizes=tokens_of_ranks, group=group)

    # The position embedding adds the positions of this rank's band, and the head makes an image of the band.
    start = sum(tokens_of_ranks[: group.rank])
    end = start + tokens_of_ranks[group.rank]
    model.pos_embed.tokens = slice(start, end)
    model.head.grid = (sizes[group.rank], *others)


def check_attention(attention: SplittableAttention, method: str, ranks: int, kind: str) -> None:
    """Raises ValueError if a method cannot split the tokens of an attention layer over this number of ranks.

    The layer may already be split over tensor-parallel ranks. kind: the kind of parallelism, for the message.
    """
    heads = attention.proj.in_features // attention.head_dim  # of this rank, under tensor parallelism
    if method == "all_to_all" and heads % ranks:
        raise LayoutError(f"{kind}: all_to_all cannot split {heads} heads over {ranks} ranks")
    if method == "ring" and attention.dropout:
        raise LayoutError(f"{kind}: ring attention cannot drop out attention weights; use gather or all_to_all")


def l2_norms(*tensors: Tensor, group: AnyGroup) -> tuple[Tensor, ...]:
    """L2 norms of tensors whose second axis is split over a context-parallel group: each (B, M_local) -> (B,).

    Forward is one all-reduce of (len(tensors), B) numbers; backward communicates nothing. The gradients are those of a
    serial loss after data parallelism has averaged them over this group too: see the top of this file.
    """
    norms = [torch.linalg.vector_norm(t, dim=1) for t in tensors]
    squares = torch.stack(norms).square()  # (tensors, B)
    total = sum_over_ranks(squares, as_group(group))
    # The square root has no NaN gradient at an error of 0 if its argument is at least the smallest normal number.
    tiny = torch.finfo(total.dtype).tiny
    return total.clamp_min(tiny).sqrt().unbind()
