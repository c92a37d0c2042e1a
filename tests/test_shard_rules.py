"""Rules of ShardTensor against the whole tensors: a table of expressions, each of them split in many ways."""

from functools import wraps

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from distributed.shard.core import halo
from tests.support.shard_parity import Case, X, domain_mesh, draw, evaluate, hand_on, refused, split, without
from utils.torch_private import VERSION

ANY_PART = [  # of x (3, 7, 4)
    "x[:, 1:]", "x[:, :-1]", "x[:, 2:6]", "x[:, 1::2]", "x[:, ::3]", "x[:, 6:]", "x[:, 5:2]", "x[..., 1:3, :]",
    "x[:, 3]", "x[:, -1]", "x[1]", "x[0, 2, 3]", "x[:, 3:4, None]", "x[None, ..., 0]", "x[...]", "x[:, :, [0, 2, 2]]",
    "x[[2, 0]]", "x[:, 1:5, torch.tensor([[0, 1], [3, 3]])]", "x[torch.tensor([0, 2]), :, torch.tensor([1, 3])]",
    "x[1, :, torch.tensor([1, 3])]", "x[:, None, :, torch.tensor([1, 3])]", "x[torch.tensor(1), 2:]",
    "x[[0, 1], 2:4, None, [1, 3]]", "x.select(1, -2)", "x.narrow(1, 2, 4)", "torch.narrow(x, -1, 1, 2)",
    "x.index_select(2, torch.tensor([3, 1]))", "x.split(3, 1)", "torch.split(x, [2, 0, 5], dim=1)",
    "x.split([1, 3], -1)",
    "x.chunk(3, 1)", "x.chunk(2, dim=2)", "torch.tensor_split(x, 3, dim=1)", "x.tensor_split([2, 5], 1)",
    "x.split([3, 0, 4], 1)", "torch.chunk(x, 5, dim=1)",
    "x.unbind(1)", "torch.unbind(x)", "x[:, 1:] - x[:, :1]", "(x > 0)[:, 2]", "x.sum(0)[3]",
    "x[:, 2].square() + x[:, 3]",
    "x.flip(1)", "x.flip(0, 1)", "torch.flip(x, dims=(2,))", "x.roll(2, 1)", "x.roll(-1, 1)", "x.roll((1, 9), (0, 1))",
    "torch.roll(x, 1)", "x.repeat(1, 2, 1)", "x.repeat(2, 1, 1, 3)", "x.tile(2, 1)", "torch.tile(x, (2,))",
    "x.repeat_interleave(2, 1)", "torch.repeat_interleave(x, 3, dim=2)", "x.tril()", "x.triu(-1)", "x.mT.tril(2)",
    "torch.triu(x, 1)", "x.gather(2, torch.tensor([[[3], [0]]]).expand(3, -1, 1).repeat(1, 4, 1)[:, :7].long())",
    "torch.take_along_dim(x, x.detach().argmax(2, keepdim=True), 2)", "x.gather(2, x.detach().argmax(2, keepdim=True))",
]  # fmt: skip
VIEWS = [
    "x.view(3, 7, 2, 2)", "x.reshape(21, 4)", "x.reshape(shape=(3, 28))", "x.flatten()", "x.ravel()", "x.flatten(1)",
    "x.view_as(x)", "x.reshape_as(torch.empty(21, 4))", "x.unflatten(-1, (2, -1))", "x.flatten(1).unflatten(1, (7, 4))",
    "x.flatten(0, 1).unflatten(0, (3, 7))[:, 2:5]", "x.permute(2, 0, 1)", "torch.permute(x, dims=(1, 0, 2))",
    "x.transpose(0, -1)", "torch.swapaxes(x, 0, 1)", "x.mT", "x.adjoint()", "x[0].T", "x[0].t()", "x[:, :, 0].H",
    "x.movedim(0, -1)", "torch.movedim(x, (0, 1), (1, 0))", "x.unsqueeze(-1).expand(-1, -1, -1, 3)",
    "x.expand(2, 3, 7, 4)",
    "x[:1].expand_as(x)", "torch.broadcast_to(x, (2, 3, 7, 4))", "torch.broadcast_tensors(x[:1], x)",
    "x[:, :, :1].squeeze(2)", "x[:1, 3:4].squeeze(1)", "x[:1].narrow(1, 2, 1).squeeze(-2)",
    "x[:1].squeeze()", "x.unsqueeze(0).squeeze((0,))", "x.movedim(1, 0).reshape(7, 12)",
    "x.repeat(1, 2, 1).flatten(1) * 2",
    "F.pixel_shuffle(x.permute(2, 0, 1), 2)", "x.repeat_interleave(2, 0)[:, :, :2].unflatten(0, (1, 6))",
]  # fmt: skip
STRIDED = [  # x (3, 7, 4), in rows
    "x.as_strided((3, 7, 4), (28, 4, 1))", "x.as_strided((3, 5, 3, 4), (28, 4, 4, 1))",
    "torch.as_strided(x, (3, 4, 7), (28, 1, 4), 0)",
    "x.as_strided((2, 4, 3), (0, 1, 28))", "x.flatten(1).as_strided((3, 3, 14), (28, 7, 1))",
    "x[0].as_strided((2, 3, 2), (12, 4, 2))",
    "x.as_strided((3, 3, 1, 2, 4), (28, 8, 9, 4, 1))",
]  # fmt: skip
REDUCTIONS_ALONG = ["", ", dim=1", ", dim=-1", ", dim=(1, 2), keepdim=True", ", dim=(-2, 0)"]
EXTREMA_ALONG = ["", *(f", dim={dim}, keepdim={keep}" for dim in (0, 1, -1) for keep in (False, True))]
MASK = "torch.arange(7)[:, None] < 2"  # rows of which a rank has nothing that counts
REDUCED = [
    *(f"torch.{name}(x{along})" for name in ("sum", "mean", "amax", "amin", "var", "std", "any", "all")
      for along in REDUCTIONS_ALONG),
    *(f"torch.{name}(x{along})" for name in ("prod", "max", "min", "argmax", "argmin") for along in EXTREMA_ALONG),
    *(f"torch.{name}(x, axis=2, keepdims=True)" for name in ("sum", "mean", "amax", "amin")),
    *(f"torch.logsumexp(x{along})" for along in REDUCTIONS_ALONG[1:]),
    *(f"torch.{name}(x, dim=(1, 2), correction=0)" for name in ("var", "std", "var_mean", "std_mean")),
    *(f"torch.{name}(x, dim={dim})" for name in ("cumsum", "softmax", "log_softmax") for dim in (1, 2, -3)),
    *(f"torch.linalg.vector_norm(x, {order}, dim=(1, 2)) + torch.norm(x, {order})"
      for order in (1, 2, 3.5, "math.inf", "-math.inf")),
    *(f"x.{name}({args})" for name in ("sum", "mean", "amax") for args in ("", "1", "(1, 2), True")),
    *(f"x.{name}({args})" for name in ("max", "min", "argmax", "prod") for args in ("", "1", "2, True")),
    *(f"x.{name}({dim})" for name in ("softmax", "log_softmax", "cumsum", "logsumexp") for dim in (1, -1)),
    *(f"(x * 3).round().long().{name}(1)" for name in ("sum", "amax", "argmax", "argmin", "max", "prod", "cumsum")),
    *(f"(x * 3).round().long().{name}()" for name in ("argmax", "argmin", "min", "sum")),
    *(f"(x > 0.5).{name}(2)" for name in ("sum", "any", "all")),
    *(f"F.{name}(x.masked_fill({MASK}, -math.inf), dim=1).masked_fill({MASK}, 0.0)"
      for name in ("softmax", "log_softmax")),
    *(f"torch.amax((x > 0) * x.detach().round() + x - x.detach(), {dim})" for dim in (1, (1, 2))),  # ties
    *(f"torch.var(x + 1000{along})" for along in REDUCTIONS_ALONG),
    "torch.var(x, False)", "torch.var(x, 1, False)", "torch.var(x, 1, True, True)", "x.var(1)", "x.std(1, False)",
    "x.std()", "F.softmax(x, dim=-1)", "F.log_softmax(x, dim=1)", "torch.special.softmax(x, dim=1)",
    "torch.special.log_softmax(x, 1)", "torch.special.logsumexp(x, 2)", "torch.norm(x)",
    "torch.norm(x, dim=1)", "torch.norm(x, p='fro', dim=(1, 2))", "torch.linalg.norm(x, dim=1)",
    "torch.linalg.norm(x, ord=1, dim=2, keepdim=True)", "torch.count_nonzero(x)", "torch.count_nonzero(x, dim=1)",
    "x.norm(1, -1)", "x.norm(2, (1, 2), True)", "torch.std(x * 0.0 + 1, 1)",
    f"x.masked_fill({MASK}, -math.inf).logsumexp(1)", "torch.linalg.vector_norm(x.round().detach(), 0, dim=(0, 1))",
    "(x - x.mean((1, 2), True)) / (3 * x.mean((1, 2), True).square() + x.sum() - 2 * x.mean()).abs().sqrt()",
]  # fmt: skip
FOURIER = [  # of x (3, 7, 4)
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
    "torch.gradient(x, spacing=0.5, dim=1)", "x.unfold(1, 3, 1)", "x.unfold(1, 2, 3)",
    "x.unfold(2, 2, 2)", "x.unfold(1, 7, 1)", "torch.unique((x.detach() * 2).round())",
]  # fmt: skip
JOINS = [  # x, y (3, 7, 4), z plain (3, 1, 4)
    "z.expand_as(x) * 2", "z[0, 0].expand_as(y) + x",
    "torch.cat([x, y], 0)", "torch.cat([x, y], dim=1)", "torch.cat((x, y, x), -1)", "torch.cat([z, x], 1)",
    "torch.cat([x, z], 1)", "torch.cat([z, x, y], dim=1)", "torch.cat([x[:, -2:], x, x[:, :1]], 1)",
    "torch.cat([x, x.square()[:, :0]], 1)",
    "torch.cat([x[..., :1], z.expand(3, 7, 4)], -1)", "torch.stack([x, y])", "torch.stack((x, y, x), -1)",
    "torch.stack([x, z.expand(3, 7, 4)], 1)",
    "torch.stack([x.sum(1), y.sum(1)])", "torch.stack([x.sum(1), y.mean(1)]).square()",
    "torch.cat([x.sum(1), y.sum(1)])",
    "torch.cat([x.sum(1, keepdim=True), z], 1)", "torch.concat([x.sum(1), x[:, 0]], 1)",
    "torch.cat([z.mean(1), x.sum(1)])",
    "torch.cat([x, y.flip(1)], 0)", "torch.add(input=x, other=y)",
    "torch.mul(other=z, input=y)", "torch.cat([x[:, 1:], x[:, :1]], 1) * y",
]  # fmt: skip
PRODUCTS = [  # x (3, 7, 4), y (3, 7, 4), z plain (4, 5)
    "torch.cross(x, y, dim=0)", "x.cross(y, dim=-3)", "torch.linalg.cross(x[..., :3], y[..., 1:])",
    "torch.linalg.cross(x[:, :3], z[None, :3, :4], dim=-2)", "torch.linalg.cross(z[None, :3, :1], x[:, 4:], dim=1)",
    "torch.linalg.cross(x.sum(2)[:, :3], y[..., 0][:, 4:])",
    "x @ z", "torch.matmul(x, z)", "x @ y.mT", "x.mT @ y", "torch.bmm(x.mT, y)", "x[0].mm(z)", "x[0].mT @ x[0]",
    "x @ z[:, 0]",
    "x[0].mv(z[:, 0])", "x[0, 0] @ z", "z.mT @ x.mT", "x.mT[:, :, None] @ y[:, :, None, :].transpose(1, 2)[:, :1]",
    "x @ y[0].mT",
    "torch.einsum('bnd,de->bne', x, z)", "torch.einsum('bnd,bmd->bnm', x, y)", "torch.einsum('bnd,bnd->', x, y)",
    "torch.einsum('...nd,de', x, z)", "torch.einsum('bnd,bnd,de->be', x, y, z)", "torch.einsum('bnd->dbn', x)",
    "torch.einsum('bnd,bne->bde', x, y)", "torch.einsum('n d, n d -> d', x[0], y[0])", "torch.einsum('bnd->d', x)",
    "torch.addmm(y[0, :, 0][:, None], x[0], z, beta=2, alpha=0.5)", "torch.baddbmm(y.mT @ y, x.mT, y)",
    "torch.outer(x[0, :, 0], y[0, 0])", "torch.outer(z[:, 0], x[0, :, 0])", "torch.dot(x[0, :, 0], y[0, :, 1])",
    "F.linear(x, z.mT)", "F.linear(x.mT, y[0].mT)", "F.linear(x, z.mT, z[0])", "F.linear(x.sum(1), z.mT, z[0])",
    "F.linear(x.mT, torch.ones(2, 7), z[0, :2])", "F.linear(x.mT, torch.ones(2, 7)).tanh() @ z[:2]", "x.mean(1) @ z",
    "(x @ z).softmax(1)",
    "F.linear(x.flatten(1), torch.ones(2, 28) + 0 * z[0, 0], z[0, :2])",
    "torch.matmul(x, other=z)", "torch.matmul(input=x.mT, other=y)", "F.linear(x, z.mT, bias=z[0])",
    "F.linear(x.mT, weight=y[0].mT, bias=z[0, :1].expand(4))",
]  # fmt: skip
REDUCTIONS = ("mean", "sum", "none")
LOSSES = [  # x, y (3, 7, 4), z plain (7, 4)
    *(f"F.{name}, reduction='{reduction}')" for reduction in REDUCTIONS for name in (
        "mse_loss(x, y", "l1_loss(x, y", "smooth_l1_loss(x, y", "huber_loss(x, y", "kl_div(x, y.softmax(1)",
        "binary_cross_entropy_with_logits(x, y.sigmoid()")),
    "F.mse_loss(x, z.expand(3, 7, 4))", "F.mse_loss(x, y, weight=z.detach().abs().expand(3, 7, 4))",
    "F.huber_loss(x, y, delta=0.3, weight=z.detach().abs().expand(3, 7, 4))", "F.smooth_l1_loss(x, y, beta=0.2)",
    "F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction='batchmean', log_target=True)",
    "F.binary_cross_entropy_with_logits(x, (y > 0).float(), z.detach().abs(), pos_weight=torch.arange(4.))",
    "F.binary_cross_entropy(x.sigmoid(), y.sigmoid())", "torch.nn.MSELoss()(x, y)",
    "torch.nn.L1Loss(reduction='sum')(x, y)",
]  # fmt: skip
CLASS_LOSSES = [  # x (3, 4, 7): 4 classes; y (3, 7)
    *(f"F.cross_entropy(x, {rest}, reduction='{reduction}')" for reduction in REDUCTIONS for rest in (
        "(y * 2).long() % 4", "(y * 2).long() % 4, weight=torch.arange(4.)", "(y * 2).long() % 4, ignore_index=1",
        "(y * 2).long() % 4, label_smoothing=0.1", "(2 * x.detach()).softmax(1), label_smoothing=0.1",
        "(y * 2).long() % 4, weight=torch.arange(4.), label_smoothing=0.2, ignore_index=2",
        "(torch.arange(21) % 4).view(3, 7)[:len(x)], ignore_index=3")),
    *(f"F.nll_loss(x.log_softmax(1), (y * 2).long() % 4, torch.arange(4.), reduction='{r}')" for r in REDUCTIONS),
    "F.cross_entropy(x[0].mT, torch.arange(7) % 4)", "F.cross_entropy(x[0].mT, (y * 2).long()[0] % 4)",
    "F.one_hot((y * 2).long() % 4)", "F.one_hot((y * 2).long() % 4, num_classes=6)",
]  # fmt: skip
TABLES = [
    "F.embedding((x * 2).long() % 5, y)",
    "F.embedding((x * 2).long() % 5, y, padding_idx=1)",
    "y[(x * 2).long() % 5]",
]
WIDENED = [
    "torch.sum(x, dtype=torch.float64)",
    "torch.mean(x, dim=1, dtype=torch.float64)",
    "x.softmax(1, torch.float64)",
]
HALVED = [f"torch.{name}(x, dim=1)" for name in ("softmax", "log_softmax", "mean", "var", "std", "logsumexp")]
WRITES = [
    f"write(x, y, at[{index}], {value})" for index in (":, 1:5", "..., 0:2", "0", ":, ::2, 1", "0:2, None")
    for value in (None, 3.0)
]  # fmt: skip
COMPOSED = [  # x (3, 7, 4), y (3, 7, 4), z plain (2, 4)
    "layer(mha(), x, x, x)", "layer(mha(), x, x, x, need_weights=False)[0]",
    "layer(mha(), x, y, y, need_weights=False)[0]", "layer(mha(), x, x, x, attn_mask=causal(7))",
    "layer(mha(), x, x, x, need_weights=False, attn_mask=causal(7))[0]", "layer(mha(kdim=4, vdim=4), x, y, y)[0]",
    "layer(mha(), z.expand(3, -1, -1), x, x, need_weights=False)[0]",
    "layer(mha(), x, z.expand(3, -1, -1), z.expand(3, -1, -1), need_weights=False)[0]",
    "layer(mha(), x, x, x, key_padding_mask=torch.arange(21).view(3, 7) % 7 > 4, need_weights=False)[0]",
    "layer(encoder(), x)", "layer(encoder(norm_first=True), x)", "layer(decoder(), x, y)",
    "layer(decoder(), z.expand(3, -1, -1), y)", "layer(transformer(), x.transpose(0, 1))",
    "layer(transformer(), x.transpose(0, 1), mask=causal(7))",
    "F.scaled_dot_product_attention(x[:, None], z[None, None], z[None, None])",
    "F.scaled_dot_product_attention(z[None], y, y)", "F.scaled_dot_product_attention(x, y, y, is_causal=True)",
    "F.scaled_dot_product_attention(*[x.view(3, 7, 1, 2, 2).transpose(2, 3)] * 3)",
    "F.scaled_dot_product_attention(*[x.view(3, 7, 2, 2, 1).permute(0, 2, 3, 1, 4)] * 3, attn_mask=causal(7))",
    "F.scaled_dot_product_attention(x, y, z.repeat(1, 2)[:1].expand(1, 7, -1))",
    "F.scaled_dot_product_attention(x[0], y[0], y[0])", "layer(recurrent(nn.LSTM, 3, 2, batch_first=True), x)[0]",
    "layer(recurrent(nn.GRU, 3, bidirectional=True), x)", "layer(recurrent(nn.LSTM, 4, proj_size=2), x)[1]",
    "layer(recurrent(nn.RNN, 3, batch_first=True), x.transpose(0, 1))[0]",
    "F.bilinear(x, y, z.view(2, 4, 1) * torch.arange(4.), z[:, 0])", "F.cosine_similarity(x, y)",
    "F.cosine_similarity(x, y, dim=2)", "F.softmin(x, 1)", "torch.cdist(x, y)", "torch.cdist(x, z.expand(3, -1, -1))",
    "torch.cdist(x, y, p=1)", "x.diff(dim=1)", "torch.diff(x, 2, 0)", "x.diff(dim=1, prepend=y[:, :1])",
    "torch.trapezoid(x, dim=1)", "torch.trapz(x, torch.arange(7.).square(), dim=1)", "torch.trapezoid(x, y, dim=2)",
    "torch.trapezoid(x, dx=0.1)", "torch.rot90(x, 1, (1, 2))", "x.rot90(2, (0, 1))", "x.rot90(-1, (2, 1))",
    "torch.dist(x, y)", "x.dist(y, 1)", "F.pairwise_distance(x, y, keepdim=True)", "torch.linalg.vecdot(x, y, dim=1)",
    "torch.fliplr(x)", "x.flipud()",
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


def write(x, y, index, value):
    out = x * 1
    out[index] = y[index] if value is None else value
    return out * 2


def layer(module, x, *args, **keywords):
    """A layer applied to tensors: a call, that an expression can hold."""
    return module(x, *args, **keywords)


def built(make):
    """A function that builds a layer with weights of a seed. Compiled code calls the layer, and does not build it."""

    @wraps(make)
    def build(*args, **options):
        torch.manual_seed(0)
        return make(*args, **options).double()

    build.is_constant = True
    return build


@built
def mha(**options):
    return nn.MultiheadAttention(4, 2, batch_first=True, **options)


@built
def encoder(**options):
    return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **options)


