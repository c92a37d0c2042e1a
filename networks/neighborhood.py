"""Neighborhood attention: each point of a grid attends to a window around it, in one, two or three dimensions.

Method: Hassani et al. 2023, "Neighborhood Attention Transformer" (arXiv:2204.07143). Hassani and Shi 2022
(arXiv:2209.15001) add dilation, gaps between the keys. At the edges the window is moved inwards, so that each query has
kernel_size keys along every axis. Cost and memory grow with points x window, not with points squared.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from networks.vit import Block, ImageHead, Linear, PatchEmbed, PerAxis, Transformer, patch_grid, per_axis

TILE_QUERIES = 64  # queries that share one piece of keys and values


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis = 1,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of each query over the keys in its window.

    q, k, v: (B, heads, *spatial, d), one to three spatial axes.
    kernel_size: number of keys of a window along each axis, odd, or one number for all axes. dilation: distance between
    two of them in points, likewise. scale: of the scores, by default 1 / sqrt(d).
    Returns (B, heads, *spatial, d). Raises ValueError for an even kernel, and for a window longer than the axis.
    """
    if has_torch_function((q, k, v)):  # a tensor subclass may have its own implementation
        return handle_torch_function(
            neighborhood_attention,
            (q, k, v),
            q,
            k,
            v,
            kernel_size,
            dilation=dilation,
            scale=scale,
        )
    spatial = q.shape[2:-1]
    kernel_size = per_axis(kernel_size, len(spatial))
    dilation = per_axis(dilation, len(spatial))
    starts = []
    for length, kernel, step in zip(spatial, kernel_size, dilation, strict=True):
        starts.append(window_starts(length, kernel, step))
    return attend_windows(q, k, v, kernel_size, starts, dilation, scale)


