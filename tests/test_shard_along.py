"""Models of spectral blocks on split images, and what operations along a split dimension send."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, evaluate, messages, outputs, split


def afno(x, first, second):
    """Adaptive Fourier mixing of an image (B, H, W, C), with blocks of channels, as FourCastNet has it."""
    b, h, w, c = x.shape
    y = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, 2, c // 2)
    out = torch.zeros(b, h, w // 2 + 1, 2, c // 2, dtype=x.dtype)
    other = torch.zeros_like(out)
    kept = slice(1, h - 1), slice(0, w // 2)
    out[:, *kept] = F.relu(torch.einsum("...bi,bio->...bo", y[:, *kept].real, first)
                           - torch.einsum("...bi,bio->...bo", y[:, *kept].imag, second))  # fmt: skip
    other[:, *kept] = F.relu(torch.einsum("...bi,bio->...bo", y[:, *kept].imag, first))
    z = torch.view_as_complex(F.softshrink(torch.stack([out, other], -1), 0.01))
    return x + torch.fft.irfft2(z.reshape(b, h, w // 2 + 1, c), s=(h, w), dim=(1, 2), norm="ortho")


def fno(x, real, imaginary):
    """A spectral convolution of (B, C, H, W) with weights of the lowest frequencies."""
    weight = torch.complex(real, imaginary)
    modes = torch.fft.rfft2(x)
    out = torch.zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=modes.dtype)
    out[:, :, :2, :3] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :2, :3], weight)
    out[:, :, -2:, :3] = torch.einsum("bixy,ioxy->boxy", modes[:, :, -2:, :3], weight.conj())
    return torch.fft.irfft2(out, s=x.shape[-2:]) + x


def sht(x, legendre):
    """A transform to spherical harmonics and back: sums over latitude."""
    modes = 2 * math.pi * torch.view_as_real(torch.fft.rfft(x, dim=-1, norm="forward"))
    out = torch.zeros(*modes.shape[:-3], 4, *modes.shape[-2:], dtype=x.dtype)
    for i in (0, 1):
        out[..., i] = torch.einsum("...km,lk->...lm", modes[..., i], legendre)
    coefficients = torch.view_as_complex(out.contiguous()) * (1 + 2j)
    back = torch.einsum("...lm,lk->...km", torch.view_as_real(coefficients)[..., 0], legendre)
    return coefficients, torch.fft.irfft(back + 0j, n=x.shape[-1], dim=-1) * x


def blocks(world):
    """Each block on images split by rows, and by tiles of four ranks: channels last, then first."""
    tiles = {1: (2, 4)} if world == 4 else {}
    for rows in {2: [(5, 3), (1, 7)], 3: [(3, 0, 5)], 4: [(4, 4)]}[world]:
        for function, shape, weights in (
            (afno, (2, 8, 6, 4), [(2, 2, 2)] * 2),
            (fno, (2, 3, 8, 6), [(3, 3, 2, 3)] * 2),
            (sht, (2, 3, 8, 6), [(4, 8)]),
        ):
            height = shape.index(8)
            x = X(shape, (height, height + 1)[: 1 + len(tiles)], {0: rows} | tiles)
            yield Case(function, (x,), weights, (2, 2) if tiles else (), torch.float64)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_spectral_blocks_give_what_the_whole_gives(ranks, world):
    ranks(world, check_all, list(blocks(world)))


def counted(code, splits, mesh=()):
    x = split(draw((2, 8, 6, 4), torch.float64, 0), X((2, 8, 6, 4), splits), domain_mesh(mesh))
    return messages(lambda x: outputs(evaluate(x, code=code))[0], x)[::2]


@pytest.mark.parametrize(
    ("code", "count"),
    [("torch.fft.rfft2(x, dim=(1, 2))", 2), ("torch.fft.irfft2(x + 0j, dim=(1, 2))", 2), ("torch.fft.fft(x, dim=2)", 0),
     ("torch.fft.rfft2(x, dim=(2, 3))", 0), ("x.sort(2)", 0), ("x.cumprod(1)", 2), ("x.topk(2, 1)", 1)],
)  # fmt: skip
def test_a_split_dimension_costs_two_all_to_alls(ranks, code, count):
    expected = {"all_to_all": count} if count else {}
    assert ranks(2, counted, code, (1,))[0] == [expected, expected]
    if "2)" in code and "fft2" in code:
        tiles = {"all_to_all": 2 * count} if "(1, 2)" in code else {"all_to_all": 2}
        assert ranks(4, counted, code, (1, 2), (2, 2))[0] == [tiles, tiles]
