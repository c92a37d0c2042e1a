"""Functions of torch and layers that are made of several operations, and rows that other tensors choose."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from distributed.shard_tensor import ShardTensor, local
from tests.support.shard_parity import Case, X, check, check_all, domain_mesh, draw, split


def evaluate(*tensors, code):
    """A Python expression of x, y, z: the tensors, plain weights last."""
    return eval(code, {"torch": torch, "F": F, "dist": dist, **globals(), **dict(zip("xyz", tensors, strict=False))})


def layer(make, x, *args, **keywords):
    """A layer with weights of a seed, applied to tensors."""
    torch.manual_seed(0)
    module = make().double()
    return module(x, *args, **keywords)


def mha(**options):
    return lambda: nn.MultiheadAttention(4, 2, batch_first=True, **options)


def encoder(**options):
    return lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **options)


def decoder():
    return nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)


def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 2, enable_nested_tensor=False)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def scattered(x, index):
    return torch.zeros_like(x).scatter_add(1, index, x)


def zeroed(x, mask):
    out = x * 1
    out[mask] = 0.0
    return out * x


TOKENS = [  # x (3, 7, 4), y (3, 7, 4), z plain (2, 4)
    "layer(mha(), x, x, x)", "layer(mha(), x, x, x, need_weights=False)[0]",
    "layer(mha(), x, y, y, need_weights=False)[0]", "layer(mha(), x, x, x, attn_mask=causal(7))",
    "layer(mha(), x, x, x, need_weights=False, attn_mask=causal(7))[0]", "layer(mha(kdim=4, vdim=4), x, y, y)[0]",
    "layer(mha(), z.expand(3, -1, -1), x, x, need_weights=False)[0]",
    "layer(mha(), x, z.expand(3, -1, -1), z.expand(3, -1, -1), need_weights=False)[0]",
    "layer(mha(), x, x, x, key_padding_mask=torch.arange(21).view(3, 7) % 7 > 4, need_weights=False)[0]",
    "layer(encoder(), x)", "layer(encoder(norm_first=True), x)", "layer(decoder, x, y)",
    "layer(decoder, z.expand(3, -1, -1), y)", "layer(transformer, x.transpose(0, 1))",
    "layer(transformer, x.transpose(0, 1), mask=causal(7))",
    "F.scaled_dot_product_attention(x[:, None], z[None, None], z[None, None])",
    "F.scaled_dot_product_attention(z[None], y, y)", "F.scaled_dot_product_attention(x, y, y, is_causal=True)",
    "F.scaled_dot_product_attention(*[x.view(3, 7, 1, 2, 2).transpose(2, 3)] * 3)",
    "F.scaled_dot_product_attention(*[x.view(3, 7, 2, 2, 1).permute(0, 2, 3, 1, 4)] * 3, attn_mask=causal(7))",
    "F.scaled_dot_product_attention(x, y, z.repeat(1, 2)[:1].expand(1, 7, -1))",
    "F.scaled_dot_product_attention(x[0], y[0], y[0])", "layer(lambda: nn.LSTM(4, 3, 2, batch_first=True), x)[0]",
    "layer(lambda: nn.GRU(4, 3, bidirectional=True), x)", "layer(lambda: nn.LSTM(4, 4, proj_size=2), x)[1]",
    "layer(lambda: nn.RNN(4, 3, batch_first=True), x.transpose(0, 1))[0]",
    "F.bilinear(x, y, z.view(2, 4, 1) * torch.arange(4.), z[:, 0])", "F.cosine_similarity(x, y)",
    "F.cosine_similarity(x, y, dim=2)", "F.softmin(x, 1)", "torch.cdist(x, y)", "torch.cdist(x, z.expand(3, -1, -1))",
    "torch.cdist(x, y, p=1)", "x.diff(dim=1)", "torch.diff(x, 2, 0)", "x.diff(dim=1, prepend=y[:, :1])",
    "torch.trapezoid(x, dim=1)", "torch.trapz(x, torch.arange(7.).square(), dim=1)", "torch.trapezoid(x, y, dim=2)",
    "torch.trapezoid(x, dx=0.1)", "torch.rot90(x, 1, (1, 2))", "x.rot90(2, (0, 1))", "x.rot90(-1, (2, 1))",
    "F.prelu(x, z[0, :1])", "torch.prelu(x[:, :, 0], z[0, :1])", "x.index_select(1, torch.tensor([3, 0, 6]))",
    "x[:, [3, 0, 6]]", "x[torch.tensor([0, 2]), torch.tensor([6, 1])]", "x[:, torch.arange(7) % 2 == 0]",
    "x.gather(1, (y.detach().abs() * 2).long() % 7)", "x.gather(1, torch.tensor([[[3]]]).expand(3, 1, 4))",
    "torch.take_along_dim(x, y.detach().argsort(1), 1)", "scattered(x, (y.detach().abs() * 2).long() % 7)",
    "x.scatter(1, (y.detach() * 0).long()[:, :1] + 2, y[:, :1])", "x.scatter(2, torch.zeros(3, 7, 1).long(), 3.0)",
    "torch.zeros(3, 7, 4).scatter_add(1, (y.detach().abs() * 2).long() % 7, x.float())",
    "x.scatter_reduce(1, (y.detach().abs() * 2).long() % 7, y, 'amax')",
    "x.index_add(1, torch.tensor([2, 2, 5]), y[:, :3])", "x.index_add(0, torch.tensor([1]), y[:1], alpha=2)",
    "x.index_copy(2, torch.tensor([1]), y[:, :, :1])", "x.index_fill(1, torch.tensor([1, 4]), 0.5)",
    "(x * 1).index_fill_(2, torch.tensor([1]), 0)",
    "torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype))",
    "x * x.new_ones(3, 1, 1) + x.new_tensor([1.0, 2, 3, 4])", "x + x.new_zeros(x.shape) + x.new_full((4,), 2.0)",
    "torch.ones_like(x) * x", "x[0][x[0] > 0]", "x[:1][y[:1] > 0]", "x[0].masked_select(x[0] > 9)",
    "x[0][y[0, :, 0] > 0]", "x[y > 0]", "x[x[..., 0] > 0]", "x.transpose(1, 2)[y.transpose(1, 2) > 0]",
    "x.flatten(1)[y.flatten(1) > 0] * 2", "x.flatten()[y.flatten() > 0]", "x[(z[0] > 9) & (y > 0)]", "zeroed(x, y > 0)",
    "x.masked_select(torch.arange(84).view(3, 7, 4) % 3 == 1)", "F.gaussian_nll_loss(x, y, x.square())",
]  # fmt: skip
MAY_BE_REFUSED = {  # in place along a split dimension
    "(x * 1).index_fill_(2, torch.tensor([1]), 0)",
}  # fmt: skip
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
    "F.instance_norm(x, torch.zeros(4).double(), torch.ones(4).double(), z)",
]  # fmt: skip


def table(world):
    mesh, double = (2, 2) if world == 4 else (), torch.float64
    sizes = {2: [(3, 4), (7, 0)], 3: [(2, 0, 5)], 4: [(3, 4)]}[world]
    for cut in sizes:
        x = X((3, 7, 4), (1, 2) if mesh else (1,), {0: cut, 1: (1, 3)} if mesh else {0: cut})
        others = [(x, x)] if mesh else [(x, x), (X((3, 7, 4), (2,)), X((3, 7, 4), (0,)))]
        for pair in others:
            yield from (Case(evaluate, pair, ((2, 4),), mesh, double, {"code": code}) for code in TOKENS)
    for cut in {2: [(4, 5), (9, 0)], 3: [(5, 0, 4)], 4: [(3, 6)]}[world]:
        x = X((2, 4, 9, 8), (2, 3) if mesh else (2,), {0: cut})
        yield from (Case(evaluate, (x, x), ((4,),), mesh, double, {"code": code}) for code in IMAGES)


def check_or_refuse(world):
    for case in table(world):
        try:
            check(case)
        except NotImplementedError:
            assert case.keywords["code"] in MAY_BE_REFUSED, case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_composed_functions_give_what_the_whole_tensors_give(ranks, world):
    ranks(world, check_or_refuse, world)


STRIDED = [  # x (3, 7, 4), in rows
    "x.as_strided((3, 7, 4), (28, 4, 1))", "x.as_strided((3, 5, 3, 4), (28, 4, 4, 1))",
    "torch.as_strided(x, (3, 4, 7), (28, 1, 4), 0)",
    "x.as_strided((2, 4, 3), (0, 1, 28))", "x.flatten(1).as_strided((3, 3, 14), (28, 7, 1))",
    "x[0].as_strided((2, 3, 2), (12, 4, 2))",
    "x.as_strided((3, 3, 1, 2, 4), (28, 8, 9, 4, 1))",
]  # fmt: skip


def strided_cases(world):
    for sizes in {2: [(4, 3)], 3: [(2, 1, 4)]}[world]:
        for dims, cut in (((1,), {0: sizes}), ((0,), None)):
            x = X((3, 7, 4), dims, cut)
            yield from (Case(evaluate, (x,), (), (), torch.float64, {"code": code}) for code in STRIDED)


def refused_strides():
    """What is not in row-major order on one of the ranks, or has been broken up, on all ranks alike."""
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


@pytest.mark.parametrize("world", [2, 3])
def test_windows_by_strides_are_those_of_the_whole_tensor(ranks, world):
    ranks(world, check_all, list(strided_cases(world)))


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


def instance_statistics():
    """Running statistics of instance norm, two steps and one in evaluation mode."""
    torch.manual_seed(0)
    whole = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).double()
    mine = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).double()
    for step in range(3):
        whole.train(step < 2), mine.train(step < 2)
        full = draw((3, 4, 7, 5), torch.float64, step).detach() * 2 + 1
        part = split(full, X((3, 4, 7, 5), (2,), {0: (2, 5)}), domain_mesh())
        torch.testing.assert_close(mine(part).full_tensor(), whole(full))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(mine, name), getattr(whole, name))


def test_instance_norm_keeps_the_running_statistics_of_the_whole(ranks):
    ranks(2, instance_statistics)


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
