"""Arithmetic of the vision transformer, for model FLOP utilisation."""

import math
from collections.abc import Sequence

from utils.schema import Config


def vit_flops(
    img_size: Sequence[int],
    patch_size: int,
    in_channels: int,
    out_channels: int,
    embed_dim: int,
    depth: int,
    mlp_ratio: float,
) -> float:
    """Floating-point operations of one forward pass of networks.vit.ViT on one sample.

    Matrix products only, a multiply-add counted as two. With N tokens of size D and patches of P points:

        patch embedding and head   2 N D P (in_channels + out_channels)
        each block                 2 N D^2 (4 + 2 mlp_ratio)   for qkv, proj, fc1, fc2
                                   4 N^2 D                     for the two products of attention

    A training step is counted as three forward passes (the backward pass has two products for each one), also where
    activation checkpointing computes more: utilisation is of the work the model needs (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B).
    """
    points = patch_size ** len(img_size)
    tokens = math.prod(img_size) // points
    ends = 2 * tokens * embed_dim * points * (in_channels + out_channels)
    block = 2 * tokens * embed_dim**2 * (4 + 2 * mlp_ratio) + 4 * tokens**2 * embed_dim
    return ends + depth * block


def training_flops(config: Config) -> float:
    """Floating-point operations of one training step on one sample."""
    return 3 * vit_flops(
        config.img_size, config.patch_size, config.n_in_channels, config.n_out_channels,
        config.embed_dim, config.depth, config.mlp_ratio,
    )  # fmt: skip
