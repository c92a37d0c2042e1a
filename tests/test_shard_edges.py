"""Rows that tensors of indices find along a split dimension: graphs of nodes and edges, and tables of neighbours."""

import gc
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distributed.shard.core import constants
from distributed.shard_tensor import local
from tests.support.compiled_parity import check_compiled
from tests.support.marks import needs_torch, slow_but
from tests.support.shard_parity import (
    Case,
    X,
    check_all,
    domain_mesh,
    draw,
    evaluate,
    messages,
    split,
    without,
)
from utils.torch_private import storage_id


def message_passing(x, weight, kernel, edges=None):
    """Messages along edges between the points of an image (B, C, H, W), which become an image again."""
    source, target = edges
    nodes = x.flatten(2).transpose(1, 2)  # (B, N, C)
    ends = torch.cat([nodes[:, source], nodes[:, target]], -1)  # (B, E, 2 C)
    summed = torch.zeros_like(nodes).index_add(1, target, F.linear(ends, weight))
    image = summed.transpose(1, 2).view(x.shape)
    return F.conv2d(image, kernel, padding=1)


def sizes_of(length, ranks):
    """Uneven sizes, some of them 0 or 1."""
    return st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1).map(
        lambda cuts: tuple(b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), length], strict=True))
    )


@st.composite
def graphs(draw_, ranks):
    """Message passing of any batch, nodes, features, edges, and rows on each rank."""
    batch, features = draw_(st.sampled_from([1, 2, 5, 16])), draw_(st.sampled_from([1, 2, 3, 12]))
    rows, columns = draw_(st.integers(1, 9)), draw_(st.integers(1, 4))
    count = rows * columns
    edge = st.tuples(st.integers(-count, count - 1), st.integers(0, count - 1))
    edges = draw_(st.lists(edge, min_size=1, max_size=30))
    image = X((batch, features, rows, columns), (2,), {0: draw_(sizes_of(rows, ranks))})
    weights = (features, 2 * features), (2, features, 3, 3)
    return Case(message_passing, (image,), weights, keywords={"edges": torch.tensor(edges).T})


def drawn(strategy, count):
    found = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(case):
        found.append(case)

    collect()
    return found


@pytest.mark.parametrize("size", slow_but([3], [2, 3, 4], "graphs on other numbers of ranks"))
def test_a_graph_is_right_at_any_batch_size_and_split(ranks, size):
    ranks(size, check_all, drawn(graphs(size), 40))


EDGES = torch.tensor(
    [[0, 9, 4, 4, 11, 2, 7, 1, 0, 5, 10, 3, 8, 6, 6], [1, 0, 5, 3, 10, 2, 6, 0, 11, 4, 11, 2, 7, 7, 1]]
)
NEIGHBOURS = torch.tensor([[n - 1, n, (n + 5) % 12] for n in range(12)])
NAMES = {"e": EDGES, "s": EDGES[0], "t": EDGES[1], "k": NEIGHBOURS, "p": NEIGHBOURS[:, 2]}
FOUND = [  # of x and y (2, 12, 3), split along the nodes, and z plain (3, 3)
    "x[:, s]", "x[:, e[0]] - y[:, e[1]]", "x.index_select(1, t)", "x[:, k]", "x[:, k].mean(2) + y", "x[:, p] * x",
    "x[:, k[:7]]", "x[:, k[3:]].amax(2) @ z",
    "x[:, s].exp().sum(1)", "x[:, s].softmax(1)", "x[:, t].softmax(-1) @ z", "(x[:, s] * y[:, t]).sum(-1)",
    "torch.einsum('bec,bed->bcd', x[:, s], y[:, t])", "F.layer_norm(x[:, s], (3,)).flip(1)", "x[:, s].cumsum(1)",
    "x[:, s][:, 2:7]", "x[:, s][..., 1:]", "x[:, s][:, 4]", "x[:, s].unflatten(-1, (1, 3)).transpose(1, 2)",
    "x[:, s].reshape(2, 5, 3, 3)", "x[:, s].flatten(1)", "torch.cat([x[:, s], y[:, t]], 1)", "x[:, s][:, s % 9]",
    "torch.stack([x[:, s], y[:, t]], 1)", "x[:, s].split([1, 2], -1)[1]", "x[:, s].sort(1).values",
    "x[:, s].amax(1) + x[:, s].mean((1, 2))[:, None] + x[:, s].var(1)", "x[:, s] + torch.arange(15.0)[:, None]",
    "x.gather(1, s[None, :, None].expand(2, -1, 3))", "x[:, s][x[:, s] > 0].sum()",
    "torch.where(y[:, s] > 0, x[:, s], 0)",
    "F.cross_entropy(x[:, s].transpose(1, 2), (y[:, t, 0] > 0).long())", "F.prelu(x[:, s].transpose(1, 2), z[0])",
    "F.group_norm(x[:, s].transpose(1, 2), 3, z[0], z[1]).transpose(1, 2)", "x[:, s].argmax(1)", "x[:, s].max(1)",
    "x.transpose(1, 2)[..., s]", "x[0][s]", "x[0, :, 0][s].cumsum(0)", "x[:, s[:1]] * 2", "x[:, s[:0]].sum(1)",
]  # fmt: skip
SUMMED = [
    "y.index_add(1, t, x[:, s] - x[:, t])", "y.index_add(1, t, x[:, s], alpha=2)", "y.index_add(1, s, x[:, s])",
    "y.index_add(1, t, z.repeat(1, 5).view(15, 3).expand(2, -1, -1))", "(y * 1).index_add_(1, t, x[:, s])",
    "y.scatter_add(1, t[:, None].expand_as(x[:, s]), x[:, s])",
    "y.scatter_add(1, t[None, :, None].expand(2, 15, 3), x[:, s].exp())",
    *(f"y.scatter_reduce(1, t[:, None].expand_as(x[:, s]), x[:, s], '{kind}', include_self={own})"
      for kind in ("sum", "mean", "amax", "amin") for own in (True, False)),
    "x.new_zeros(2, 12, 3).scatter_add_(1, t[:, None].expand_as(x[:, s]), x[:, s])",
    "torch.zeros(2, 12, 3).double().index_add_(1, t, x[:, s]) + y",
    "torch.zeros(2, 12, 3).double().index_add(1, t, x[:, s] * y[:, t])",
    "torch.zeros(2, 7, 3).double().index_add(1, t % 7, x[:, s])", "y.index_copy(1, k[:, 0] % 12, x)",
    "z.repeat(4, 1).expand(2, -1, -1).index_add(1, t, x[:, s])", "checkpoint(edge_model, x, y, use_reentrant=False)",
    "y.index_fill(1, t, 2.0)", "y.index_add(1, t, x[:, s]).index_add(1, s, x[:, t])",
    "torch.zeros_like(x).index_add(1, t, (x[:, s] * (x[:, s] * y[:, t]).sum(-1, keepdim=True).sigmoid())) @ z",
    "y.index_add(1, t, torch.cat([x[:, s[:5]], x[:, t[5:]]], 1))", "x[:, s].index_add(1, k[:, 1], y)",
    "torch.autograd.grad(x[:, s].square().sum(), x, create_graph=True)[0]",
]  # fmt: skip


