"""Operations along one dimension, whole or split: Fourier transforms, sorting, windows; models of spectral blocks."""

import math

import pytest
import torch
from torch.nn import functional as F

from distributed.shard import redistribute
from tests.support.shard_parity import Case, X, check, check_all, domain_mesh, draw, split
from tools.instruments.counting import CollectiveCounter
from utils.torch_private import VERSION


def evaluate(*tensors, code):
    """A Python expression of x, y: tensors; complex results as pairs of real numbers."""
    names = {"torch": torch, "F": F, "math": math, "sht": sht, "afno": afno, "fno": fno}
    found = eval(code, {**names, **dict(zip("xyzw", tensors, strict=False))})
    real = lambda y: torch.view_as_real(y.resolve_conj()) if y.is_complex() else y  # noqa: E731
    return [real(y) for y in found] if isinstance(found, list | tuple) else real(found)


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


FOURIER = [
    *(f"torch.fft.{name}(x)" for name in ("fft", "ifft", "rfft", "fft2", "ifft2", "rfft2", "fftn", "ifftn", "rfftn")),
    *(f"torch.fft.{name}(x, dim={dim})" for name in ("fft", "rfft", "ifft") for dim in (0, 1)),
    "torch.fft.irfft(x + 0j)", "torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])",
    "torch.fft.irfftn(x + 0j, dim=(1, 0))", "torch.fft.rfft2(x, s=(6, 3), norm='ortho')",
    "torch.fft.irfft(x + 0j, n=9, dim=1)", "torch.fft.fft(x, 5, 1)", "torch.fft.fftshift(x)",
    "torch.fft.ifftshift(x, dim=(0, 1))", "torch.fft.fft2(x, norm='forward').abs().square().mean(1)",
    "torch.fft.rfftn(x, dim=(1, 2)).conj() * 2j", "torch.complex(x, x * 2).angle()", "torch.view_as_real(x * 1j)",
    "torch.view_as_complex(torch.stack([x, -x], -1)).mH", "torch.polar(x.abs(), x)", "(x * 1j).imag + (x * 1j).real",
    "torch.einsum('abc,acd->abd', x * 1j, x.mT + 0j)", "torch.fft.fft(x, dim=1).sum(1)",
    "(x + 1j * x).roll(2, 1).flip(1)",
]  # fmt: skip
SORTED = [
    "x.sort(1)", "x.sort(dim=2, descending=True)", "torch.sort(x, stable=True, dim=0)", "x.argsort(1)",
    "torch.msort(x)", "x.topk(2, 1)", "x.topk(2)", "x.kthvalue(2, 1)", "x.median(1)", "x.median()",
    "x.nanmedian(2, True)", "x.median(1).values", "x.quantile(0.3, 1)",
    "x.quantile(torch.tensor([0.1, 0.7], dtype=x.dtype), 2)", "torch.quantile(x, 0.5)",
    "x.quantile(0.25, dim=1, keepdim=True)", "x.cumprod(1)", "x.logcumsumexp(dim=1)", "x.cummax(1)",
    "x.cummin(2).values", "F.glu(torch.cat([x, x * 2], 2))", "F.glu(torch.cat([x, x * 2], 1), 1)", "torch.gradient(x)",
    "torch.gradient(x, spacing=0.5, dim=1)", "x.aminmax(dim=1)", "x.unfold(1, 3, 1)", "x.unfold(1, 2, 3)",
    "x.unfold(2, 2, 2)", "x.unfold(1, 7, 1)", "torch.unique((x.detach() * 2).round())",
]  # fmt: skip


