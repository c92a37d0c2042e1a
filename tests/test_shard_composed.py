"""Functions of torch and layers on split images, windows by strides, and plain tensors that take split values."""

import pytest
import torch
from torch.nn import functional as F

from distributed.shard_tensor import ShardTensor, local
from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, split

IMAGES = [  # x (2, 4, 9, 8), y (2, 4, 9, 8), z plain (4,)
    "F.prelu(x, z)", "F.channel_shuffle(x, 2)", "F.lp_pool2d(x.abs() + 1, 2, 3, 2)", "F.local_response_norm(x, 3)",
    "F.unfold(x, 3)", "F.unfold(x, (3, 2), padding=1, stride=2)", "F.unfold(x, 2, dilation=2)",
    "F.unfold(x, 3, stride=3, padding=(0, 2))", "F.fold(F.unfold(x, 3, padding=1), (9, 8), 3, padding=1)",
    "F.fold(F.unfold(x, 2, stride=2), (9, 8), 2, stride=2)", "F.dropout2d(x, 0.0)", "F.dropout2d(x, 0.5, False)",
    "F.dropout2d(x * 1, 0.0, True, True)",
    "F.alpha_dropout(x, 0.3, False)", "F.interpolate(x, (18, 16), mode='bicubic')",
    "F.interpolate(x, (5, 11), mode='bicubic', align_corners=True)",
    "F.interpolate(x, (4, 5), mode='bilinear', antialias=True)",
    "F.interpolate(x, (4, 5), mode='bicubic', antialias=True)", "F.interpolate(x, scale_factor=1.7, mode='bicubic')",
    "F.grid_sample(x, y[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)",
    "F.grid_sample(x, y[:, :2, :3].permute(0, 2, 3, 1), 'bilinear', 'border', True)",
    "F.grid_sample(x, z.view(1, 2, 1, 2).expand(2, -1, -1, -1), padding_mode='reflection', align_corners=False)",
    "torch.stack(torch.meshgrid(x[0, 0, :, 0], y[0, 0, 0], indexing='ij'))",
    "torch.stack(torch.meshgrid(x[0, 0, :, 0], z, y[0, 0, 0], indexing='xy'))",
    "torch.meshgrid([x[0, 0, :, 0], x[1, 0, :, 0]], indexing='ij')[1] * 2",
    "F.instance_norm(x, torch.zeros(4).double(), torch.ones(4).double(), z)",
]  # fmt: skip


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_functions_of_images_give_what_the_whole_gives(ranks, world):
    mesh, cuts = (2, 2) if world == 4 else (), {2: [(4, 5), (9, 0)], 3: [(5, 0, 4)], 4: [(3, 6)]}
    images = [X((2, 4, 9, 8), (2, 3) if mesh else (2,), {0: cut}) for cut in cuts[world]]
    ranks(world, check_all, [Case(code, (x, x), ((4,),), mesh, torch.float64) for x in images for code in IMAGES])


def refused_strides():
    """Tensors out of row-major order on one rank, or broken up, are refused on all ranks alike."""
    x = split(draw((3, 8, 4), torch.float64, 0), X((3, 8, 4), (1,)), domain_mesh())
    columns = split(draw((3, 7, 4), torch.float64, 0), X((3, 7, 4), (2,)), domain_mesh())
    for y in (x.transpose(1, 2), x[:, 4:], x[:, 1:], x[:, :, 1:]):
        with pytest.raises(NotImplementedError, match=r"no rule for as_strided.*not in row-major order"):
            y.as_strided((2, 2), (2, 1))
    for y, sizes, strides in ((columns, (3, 5, 3, 4), (28, 4, 4, 1)), (x, (8, 4), (4, 1))):
        with pytest.raises(NotImplementedError, match=r"no rule for as_strided.*not in one piece"):
            y.as_strided(sizes, strides)
    with pytest.raises(NotImplementedError, match=r"no rule for as_strided_"):
        x.detach().as_strided_((2, 2), (2, 1))
    with pytest.raises(RuntimeError, match="as_strided: sizes"):
        x.as_strided((97,), (1,))
    with pytest.raises(NotImplementedError, match="in place on what as_strided copied"):
        x.detach().as_strided((3, 8, 4), (32, 4, 1)).add_(1)


def test_strides_of_another_order_are_refused(ranks):
    ranks(2, refused_strides)


def dropped():
    """Channels that are dropped, of a split image: on every rank the same, and as many as asked for."""
    x = split(torch.ones(64, 8, 6, 2, dtype=torch.float64), X((64, 8, 6, 2), (2,)), domain_mesh())
    found = []
    for name in ("dropout2d", "feature_alpha_dropout", "alpha_dropout"):
        torch.manual_seed(0)  # the default generators of ranks that share an image are alike
        y = getattr(F, name)(x, 0.25, True)
        assert isinstance(y, ShardTensor) and y.shape == x.shape
        whole = y.full_tensor()
        if name != "alpha_dropout":
            assert (whole == whole[:, :, :1, :1]).all(), name
        kept = (whole == whole.max()).double().mean().item()
        assert abs(kept - 0.75) < 0.1, (name, kept)
        found.append(whole[:, :, 0, 0])
    assert set(found[0].unique().tolist()) == {0.0, 1 / 0.75}
    return [y.tolist() for y in found[:2]]


def test_channels_are_dropped_alike_on_all_ranks(ranks):
    first, second = ranks(2, dropped)
    assert first == second


def filled():
    """A plain tensor takes split values only if nothing else sees it."""
    x = split(draw((3, 7, 4), torch.float64, 0), X((3, 7, 4), (1,)), domain_mesh())
    out = torch.zeros(3, 7, 4, dtype=torch.float64)
    out[:, :, 1:3] = x[:, :, 1:3]
    assert isinstance(out, ShardTensor) and local(out).shape == local(x).shape
    total = torch.zeros(3, 7, 4, dtype=torch.float64)
    total += x
    assert isinstance(total, ShardTensor)
    running = torch.zeros(4, dtype=torch.float64)
    running.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    assert type(running) is torch.Tensor
    torch.testing.assert_close(running, x.full_tensor().mean((0, 1)).detach() * 0.1)
    seen = torch.zeros(3, 7, 4, dtype=torch.float64)
    view = seen[1:]
    for write in (
        lambda: seen.__setitem__(slice(None), x),
        lambda: view.__setitem__(slice(None), x[1:]),
        lambda: seen.add_(x),
    ):
        with pytest.raises(NotImplementedError, match="a plain tensor cannot take the values of a split one"):
            write()
    assert not seen.any()


def test_a_plain_tensor_that_others_see_takes_no_split_values(ranks):
    ranks(2, filled)