@built
def decoder():
    return nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)


@built
def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 2, enable_nested_tensor=False)


@built
def recurrent(kind, *sizes, **options):
    return kind(4, *sizes, **options)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def scattered(x, index):
    return torch.zeros_like(x).scatter_add(1, index, x)


def zeroed(x, mask):
    out = x * 1
    out[mask] = 0.0
    return out * x


class Index:
    """Of which at[1:, 2] is the index (slice(1, None), 2)."""

    def __getitem__(self, index):
        return index


NAMES = {
    "write": write, "layer": layer, "mha": mha, "encoder": encoder, "decoder": decoder, "transformer": transformer,
    "recurrent": recurrent, "causal": causal, "scattered": scattered, "zeroed": zeroed, "at": Index(),
}  # fmt: skip


def layouts(ranks):
    """x (3, 7, 4) split evenly, unevenly, with empty parts; rows, samples, columns, and not at all."""
    yield X((3, 7, 4), (1,), {0: (*[0] * (ranks - 2), 2, 5)})
    yield X((3, 7, 4), (2,), {0: (3, *[0] * (ranks - 2), 1)})
    if ranks == 2:
        yield X((3, 7, 4), (1,))
        yield X((3, 7, 4), (1,), {0: (7, 0)})
        yield X((3, 7, 4), (0,), {0: (1, 2)})
        yield X((3, 7, 4))


