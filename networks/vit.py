"""Vision transformer from image to image: it takes the state of the atmosphere and gives the state one step later.

Method: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words" (arXiv:2010.11929), with pre-norm blocks and a
linear head that folds the tokens back into an image. No process group, mesh or rank appears here: parallelism is
applied to this model from outside.

Shapes in comments: B batch, C channels, N tokens, D embedding size, d size of one head.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PerAxis = int | Sequence[int]  # one number for all axes, or one for each
LAYER_NORM_EPS = 1e-6  # the same in every layer, and in every parallel form of it
CONV: dict[int, Callable[..., nn.Module]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


def per_axis(value: PerAxis, axes: int) -> tuple[int, ...]:
    """One number for each axis. Raises ValueError if there are more or fewer."""
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(values) != axes:
        raise ValueError(f"{list(values)} for {axes} spatial axes")
    return values


def patch_grid(
    img_size: Sequence[int],
    patch_size: PerAxis,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Patches along each axis, and points of a patch along each axis: ((8, 12), 4) -> ((2, 3), (4, 4)).

    Raises ValueError where a patch does not divide the image.
    """
    patch_size = per_axis(patch_size, len(img_size))
    grid = []
    for points, patch in zip(img_size, patch_size, strict=True):
        if points % patch:
            raise ValueError(f"img_size {list(img_size)} cannot be cut into patches of {list(patch_size)}")
        grid.append(points // patch)
    return tuple(grid), patch_size


class Linear(nn.Linear):
    """A linear layer with the initial weights of vision transformers: truncated normal numbers, and no bias."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each one to a token: (B, C, *img_size) -> (B, N, D)."""

    def __init__(self, patch_size: tuple[int, ...], in_channels: int, embed_dim: int):
        super().__init__()
        self.proj = CONV[len(patch_size)](in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, *img_size) -> tokens, (B, N, D), N patches in row-major order."""
        tokens = self.proj(x).flatten(2).transpose(1, 2)
        # One copy here: all that follows takes the order in memory from its input, and each LayerNorm would copy it.
        return tokens.contiguous()


class PositionEmbedding(nn.Module):
    """Add a learned vector to each token: (B, N, D) -> (B, N, D).

    tokens: which of the image's tokens come, a slice; all of them, unless the model is given a part of the image.
    """

    def __init__(self, num_tokens: int, embed_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, embed_dim))
        self.tokens = slice(0, num_tokens)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors."""
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D) -> (B, N, D), N as of `tokens`."""
        return x + self.weight[self.tokens]


class Attention(nn.Module):
    """Multi-head self-attention: (B, N, D) -> (B, N, D).

    q, k and v are one projection whose rows are ordered (head, q|k|v, d): a contiguous block of rows is a set of
    whole heads.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.qkv = Linear(embed_dim, 3 * embed_dim)
        self.proj = Linear(embed_dim, embed_dim)
        # From q, k, v of the tokens that this model holds.
        self.attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D) -> (B, N, D). Attention weights are dropped out in training only."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # (B, N, heads, 3, d)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # (B, heads, N, d)
        dropout = self.dropout if self.training else 0.0
        x = self.attend(q, k, v, dropout_p=dropout)  # (B, heads, N, d)
        x = x.transpose(1, 2).flatten(2)  # (B, N, D)
        return self.proj(x)


class MLP(nn.Module):
    """Two linear layers with a GELU between: (B, N, D) -> (B, N, D)."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float):
        super().__init__()
        self.fc1 = Linear(embed_dim, hidden_dim)
        self.fc2 = Linear(hidden_dim, embed_dim)
        self.drop: nn.Module = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D) -> (B, N, D)."""
        x = F.gelu(self.fc1(x))  # (B, N, hidden_dim)
        x = self.drop(x)
        return self.fc2(x)