def window_starts(length: int, kernel_size: int, dilation: int = 1) -> list[int]:
    """The first key of each query's window along an axis of `length` points: length 6, kernel 3 -> [0, 0, 1, 2, 3, 3].

    The window has kernel_size keys: the first key and every dilation-th key after it.
    Raises ValueError for an even kernel, and for a window longer than the axis.
    """
    if kernel_size % 2 == 0 or min(kernel_size, dilation) < 1:
        raise ValueError(f"kernel_size {kernel_size} with dilation {dilation}: the kernel is odd, both are positive")
    if kernel_size * dilation > length:
        raise ValueError(f"kernel_size {kernel_size} with dilation {dilation} is longer than the axis, {length} points")
    starts = []
    for point in range(length):
        # Points with the same phase form an axis of their own, on which the keys of a window are neighbours.
        step, phase = divmod(point, dilation)
        points = -(-(length - phase) // dilation)  # of this axis, rounded up
        centred = step - kernel_size // 2
        moved_inwards = min(max(centred, 0), points - kernel_size)
        starts.append(phase + dilation * moved_inwards)
    return starts


def attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: PerAxis,
    starts: Sequence[list[int]],
    dilation: PerAxis = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention over given windows: `neighborhood_attention` for a part of the queries.

    q: (B, heads, *queries, d). k, v: (B, heads, *keys, d), at least the keys of all windows.
    starts: for each axis, a list with the first key of each query's window, as an index into k and v.
    Other arguments: as in neighborhood_attention. Returns (B, heads, *queries, d).
    Raises ValueError if a window extends beyond k and v.
    """
    axes = len(starts)
    batch = q.shape[:2]  # (B, heads)
    queries = q.shape[2:-1]
    kernel_size = per_axis(kernel_size, axes)
    dilation = per_axis(dilation, axes)

    # A CUDA graph cannot copy from the host. A compiler, or a tensor without data, makes tensors that end with it.
    can_keep_tiles = type(q) is Tensor and not torch.compiler.is_compiling()
    tiles_of = _kept_tiles if can_keep_tiles else _tiles

    # Equal boxes of queries, each with a box of keys around it of equal size, so that one call handles all boxes.
    tile = round(TILE_QUERIES ** (1 / axes))
    mask = torch.ones((), dtype=torch.bool, device=q.device)
    for axis in range(axes):
        dim = 2 + 2 * axis  # each axis before this one has become two: tiles, points of a tile
        windows = tuple(starts[axis])
        lengths = q.shape[dim], k.shape[dim]
        rows, columns, seen = tiles_of(q.device, windows, kernel_size[axis], dilation[axis], tile, *lengths)
        q = _take_tiles(q, dim, rows)
        k = _take_tiles(k, dim, columns)
        v = _take_tiles(v, dim, columns)
        mask = mask & seen.view(_mask_shape(seen.shape, axis, axes))  # (*tiles, *T, *L)

    # Attention takes the tiles as a batch.
    tiles = q.shape[2:-1:2]
    box = q.shape[3:-1:2]
    q = _tiles_first(q, axes)  # (all tiles, B heads, queries of a tile, d)
    k = _tiles_first(k, axes)  # (all tiles, B heads, keys of a tile, d)
    v = _tiles_first(v, axes)
    mask = mask.flatten(2 * axes)  # (*tiles, *T, keys)
    mask = mask.flatten(axes, 2 * axes - 1)  # (*tiles, queries, keys)
    mask = mask.flatten(0, axes - 1)  # (all tiles, queries, keys)
    x = F.scaled_dot_product_attention(q, k, v, mask[:, None], scale=scale)
    return _join_tiles(x, batch, tiles, box, queries)


def _tiles(device, *axis):
    """The result of _cut_axis, on a device."""
    with torch.inference_mode(False):  # whoever kept them could not train with them otherwise
        parts = _cut_axis(*axis)
        return tuple(part.to(device, non_blocking=True) for part in parts)


_kept_tiles = cache(_tiles)  # for the life of the process: a CUDA graph reads them


def _cut_axis(starts, kernel_size, dilation, tile, num_queries, num_keys):
    """Cut an axis into tiles of about `tile` queries. All tiles have T queries and L keys.

    Returns the queries of each tile, (tiles, T), where the last query is repeated to fill the tile; its keys,
    (tiles, L); and whether each query sees each key, (tiles, T, L).
    """
    reach = (kernel_size - 1) * dilation  # from the first key of a window to its last
    first = min(starts)
    last = max(starts) + reach
    if len(starts) != num_queries or first < 0 or last >= num_keys:
        raise ValueError(f"{len(starts)} windows from {first} to {last} for {num_queries} queries, {num_keys} keys")
    # Tiles are as even as possible, so that few queries are computed twice.
    num_tiles = -(-num_queries // max(tile, kernel_size))
    size = -(-num_queries // num_tiles)
    queries = []
    for start in range(0, num_queries, size):
        queries.append([min(query, num_queries - 1) for query in range(start, start + size)])

    # The keys of a tile reach from its first window to the end of its last one. All tiles take as many as the longest.
    begins = []
    lengths = []
    for row in queries:
        starts_of_row = [starts[query] for query in row]
        begin = min(starts_of_row)
        end = max(starts_of_row) + reach + 1
        begins.append(begin)
        lengths.append(end - begin)
    length = max(lengths)
    first_keys = [min(begin, num_keys - length) for begin in begins]

    rows = torch.tensor(queries)  # (tiles, T)
    columns = torch.tensor(first_keys)[:, None] + torch.arange(length)  # (tiles, L)
    windows = torch.tensor(starts)[rows]  # (tiles, T)
    ahead = columns[:, None] - windows[:, :, None]  # (tiles, T, L): points from the first key of the window
    in_window = (ahead >= 0) & (ahead <= reach)
    return rows, columns, in_window & (ahead % dilation == 0)


def _take_tiles(x, dim, points):
    """Replace an axis by tiles and the points of each tile. points: their indices along it, (tiles, n)."""
    taken = x.index_select(dim, points.flatten())
    return taken.unflatten(dim, points.shape)


def _mask_shape(shape, axis, axes):
    """The shape (tiles, T, L) of one axis, for multiplication with the others: (*tiles, *T, *L), elsewhere 1."""
    before = [1] * axis
    after = [1] * (axes - axis - 1)
    aligned = []
    for length in shape:
        aligned += [*before, length, *after]
    return aligned


def _tiles_first(x, axes):
    """(B, heads, tiles_0, n_0, tiles_1, n_1, .., d) -> (all tiles, B heads, all n, d)."""
    tile_dims = range(2, 2 + 2 * axes, 2)
    point_dims = range(3, 3 + 2 * axes, 2)
    x = x.permute(*tile_dims, 0, 1, *point_dims, -1)  # (*tiles, B, heads, *n, d)
    x = x.flatten(axes + 2, 2 * axes + 1)  # (*tiles, B, heads, all n, d)
    x = x.flatten(axes, axes + 1)  # (*tiles, B heads, all n, d)
    return x.flatten(0, axes - 1)


def _join_tiles(x, batch, tiles, box, queries):
    """Undo _tiles_first for the queries: (all tiles, B heads, all T, d) -> (B, heads, *queries, d)."""
    axes = len(tiles)
    x = x.unflatten(2, box).unflatten(1, batch).unflatten(0, tiles)  # (*tiles, B, heads, *T, d)
    pairs = []
    for axis in range(axes):
        pairs += [axis, axes + 2 + axis]
    x = x.permute(axes, axes + 1, *pairs, -1)  # (B, heads, tiles_0, T_0, tiles_1, T_1, .., d)
    for axis, length in enumerate(queries):
        x = x.flatten(2 + axis, 3 + axis)
        x = x.narrow(2 + axis, 0, length)  # without the queries that fill the last tile
    return x


class NeighborhoodAttention(nn.Module):
    """Multi-head attention of each point over the window around it: (B, *spatial, D) -> (B, *spatial, D).

    q, k and v are one projection whose rows are ordered (head, q|k|v, d), as in networks.vit.Attention.
    """

    def __init__(self, embed_dim: int, num_heads: int, kernel_size: PerAxis, dilation: PerAxis = 1):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.head_dim = embed_dim // num_heads
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.qkv = Linear(embed_dim, 3 * embed_dim)
        self.proj = Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, *spatial, D) -> (B, *spatial, D)."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # (B, *spatial, heads, 3, d)
        axes = x.ndim - 2
        heads_second = 0, axes + 1, *range(1, axes + 1), axes + 2
        q, k, v = [part.permute(heads_second) for part in qkv.unbind(-2)]  # (B, heads, *spatial, d)
        x = neighborhood_attention(q, k, v, self.kernel_size, self.dilation)
        heads_last = 0, *range(2, axes + 2), 1, axes + 2
        x = x.permute(heads_last).flatten(-2)  # (B, *spatial, D)
        return self.proj(x)


class NeighborhoodTransformer(Transformer):
    """The vision transformer with neighborhood attention: (B, in_channels, *img_size) -> (B, out_channels, *img_size).

    kernel_size, dilation: the window of each token, in patches. The other arguments are those of networks.vit.ViT.
    Raises ValueError where a patch does not divide the image, or num_heads does not divide embed_dim; in forward, where
    the window is longer than the grid of patches.
    """

    def __init__(
        self,
        img_size: Sequence[int],
        patch_size: PerAxis,
        in_channels: int,
        out_channels: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        kernel_size: PerAxis = 5,
        dilation: PerAxis = 1,
    ):
        grid, patch_size = patch_grid(img_size, patch_size)
        patch_embed = PatchEmbed(patch_size, in_channels, embed_dim)
        head = ImageHead(grid, patch_size, out_channels, embed_dim)
        attention = [NeighborhoodAttention(embed_dim, num_heads, kernel_size, dilation) for _ in range(depth)]
        blocks = [Block(each, embed_dim, mlp_ratio, dropout, grid) for each in attention]
        super().__init__(
            patch_embed=patch_embed,
            blocks=blocks,
            head=head,
            grid=grid,
            patch_size=patch_size,
            embed_dim=embed_dim,
            dropout=dropout,
        )