def pairs(ranks):
    """x and y split alike, differently, and one of them not."""
    yield from ((how, how) for how in layouts(ranks))
    yield X((3, 7, 4), (1,)), X((3, 7, 4), (2,))
    if ranks == 2:
        yield X((3, 7, 4), (1,)), X((3, 7, 4))
        yield X((3, 7, 4)), X((3, 7, 4), (1,), {0: (0, 7)})
        yield X((3, 7, 4), (1,)), X((3, 7, 4), (1,), {0: (2, 5)})
        yield X((3, 7, 4), (2,)), X((3, 7, 4), (0,))


def plane_pairs():
    yield X((3, 7, 4), (1, 2)), X((3, 7, 4), (1, 2))
    yield X((3, 7, 4), (1, None), {0: (7, 0)}), X((3, 7, 4), (None, 1))
    yield X((3, 7, 4), (0, 1), {0: (1, 2), 1: (2, 5)}), X((3, 7, 4), (1, 2))


def classes(ranks):
    yield X((3, 4, 7), (2,)), X((3, 7), (1,))
    yield X((3, 4, 7), (2,), {0: (*[0] * (ranks - 2), 2, 5)}), X((3, 7))
    yield X((3, 4, 7), (0,), {0: (1, 2, *[0] * (ranks - 2))}), X((3, 7), (0,))
    yield X((3, 4, 7)), X((3, 7), (1,))
    yield X((1, 4, 7), (0,)), X((1, 7), (1,))


