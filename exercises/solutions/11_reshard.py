"""Exercise 11, rung 3: a checkpoint of four tensor-parallel ranks, for two, for one, and for another library.

Under tensor parallelism of t ranks each holds 1/t of the split weights: rows (dim 0) of those whose output features are
split, columns (dim 1) where the input features are; the others are whole on every rank. Going on with another t
means to join and to cut again. That this is all, for qkv too, comes from the order of its rows, (head, q|k|v, d), heads
outermost: a piece is some heads with their q, k and v. Other libraries have (q|k|v, head, d): cut in four pieces, the
first would be most of q and nothing else. To hand weights to them the rows have to be sorted.

Below everything is joined along rows. Mend it, and fill in the other.

Done for real in training/checkpoints/folder.py, by torch.distributed.checkpoint, with the dims that
distributed/tensor_parallel.py names. Chapter: docs/reference/model_parallel.md, "Checkpoints move between layouts".
"""

import torch
from torch import Tensor

WEIGHTS = (
    "norm.weight", "qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "fc1.weight", "fc1.bias", "fc2.weight",
    "fc2.bias",
)  # fmt: skip


def reshard(pieces: list[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """State dicts of `size` ranks from those of any other number: [{name: tensor}, ...] -> the same.

    Names are WEIGHTS: qkv and fc1 are split by output features, proj and fc2 by input features.
    """
    # TODO: which dim is a weight split along, if any?
    rows, columns = ("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias"), ("proj.weight", "fc2.weight")
    dims = dict.fromkeys(rows, 0) | dict.fromkeys(columns, 1)
    ranks: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for name in WEIGHTS:
        parts = [pieces[0][name]] * size
        if name in dims:
            whole = torch.cat([piece[name] for piece in pieces], dims[name])
            parts = list(whole.chunk(size, dims[name]))
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.clone()
    return ranks
    # END


def qkv_outermost(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order (q|k|v, head, d) from rows in the order (head, q|k|v, d): (3 D, ...) -> (3 D, ...)."""
    # TODO
    return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    # END
