"""Pieces of any number of ranks must be those of the whole, and another library must compute the same with them."""

from types import ModuleType

import torch
from torch import Tensor, nn

from exercises.checks.common import Draw, expect, expect_same, expect_tensor, same
from networks.vit import Attention

WORLD_SIZES = (1,)
DIMS = {
    "norm.weight": None,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "proj.weight": 1,
    "proj.bias": None,
    "fc1.weight": 0,
    "fc1.bias": 0,
    "fc2.weight": 1,
    "fc2.bias": None,
}


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `reshard` between several numbers of ranks, and `qkv_outermost`. Raises Wrong."""
    for before, after in ((4, 2), (4, 1), (2, 4), (draw.integer(1, 2), 3)):
        # Sizes are multiples of twelve, so that three and four ranks can share them.
        width = 12 * draw.integer(1, 3)
        hidden = 12 * draw.integer(1, 4)
        shapes = {
            "norm.weight": (width,),
            "qkv.weight": (3 * width, width),
            "qkv.bias": (3 * width,),
            "proj.weight": (width, width),
            "proj.bias": (width,),
            "fc1.weight": (hidden, width),
            "fc1.bias": (hidden,),
            "fc2.weight": (width, hidden),
            "fc2.bias": (width,),
        }
        whole = {name: draw.tensor(*shape) for name, shape in shapes.items()}
        found = exercise.reshard(cut(whole, before), after)
        expect(
            isinstance(found, list) and len(found) == after,
            f"{before} to {after} ranks: a list of {after} dicts is wanted",
        )
        where = f"{before} to {after} ranks"
        for number, (got, want) in enumerate(zip(found, cut(whole, after), strict=True)):
            for name, tensor in want.items():
                compare(got, name, tensor, whole[name], number, where, before)
    compare_order(exercise, draw)


def cut(whole: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """The pieces that so many ranks have of the weights."""
    pieces: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for name, tensor in whole.items():
        dim = DIMS[name]
        parts = [tensor] * size if dim is None else tensor.chunk(size, dim)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part.clone()
    return pieces


def compare(got: dict[str, Tensor], name: str, want: Tensor, whole: Tensor, rank: int, where: str, before: int) -> None:
    """got: a rank's weights, of which `name` is to be `want`. where: the case in words, for the message."""
    expect(name in got, f"{where}: rank {rank} has no {name}")
    tensor = got[name]
    hint = ""
    if tensor.shape != want.shape:
        kind = {0: "split along dim 0", 1: "split along dim 1", None: "whole on every rank"}[DIMS[name]]
        hint = f"it is {tuple(tensor.shape)}, should be {tuple(want.shape)}: it is {kind}, and so it was in the pieces"
    elif not same(tensor, want):
        hint = "right shape, wrong numbers: are pieces joined and cut in the order of ranks?"
        if DIMS[name] is None:
            hint = "whole on every rank: take one of them, the copies are equal"
        elif name.startswith("qkv"):
            hint = "right shape, wrong rows: heads are outermost, so pieces are joined as they are"
    expect(not hint, f"{where}: {name} of rank {rank}: {hint}")


def compare_order(exercise: ModuleType, draw: Draw) -> None:
    """nn.MultiheadAttention must compute the same with the sorted weights."""
    heads = draw.integer(4, 6)
    d = draw.integer(2, 5)
    attention = Attention(heads * d, heads, 0.0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    weight = attention.qkv.weight.detach()
    bias = attention.qkv.bias.detach()
    sorted_weight = expect_tensor(exercise.qkv_outermost(weight, heads), weight.shape, "qkv_outermost(weight)")
    sorted_bias = expect_tensor(exercise.qkv_outermost(bias, heads), bias.shape, "qkv_outermost(bias)")

    rows = weight.view(heads, 3, d, -1)  # (heads, q|k|v, d, D)
    want = rows.transpose(0, 1).reshape(weight.shape)
    way_back = weight.view(3, heads, d, -1).transpose(0, 1).reshape(weight.shape)
    heads_inside = rows.permute(1, 2, 0, 3).reshape(weight.shape)
    hints = {
        "the order has not changed": weight,
        "this is the way back, from (q|k|v, head, d)": way_back,
        "heads vary faster than d": heads_inside,
    }
    expect_same(sorted_weight, want, "qkv_outermost", "rows of q come first, head by head, then those of k", hints)

    other = nn.MultiheadAttention(heads * d, heads, batch_first=True)
    state = {"in_proj_weight": sorted_weight, "in_proj_bias": sorted_bias}
    for name, tensor in attention.proj.state_dict().items():
        state[f"out_proj.{name}"] = tensor
    other.load_state_dict(state)
    x = draw.tensor(2, 5, heads * d)
    with torch.no_grad():
        out, _ = other(x, x, x, need_weights=False)
        expect(
            same(out, attention(x), 1e-3),
            "torch.nn.MultiheadAttention computes something else with these weights: is the bias sorted too?",
        )