def edge_model(x, y):
    """Messages by an attention over the edges that end at a node."""
    s, t = EDGES
    score = (x[:, s] * y[:, t]).sum(-1, keepdim=True).exp()
    total = torch.zeros_like(y[..., :1]).index_add(1, t, score)
    return torch.zeros_like(y).index_add(1, t, x[:, s] * score / total[:, t])


PIECES = ["y.index_add(1, t, torch.cat([x, y[:, 1:4]], 1))"]  # edges in contiguous pieces
WRITTEN = [
    "write(x[:, s] * 1, y[:, t])", "(x[:, s] * 1).mul_(y[:, t])", "(x[:, s] * 1).index_fill_(1, t[:3], 0.0)",
]  # fmt: skip


def write(x, y):
    x[:, 2:5] = y[:, :3]
    return x


def cases_of(codes, inputs, mesh=()):
    names = NAMES | {"write": write, "checkpoint": checkpoint, "edge_model": edge_model}
    return [Case(code, inputs, ((3, 3),), mesh, torch.float64, names) for code in codes]


def of_nodes(x, y, z, code, **names):
    """An expression of the nodes of images (B, C, H, W)."""
    x, y = (image.flatten(2).transpose(1, 2) for image in (x, y))
    return evaluate(x, y, z, code=code, **names)


def cases_of_tiles(codes, image):
    names = NAMES | {"write": write, "checkpoint": checkpoint, "edge_model": edge_model}
    return [Case(of_nodes, (image, image), ((3, 3),), (2, 2), torch.float64, names | {"code": code}) for code in codes]


TILES = X((2, 3, 4, 3), (2, 3), {0: (3, 1), 1: (1, 2)})
BANDS = X((2, 12, 3), (1,), {0: (5, 0, 7)}), X((2, 12, 3), (1,))


def test_rows_that_constant_indices_find_are_those_of_the_whole(ranks):
    ranks(3, check_all, cases_of(FOUND + SUMMED + PIECES + WRITTEN, BANDS))


@pytest.mark.slow("four ranks, each with a tile of the nodes")
def test_on_tiles_too(ranks):
    ranks(4, check_all, cases_of_tiles(FOUND + SUMMED + WRITTEN, TILES))


@needs_torch((2, 13), "cannot trace the rules of ShardTensor")
def test_compiled_code_which_knows_no_values_gives_the_same(ranks):
    names = {"s": EDGES[0], "t": EDGES[1]}
    codes = "x[:, s] + y[:, t]", "y.index_add(1, t, x[:, s] @ z)"
    bands = X((2, 12, 3), (1,), {0: (5, 7)})
    cases = [Case(code, (bands, bands), ((3, 3),), (), torch.float64, names) for code in codes]
    assert ranks(2, check_compiled, cases) == [{}] * 2


def nothing_received(rows, sent, received, group):
    return rows.sum() * 0 + rows.new_zeros(sum(received), *rows.shape[1:])


