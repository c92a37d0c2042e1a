"""Rows, elements and places that other tensors choose: tables, gather and scatter, masks, samples of images."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.halo import HaloExchange, Interval, bounds
from distributed.shard.operands import (
    as_replicated,
    check_writable,
    global_shape,
    local_operand,
    redistribute,
    scale_grad_by_replicas,
    sum_grad_over_replicas,
    sum_partial,
    to_spec,
)
from distributed.shard.rules.along import moved, unshard_dims
from distributed.shard.rules.spatial import no_outputs, splits_of
from distributed.shard.rules.windows import Splits
from distributed.shard.spec import Axes, Axis, Spec, merged, mesh_dims_of, shard_sizes, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(*named("gather", "take_along_dim"))
def gather(
    func: Callable,
    input: Tensor,
    dim: Any,
    index: Any = None,
    *,
    sparse_grad: bool = False,
    **kwargs: Any,
) -> ShardTensor:
    """Gather along a dimension. The indices have the tensor's size in all others, and are brought to its split."""
    if func.__name__ == "take_along_dim" and isinstance(dim, Tensor):
        # take_along_dim(input, indices, dim) has its arguments in another order.
        indices = dim
        dim = kwargs.get("dim", index)
        index = indices
    if dim is None or not isinstance(input, ShardTensor):
        raise no_rule(func, (input, index), {}, "of a plain tensor, or without a dimension")
    dim = dim % len(input.spec.dims)
    x = unshard_dims(input, (dim,))
    places = split_as(func, x.spec, dim, index)
    found = local(x).gather(dim, places)  # (..., indices, ...)
    count = global_shape(index)[dim]
    return wrap(found, x.spec.with_axes(dim, unsplit_axes(count)))


def split_as(
    func: Callable,
    spec: Spec,
    dim: int,
    y: Tensor,
) -> Tensor:
    """The local part of an operand with a size of its own along dim, split as a tensor with this spec."""
    shape = global_shape(y)
    own_axes = unsplit_axes(shape[dim])
    out = spec.with_axes(dim, own_axes)
    if out.shape != shape:
        raise no_rule(func, (y,), {}, "it must have the tensor's size in all other dimensions")
    part = local_operand(sum_partial(y), out)
    return part.expand(out.local_shape)


SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
SCATTERS_IN_PLACE = [f"{name}_" for name in SCATTERS]