def table_of(ranks, pairs, mesh=()):
    """All cases of one world size."""
    found, pairs, double = [], list(pairs), torch.float64

    def add(codes, inputs, *weights, dtype=torch.float32, names=None):
        found.extend(Case(code, inputs, weights, mesh, dtype, names) for code in codes)

    for x in {str(x): x for x, _ in pairs}.values():
        add(ANY_PART + VIEWS + STRIDED + WIDENED, (x,))
        add(REDUCED + FOURIER + SORTED, (x,), dtype=double)
        if VERSION >= (2, 13):  # before, it had no derivative
            add(["x.aminmax(dim=1)"], (x,), dtype=double)
        add(TABLES, (x,), (5, 3))
    for pair in pairs:
        add(JOINS, pair, (3, 1, 4))
        add(PRODUCTS, pair, (4, 5))
        add(LOSSES, pair, (7, 4))
        add(WRITES, pair, names=NAMES)
        add(COMPOSED, pair, (2, 4), dtype=double, names=NAMES)
    if not mesh:
        for pair in classes(ranks):
            add(CLASS_LOSSES, pair)
        long = X((2, 257, 3), (1,), {0: (160, 97 - 10 * (ranks - 2), *[10] * (ranks - 2))})
        add(HALVED, (long,), dtype=torch.bfloat16)
    return found


