"""Vision transformer that classifies images, in two or three dimensions: the example of the domain-parallel lesson.

Method: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words" (arXiv:2010.11929), with a normalized patch embedding
and the mean over all tokens instead of a class token. The rest is the forecasting model's.

Shapes in comments: B batch, C channels, N tokens, D embedding size.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from networks.vit import LAYER_NORM_EPS, Attention, Block, Linear, PatchEmbed, PerAxis, Transformer, patch_grid


class NormalizedPatchEmbed(PatchEmbed):
    """Patches to tokens, then LayerNorm and ReLU: (B, C, *img_size) -> (B, N, D)."""

    def __init__(self, patch_size: tuple[int, ...], in_channels: int, embed_dim: int):
        super().__init__(patch_size, in_channels, embed_dim)
        self.norm = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, *img_size) -> tokens, (B, N, D)."""
        tokens = self.norm(super().forward(x))
        return F.relu(tokens)


class ClassHead(nn.Module):
    """Mean over the tokens, then one linear layer: (B, N, D) -> (B, num_classes)."""

    def __init__(self, embed_dim: int, num_classes: int):
        super().__init__()
        self.proj = Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, N, D) -> logits, (B, num_classes)."""
        image = x.mean(1)  # (B, D)
        return self.proj(image)


class Classifier(Transformer):
    """Vision transformer, (B, in_channels, *img_size) -> (B, num_classes), not normalized.

    img_size: points along each axis, two or three of them.
    patch_size: points of a patch along each axis, or one number for all.
    Raises ValueError where a patch does not divide the image, or num_heads does not divide embed_dim.
    """

    def __init__(
        self,
        img_size: Sequence[int],
        patch_size: PerAxis = 8,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
    ):
        grid, patch_size = patch_grid(img_size, patch_size)
        patch_embed = NormalizedPatchEmbed(patch_size, in_channels, embed_dim)
        head = ClassHead(embed_dim, num_classes)
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
        )
