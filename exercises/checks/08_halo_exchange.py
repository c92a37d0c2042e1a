"""A convolution over bands must equal that of the whole image; in the backward pass too."""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from exercises.checks.common import Draw, Wrong, expect, expect_same, expect_tensor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `Halo` by a convolution, forward and backward. Raises Wrong."""
    for _ in range(3):
        r, channels, width = draw.integer(1, 2), draw.integer(1, 3), draw.integer(4, 7)
        heights = [draw.integer(2 * r, 7) for _ in range(size)]
        image = draw.tensor(channels, sum(heights), width).requires_grad_()
        kernel, weights = draw.tensor(2, channels, 2 * r + 1, 3), draw.tensor(2, sum(heights), width)
        whole = F.conv2d(image, kernel, padding=(r, 1))
        (image_grad,) = torch.autograd.grad((whole * weights).sum(), image)
        first = sum(heights[:rank])
        rows = slice(first, first + heights[rank])
        band = image.detach()[:, rows].clone().requires_grad_()
        extended = exercise.Halo.apply(band, r)
        expect_tensor(extended, (channels, heights[rank] + 2 * r, width), "the extended band")
        compare_rows(extended.detach(), F.pad(image.detach(), (0, 0, r, r)), first, r)
        out = F.conv2d(extended, kernel, padding=(0, 1))
        expect(same(out, whole[:, rows]), "the convolution of the extended band is not that of the image")
        (out * weights[:, rows]).sum().backward()
        local = torch.autograd.grad((F.conv2d(extended, kernel, padding=(0, 1)) * weights[:, rows]).sum(), extended)[0]
        compare_gradient(band.grad, image_grad[:, rows], local, r)
        expect(torch.equal(band.detach(), image.detach()[:, rows]), "the band itself was changed")


def compare_rows(got: Tensor, padded: Tensor, first: int, r: int) -> None:
    """padded: the image with r rows of 0 at its top and bottom."""
    want = padded[:, first : first + got.shape[1]]
    if same(got, want):
        return
    expect(same(got[:, r:-r], want[:, r:-r]), "the rows of the band itself are not in the middle of the extended one")
    above, below, want_above, want_below = got[:, :r], got[:, -r:], want[:, :r], want[:, -r:]
    side = "below" if same(above, want_above) else "above"
    got, want, other = (below, want_below, want_above) if side == "below" else (above, want_above, want_below)
    zeros = torch.zeros_like(want)
    hint = "the image ends here, they are 0" if same(want, zeros) else "which rows does the neighbour need?"
    expect_same(got, want, f"the {r} rows {side} the band are not those of the image", hint, {
        "they are 0, did they come?": zeros, "they are upside down": want.flip(1),
        "those from above and from below are swapped": other,
    })  # fmt: skip


def compare_gradient(grad: Tensor | None, want: Tensor, local: Tensor, r: int) -> None:
    """local: the gradient of the extended band that this rank computes alone."""
    grad = expect_tensor(grad, want.shape, "the gradient of the band")
    if same(grad, want):
        return
    own, wrong = local[:, r:-r], [row for row in range(want.shape[1]) if not same(grad[:, row], want[:, row])]
    hint = "does it travel to the rank that owns the rows?"
    if same(grad, own):
        hint = "they have only what this rank gives: the halo's gradient was dropped, send it to the owner"
    elif set(wrong) - {*range(r), *range(want.shape[1] - r, want.shape[1])}:
        hint = "those in the middle need no message: is it the gradient of the band, without the halo?"
    elif all(same(grad[:, row] + own[:, row], want[:, row]) for row in wrong):
        hint = "they have only what the neighbour gives: it is to be added to what is there"
    raise Wrong(f"the gradient of rows {wrong} of the band is wrong: {hint}")