# Indices that are tensors, or single rows that are written, want a whole dimension.
MAY_BE_REFUSED = {
    *(code for code in ANY_PART if any(part in code for part in ("tensor", "[[", ", [", "gather", "take"))),
    *WRITES, *STRIDED, "x.view(3, 7, 2, 2)", "x.unflatten(-1, (2, -1))",
    "F.pixel_shuffle(x.permute(2, 0, 1), 2)", "x[:1].expand_as(x)", "torch.broadcast_tensors(x[:1], x)",
    "(x * 1).index_fill_(2, torch.tensor([1]), 0)",
}  # fmt: skip


def one_split_each(table):
    """Of the cases of each expression one, so that all splits come in turns."""
    cases = {}
    for case in table:
        cases.setdefault(case.function, []).append(case)
    return [each[number % len(each)] for number, each in enumerate(cases.values())]


def test_rules_give_what_the_whole_tensors_give(ranks):
    first, *others = ranks(3, refused, one_split_each(table_of(3, pairs(3))))
    assert all(found == first for found in others)
    assert first <= MAY_BE_REFUSED


@pytest.mark.slow("every rule with every split, and on another number of ranks")
@pytest.mark.parametrize("size", [2, 3])
def test_rules_of_every_split_give_what_the_whole_tensors_give(ranks, size):
    first, *others = ranks(size, refused, table_of(size, pairs(size)))
    assert all(found == first for found in others)
    assert first <= MAY_BE_REFUSED


