"""Windows that the ranks' pieces do not fit, and class tokens beside the tokens of tiles."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, messages, split


def windows(x, size, channels_last=True):
    """(B, H, W, C) -> (B * windows, size * size, C), padded as Swin does."""
    b, h, w, c = x.shape
    x = F.pad(x, (0, 0, 0, -w % size, 0, -h % size))
    x = x.view(b, x.shape[1] // size, size, x.shape[2] // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


def swin(x, qkv, bias, size=4, shift=0):
    """Attention in windows beside the image itself, as a block of Swin has it."""
    b, h, w, c = x.shape
    y = windows(x.roll((-shift, -shift), (1, 2)) if shift else x, size)
    q, k, v = F.linear(y, qkv).unflatten(-1, (3, 2, c // 2)).permute(2, 0, 3, 1, 4).unbind()
    y = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
    high, wide = h + -h % size, w + -w % size
    y = y.view(b, high // size, wide // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(b, high, wide, c)
    y = y[:, :h, :w].contiguous()
    return x + (y.roll((shift, shift), (1, 2)) if shift else y)


def swin_of_tokens(x, qkv, bias):
    """The same on tokens (B, H * W, C), whose skip connection is a product of axes on tiles."""
    tokens = x.flatten(1, 2)
    y = swin(tokens.view(x.shape), qkv, bias).flatten(1, 2) - tokens
    return tokens * 2 + y


def grid(x, size=2):
    """MaxViT: tokens that are a stride apart attend to each other."""
    b, h, w, c = x.shape
    y = x.view(b, size, h // size, size, w // size, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, size * size, c)
    y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])
    y = y.view(b, h // size, w // size, size, size, c).permute(0, 3, 1, 4, 2, 5)
    return y.reshape(b, h, w, c) * x


def merge(x):
    """Patches of 2 x 2 become one."""
    parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return torch.cat(parts, -1) - F.pixel_unshuffle(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


def image(world):
    """(image (B, H, W, 4), mesh): bands and tiles that windows of 4 do not fit."""
    for sizes in {2: [(7, 5), (1, 11), (3, 3)], 3: [(5, 1, 6), (7, 0, 3)], 4: []}[world]:
        yield X((2, sum(sizes), 10, 4), (1,), {0: sizes}), ()
        yield X((1, 10, sum(sizes), 4), (2,), {0: sizes}), ()
    if world == 4:
        for h, w in (((7, 5), (3, 9)), ((1, 9), (6, 4))):
            yield X((2, sum(h), sum(w), 4), (1, 2), {0: h, 1: w}), (2, 2)


def window_cases(world):
    weights = ((12, 4), (2, 16, 16))
    for x, mesh in image(world):
        for keywords in ({}, {"shift": 2}):
            yield Case(swin, (x,), weights, mesh, torch.float64, keywords)
        yield Case(swin_of_tokens, (x,), weights, mesh, torch.float64)
        if x.shape[1] % 2 == x.shape[2] % 2 == 0:
            yield Case(grid, (x,), (), mesh, torch.float64)
            yield Case(merge, (x,), (), mesh, torch.float64)


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_windows_that_the_pieces_do_not_fit_give_what_the_whole_gives(ranks, world):
    ranks(world, check_all, list(window_cases(world)))


def counted(sizes):
    x = split(draw((1, sum(sizes), 8, 4), torch.float32, 0), X((1, sum(sizes), 8, 4), (1,), {0: sizes}), domain_mesh())
    return messages(windows, x, 4)[::2]


def test_only_pieces_that_do_not_fit_cost_one_all_to_all(ranks):
    one = {"all_to_all": 1}
    assert ranks(2, counted, (8, 4))[0] == [{}, {}]
    assert ranks(2, counted, (7, 5))[0] == [one, one]


def classify(x, token, positions, qkv, registers=0):
    """A class token (and registers) with the tokens of an image (B, H, W, 4), one attention, and taken off again."""
    b, h, w, c = x.shape
    y = torch.cat([token.expand(b, -1, -1), x.flatten(1, 2)], 1)
    if registers:
        y = torch.cat([y[:, :1], token.expand(b, -1, -1).repeat(1, registers, 1), y[:, 1:]], 1)
    y = F.layer_norm(y + positions[:, : y.shape[1]], (c,))
    q, k, v = F.linear(y, qkv).reshape(b, -1, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind()
    y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c)
    ahead = y.shape[1] - h * w
    return [y, y[:, 0], y[:, ahead:].mean(1), y[:, ahead:].view(b, h, w, c), y[:, :ahead], y[:, 1:], y[:, ahead + 3]]


def softmax_of_all(x, token):
    y = torch.cat([token.expand(len(x), -1, -1), x.flatten(1, 2)], 1)
    return y.softmax(1), y.amax(1), y.var(1), y @ y.mT, y[0].flatten(), y[0].reshape(-1, 2, 2)


def tokens(world):
    if world == 4:
        for h, w in (((2, 2), (3, 3)), ((3, 2), (1, 4)), ((0, 3), (4, 1))):
            yield X((2, sum(h), sum(w), 4), (1, 2), {0: h, 1: w}), (2, 2)
        yield X((2, 3, 4, 4), (2, 0)), (2, 2)
    else:
        sizes = {2: (3, 2), 3: (1, 0, 4)}[world]
        yield X((2, 5, 3, 4), (1,), {0: sizes}), ()
        yield X((1, 3, 5, 4), (2,), {0: sizes}), ()


def token_cases(world):
    for x, mesh in tokens(world):
        weights = ((1, 1, 4), (1, 40, 4), (12, 4))
        for keywords in ({}, {"registers": 2}):
            yield Case(classify, (x,), weights, mesh, torch.float64, keywords)
        yield Case(softmax_of_all, (x,), weights[:1], mesh, torch.float64)


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_a_class_token_ahead_of_tokens_of_tiles(ranks, world):
    ranks(world, check_all, list(token_cases(world)))


def with_a_class_token(x, token):
    y = torch.cat([token, x.flatten(1, 2)], 1)
    return y[:, 1:].unflatten(1, (4, 6)) + x


def messages_of_a_class_token():
    x = split(draw((1, 4, 6, 4), torch.float32, 0), X((1, 4, 6, 4), (1, 2)), domain_mesh((2, 2)))
    return messages(with_a_class_token, x, torch.ones(1, 1, 4, requires_grad=True))[::2]


def test_a_class_token_costs_no_message(ranks):
    assert ranks(4, messages_of_a_class_token) == [[{}, {}]] * 4