@pytest.mark.parametrize("code", ["x[:, s] * y[:, t]", "x[:, k]", "y.index_add(1, t, x[:, s])"])
def test_a_missing_exchange_is_noticed(ranks, code):
    (case,) = cases_of([code], BANDS)
    found = ranks(3, without, "distributed.shard.core.order.all_to_all", nothing_received, case)
    assert any(message and "output 0" in message for message in found)


GRID = 32, 64


def grid_edges(height, columns):
    """Edges (2, E) from the four neighbours of each point, periodic along longitude, one direction after the other."""
    nodes = torch.arange(height * columns).view(height, columns)
    pairs = [(nodes.roll(shift, 1), nodes) for shift in (1, -1)]
    pairs += [(nodes[1:], nodes[:-1]), (nodes[:-1], nodes[1:])]
    return torch.cat([torch.stack(pair).flatten(1) for pair in pairs], 1)


def of_grid(x, weight, edges):
    source, target = edges
    nodes = x.flatten(2).transpose(1, 2)
    ends = torch.cat([nodes[:, source], nodes[:, target]], -1)
    return torch.zeros_like(nodes).index_add(1, target, F.linear(ends, weight))


def kept_for_backward(function, *args):
    """Bytes that the backward pass of function(*args) keeps, beside its arguments."""
    given = {storage_id(local(x)) for x in args}
    kept = {}

    def keep(tensor):
        if storage_id(tensor) not in given:
            kept[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*args)
    return sum(kept.values())


def cost_of_grid(sizes=None):
    """(messages of forward and backward, bytes kept for backward here, and on one device)."""
    full, weight = draw((2, 12, *GRID), torch.float32, 0), draw((12, 24), torch.float32, 1)
    x = split(full, X(full.shape, (2,), sizes and {0: sizes}), domain_mesh())
    edges = grid_edges(*GRID)
    found = messages(of_grid, x, weight, edges)
    return found, kept_for_backward(of_grid, x, weight, edges), kept_for_backward(of_grid, full, weight, edges)


@pytest.mark.parametrize("sizes", [None, (9, 1, 7, 15)], ids=["even", "uneven"])
def test_a_graph_sends_the_rows_of_its_border_and_keeps_its_share(ranks, sizes):
    row = 2 * 12 * GRID[1] * 4  # bytes of a row of the grid, 2 samples of 12 features in float32
    for rank, (found, kept, of_one) in enumerate(ranks(4, cost_of_grid, sizes)):
        neighbours = 1 if rank in (0, 3) else 2
        assert found == [{"all_to_all": 1}, {"all_to_all": neighbours * row}] * 2
        share = 0.3 if sizes is None else sizes[rank] / GRID[0] * 1.2
        assert kept < share * of_one


def replanned():
    """Lookups by a buffer that changes in place: errors, and how often its values were read."""
    full = draw((2, 12, 3), torch.float32, 0).detach()
    x = split(full, BANDS[0], domain_mesh())
    edges = EDGES.clone()
    gc.collect()  # a mock keeps its arguments
    errors, reads = [], []
    with mock.patch.object(constants, "read", wraps=constants.read) as read:
        for change in (lambda: None, lambda: None, lambda: edges.roll(1), lambda: edges.copy_(EDGES.flip(1))):
            change()
            source, target = edges  # new views of the same buffer
            found = (x[:, source] - x[:, target]).full_tensor()
            expected = full[:, edges[0]] - full[:, edges[1]]
            errors.append((found - expected).abs().max().item())
            reads.append(read.call_count)
    return errors, reads, len(constants._seen)


def test_an_index_is_read_once_and_again_when_it_changes(ranks):
    for errors, reads, _ in ranks(3, replanned):
        assert errors == [0.0] * 4
        assert reads == [2, 2, 2, 4]
    (_, _, before), *_ = ranks(3, replanned)
    (_, _, after), *_ = ranks(3, replanned)
    assert after == before  # what was planned ends with its tensor


@torch.inference_mode()
def inferred():
    full = draw((2, 12, 3), torch.float32, 0).detach()
    x = split(full, BANDS[0], domain_mesh())
    return [(edge_model(y, y).full_tensor() if y is x else edge_model(y, y)) for y in (x, full)]


def test_inference_tensors_which_have_no_version_are_right_too(ranks):
    for found, expected in ranks(3, inferred):
        assert torch.allclose(found, expected, rtol=1e-5)


def wrong_numbers():
    x = split(draw((2, 12, 3), torch.float32, 0), BANDS[0], domain_mesh())
    messages = []
    for function in (
        lambda: x[:, torch.tensor([0, 12])],
        lambda: x.index_add(1, torch.tensor([-1]), x[:, :1]),
        lambda: x[:, EDGES[0]][:, 1].mul_(2),
    ):
        with pytest.raises((IndexError, NotImplementedError)) as error:
            function()
        messages.append(str(error.value))
    return messages


def test_wrong_numbers_and_writing_to_copies_are_errors_on_every_rank(ranks):
    for outside, below, copied in ranks(3, wrong_numbers):
        assert "index 12 is out of bounds for a dimension of size 12" in outside
        assert "index -1 is out of bounds" in below
        assert "in place on what __getitem__ copied" in copied