@pytest.mark.slow("four ranks")
def test_rules_on_a_plane_of_ranks_give_what_the_whole_tensors_give(ranks):
    assert ranks(4, refused, table_of(4, plane_pairs(), (2, 2)))[0] <= MAY_BE_REFUSED


def test_of_rows_that_are_split_nothing_is_refused(ranks):
    rows = X((3, 7, 4), (1,))
    assert ranks(2, refused, table_of(2, [(rows, rows)]))[0] == set()


def without_a_rule():
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh())
    messages = []
    for operation in (
        torch.linalg.svd,
        lambda x: x[x.argmax(0), 0],
        lambda x: F.cross_entropy(x, x.argmax(1)),
    ):
        with pytest.raises(NotImplementedError) as error:
            operation(x)
        messages.append(str(error.value))
    return messages


def of_wrong_masks():
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh())
    messages = []
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(3, 6, dtype=torch.bool)):
        index = (slice(None), mask) if mask.dim() == 1 else (mask, None)
        with pytest.raises(IndexError) as error:
            x[index]
        messages.append(str(error.value))
    return messages


def test_a_mask_of_another_size_is_an_error(ranks):
    """One that is too short would select rows silently."""
    said = ["a mask of (4,) does not fit a tensor of (4, 6)", "a mask of (3, 6) does not fit a tensor of (4, 6)"]
    assert ranks(2, of_wrong_masks)[0] == said


