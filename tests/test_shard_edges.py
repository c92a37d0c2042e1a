"""Rows that tensors of indices find along a split dimension: graphs of nodes and edges, and tables of neighbours."""


import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, evaluate, messages, split

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

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
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


EDGES = torch.tensor(
    [[0, 9, 4, 4, 11, 2, 7, 1, 0, 5, 10, 3, 8, 6, 6], [1, 0, 5, 3, 10, 2, 6, 0, 11, 4, 11, 2, 7, 7, 1]]
)
NEIGHBOURS = torch.tensor([[n - 1, n, (n + 5) % 12] for n in range(12)])
NAMES = {"e": EDGES, "s": EDGES[0], "t": EDGES[1], "k": NEIGHBOURS, "p": NEIGHBOURS[:, 2]}
FOUND = [  # of x and y (2, 12, 3), split along the nodes, and z plain (3, 3)
    "x[:, s]", "x[:, e[0]] - y[:, e[1]]", "x.index_select(1, t)", "x[:, k]", "x[:, k].mean(2) + y", "x[:, p] * x",
    "x[:, s].exp().sum(1)", "x[:, s].softmax(1)", "x[:, t].softmax(-1) @ z", "(x[:, s] * y[:, t]).sum(-1)",
    "torch.einsum('bec,bed->bcd', x[:, s], y[:, t])", "F.layer_norm(x[:, s], (3,)).flip(1)", "x[:, s].cumsum(1)",
    "x[:, s][:, 2:7]", "x[:, s][..., 1:]", "x[:, s][:, 4]", "x[:, s].unflatten(-1, (1, 3)).transpose(1, 2)",
    "x[:, s].reshape(2, 5, 3, 3)", "x[:, s].flatten(1)", "torch.cat([x[:, s], y[:, t]], 1)", "x[:, s][:, s % 9]",
    "torch.stack([x[:, s], y[:, t]], 1)", "x[:, s].split([1, 2], -1)[1]", "x[:, s].sort(1).values",
    "x[:, s].amax(1) + x[:, s].mean((1, 2))[:, None] + x[:, s].var(1)", "x[:, s] + torch.arange(15.0)[:, None]",
    "x.gather(1, s[None, :, None].expand(2, -1, 3))", "x[:, s][x[:, s] > 0].sum()", "torch.where(y[:, s] > 0, x[:, s], 0)",
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
    "torch.zeros(2, 12, 3).double().index_add_(1, t, x[:, s]) + y", "torch.zeros(2, 12, 3).double().index_add(1, t, x[:, s] * y[:, t])",
    "torch.zeros(2, 7, 3).double().index_add(1, t % 7, x[:, s])", "y.index_copy(1, k[:, 0] % 12, x)", "y.index_fill(1, t, 2.0)",
    "torch.zeros_like(x).index_add(1, t, (x[:, s] * (x[:, s] * y[:, t]).sum(-1, keepdim=True).sigmoid())) @ z",
    "y.index_add(1, t, x[:, s]).index_add(1, s, x[:, t])", "y.index_add(1, t, torch.cat([x[:, s[:5]], x[:, t[5:]]], 1))",
    "y.index_add(1, t, torch.cat([x, y[:, 1:4]], 1))", "x[:, s].index_add(1, k[:, 1], y)",
    "torch.autograd.grad(x[:, s].square().sum(), x, create_graph=True)[0]",
]  # fmt: skip
WRITTEN = [
    "write(x[:, s] * 1, y[:, t])", "(x[:, s] * 1).mul_(y[:, t])", "(x[:, s] * 1).index_fill_(1, t[:3], 0.0)",
]  # fmt: skip


def write(x, y):
    x[:, 2:5] = y[:, :3]
    return x


def cases_of(codes, inputs, mesh=()):
    names = NAMES | {"write": write}
    return [Case(code, inputs, ((3, 3),), mesh, torch.float64, names) for code in codes]


def of_nodes(x, y, z, code, **names):
    """An expression of the nodes of images (B, C, H, W)."""
    x, y = (image.flatten(2).transpose(1, 2) for image in (x, y))
    return evaluate(x, y, z, code=code, **names)


def cases_of_tiles(codes, image):
    names = NAMES | {"write": write}
    return [Case(of_nodes, (image, image), ((3, 3),), (2, 2), torch.float64, names | {"code": code}) for code in codes]


TILES = X((2, 3, 4, 3), (2, 3), {0: (3, 1), 1: (1, 2)})
BANDS = X((2, 12, 3), (1,), {0: (5, 0, 7)}), X((2, 12, 3), (1,))
