"""ShardTensor itself: making, redistributing, elementwise operations and views, against whole tensors."""

from torch.nn import functional as F

from tests.shard_parity import Case, X, check_all


def test_a(ranks):
    ranks(2, check_all, CASES)


def add(x, y):
    return x + y


def tokens(x, weight, bias):
    return F.linear(x.flatten(2).transpose(1, 2), weight, bias)


CASES = [
    Case(add, (X((2, 7, 3), (1,)), X((2, 7, 3), (1,)))),
    Case(add, (X((2, 7, 3), (1,)), X((7, 3), ()))),
    Case(add, (X((2, 7, 3), (1,)), X((2, 7, 3), (2,)))),
    Case(add, (X((2, 7, 3), (1,), {0: (0, 7)}),), ((7, 1),)),
    Case(tokens, (X((2, 5, 7, 3), (2,)),), ((4, 5), (4,))),
    Case(tokens, (X((2, 5, 7, 3), (1,)),), ((4, 5), (4,))),
    Case(tokens, (X((2, 5, 7, 3), (0,)),), ((4, 5), (4,))),
    Case(tokens, (X((2, 5, 7, 3), ()),), ((4, 5), (4,))),
]