def test_what_has_no_rule_is_refused_with_two_ways_out(ranks):
    for messages in ranks(2, without_a_rule):
        assert "no rule for linalg_svd of Spec((4, 6), S(1))" in messages[0]
        assert all("redistribute" in message and "full_tensor" in message and "@" in message for message in messages)
        assert "indices that are split" in messages[1] and "classes are split" in messages[2]


@st.composite
def chains(draw_):
    """An expression of up to four operations, one after the other, of a tensor with any split."""

    def number(low, high):
        return draw_(st.integers(low, high))

    cuts = [tuple(number(0, 4) for _ in range(2)) for _ in range(2)]
    dims = draw_(st.permutations([0, 1, 2]))[:2]
    shape = [number(1, 4) for _ in range(3)]
    for dim, sizes in zip(dims, cuts, strict=True):
        shape[dim] = sum(sizes)
    code, y = "x", torch.zeros(shape)
    for _ in range(number(1, 4)):
        if not y.dim():
            break
        d, n = number(-y.dim(), y.dim() - 1), number(-3, 3)
        before, keep = ":, " * (d % y.dim()), bool(number(0, 1))
        step = draw_(st.sampled_from([
            f".sum({d}, {keep})", f".mean({d}, keepdim={keep})", f".amax({d}, {keep})", f".var({d}, correction=0)",
            f"[{before}{n}:]", f"[{before}:{n}]", f"[{before}::2]", f"[{before}{n}]", f".softmax({d})", f".flip({d})",
            f".transpose({d}, 0)", ".flatten()", ".flatten(-2)", f".unsqueeze({d})",
            ".squeeze()", f".unflatten({d}, (-1, 2))",
            f".roll({n}, {d})", f".cumsum({d})", f".logsumexp({d})", f".repeat_interleave(2, {d})", " * 2 - 1",
            ".sin()",
            ".square().mean()", f".max({d}).values", f".chunk(2, {d})[-1]", f".std({d}, correction=0, keepdim={keep})",
        ]))  # fmt: skip
        try:
            y = evaluate(y, code="x" + step)
        except (RuntimeError, IndexError):
            continue
        code = f"({code}){step}"
    return Case(code, (X(tuple(shape), tuple(dims), dict(enumerate(cuts))),), (), (2, 2))