def cases(world, codes):
    for sizes in {2: [(3, 4), (0, 7)], 3: [(2, 0, 5)], 4: []}[world]:
        for dim in (0, 1, 2):
            shape = [3, 5, 4]
            shape[dim] = sum(sizes)
            shape[1] = max(shape[1], 7)
            yield from (
                Case(evaluate, (X((tuple(shape)), (dim,), {0: sizes}),), (), (), torch.float64, {"code": c})
                for c in codes
            )
    if world == 4:
        for dims, sizes in (((1, 2), {0: (3, 4), 1: (3, 1)}), ((0, 1), {0: (2, 1), 1: (7, 0)})):
            yield from (
                Case(evaluate, (X((3, 7, 4), dims, sizes),), (), (2, 2), torch.float64, {"code": c}) for c in codes
            )


BLOCKS = {"afno(x, y, z)": (-3, ((2, 2, 2), (2, 2, 2))), "fno(x, y, z)": (-2, ((3, 3, 2, 3), (3, 3, 2, 3))),
          "sht(x, y)": (-2, ((4, 8),))}  # fmt: skip


def blocks(world):
    for code, (rows, weights) in BLOCKS.items():
        channels_last = rows == -3
        for sizes in {2: [(5, 3), (1, 7)], 3: [(3, 0, 5)], 4: [(4, 4)]}[world]:
            shape = (2, 8, 6, 4) if channels_last else (2, 3, 8, 6)
            dims = (4 + rows,) if world < 4 else (4 + rows, 5 + rows)
            x = X(shape, dims, {0: sizes} if world < 4 else {0: sizes, 1: (2, 4)})
            yield Case(evaluate, (x,), weights, () if world < 4 else (2, 2), torch.float64, {"code": code})


@pytest.mark.parametrize("world", [2, 3, 4])
def test_along_any_dimension_as_for_the_whole(ranks, world):
    codes = FOURIER + SORTED
    if VERSION < (2, 13):
        codes.remove("x.aminmax(dim=1)")  # which has no derivative there
    ranks(world, check_all, list(cases(world, codes)))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_spectral_blocks_give_what_the_whole_gives(ranks, world):
    ranks(world, check_all, list(blocks(world)))


def messages(code, splits, mesh=()):
    x = split(draw((2, 8, 6, 4), torch.float64, 0), X((2, 8, 6, 4), splits), domain_mesh(mesh))
    with CollectiveCounter() as forward:
        y = evaluate(x, code=code)
        y = y[0] if isinstance(y, list | tuple) else y
    with CollectiveCounter() as backward:
        y.to_local().sum().backward()
    return dict(forward.calls), dict(backward.calls)


@pytest.mark.parametrize(
    ("code", "count"),
    [("torch.fft.rfft2(x, dim=(1, 2))", 2), ("torch.fft.irfft2(x + 0j, dim=(1, 2))", 2), ("torch.fft.fft(x, dim=2)", 0),
     ("torch.fft.rfft2(x, dim=(2, 3))", 0), ("x.sort(2)", 0), ("x.cumprod(1)", 2), ("x.topk(2, 1)", 1)],
)  # fmt: skip
def test_a_split_dimension_costs_two_all_to_alls(ranks, code, count):
    expected = {"all_to_all": count} if count else {}
    assert ranks(2, messages, code, (1,))[0] == (expected, expected)
    if "2)" in code and "fft2" in code:
        tiles = {"all_to_all": 2 * count} if "(1, 2)" in code else {"all_to_all": 2}
        assert ranks(4, messages, code, (1, 2), (2, 2))[0] == (tiles, tiles)


def without_the_exchange(code):
    exchange = redistribute.all_to_all
    redistribute.all_to_all = lambda x, sent, received, group: x.sum() * 0 + x.new_zeros(sum(received))
    try:
        check(Case(evaluate, (X((3, 7, 4), (1,), {0: (3, 4)}),), keywords={"code": code}))
    except AssertionError as error:
        return str(error)
    finally:
        redistribute.all_to_all = exchange


@pytest.mark.parametrize("code", ["torch.fft.fft(x, dim=1)", "x.sort(1)"])
def test_a_missing_exchange_is_noticed(ranks, code):
    assert all("output 0" in found for found in ranks(2, without_the_exchange, code))
