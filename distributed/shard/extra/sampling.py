"""F.grid_sample: samples of split images at places of any split.

The samples are split as the places are. The rows of the image that a rank's places read come as a halo, if that is less
than a gather; the plain operation then samples the part of the image that this rank has.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.shard.core.axes import mesh_dims_of, unsplit_axes
from distributed.shard.core.halo import HaloExchange, Interval, bounds
from distributed.shard.core.operands import as_replicated, sum_grad_over_replicas, sum_partial, to_spec
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, rule, wrap
from distributed.shard.ops.along import unshard_dims
from distributed.shard.ops.windows import Splits, no_outputs, splits_of

FIRST_SPATIAL = 2  # dimension of images (B, C, ...)


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
    out = _sampled_spec(x.spec, places.spec)  # (B, C, ...) split as the places
    samples, channels, *_ = out.dims
    grid_part = sum_grad_over_replicas(places, out)  # (b, ..., 2 or 3)

    # Which rows of the image each rank needs, for the dimensions where a halo is less than a gather.
    shape = x.spec.shape[FIRST_SPATIAL:]
    halos: dict[int, list[Interval]] = {}
    rows_of_places: dict[int, Tensor] = {}  # {dimension of the image: this rank's places among its rows, (b, ...)}
    mesh_dims_of_places = mesh_dims_of(*places.spec.dims) - mesh_dims_of(samples)
    candidates = halo_dims(x.spec, mesh_dims_of_places)
    values_are_known = not torch.compiler.is_compiling() and not isinstance(grid_part, FakeTensor)
    is_precise = mode != "bicubic" and min(shape) > 1 and grid_part.element_size() > 2
    if candidates and is_precise and values_are_known:
        rows_of_places = _rows_of_places(grid_part, shape, mode, padding_mode, align_corners)
        splits = splits_of(x, candidates)
        candidate_places = {d: rows_of_places[d].detach() for d in candidates}
        halos = worthwhile_halos(x.spec, splits, candidate_places)

    # Gather the other dimensions, and fetch the halos.
    part = _gather_images(x, samples, channels, halos, out)
    for d, (sizes, group) in splits_of(x, halos).items():
        part = HaloExchange(part, d, sizes, halos[d], group).rows()
        first_row, _ = halos[d][group.rank]
        rows_of_places[d] = rows_of_places[d] - first_row
    if not out.local_shape.numel():
        return wrap(no_outputs(part, out.local_shape, grid_part), out)
    if halos:
        # The places in the part of the image that this rank has. They lie where they read after padding.
        grid_part = _grid_of_rows(rows_of_places, part.shape)
        padding_mode = "zeros"
        align_corners = True
    sampled = func(part, grid_part, mode, padding_mode, align_corners)  # (b, c, ...)
    return wrap(sampled, out)


def _whole_places(grid, image):
    """The places (B, ..., 2 or 3) as a ShardTensor whose last dimension, the coordinates, is whole.

    The samples B take the split of the images, a Spec, unless a mesh dimension of theirs splits the places already.
    """
    places = as_replicated(grid, image)
    coordinates = len(places.spec.dims) - 1
    places = unshard_dims(places, (coordinates,))
    image_samples = image.dims[0]
    is_taken = mesh_dims_of(image_samples) & mesh_dims_of(*places.spec.dims)
    if is_taken:
        return places
    return to_spec(places, places.spec.with_axes(0, image_samples))


def _sampled_spec(image, places):
    """The spec of the result (B, C, ...) for the specs of image and places: all but the channels split as the places.

    Channels keep the split of the image, unless a mesh dimension of theirs splits the places.
    """
    samples, *rows, _ = places.dims
    channels = image.dims[1]
    if mesh_dims_of(channels) & mesh_dims_of(samples, *rows):
        channels = unsplit_axes(image.shape[1])
    return image.with_dims([samples, channels, *rows])


def _rows_of_places(grid, shape, mode, padding_mode, align_corners):
    """{dimension of the image: the places (b, ...) among its rows}, of a grid (b, ..., 2 or 3). shape: of the rows."""
    rows_of_places = {}
    for i, length in enumerate(shape):
        # The last coordinate of a grid is that of the image's first spatial dimension.
        rows = rows_at(grid[..., -1 - i], length, padding_mode, align_corners)
        if mode == "nearest":
            rows = rows.round()
        rows_of_places[FIRST_SPATIAL + i] = rows
    return rows_of_places


def _gather_images(x, samples, channels, halos, out):
    """This rank's part of the images, (b, c, ...), gathered along the dimensions that get no halo.

    samples, channels: their axes in the result. out: spec of the result.
    """
    dims = [samples, channels]
    for d, n in enumerate(x.spec.shape[FIRST_SPATIAL:], FIRST_SPATIAL):
        axes = x.spec.dims[d] if d in halos else unsplit_axes(n)
        dims.append(axes)
    images = to_spec(x, x.spec.with_dims(dims))
    return sum_grad_over_replicas(images, out)


def _grid_of_rows(rows_of_places, shape):
    """The grid (b, ..., 2 or 3) of places among the rows of an image (b, c, ...) of this shape."""
    coordinates = []
    for d, rows in rows_of_places.items():
        coordinates.append(as_grid(rows, shape[d]))
    # F.grid_sample takes the coordinate of the last dimension first.
    return torch.stack(coordinates[::-1], -1)


def halo_dims(spec: Spec, mesh_dims: set[int]) -> list[int]:
    """The dimensions of images (B, C, ...) for which a halo is possible.

    They are in one piece on each rank, and split over some of the mesh dimensions that split the places alone.
    """
    dims = []
    for d in spec.split_dims:
        axes = spec.dims[d]
        is_in_one_piece = len(axes) == 1
        is_split_as_places = mesh_dims_of(axes) <= mesh_dims
        if d >= FIRST_SPATIAL and is_in_one_piece and is_split_as_places:
            dims.append(d)
    return dims


def rows_at(
    grid: Tensor,
    rows: int,
    padding_mode: str,
    align_corners: bool | None,
) -> Tensor:
    """Convert places from -1 to 1 to places among so many rows, of the same shape: 1.5 is between rows 1 and 2.

    Places outside of the image become those where they read after padding, as in the plain operation.
    """
    # The ends of the grid are the middles of the outer rows with align_corners, and otherwise their outer edges.
    if align_corners:
        last_row = rows - 1
        at = (grid + 1) * last_row / 2
    else:
        at = ((grid + 1) * rows - 1) / 2
    if padding_mode == "zeros":
        return at.clamp(-2, rows + 1)  # outside of it there is nothing but zeros
    if padding_mode == "reflection":
        # Mirrors stand at `low` and at low + span: a place beyond them comes back, as often as it passes one.
        low, span = (0, rows - 1) if align_corners else (-0.5, rows)
        distance = (at - low).abs()
        rest = distance.fmod(span)
        reflections = (distance / span).floor()
        is_forward = reflections % 2 == 0
        at = torch.where(is_forward, rest, span - rest) + low
    inside = (at > 0) & (at < rows - 1)
    on_border = at.detach().clamp(0, rows - 1)  # a place at the border has no gradient
    return torch.where(inside, at, on_border)


def as_grid(at: Tensor, rows: int) -> Tensor:
    """Convert places among so many rows to places from -1 to 1, the inverse of rows_at with align_corners.

    F.grid_sample gets the same places of them, to rounding, and each between the same two rows: the gradient of a place
    is the difference of these.
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


