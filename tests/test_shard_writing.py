"""Parts of a ShardTensor that are written in place: rows, slices, masks and tensors of indices, split in many ways."""

import numpy as np
import pytest
import torch

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all

# Of h (3, 7, 4), made of x; y (3, 7, 4) is split as x; z (7, 4) and w (4,) are plain.
ROWS = [
    "h[:, 0] = 2.0", "h[:, -1] *= 0.5", "h[:, 3] += w", "h[:, 0] = w", "h[1] = z", "h[0, 2, 3] = 1.5",
    "h[:, 6, 1:3] = 0",
    "h[:, -1, :] -= h[:, 0, :]", "h[:, 2] = y[:, 5]", "h[:, 2] = y.mean(1)", "h[2, 4] = h[2, 4].clone() * w",
    "h[:, 1].mul_(w)",
    "h[:, 1].zero_()", "h[..., 0] = h[..., 1]", "h[:, 5:6] = z[:1]", "h[:, 4] = x[:, 4].tanh() * w.sum()",
    "h[:, 0].copy_(w)", "h[:, 2].clamp_(min=-0.5)", "h[:, 3] /= 2", "h[:, 3, None] = z[2]", "h[None, :, 6] = w",
    "h[0, 2:6] = h[0, 2:6].mT.clone()",
    "t = h[:, 3]; t *= 2; t += w; h[:, 1] = t.exp()",
]  # fmt: skip
PLACES = [
    "h[:, MASK] = 0.0", "h[:, MASK] = 3", "h[:, MASK] = z[:1, :1]", "h[:, MASK] = y[:, MASK] * 2", "h[:, MASK] *= 0.5",
    "h[:, ROWS_MASK] = w", "h[:, ROWS_MASK] = z[:3]", "h[:, [0, 5]] = 0", "h[:, [5, 0]] = z[:2]", "h[:, [6, -7]] += w",
    "h[:, torch.tensor([0, 3]), torch.tensor([1, 2])] = w[:2]", "h[..., [0, 2]] = z[:, :2]", "h[[0, 2], 3] = w",
    "h[[2, 0]] = y[:2]", "h[:, [[0, 1], [4, 6]], :] = z[:4].view(2, 2, 4)", "h[1:, MASK] = 1.0", "h[FULL] = 0.5",
    "h[FULL] = z.sum()", "h[:, MASK] = w.sum()", "h[FULL] = x[FULL] * 3", "h[:, range(1, 7, 2)] = w",
    "h[h > 0.5] = 0.0",
    "h[(y > 0)[..., 0]] = 1.0", "h[(y > 0)[..., 0]] = w", "h[:, :, np.array([True, False, True, False])] = 0",
    "h[:, torch.tensor(2), [1, 3]] = z[0, :2]", "h[:, []] = 1.0", "h[:, 1:5, [0, 3]] = z[:4, :2]",
]  # fmt: skip
MASK = torch.arange(28).view(7, 4) % 3 == 1
FULL = torch.arange(84).view(3, 7, 4) % 5 == 2
ROWS_MASK = torch.arange(7) % 3 == 0
NAMES = {"torch": torch, "MASK": MASK, "FULL": FULL, "ROWS_MASK": ROWS_MASK}
LAYOUTS = {
    2: [
        X((3, 7, 4), (1,)),
        X((3, 7, 4), (1,), {0: (7, 0)}),
        X((3, 7, 4), (1,), {0: (2, 5)}),
        X((3, 7, 4), (2,), {0: (1, 3)}),
        X((3, 7, 4), (0,)),
        X((3, 7, 4)),
    ],
    3: [X((3, 7, 4), (1,)), X((3, 7, 4), (1,), {0: (1, 0, 6)})],
    4: [X((3, 7, 4), (1, 2)), X((3, 7, 4), (2, 1), {0: (1, 3), 1: (6, 1)})],
}


def changed(x, y, z, w, code):
    """Change a tensor made of x, so that earlier and later values of it count."""
    h = x * 1
    try:
        exec(code, NAMES | {"h": h, "x": x, "y": y, "z": z, "w": w, "np": np})
    except RuntimeError as error:
        error.add_note(f"{code} of {x}")
        raise
    return h * h + x


def cases(size):
    """All writes, in all layouts of so many ranks."""
    mesh = (2, 2) if size == 4 else ()
    for x in LAYOUTS[size]:
        for code in ROWS + PLACES:
            yield Case(changed, (x, x), ((7, 4), (4,)), mesh, torch.float64, {"code": code})


@pytest.mark.parametrize("size", slow_but([2, 3], [2, 3, 4], "tiles"))
def test_writes_in_place_give_what_they_give_on_whole_tensors(ranks, size):
    ranks(size, check_all, list(cases(size)))