@rule(*named(*SCATTERS, *SCATTERS_IN_PLACE))
def scatter(
    func: Callable,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Write or add along a dimension, at indices: of elements (scatter), or plain ones of rows (index_add)."""
    for name in ("src", "value", "source"):
        if name in kwargs:
            source = kwargs.pop(name)
    # The split of the first ShardTensor that has the dimensions of the input decides.
    split_operands = [x for x in (input, source, index) if isinstance(x, ShardTensor)]
    like = next(x for x in split_operands if x.dim() == input.dim())
    dim = dim % len(like.spec.dims)
    x = unshard_dims(like, (dim,))
    length = global_shape(input)[dim]
    spec = x.spec.with_axes(dim, unsplit_axes(length))

    # In place, this rank's part of the input must be the one that is written.
    in_place = func.__name__.endswith("_")
    is_unchanged = not like.spec.partial and x.spec.placements == like.spec.placements
    keeps_split = like is input and is_unchanged
    if in_place and not keeps_split:
        raise no_rule(func, (input, index), {}, "in place on a plain tensor or along a split dimension")

    def part(y: Any) -> Any:
        """The operand as this rank needs it."""
        is_of_elements = isinstance(y, Tensor) and not y.dim() < 2 <= len(spec.dims)
        if is_of_elements:
            return split_as(func, spec, dim, y)
        # Every rank needs all indices of rows; a number is the same on all of them.
        if isinstance(y, ShardTensor):
            return y.full_tensor()
        return scale_grad_by_replicas(y, spec)

    if in_place:
        target = input
    elif like is input:
        target = local(x)
    else:
        target = part(input)
    own_index = part(index)
    own_source = part(source)
    out = func(target, dim, own_index, own_source, *args, **kwargs)
    return check_writable(like) if in_place else wrap(out, spec)


@rule(*named("bucketize"))
def bucketize(
    func: Callable,
    input: ShardTensor,
    boundaries: Tensor,
    **kwargs: Any,
) -> ShardTensor:
    """The place of each element among plain boundaries."""
    if isinstance(boundaries, ShardTensor):
        raise no_rule(func, (input, boundaries), kwargs, "boundaries must be plain")
    input = sum_partial(input)
    places = func(local(input), boundaries, **kwargs)
    return wrap(places, input.spec)


def mask_of(x: Any, index: Any) -> Tensor | None:
    """The mask, if an index is one of at least two dimensions or a ShardTensor."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_mask or not isinstance(x, ShardTensor):
        return None
    # A plain mask of one dimension is as good as the indices of its rows, which indexing finds.
    is_plain_row_mask = index.dim() <= 1 and not isinstance(index, ShardTensor)
    return None if is_plain_row_mask else index


@rule(*named("masked_select"))
def masked(func: Callable, input: ShardTensor, mask: Tensor) -> ShardTensor:
    """The elements that a mask of the first dimensions selects: (selected, ...), one gather of their numbers."""
    count = mask.dim()
    mask_shape = tuple(global_shape(mask))
    fits = isinstance(input, ShardTensor) and mask_shape == tuple(input.spec.shape[:count])
    if not fits:
        raise no_rule(func, (input, mask), {}, "of a plain tensor, or by a mask that broadcasts")
    x = in_order(sum_partial(input), count)
    spec = x.spec
    mask_dims = spec.dims[:count]
    rest = spec.dims[count:]
    # The mask is cut as the tensor is, so that each rank selects among its own elements.
    own_mask = local_operand(sum_partial(mask), spec.with_dims(mask_dims))
    selected = local(x)[own_mask]  # (selected on this rank, ...)

    # Where the mask is split, every rank must know how many elements each of the others has selected.
    axes = merged(chain.from_iterable(mask_dims))
    rows: Axes = unsplit_axes(len(selected))
    if mesh_dims_of(axes):
        mesh_dim = axes[0].mesh_dim
        group = spec.mesh.groups[mesh_dim]
        number = torch.tensor([len(selected)], device=selected.device)
        one_of_each = (1,) * group.size
        numbers = all_gather(number, 0, one_of_each, group)  # (ranks,)
        sizes = tuple(numbers.tolist())
        rows = (Axis(sum(sizes), mesh_dim, sizes),)
    return wrap(selected, spec.with_dims((rows, *rest)))


def in_order(x: ShardTensor, count: int) -> ShardTensor:
    """The tensor whose parts follow each other when the first `count` dimensions are flattened.

    One mesh dimension splits the first of these that is longer than 1, into bands; others split none of them.
    """
    spec = x.spec
    axes = merged(chain.from_iterable(spec.dims[:count]))
    if len(axes) < 2:
        return x
    longer = [d for d in range(count) if spec.shape[d] > 1]
    lead = longer[0]
    splits = []
    for m, placement in enumerate(spec.placements):
        if isinstance(placement, Shard) and placement.dim < count:
            splits.append(m)

    # Keep the mesh dimension that splits the leading dimension already, if one does.
    leading = [m for m in splits if spec.placements[m] == Shard(lead)]
    kept = leading[0] if leading else splits[0]
    for m in splits:
        if m != kept:
            x = moved(x, m, range(count))
    sizes = None
    if len(x.spec.dims[lead]) > 1:  # a product of axes becomes one axis, in even pieces
        group = x.spec.mesh.groups[kept]
        sizes = shard_sizes(x.spec.shape[lead], group.size)
    placements = list(x.spec.placements)
    placements[kept] = Shard(lead)
    return redistribute(x, placements, {kept: sizes})


def rows_of_plain(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Look up rows of a plain table by a ShardTensor of indices."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != 1 or index[0].dtype == torch.bool:
        raise no_rule(func, (x, *index), {}, "of a plain tensor, by more than one ShardTensor of indices")
    index = sum_partial(index[0])
    row_dims = map(unsplit_axes, x.shape[1:])
    spec = index.spec.with_dims((*index.spec.dims, *row_dims))
    table = scale_grad_by_replicas(x, spec)
    return wrap(table[local(index)], spec)


@rule(F.embedding)
def embedding(
    func: Callable,
    input: ShardTensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardTensor:
    """Look up split indices in a plain table: (...) -> (..., D)."""
    if isinstance(weight, ShardTensor) or max_norm is not None or scale_grad_by_freq:
        raise no_rule(func, (input, weight), {}, "indices must be a ShardTensor, the table plain, without max_norm")
    input = sum_partial(input)
    features = unsplit_axes(weight.shape[1])
    spec = input.spec.with_dims((*input.spec.dims, features))
    table = scale_grad_by_replicas(weight, spec)
    rows = F.embedding(local(input), table, padding_idx, sparse=sparse)  # (..., D)
    return wrap(rows, spec)


@rule(F.one_hot)
def one_hot(func: Callable, tensor: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a dimension of num_classes; -1 takes the largest index of all ranks plus one."""
    if num_classes == -1:
        largest = dispatch(torch.amax, tensor)  # of all ranks
        num_classes = int(local(largest)) + 1
    tensor = sum_partial(tensor)
    classes = unsplit_axes(num_classes)
    spec = tensor.spec.with_dims((*tensor.spec.dims, classes))
    return wrap(F.one_hot(local(tensor), num_classes), spec)


@rule(F.grid_sample)
def grid_sample(
    func: Callable,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> ShardTensor:
    """Samples of images (B, C, ...) at places (B, ..., 2 or 3), which are split as the places are.

    A split dimension of the image is exchanged as a halo where the places of all ranks reach so little beyond the rows
    of their ranks that this sends at most half of what a gather would; otherwise it is gathered. The values of `grid`
    decide the size of that message. The ranks therefore tell each other the first and last row that they need, two
    numbers a dimension in one all-gather, and the host has to read them. It reads nothing, and the image is gathered,
    while compiling or planning, for bicubic samples and 16-bit places, and where the dimension and the places are not
    split over the same ranks.
    """
    like = next(y for y in (input, grid) if isinstance(y, ShardTensor)).spec
    x = sum_partial(as_replicated(input, like))
    places = _whole_places(grid, x.spec)
    out = _sampled_spec(x.spec, places.spec)
    samples, channels, *_ = out.dims
    grid_part = sum_grad_over_replicas(places, out)  # (b, ..., 2 or 3)

    # Which rows of the image each rank needs, for the dimensions where a halo is less than a gather.
    shape = x.spec.shape[2:]
    needed: dict[int, list[Interval]] = {}
    rows_of_places: list[Tensor] = []  # this rank's places along each dimension of the image, each (b, ...)
    mesh_dims_of_rows = mesh_dims_of(*places.spec.dims) - mesh_dims_of(samples)
    near = halo_dims(x.spec, mesh_dims_of_rows)
    values_are_known = not torch.compiler.is_compiling() and not isinstance(grid_part, FakeTensor)
    is_precise = mode != "bicubic" and min(shape) > 1 and grid_part.element_size() > 2
    if near and is_precise and values_are_known:
        for i, n in enumerate(shape):
            of_dim = rows_at(grid_part[..., -1 - i], n, padding_mode, align_corners)
            if mode == "nearest":
                of_dim = of_dim.round()
            rows_of_places.append(of_dim)
        splits = splits_of(x, near)
        places_near = {d: rows_of_places[d - 2].detach() for d in near}
        needed = rows_needed(x.spec, splits, places_near)

    # Gather the other dimensions, and fetch the halos.
    part = _gather_images(x, samples, channels, needed, out)
    for d, (sizes, group) in splits_of(x, needed).items():
        part = HaloExchange(part, d, sizes, needed[d], group).rows()
        first_row, _ = needed[d][group.rank]
        rows_of_places[d - 2] = rows_of_places[d - 2] - first_row
    if not out.local_shape.numel():
        return wrap(no_outputs(part, out.local_shape, grid_part), out)
    if needed:  # places in the part of the image that this rank has, which rows_at has padded
        grid_part = _grid_of_rows(rows_of_places, part.shape[2:])
        padding_mode = "zeros"
        align_corners = True
    sampled = func(part, grid_part, mode, padding_mode, align_corners)
    return wrap(sampled, out)


def _whole_places(grid, image):
    """The places (B, ..., 2 or 3) as a ShardTensor, with whole coordinates and, if it can be, the images' samples."""
    places = as_replicated(grid, image)
    coordinates = len(places.spec.dims) - 1
    places = unshard_dims(places, (coordinates,))
    image_samples = image.dims[0]
    is_taken = mesh_dims_of(image_samples) & mesh_dims_of(*places.spec.dims)
    if is_taken:
        return places
    return to_spec(places, places.spec.with_axes(0, image_samples))


def _sampled_spec(image, places):
    """The spec of samples (B, C, ...): split as the places are; channels, as those of the image unless places are."""
    samples, *rows, _ = places.dims
    channels = image.dims[1]
    if mesh_dims_of(channels) & mesh_dims_of(samples, *rows):
        channels = unsplit_axes(image.shape[1])
    return image.with_dims([samples, channels, *rows])


def _gather_images(x, samples, channels, needed, out):
    """This rank's part of the images, (b, c, ...), gathered along the dimensions that need no halo."""
    dims = [samples, channels]
    for d, n in enumerate(x.spec.shape[2:], 2):
        axes = x.spec.dims[d] if d in needed else unsplit_axes(n)
        dims.append(axes)
    images = to_spec(x, x.spec.with_dims(dims))
    return sum_grad_over_replicas(images, out)


def _grid_of_rows(rows_of_places, shape):
    """The places along each dimension of an image of this shape as the last dimension of a grid, (b, ..., 2 or 3)."""
    coordinates = []
    for rows, length in zip(rows_of_places, shape, strict=True):
        coordinates.append(as_grid(rows, length))
    # F.grid_sample takes the coordinate of the last dimension first.
    return torch.stack(coordinates[::-1], -1)


def halo_dims(spec: Spec, mesh_dims: set[int]) -> list[int]:
    """The dimensions of images (B, C, ...) in one piece on each rank that only these mesh dimensions split."""
    dims = []
    for d in spec.split_dims:
        axes = spec.dims[d]
        is_in_one_piece = len(axes) == 1
        is_split_as_places = mesh_dims_of(axes) <= mesh_dims
        if d > 1 and is_in_one_piece and is_split_as_places:
            dims.append(d)
    return dims


def rows_at(
    grid: Tensor,
    rows: int,
    padding_mode: str,
    align_corners: bool | None,
) -> Tensor:
    """Places -1 to 1 as places among so many rows, where they read after padding; as the plain operation does it."""
    # The ends of the grid are the middles of the outer rows with align_corners, and otherwise their outer edges.
    if align_corners:
        last_row = rows - 1
        at = (grid + 1) * last_row / 2
    else:
        at = ((grid + 1) * rows - 1) / 2
    if padding_mode == "zeros":
        return at.clamp(-2, rows + 1)  # outside of it there is nothing but zeros
    if padding_mode == "reflection":
        low, span = (0, rows - 1) if align_corners else (-0.5, rows)
        apart = (at - low).abs()
        rest = apart.fmod(span)
        reflections = (apart / span).floor()
        is_forward = reflections % 2 == 0
        at = torch.where(is_forward, rest, span - rest) + low
    inside = (at > 0) & (at < rows - 1)
    on_border = at.detach().clamp(0, rows - 1)  # a place at the border has no gradient
    return torch.where(inside, at, on_border)


def as_grid(at: Tensor, rows: int) -> Tensor:
    """Places among so many rows as places -1 to 1, of which F.grid_sample with align_corners makes the same again.

    The same to rounding, and between the same two rows: the gradient of a place is the difference of these.
    """
    half = (rows - 1) / 2
    grid = at / half - 1
    # Rounding may put a place on the other side of a row. It is moved by the smallest step until it is right.
    eps = torch.finfo(at.dtype).eps
    with torch.no_grad():
        exact = grid.clone()
        for _ in range(3):
            row_again = ((exact + 1) * half).floor()
            exact += (at.floor() - row_again) * eps
    correction = exact - grid.detach()
    return grid + correction


def rows_needed(
    spec: Spec,
    splits: Splits,
    places: dict[int, Tensor],
) -> dict[int, list[Interval]]:
    """The rows of an image with this spec that each rank of a dimension needs, for the dimensions where a halo is less.

    places: {dimension: this rank's places among its rows}. All ranks call this together; the result is the same on all.
    """
    # The first and last row that this rank needs along each dimension.
    ends = []  # low and high of one dimension after the other
    for d, at in places.items():
        n = spec.shape[d]
        if at.numel():
            rows = at.floor().nan_to_num()
            low, high = torch.aminmax(rows)
        else:  # no rows at all
            low = at.new_full((), n)
            high = at.new_zeros(()) - 2
        end = high + 2  # a sample also reads the row behind its place
        ends += [low.clamp(0, n), end.clamp(0, n)]
    group = spec.mesh.joint
    own_ends = torch.stack(ends)[None].long()  # (1, 2 * dimensions)
    one_of_each = (1,) * group.size
    gathered_ends = all_gather(own_ends, 0, one_of_each, group)  # (ranks, 2 * dimensions)
    ends_of_ranks = gathered_ends.tolist()

    # Each dimension is decided by itself: a halo, or a gather.
    halos = {}
    for i, (d, (sizes, _)) in enumerate(splits.items()):
        n = spec.shape[d]
        (mesh_dim,) = mesh_dims_of(spec.dims[d])
        intervals = []
        for coordinate in range(len(sizes)):
            # Ranks of one row of tiles exchange what any of them needs, at least two rows.
            first = n - 2
            last = 0
            for rank, of_rank in enumerate(ends_of_ranks):
                if spec.coordinate(mesh_dim, rank) == coordinate:
                    rank_first, rank_last = of_rank[2 * i : 2 * i + 2]
                    first = min(first, rank_first)
                    last = max(last, rank_last)
            last = max(last, first + 2)
            intervals.append((first, last))

        # Rows that all ranks together would receive: as halos, and by a gather.
        fetched = 0
        for (first, last), (own_first, own_last) in zip(intervals, bounds(sizes), strict=True):
            common = min(last, own_last) - max(first, own_first)
            fetched += last - first - max(0, common)
        gathered = (len(sizes) - 1) * n
        if 2 * fetched <= gathered:
            halos[d] = intervals
    return halos