def test_any_chain_of_operations_is_exact_or_refused(ranks):
    found = []

    @settings(max_examples=300, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(chains())
    def collect(case):
        x = torch.randn(case.inputs[0].shape, requires_grad=True)
        y = evaluate(x, code=case.function)
        if x.numel() and y.isfinite().all():
            y.sum().backward()
            if x.grad.isfinite().all() and x.grad.abs().max() > 1e-3:  # not a gradient of rounding errors alone
                found.append(case)

    collect()
    assert len(ranks(4, refused, found)[0]) < len(found) / 4


def nothing_received(x, sent, received, group):
    return x.sum() * 0 + x.new_zeros(sum(received))


def no_halo(coming, arrived=halo.wait):
    return arrived(coming) * 0


RULES, OPERANDS = "distributed.shard.ops", "distributed.shard.core.operands.copy_to_region"
SUMS, EXCHANGE = "distributed.collectives._all_reduce", "distributed.shard.core.redistribute.all_to_all"
SAMPLES = "F.grid_sample(x[:, None], x[..., None, :2].tanh())"
KEYS = "F.scaled_dot_product_attention(x, x[:, 2:5], x[:, 2:5])"
WITHOUT = [  # the collective, what stands in its place, an expression, what is wrong then
    (f"{RULES}.normalization.reduce_from_region", hand_on, "F.layer_norm(x, (7, 4))", "gradient of input 0"),
    (f"{RULES}.reductions.gather_from_region", hand_on, "x.var(1)", "output 0"),
    (OPERANDS, hand_on, "x.softmax(1)", "gradient of input 0"),
    (OPERANDS, hand_on, "x @ x.mT", "gradient of input 0"),
    (OPERANDS, hand_on, SAMPLES, "gradient of input 0"),
    (f"{RULES}.attention.copy_to_region", hand_on, KEYS, "gradient of input 0"),
    (SUMS, hand_on, "x.mean(1).exp()", "output 0"),
    (EXCHANGE, nothing_received, "torch.fft.fft(x, dim=1)", "output 0"),
    (EXCHANGE, nothing_received, "x.sort(1)", "output 0"),
    ("distributed.shard.core.halo.wait", no_halo, "F.max_pool1d(x.mT, 3, 1, 1)", "output 0"),
]


@pytest.mark.parametrize(("collective", "instead", "code", "wrong"), WITHOUT)
def test_a_missing_collective_is_noticed(ranks, collective, instead, code, wrong):
    case = Case(code, (X((3, 7, 4), (1,), {0: (3, 4)}),))
    assert any(found and wrong in found for found in ranks(2, without, collective, instead, case))
