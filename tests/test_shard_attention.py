"""Attention over split tokens is that over whole ones: methods, masks, tiles, uneven parts, half precision."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from distributed import attention, attention_kernels
from distributed.shard_tensor import set_attention_method
from tests.support.shard_parity import Case, X, check, check_all, domain_mesh, draw, errors, split

METHODS = ["gather", "ring", "all_to_all"]


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def attend_biased(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, bias)


def attend_tiles(x, **options):
    """The tokens of an image: a dimension of two split axes, if the image is split into tiles."""
    q, k, v = x.flatten(3).transpose(2, 3).chunk(3, 1)  # (B, 3 heads, d, H, W) -> (B, heads, H W, d)
    return F.scaled_dot_product_attention(q, k, v, **options)


def masks(n, kind):
    if kind == "rows":  # some queries attend to few keys, one to the last key alone
        mask = torch.rand(n, n, generator=torch.Generator().manual_seed(3)) < 0.3
        mask[:, -1] = True
        mask[1] = False
        mask[1, -1] = True
        return mask
    if kind == "heads":
        return torch.randn(4, n, n, generator=torch.Generator().manual_seed(4))
    return torch.rand(1, 1, 1, n, generator=torch.Generator().manual_seed(5)) < 0.7  # keys that nobody sees


def cases(size, method):
    uneven = {2: (4, 9), 3: (5, 0, 8), 4: (1, 7, 0, 5)}
    for batch in (1, 3):
        for sizes in (None, {0: uneven[size]}):
            x = X((batch, 4, 13, 8), (2,), sizes)
            yield Case(attend, (x, x, x))
            yield Case(attend, (x, x, x), keywords={"scale": 0.3})
            yield Case("F.scaled_dot_product_attention(x, y, z * 0)", (x, x, x))  # 0 has no logarithm
            yield Case(attend, (x, x, x), keywords={"is_causal": True})
            for kind in ("rows", "heads", "keys"):
                yield Case(attend, (x, x, x), keywords={"attn_mask": masks(13, kind)})
            if method != "ring":
                yield Case(attend_biased, (x, x, x), ((13, 13),))
    x, few = X((2, 4, 13, 8), (2,)), X((2, 2, 13, 8), (2,))
    yield Case(attend, (x, few, few), keywords={"enable_gqa": True})
    yield Case(attend, (x, X((2, 4, 7, 8)), X((2, 4, 7, 8))))  # whole keys
    yield Case(attend, (x, X((2, 4, 13, 8)), X((2, 4, 13, 8))), keywords={"is_causal": True})
    yield Case(attend, (X((2, 4, 7, 8)), x, x))  # whole queries
    heads = X((4, 4, 13, 8), (1,))
    yield Case(attend, (heads, heads, heads), keywords={"is_causal": True})
    samples = X((4, 4, 13, 8), (0,))
    yield Case(attend, (samples, samples, samples))
    yield Case(attend, (X((4, 4, 3, 8)), samples, samples))  # queries that are the same for all samples
    yield Case(attend, (x, x, x), dtype=torch.bfloat16)


def masked_cases(size, method):
    """Masks of samples and of heads that are split, as well as tokens; masks that are ShardTensors."""
    mesh = (2, 2) if size == 4 else ()
    per_sample = torch.randn(4, 1, 13, 13, generator=torch.Generator().manual_seed(6))
    for splits in [(2, 1), (1, 2), (2, 0), (2, None), (1, 0)] if mesh else [(2,), (1,), (0,), (None,)]:
        x = X((4, 4, 13, 8), splits)
        for mask in (masks(13, "heads"), per_sample, masks(13, "rows")):
            yield Case(attend, (x, x, x), mesh=mesh, keywords={"attn_mask": mask})
        if method != "ring":
            for shape in ((13, 13), (4, 13, 13), (4, 1, 13, 13)):
                yield Case(attend_biased, (x, x, x), (shape,), mesh=mesh)
                for of_mask in [(0, 1), (None, 0), (None, None)] if mesh else [(0,), (1,), (None,)]:
                    yield Case(attend_biased, (x, x, x, X(shape, of_mask)), mesh=mesh)


def check_method(size, method, make=cases):
    set_attention_method(method)  # the next call begins with "gather": tests/support/workers.py
    check_all(make(size, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_tokens_attend_as_whole_ones(ranks, size, method):
    if method == "all_to_all" and size == 3:
        pytest.skip("4 heads are not split over 3 ranks")
    ranks(size, check_method, size, method)


def check_without_a_fused_kernel(size):
    with mock.patch.object(attention, "kernel", lambda q, mask: attention_kernels.Plain):
        check_method(size, "ring")


def test_the_ring_attends_without_a_fused_kernel(ranks):
    ranks(3, check_without_a_fused_kernel, 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_mask_goes_with_the_samples_heads_and_tokens_of_a_rank(ranks, size, method):
    ranks(size, check_method, size, method, masked_cases)


def check_tiles(method):
    set_attention_method(method)
    mask = masks(15, "rows")
    for sizes in (None, {0: (1, 2), 1: (5, 0)}):
        for splits in ((3, 4), (4, 3), (3, None), (None, 4)):
            x = X((2, 12, 8, 3, 5), splits, sizes if splits == (3, 4) else None)
            for keywords in ({}, {"is_causal": True}, {"attn_mask": mask}):
                check(Case(attend_tiles, (x,), mesh=(2, 2), keywords=keywords))


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_tiles_attend_as_whole_ones(ranks, method):
    ranks(4, check_tiles, method)


def errors_of(method):
    set_attention_method(method)
    return errors(Case(attend, (X((2, 4, 33, 16), (2,)),) * 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_as_exact_as_on_one_device(ranks, method):
    for whole, parts in ranks(2, errors_of, method)[0]:
        assert parts <= 1.2 * whole + 1e-4


def refused():
    mesh = domain_mesh()
    q = split(draw((2, 4, 13, 8), torch.float32, 1), X((2, 4, 13, 8), (2,)), mesh)
    keys = split(draw((2, 2, 13, 8), torch.float32, 1), X((2, 2, 13, 8), (1,)), mesh)
    with pytest.raises(NotImplementedError, match="split heads of which several share keys"):
        attend(q, keys, keys, enable_gqa=True)
    with pytest.raises(ValueError, match="no method 'magic'"):
        set_attention_method("magic")
    set_attention_method("ring")
    with pytest.raises(ValueError, match="ring attention cannot drop out"):
        attend(q, q, q, dropout_p=0.1)


def test_what_cannot_be_is_refused(ranks):
    ranks(2, refused)
