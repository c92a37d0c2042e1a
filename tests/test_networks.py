"""The plain networks of the domain-parallel lesson."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from networks.classifier import Classifier
from networks.neighborhood import attend_windows, neighborhood_attention
from networks.unet import UNet
from networks.vit import ViT

SMALL = {"in_channels": 3, "num_classes": 7, "embed_dim": 16, "depth": 2, "num_heads": 4}
MODELS = {
    "vit": lambda: ViT((8, 12), 4, 3, 5, 16, 2, 4),
    "classifier": lambda: Classifier((8, 12), 4, **SMALL),
    "unet": lambda: UNet((8, 12), 3, 2, width=8),
}


# ---- classifier


@pytest.mark.parametrize(("img_size", "patch_size"), [((8, 12), 4), ((8, 12), (2, 3)), ((4, 6, 8), 2)])
def test_the_classifier_takes_images_of_two_and_three_dimensions(img_size, patch_size):
    model = Classifier(img_size, patch_size, **SMALL)
    x = torch.randn(2, 3, *img_size)
    tokens = model.patch_embed(x)
    assert model(x).shape == (2, 7) and (tokens >= 0).all() and (tokens == 0).any()


def test_the_classifier_of_the_lesson():
    with torch.device("meta"):
        model = Classifier((256, 256))
        assert model(torch.empty(1, 3, 256, 256)).shape == (1, 1000)
    assert (len(model.blocks), model.norm.weight.numel(), model.blocks[0].attn.head_dim) == (16, 768, 128)


# ---- convolutional network


def test_the_unet_commutes_with_a_shift_in_longitude():
    model, x = UNet((8, 12), 3, 2, width=8, levels=1), torch.randn(2, 3, 8, 12)
    y = model(x)
    assert y.shape == (2, 2, 8, 12)
    torch.testing.assert_close(model(x.roll(4, 3)), y.roll(4, 3))
    assert not torch.allclose(model(x.roll(4, 2)), y.roll(4, 2))


# ---- weights of all


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_every_parameter_gets_a_gradient(build):
    model = build()
    model(torch.randn(2, 3, 8, 12)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


# ---- neighborhood attention


def seen_keys(length, kernel_size, dilation):
    """Which keys each query sees along an axis, by definition: of the points in its own phase, the nearest ones."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        phase = range(query % dilation, length, dilation)
        first = min(max(phase.index(query) - kernel_size // 2, 0), len(phase) - kernel_size)
        seen[query, list(phase)[first : first + kernel_size]] = True
    return seen


def dense(q, k, v, kernel_size, dilation):
    """All queries with all keys, masked."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for axis in zip(q.shape[2:-1], kernel_size, dilation, strict=True):
        mask = torch.kron(mask, seen_keys(*axis))
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*flat, attn_mask=mask).unflatten(2, q.shape[2:-1])


CASES = {
    "1d": ((37,), (5,), (1,)),
    "1d, several tiles": ((150,), (7,), (1,)),
    "1d, kernel 1": ((9,), (1,), (1,)),
    "1d, gaps": ((23,), (3,), (4,)),
    "2d": ((9, 14), (3, 5), (1, 1)),
    "2d, several tiles": ((19, 21), (5, 3), (1, 1)),
    "2d, window as long as an axis": ((7, 13), (7, 3), (1, 1)),
    "2d, gaps": ((11, 18), (3, 5), (2, 3)),
    "3d": ((5, 6, 7), (3, 5, 3), (1, 1, 1)),
    "3d, gaps": ((6, 5, 9), (3, 3, 3), (2, 1, 3)),
}


@pytest.mark.parametrize(("spatial", "kernel_size", "dilation"), CASES.values(), ids=CASES)
def test_neighborhood_attention_is_dense_attention_under_a_mask(spatial, kernel_size, dilation):
    qkv = [torch.randn(2, 3, *spatial, 4, requires_grad=True) for _ in range(3)]
    expected = dense(*qkv, kernel_size, dilation)
    result = neighborhood_attention(*qkv, kernel_size, dilation)
    torch.testing.assert_close(result, expected)
    upstream = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(result, qkv, upstream), torch.autograd.grad(expected, qkv, upstream), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_windows_that_do_not_fit_are_refused():
    x = torch.randn(1, 1, 6, 8, 4)
    for kernel, dilation, line in [
        (4, 1, "kernel_size 4 with dilation 1: the kernel is odd"),
        ((3, 9), 1, "kernel_size 9 with dilation 1 is longer than the axis, 8 points"),
        (3, 3, "kernel_size 3 with dilation 3 is longer than the axis, 6 points"),
        ((3, 3, 3), 1, r"\[3, 3, 3\] for 2 spatial axes"),
    ]:
        with pytest.raises(ValueError, match=line):
            neighborhood_attention(x, x, x, kernel, dilation)
    with pytest.raises(ValueError, match="6 windows from 0 to 8 for 6 queries, 6 keys"):
        attend_windows(x, x, x, 3, [[0, 1, 2, 3, 4, 6], [0] * 8])


class CountingCopies(TorchDispatchMode):
    """Counts copies from one device to another."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_neighborhood_attention_copies_from_the_host_once():
    """A CUDA graph cannot; what an evaluation has kept is of use to training."""
    q, k, v = torch.randn(3, 1, 2, 9, 7, 4, device="meta").unbind()
    for copied in (True, False):
        with CountingCopies() as copies:
            neighborhood_attention(q, k, v, 3)
        assert (copies.count > 0) == copied
    x = torch.randn(1, 2, 11, 7, 4)
    with torch.inference_mode():
        neighborhood_attention(x, x, x, 3)
    x.requires_grad_()
    neighborhood_attention(x, x, x, 3).sum().backward()


def test_neighborhood_attention_of_fake_tensors_leaves_nothing_behind():
    for mode in (FakeTensorMode(), FakeTensorMode(), contextlib.nullcontext()):
        with mode:
            x = torch.randn(1, 2, 13, 7, 4)
            assert neighborhood_attention(x, x, x, 3).shape == x.shape
