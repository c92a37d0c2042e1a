"""A convolution over bands must equal that of the whole image; in the backward pass too."""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from exercises.checks.common import Draw, Wrong, expect, expect_same, expect_tensor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `Halo` by a convolution, forward and backward. Raises Wrong."""
    for r in (1, 2, draw.integer(1, 2)):  # a halo of one row cannot be upside down
        channels = draw.integer(1, 3)
        width = draw.integer(4, 7)
        heights = [draw.integer(2 * r, 7) for _ in range(size)]
        height = sum(heights)
        image = draw.tensor(channels, height, width).requires_grad_()
        kernel = draw.tensor(2, channels, 2 * r + 1, 3)
        weights = draw.tensor(2, height, width)
        whole = F.conv2d(image, kernel, padding=(r, 1))  # (2, height, width)
        (image_grad,) = torch.autograd.grad((whole * weights).sum(), image)

        # Forward, on this rank's band of the image.
        first = sum(heights[:rank])
        rows = slice(first, first + heights[rank])
        band = image.detach()[:, rows].clone().requires_grad_()
        extended = exercise.Halo.apply(band, r)
        expect_tensor(extended, (channels, heights[rank] + 2 * r, width), "the extended band")
        padded = F.pad(image.detach(), (0, 0, r, r))
        compare_rows(extended.detach(), padded, first, r)
        out = F.conv2d(extended, kernel, padding=(0, 1))
        expect(same(out, whole[:, rows]), "the convolution of the extended band is not that of the image")

        # Backward, and what the gradient would be without any message.
        own_weights = weights[:, rows]
        (out * own_weights).sum().backward()
        again = F.conv2d(extended, kernel, padding=(0, 1))
        (local,) = torch.autograd.grad((again * own_weights).sum(), extended)
        compare_gradient(band.grad, image_grad[:, rows], local, r)
        own_rows = image.detach()[:, rows]
        expect(torch.equal(band.detach(), own_rows), "the band itself was changed")


def compare_rows(got: Tensor, padded: Tensor, first: int, r: int) -> None:
    """padded: the image with r rows of 0 at its top and bottom."""
    want = padded[:, first : first + got.shape[1]]
    if same(got, want):
        return
    expect(same(got[:, r:-r], want[:, r:-r]), "the rows of the band itself are not in the middle of the extended one")
    want_above = want[:, :r]
    want_below = want[:, -r:]
    if same(got[:, :r], want_above):
        side = "below"
        halo = got[:, -r:]
        want_halo = want_below
        other = want_above
    else:
        side = "above"
        halo = got[:, :r]
        want_halo = want_above
        other = want_below
    zeros = torch.zeros_like(want_halo)
    hint = "which rows does the neighbour need?"
    if same(want_halo, zeros):
        hint = "the image ends here, they are 0"
    hints = {
        "they are 0, did they come?": zeros,
        "they are upside down": want_halo.flip(1),
        "those from above and from below are swapped": other,
    }
    expect_same(halo, want_halo, f"the {r} rows {side} the band are not those of the image", hint, hints)


def compare_gradient(grad: Tensor | None, want: Tensor, local: Tensor, r: int) -> None:
    """local: the gradient of the extended band that this rank computes alone."""
    grad = expect_tensor(grad, want.shape, "the gradient of the band")
    if same(grad, want):
        return
    own = local[:, r:-r]
    rows = range(want.shape[1])
    wrong = [row for row in rows if not same(grad[:, row], want[:, row])]
    beside_cuts = {*rows[:r], *rows[-r:]}
    hint = "does it travel to the rank that owns the rows?"
    if same(grad, own):
        hint = "they have only what this rank gives: the halo's gradient was dropped, send it to the owner"
    elif set(wrong) - beside_cuts:
        hint = "those in the middle need no message: is it the gradient of the band, without the halo?"
    elif all(same(grad[:, row] + own[:, row], want[:, row]) for row in wrong):
        hint = "they have only what the neighbour gives: it is to be added to what is there"
    raise Wrong(f"the gradient of rows {wrong} of the band is wrong: {hint}")