def worthwhile_halos(
    spec: Spec,
    splits: Splits,
    places: Mapping[int, Tensor],
) -> dict[int, list[Interval]]:
    """{dimension: the rows [first, last) that each of its ranks needs} where a halo is less than a gather.

    spec: of the image. splits: of the dimensions to choose from. places: {dimension: this rank's places among its
    rows}. All ranks call this together; the result is the same on all.
    """
    # One all-gather tells every rank the rows that each of the others needs.
    ends = []  # the first row and the end of one dimension after the other
    for d, at in places.items():
        ends += _rows_read(at, spec.shape[d])
    group = spec.mesh.joint
    own_ends = torch.stack(ends)[None].long()  # (1, 2 * dimensions)
    one_of_each = (1,) * group.size
    gathered_ends = all_gather(own_ends, 0, one_of_each, group)  # (ranks, 2 * dimensions)
    ends_of_ranks = gathered_ends.tolist()

    # Each dimension is decided by itself: a halo, or a gather.
    halos = {}
    for i, (d, (sizes, _)) in enumerate(splits.items()):
        rows_of_ranks = [tuple(of_rank[2 * i : 2 * i + 2]) for of_rank in ends_of_ranks]
        intervals = _intervals(spec, d, rows_of_ranks)
        if _is_worthwhile(intervals, sizes, spec.shape[d]):
            halos[d] = intervals
    return halos


def _rows_read(at, length):
    """[first row, end] that samples at these places read of a dimension of `length` rows, as tensors of one number."""
    if at.numel():
        rows = at.floor().nan_to_num()
        low, high = torch.aminmax(rows)
    else:  # no places read no rows: from the last row to the first
        low = at.new_full((), length)
        high = at.new_zeros(()) - 2
    end = high + 2  # a sample also reads the row behind its place
    return [low.clamp(0, length), end.clamp(0, length)]


def _intervals(spec, d, rows_of_ranks):
    """The rows [first, last) that each rank along the mesh dimension of dimension d fetches, at least two.

    rows_of_ranks: what each rank of the mesh needs. On a mesh of two dimensions several ranks hold the same rows: each
    fetches what any of them needs.
    """
    (mesh_dim,) = mesh_dims_of(spec.dims[d])
    length = spec.shape[d]
    intervals = []
    for coordinate in range(spec.mesh.groups[mesh_dim].size):
        first = length - 2
        last = 0
        for rank, (rank_first, rank_last) in enumerate(rows_of_ranks):
            if spec.coordinate(mesh_dim, rank) == coordinate:
                first = min(first, rank_first)
                last = max(last, rank_last)
        last = max(last, first + 2)
        intervals.append((first, last))
    return intervals


def _is_worthwhile(intervals, sizes, length):
    """Tell whether ranks of these sizes receive at most half as many rows for their intervals as in a gather."""
    fetched = 0  # rows that all ranks together receive
    for (first, last), (own_first, own_last) in zip(intervals, bounds(sizes), strict=True):
        common = min(last, own_last) - max(first, own_first)
        fetched += last - first - max(0, common)
    gathered = (len(sizes) - 1) * length
    return 2 * fetched <= gathered
