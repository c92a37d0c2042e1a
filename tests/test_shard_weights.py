"""Weights of layers that are computed from a split image: dynamic kernels, gates, hypernetworks."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, split

WEIGHTS = {  # made of x (2, 4, 9, 8) and y plain (4, 120): numbers (120,)
    "a sum over the ranks": "(x.mean((0, 2, 3)) @ y)",
    "a copy on every rank": "(x.mean((0, 2, 3)) @ y).tanh()",
    "split over the ranks": "(x.mean((0, 1, 3))[:, None] @ y[:1]).flatten()",
}
TAKING = [  # functions with a weight or a bias, which W stands for
    "F.conv1d(x.flatten(2), W[:36].view(3, 4, 3), W[:3], padding=1)",
    "F.conv1d(x[:, :, 0], W[:8].view(2, 4, 1), W[:2])",
    "F.conv2d(x, W[:108].view(3, 4, 3, 3), W[:3], padding=1)",
    "F.conv2d(x, W[:16].view(4, 4, 1, 1))", "F.conv2d(x, W[:36].view(4, 1, 3, 3), None, 2, 1, groups=4)",
    "F.conv2d(x, y[:, :36].view(4, 4, 3, 3), bias=W[:4], padding='same')",
    "F.conv3d(x[:, :, None], W[:48].view(4, 4, 1, 3, 1), W[:4], padding=(0, 1, 0))",
    "F.conv_transpose1d(x[:, :, :, 0], W[:24].view(4, 2, 3), W[:2])",
    "F.conv_transpose2d(x, W[:96].view(4, 2, 4, 3), W[:2], stride=2)",
    "F.conv_transpose3d(x[:, :, None], W[:24].view(4, 2, 1, 3, 1), W[:2])",
    "F.linear(x, W[:24].view(3, 8), W[:3])", "F.linear(x.mT, W[:27].view(3, 9), W[:3])",
    "F.linear(x, y[:3, :8], bias=W[:3])", "F.linear(x.mT, y[:3, :9], W[:3])",
    "x @ W[:16].view(8, 2)", "x.mT @ W[:9]", "torch.einsum('bchw,cd->bdhw', x, W[:8].view(4, 2))",
    "torch.addmm(W[:2], x[0, 0], W[:16].view(8, 2))", "torch.baddbmm(W[:2], x[0], W[:64].view(4, 8, 2))",
    "F.layer_norm(x, (8,), W[:8], W[8:16])", "F.layer_norm(x, (9, 8), W[:72].view(9, 8), W[1:73].view(9, 8))",
    "F.layer_norm(x, (8,), y[0, :8], W[:8])",
    "F.rms_norm(x, (8,), W[:8])", "F.rms_norm(x, (9, 8), W[:72].view(9, 8))",
    "F.group_norm(x, 2, W[:4], W[4:8])", "F.group_norm(x, 4, y[0, :4], W[:4])",
    "F.instance_norm(x, None, None, W[:4], W[4:8])", "F.batch_norm(x, None, None, W[:4], W[4:8], training=True)",
    "F.batch_norm(x, y.detach()[0, :4], y.detach()[1, :4].square(), W[:4], W[4:8])",
    "F.batch_norm(x, W.detach()[:4], W.detach()[4:8].square(), y[0, :4], W[:4])",
    "F.bilinear(x, x, W[:64].view(1, 8, 8), W[:1])", "F.prelu(x, W[:4])", "F.prelu(x, W[:1])",
    "F.embedding((x.detach() * 2).long() % 5, W[:10].view(5, 2))",
    "F.scaled_dot_product_attention(x, x, x, attn_mask=W[:81].view(9, 9))",
    "F.scaled_dot_product_attention(x, W[:24].view(3, 8).expand(2, 4, 3, 8), W[:24].view(3, 8).expand(2, 4, 3, 8))",
    "F.multi_head_attention_forward(x[:, 0], x[:, 0], x[:, 0], 8, 1, W[:24].view(24, 1) * y[0, :8], W[:24], None, "
    "None, False, 0.0, W[:64].view(8, 8), W[:8])[0]",
    "torch.lstm(x[:, 0], (x[:1, 0] * 0, x[:1, 0] * 0), [W[:32].view(32, 1) * y[0, :8], W[:32].view(32, 1) * y[1, :8], "
    "W[:32], W[1:33]], True, 1, 0.0, False, False, False)[0]",
    "F.mse_loss(x, x.detach() * 2, weight=W.detach()[:8].square().expand(2, 4, 9, 8))",
    "F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), W[:8].square().detach(), "
    "pos_weight=W.detach()[:8].square())",
    "F.cross_entropy(x, (x.detach()[:, 0] * 2).long() % 4, W.detach()[:4].square())",
    "F.cross_entropy(x, x.detach().softmax(1), W[:4].square() + 1)",
    "x.addcmul(W[:8], W[8:16])", "x.lerp(W[:8], W[8:16])", "x.clamp(min=W[:8])", "torch.where(x > 0, W[:8], x)",
    "(x * 1).mul_(W[:8]).add_(W[:4, None, None])", "torch.cdist(x[0], W[:16].view(2, 8).expand(4, 2, 8))",
    "F.grid_sample(x, W[:24].view(1, 3, 4, 2).expand(2, 3, 4, 2).tanh(), align_corners=False)",
    "torch.quantile(x, W.detach()[:2].sigmoid(), 3)",
    "torch.gradient(x, spacing=(W[:8].detach().sort().values,), dim=3)[0]",
    "torch.bucketize(x, W[:8].detach().sort().values)",
    "torch.cat([x, W[:32].view(1, 4, 1, 8).expand(2, 4, 1, 8)], 2)", "torch.outer(x[0, 0, :, 0], W[:4])",
    "torch.linalg.cross(x[..., :3], W[:3].expand(2, 4, 9, 3))",
    "F.gaussian_nll_loss(x, x.detach(), W[:8].square().expand(2, 4, 9, 8) + 1)",
]  # fmt: skip


IMAGE = X((2, 4, 9, 8), (2,), {0: (6, 3)})


def weights_of(image, kinds=tuple(WEIGHTS)):
    """Every function with weights of some kinds, computed from an image."""
    for kind in kinds:
        for code in TAKING:
            yield Case(code.replace("W", WEIGHTS[kind]), (image,), ((4, 120),), (), torch.float64)


@pytest.mark.parametrize("world", slow_but([3], [2, 3], "another number of ranks, one of them without rows"))
def test_weights_that_are_computed_from_the_image_are_summed_and_so_are_their_gradients(ranks, world):
    images = {
        2: [IMAGE, X((2, 4, 9, 8))],
        3: [X((2, 4, 9, 8), (2,), {0: (5, 0, 4)})],
    }  # the second is whole on each rank
    ranks(world, check_all, [case for image in images[world] for case in weights_of(image)])


def changed_statistics():
    """Running statistics of which a rank has a term alone cannot be moved."""
    x = split(draw(IMAGE.shape, torch.float64, 0), IMAGE, domain_mesh())
    with pytest.raises(NotImplementedError, match="running statistics that a norm changes must be whole"):
        F.batch_norm(x, x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3)), training=True)


def test_running_statistics_that_are_a_sum_over_the_ranks_are_refused(ranks):
    ranks(2, changed_statistics)