class Block(nn.Module):
    """Pre-norm transformer block: (B, N, D) -> (B, N, D), or of any shape that its attention takes and gives.

    grid: of the N tokens, in row-major order, for an attention that takes them as (B, *grid, D).
    """

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        mlp_ratio: float,
        dropout: float,
        grid: tuple[int, ...] = (),
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self.attn = attention
        self.norm2 = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self.mlp = MLP(embed_dim, int(embed_dim * mlp_ratio), dropout)
        self.drop = nn.Dropout(dropout)
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D) -> (B, N, D)."""
        if self.grid:
            x = x.unflatten(1, self.grid)  # (B, *grid, D)
        x = x + self.drop(self.attn(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        if self.grid:
            x = x.flatten(1, -2)  # (B, N, D)
        return x


class ImageHead(nn.Module):
    """Project each token to its patch of the output and fold the patches: (B, N, D) -> (B, C, *img_size)."""

    def __init__(
        self,
        grid: tuple[int, ...],
        patch_size: tuple[int, ...],
        out_channels: int,
        embed_dim: int,
    ):
        super().__init__()
        self.grid = grid
        self.patch_size = patch_size
        self.out_channels = out_channels
        self.proj = Linear(embed_dim, out_channels * math.prod(patch_size))

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens, (B, N, D), in row-major order -> (B, C, *img_size)."""
        axes = len(self.grid)
        x = self.proj(x)  # (B, N, C patch_0 patch_1 ..)
        x = x.unflatten(2, (self.out_channels, *self.patch_size))  # (B, N, C, *patch)
        x = x.unflatten(1, self.grid)  # (B, *grid, C, *patch)
        pairs = []
        for axis in range(axes):
            pairs += [1 + axis, 2 + axes + axis]
        x = x.permute(0, 1 + axes, *pairs)  # (B, C, grid_0, patch_0, grid_1, patch_1, ..)
        img_size = [patches * points for patches, points in zip(self.grid, self.patch_size, strict=True)]
        return x.reshape(*x.shape[:2], *img_size)


class NoiseEmbedding(nn.Module):
    """Two linear layers from the noise of a member of an ensemble to a factor and a shift of each feature.

    Source: Perez et al. 2018, FiLM, arXiv:1709.07871. The factor matters: features differ from place to place, and with
    it a number of the noise has a pattern in space, which the blocks would else have to make.
    """

    def __init__(self, noise_features: int, embed_dim: int):
        super().__init__()
        self.first = nn.Linear(noise_features, embed_dim)
        self.second = nn.Linear(embed_dim, 2 * embed_dim)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """noise: (B, K) -> factor and shift, (B, D) each."""
        hidden = F.gelu(self.first(noise))
        change, shift = self.second(hidden).chunk(2, -1)
        return 1 + change, shift


class Transformer(nn.Module):
    """Patches, positions, blocks, head: (B, C, *img_size) -> what the head makes of the tokens.

    noise_features: numbers of the noise that the model takes beside an image, and by which it scales and shifts all
    tokens; 0: it takes none. patch_embed: module from the image to its tokens, (B, N, D). blocks: modules from tokens
    to tokens. head: module from the tokens to the output. grid, patch_size: the results of patch_grid.
    """

    def __init__(
        self,
        patch_embed: nn.Module,
        blocks: Iterable[nn.Module],
        head: nn.Module,
        grid: tuple[int, ...],
        patch_size: tuple[int, ...],
        embed_dim: int,
        dropout: float,
        noise_features: int = 0,
    ):
        super().__init__()
        self.patch_size = patch_size  # an image may be cut between patches
        self.patch_embed = patch_embed
        self.pos_embed = PositionEmbedding(math.prod(grid), embed_dim)
        self.noise_embed = NoiseEmbedding(noise_features, embed_dim) if noise_features else None
        self.pos_drop = nn.Dropout(dropout)
        self.blocks: Any = nn.ModuleList(blocks)  # torch has no type for a list of one kind of module
        self.norm = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self.head: Any = head  # only one that makes images has a grid

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """x: (B, C, *img_size) -> what the head makes of the tokens. noise: (B, noise_features), if there are any."""
        x = self.pos_embed(self.patch_embed(x))  # (B, N, D)
        if self.noise_embed is not None:
            factor, shift = self.noise_embed(noise)  # (B, D), the same for all tokens of a member
            x = x * factor[:, None] + shift[:, None]
        x = self.pos_drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(Transformer):
    """Vision transformer, (B, in_channels, *img_size) -> (B, out_channels, *img_size).

    img_size: points along each axis, two or three of them.
    patch_size: points of a patch along each axis, or one number for all.
    Raises ValueError where a patch does not divide the image, or num_heads does not divide embed_dim.
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
        noise_features: int = 0,
    ):
        grid, patch_size = patch_grid(img_size, patch_size)
        patch_embed = PatchEmbed(patch_size, in_channels, embed_dim)
        head = ImageHead(grid, patch_size, out_channels, embed_dim)
        blocks = []
        for _ in range(depth):
            attention = Attention(embed_dim, num_heads, dropout)
            blocks.append(Block(attention, embed_dim, mlp_ratio, dropout))
        super().__init__(
            patch_embed=patch_embed,
            blocks=blocks,
            head=head,
            grid=grid,
            patch_size=patch_size,
            embed_dim=embed_dim,
            dropout=dropout,
            noise_features=noise_features,
        )
