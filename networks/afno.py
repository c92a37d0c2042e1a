"""FourCastNet: a vision transformer whose tokens mix by filters in the space of frequencies instead of attention.

Method: Pathak et al. 2022, "FourCastNet" (arXiv:2202.11214), with the adaptive Fourier neural operator of Guibas et al.
2021 (arXiv:2111.13587). Every token sees all others at a cost of N log N for N tokens.

Shapes in comments: B batch, h x w tokens, D embedding size, k blocks of d features, D = k d.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.vit import Block, ImageHead, PatchEmbed, PerAxis, Transformer, patch_grid


class FourierFilter(nn.Module):
    """A two-layer network on the features of each frequency: (B, h, w, D) -> (B, h, w, D).

    num_blocks: the features of a frequency are mixed within so many blocks, a divisor of D. sparsity: numbers of the
    filtered spectrum that are smaller than this become zero.
    """

    def __init__(self, embed_dim: int, num_blocks: int, sparsity: float):
        super().__init__()
        if embed_dim % num_blocks:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_blocks {num_blocks}")
        size = embed_dim // num_blocks
        self.num_blocks = num_blocks
        self.sparsity = sparsity
        # The first dimension has the real and the imaginary part: (2, k, d, d) and (2, k, d).
        self.weight1 = nn.Parameter(torch.empty(2, num_blocks, size, size))
        self.weight2 = nn.Parameter(torch.empty(2, num_blocks, size, size))
        self.bias1 = nn.Parameter(torch.empty(2, num_blocks, size))
        self.bias2 = nn.Parameter(torch.empty(2, num_blocks, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, h, w, D) -> (B, h, w, D)."""
        dtype = x.dtype
        size = x.shape[1:3]
        # Half precision has no transforms of every size.
        wide = torch.promote_types(dtype, torch.float32)
        x = torch.fft.rfft2(x.to(wide), dim=(1, 2), norm="ortho")  # (B, h, w / 2 + 1, D), complex
        x = x.unflatten(-1, (self.num_blocks, -1))  # (B, h, w / 2 + 1, k, d)

        # A network of two layers acts on each frequency alone.
        weight1 = self.weight1.to(wide)
        real, imaginary = self._layer(x.real, x.imag, weight1, self.bias1)
        real = F.relu(real)
        imaginary = F.relu(imaginary)
        weight2 = self.weight2.to(wide)
        real, imaginary = self._layer(real, imaginary, weight2, self.bias2)

        x = torch.stack([real, imaginary], -1)  # (B, h, w / 2 + 1, k, d, 2)
        x = F.softshrink(x, self.sparsity)
        x = torch.view_as_complex(x.to(wide)).flatten(-2)  # (B, h, w / 2 + 1, D), complex
        x = torch.fft.irfft2(x, s=size, dim=(1, 2), norm="ortho")  # (B, h, w, D)
        return x.to(dtype)

    def _layer(
        self,
        real: Tensor,
        imaginary: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A linear layer of complex numbers in each block of features: (x + iy) (u + iv) = (xu - yv) + i (yu + xv)."""

        def times(x: Tensor, w: Tensor) -> Tensor:
            return torch.einsum("bhwki,kio->bhwko", x, w)

        out_real = times(real, weight[0]) - times(imaginary, weight[1])
        out_real = out_real + bias[0]
        out_imaginary = times(imaginary, weight[0]) + times(real, weight[1])
        out_imaginary = out_imaginary + bias[1]
        return out_real, out_imaginary


class AFNO(Transformer):
    """FourCastNet's network: (B, in_channels, H, W) -> (B, out_channels, H, W).

    img_size: (H, W). patch_size: points of a patch along both axes, or one number. num_blocks, sparsity: see
    FourierFilter. Raises ValueError where a patch does not divide the image, or num_blocks does not divide embed_dim.
    """

    def __init__(
        self,
        img_size: Sequence[int],
        patch_size: PerAxis,
        in_channels: int,
        out_channels: int,
        embed_dim: int,
        depth: int,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        num_blocks: int = 8,
        sparsity: float = 0.01,
        noise_features: int = 0,
    ):
        grid, patch_size = patch_grid(img_size, patch_size)
        patch_embed = PatchEmbed(patch_size, in_channels, embed_dim)
        head = ImageHead(grid, patch_size, out_channels, embed_dim)
        filters = [FourierFilter(embed_dim, num_blocks, sparsity) for _ in range(depth)]
        blocks = [Block(each, embed_dim, mlp_ratio, dropout, grid) for each in filters]
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
