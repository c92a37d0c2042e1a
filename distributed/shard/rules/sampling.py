"""Samples of an image at any places: each rank fetches the rows that its places reach, if these are near its own."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.halo import Fetch, Interval, bounds
from distributed.shard.operands import copied, reduced, to_spec, used_apart
from distributed.shard.rules.along import made_whole
from distributed.shard.rules.windows import no_outputs
from distributed.shard.spec import Spec, over, whole
from distributed.shard.tensor import ShardTensor, rule, wrap


@rule(F.grid_sample)
def grid_sample(
    func: Callable, input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> ShardTensor:  # fmt: skip
    """Samples of images (B, C, ...) at places (B, ..., 2 or 3), which are split as the places are.

    A split dimension of the image is exchanged as a halo where the places of all ranks reach so little beyond the rows
    of their ranks that this sends at most half of what a gather would; otherwise it is gathered. The values of `grid`
    decide the size of that message. The ranks therefore tell each other the first and last row that they need, two
    numbers a dimension in one all-gather, and the host has to read them. It reads nothing, and the image is gathered,
    while compiling or planning, for bicubic samples and 16-bit places, and where the dimension and the places are not
    split over the same ranks.
    """
    like = next(y for y in (input, grid) if isinstance(y, ShardTensor)).spec
    x, places = reduced(copied(input, like)), copied(grid, like)
    places = made_whole(places, (len(places.spec.dims) - 1,))
    if not over(x.spec.dims[0]) & over([axis for axes in places.spec.dims for axis in axes]):
        places = to_spec(places, places.spec.with_axes(0, x.spec.dims[0]))
    samples, *rows, _ = places.spec.dims
    used = over([*samples, *[axis for axes in rows for axis in axes]])
    channels = whole(x.spec.shape[1]) if over(x.spec.dims[1]) & used else x.spec.dims[1]
    out = x.spec.with_dims([samples, channels, *rows])
    own, shape, needed = used_apart(places, out), x.spec.shape[2:], {}
    near = [d for d in range(2, len(x.spec.dims)) if len(x.spec.dims[d]) == 1 and x.spec.is_split(d)]
    near = [d for d in near if over(x.spec.dims[d]) <= used - over(samples)]
    if near and mode != "bicubic" and min(shape) > 1 and own.element_size() > 2 and not (
        torch.compiler.is_compiling() or isinstance(own, FakeTensor)
    ):  # fmt: skip
        at = [rows_at(own[..., -1 - i], n, padding_mode, align_corners) for i, n in enumerate(shape)]
        at = [a.round() for a in at] if mode == "nearest" else at
        needed = agreed(x.spec, {d: at[d - 2].detach() for d in near})
    images = [x.spec.dims[d] if d in needed else whole(n) for d, n in enumerate(shape, 2)]
    part = used_apart(to_spec(x, x.spec.with_dims([samples, channels, *images])), out)
    for d, intervals in needed.items():
        sizes, group = x.spec.shares(d)
        part = Fetch(part, d, sizes, intervals, group).rows()
        at[d - 2] = at[d - 2] - intervals[group.rank][0]
    if not out.local_shape.numel():
        return wrap(no_outputs(part, out.local_shape, own), out)
    if needed:
        own = torch.stack([as_grid(a, n) for a, n in zip(at, part.shape[2:], strict=True)][::-1], -1)
        padding_mode, align_corners = "zeros", True
    return wrap(func(part, own, mode, padding_mode, align_corners), out)


def rows_at(grid: Tensor, rows: int, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Places -1 to 1 as places among so many rows, where they read after padding; as the plain operation does it."""
    at = (grid + 1) * (rows - 1) / 2 if align_corners else ((grid + 1) * rows - 1) / 2
    if padding_mode == "zeros":
        return at.clamp(-2, rows + 1)  # outside of it there is nothing but zeros
    if padding_mode == "reflection":
        low, span = (0, rows - 1) if align_corners else (-0.5, rows)
        apart = (at - low).abs()
        rest = apart.fmod(span)
        at = torch.where((apart / span).floor() % 2 == 0, rest, span - rest) + low
    inside = (at > 0) & (at < rows - 1)
    return torch.where(inside, at, at.detach().clamp(0, rows - 1))


def as_grid(at: Tensor, rows: int) -> Tensor:
    """Places among so many rows as places -1 to 1, of which F.grid_sample with align_corners makes the same again.

    The same to rounding, and between the same two rows: the gradient of a place is the difference of these.
    """
    half = (rows - 1) / 2
    grid = at / half - 1
    with torch.no_grad():
        exact = grid.clone()
        for _ in range(3):
            exact += (at.floor() - ((exact + 1) * half).floor()) * torch.finfo(at.dtype).eps
    return grid + (exact - grid.detach())


def agreed(spec: Spec, places: dict[int, Tensor]) -> dict[int, list[Interval]]:
    """The rows of an image with this spec that each rank of a dimension needs, for the dimensions where a halo is less.

    places: {dimension: this rank's places among its rows}. All ranks call this together; the result is the same on all.
    """
    ends = []
    for d, at in places.items():
        n = spec.shape[d]
        low, high = torch.aminmax(at.floor().nan_to_num()) if at.numel() else (at.new_full((), n), at.new_zeros(()) - 2)
        ends += [low.clamp(0, n), (high + 2).clamp(0, n)]
    group, found = spec.mesh.joint, {}
    every = all_gather(torch.stack(ends)[None].long(), 0, (1,) * group.size, group).tolist()
    for i, d in enumerate(places):
        (sizes, _), n, intervals = spec.shares(d), spec.shape[d], []
        for c in range(len(sizes)):  # ranks of one row of tiles exchange what any of them needs
            (m,) = over(spec.dims[d])
            mine = [row[2 * i : 2 * i + 2] for r, row in enumerate(every) if spec.coordinate(m, r) == c]
            first = min(*[low for low, _ in mine], n - 2)
            intervals.append((first, max(*[high for _, high in mine], first + 2)))
        own = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(intervals, bounds(sizes), strict=True)]
        more = sum([last - first for first, last in intervals]) - sum(own)
        if 2 * more <= (len(sizes) - 1) * n:
            found[d] = intervals
    return found
