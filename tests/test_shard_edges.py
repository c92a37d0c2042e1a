"""Rows that tensors of indices find along a split dimension: graphs of nodes and edges, and tables of neighbours."""

from functools import partial

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, messages, split

FLOAT = 4  # bytes


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

    @settings(max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(case):
        found.append(case)

    collect()
    return found


def test_a_graph_is_right_at_any_batch_size_and_split(ranks):
    for size in (2, 3):
        ranks(size, check_all, drawn(graphs(size), 40))


def grid_edges(height, columns):
    """Edges (2, E) to the four neighbours of each point, periodic along longitude, one direction after the other."""
    nodes = torch.arange(height * columns).view(height, columns)
    pairs = []
    for rows, shift in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        other = nodes.roll((rows, shift), (0, 1))
        kept = slice(max(rows, 0), height + min(rows, 0))
        pairs.append(torch.stack([other[kept].flatten(), nodes[kept].flatten()]))
    return torch.cat(pairs, 1)


def counted(edges, shape, sizes=None, dtype=torch.float32):
    """(forward calls, bytes, backward calls, bytes, bytes kept for backward) of the messages between nodes of an image."""
    case = X(shape, (2,), sizes and {0: sizes})
    x = split(draw(shape, dtype, 0), case, domain_mesh())
    weight = draw((shape[1], 2 * shape[1]), dtype, 1)

    def nodes_of(x):
        source, target = edges
        nodes = x.flatten(2).transpose(1, 2)
        ends = torch.cat([nodes[:, source], nodes[:, target]], -1)
        return torch.zeros_like(nodes).index_add(1, target, F.linear(ends, weight))

    nodes_of(x)  # plans
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = messages(nodes_of, x)
    return [*found, sum(kept.values())]
